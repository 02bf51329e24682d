"""Nothing that the objects of one request do touches another request."""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("transformers")

from kvflow import FailureReason
from tests.engines.raising import ERRORS, Raising, name_of
from tests.engines.transformers.models import prompt
from tests.engines.transformers.pair import Pair

pytestmark = pytest.mark.parametrize("error", [*ERRORS, KeyboardInterrupt()], ids=name_of)

PROMPT = prompt(11, 45)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with Pair() as started:
        yield started


def undisturbed(pair: Pair, room: str) -> None:
    pair.decode(PROMPT, pair.prefill(PROMPT, room))
    assert pair.result(room) == pair.reference(PROMPT)
    assert not pair.decode_end.is_busy


def test_arguments_that_raise_are_refused(pair: Pair, error: BaseException) -> None:
    room = f"arguments {name_of(error)}"
    ticket = pair.prefill(PROMPT, room)
    bad: Any = Raising(error)
    for tokens in (bad, [bad]):
        with pytest.raises(type(error)):
            pair.prefill(tokens, "other")
        with pytest.raises(type(error)):
            pair.decode(tokens, ticket)
    for settings in ({"max_new_tokens": bad}, {"eos_token_id": bad}, {"eos_token_id": [bad]}):
        with pytest.raises(type(error)):
            pair.decode_end.add_request(PROMPT, ticket, **settings)
    assert not pair.decode_end.is_busy
    undisturbed(pair, f"after {room}")


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_blocks_that_raise(pair: Pair, side: Any, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    room = f"blocks of {side} {name_of(error)}"
    engine = pair.end(side).engine
    blocks = engine.blocks

    def raising(request_id: str) -> Any:
        found = blocks(request_id)
        return dict.fromkeys(found, Raising(error)) if request_id == room else found

    monkeypatch.setattr(engine, "blocks", raising)
    pair.decode(PROMPT, pair.prefill(PROMPT, room))
    undisturbed(pair, f"beside {room}")
    assert isinstance(pair.result(room), FailureReason)

"""What the ends refuse."""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("transformers")

import kvflow
from kvflow import ConfigError, LayoutError, LocalProtocolError, PlanError, RemoteProtocolError, TicketError
from kvflow.engines.transformers.memory import CacheMap
from kvflow.engines.transformers.metadata import FirstToken, read_first_token
from kvflow.engines.transformers.prefill import PrefillManager
from tests.engines.transformers.models import make_manager, prompt
from tests.engines.transformers.pair import Pair

CONFIG = kvflow.PrefillConfig(instance="prefill", backend="memory")


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with Pair() as started:
        yield started


def test_bad_requests_are_refused_and_harm_nobody(pair: Pair) -> None:
    tokens = prompt(0, 45)
    ticket = pair.prefill(tokens, "twice")
    with pytest.raises(LocalProtocolError, match="room is in use"):
        pair.prefill(tokens, "twice")
    with pytest.raises(LocalProtocolError, match="prompt is empty"):
        pair.prefill([], "empty")
    with pytest.raises(LocalProtocolError):
        pair.prefill(tokens, "")
    with pytest.raises(TicketError):
        pair.decode(tokens, {})
    for wrong in ([], prompt(0, 64 * 8)):  # there must be room for a token more
        with pytest.raises(PlanError, match="does not fit"):
            pair.decode(wrong, ticket)
    pair.decode(tokens, ticket)
    with pytest.raises(LocalProtocolError, match="in use"):
        pair.decode(tokens, ticket)
    assert pair.result("twice") == pair.reference(tokens)


def test_first_token_may_be_the_last(pair: Pair) -> None:
    tokens = prompt(3, 40)
    expected = pair.reference(tokens)[:1]
    pair.decode(tokens, pair.prefill(tokens, "one"), max_new_tokens=1)
    assert pair.result("one") == expected
    pair.decode(tokens, pair.prefill(tokens, "end"), eos_token_id=expected)
    assert pair.result("end") == expected


def test_metadata_that_is_no_token_fails_its_request_alone(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = prompt(4, 40)
    with monkeypatch.context() as patch:
        patch.setattr(FirstToken, "to_bytes", lambda _: b'{"token": 100000}')
        pair.decode(tokens, pair.prefill(tokens, "wrong"))
        assert "not in the vocabulary" in pair.output("wrong").error
    pair.decode(tokens, pair.prefill(tokens, "right"))
    assert pair.result("right") == pair.reference(tokens)


@pytest.mark.parametrize("metadata", [b"", b"[]", b'{"token": "x"}', b'{"token": -1}', b'{"token": 10}'])
def test_no_first_token(metadata: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        read_first_token(metadata, vocab_size=10)


def test_first_token_travels() -> None:
    assert read_first_token(FirstToken(7, -0.5).to_bytes(), 10) == FirstToken(7, -0.5)


def test_managers_that_are_not_served() -> None:
    with pytest.raises(ConfigError, match="use_async_batching"):
        PrefillManager(make_manager(use_async_batching=True), CONFIG, fingerprint="x")
    manager = make_manager()
    manager.start()
    with pytest.raises(LocalProtocolError, match="before `start`"):
        PrefillManager(manager, CONFIG, fingerprint="x")
    manager.stop(hard_stop=True)


def test_caches_that_are_not_moved() -> None:
    class Cache:
        cache_allocators: dict[str, Any] = {"linear_attention": None}  # noqa: RUF012 - as the real one

    with pytest.raises(LayoutError, match="linear_attention"):
        CacheMap(Cache(), "x")


def test_end_that_is_closed_leaves_the_manager_as_it_was() -> None:
    manager = make_manager()
    with PrefillManager(manager, CONFIG, fingerprint="x") as end:
        manager.start()
    with pytest.raises(LocalProtocolError):
        end.add_request(prompt(0, 20), "late")
    manager.add_request(prompt(0, 20))
    assert len(manager.get_result(timeout=20).generated_tokens) == 24
    manager.stop()

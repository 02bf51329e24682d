"""The checks of offers pass with managers of transformers, and each fails with an adapter that is wrong."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("transformers")

from typing_extensions import override

from kvflow.engines.transformers.prefill import Moved
from kvflow.testing.offers import (
    check_held_until_safe,
    check_only_what_lacks_moves,
    check_short_owner_declines,
    check_text_moves,
)
from tests.engines.transformers.models import prompt
from tests.engines.transformers.servers import Servers


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with Servers() as started:
        yield started


@pytest.mark.parametrize("length", [45, 16, 100])
def test_the_text_moves(servers: Servers, length: int) -> None:
    check_text_moves(servers, prompt(length, length))


def test_only_what_lacks_moves(servers: Servers) -> None:
    check_only_what_lacks_moves(servers, prompt(2, 70))


def test_a_short_owner_declines(servers: Servers) -> None:
    check_short_owner_declines(servers, prompt(3, 45))


def test_blocks_are_held_until_they_are_safe(servers: Servers) -> None:
    check_held_until_safe(servers, prompt(4, 45))


class RepeatsAToken(Servers):
    """The owner delivers the last token of the holder again."""

    @override
    def result(self, room: str, timeout_s: float) -> list[int]:
        tokens = super().result(room, timeout_s)
        return [tokens[0], *tokens]


class KeepsRequest(Servers):
    """The holder generates the text, although it has moved."""

    @override
    def writer(self, room: str) -> Any:
        return "holder"

    @override
    def result(self, room: str, timeout_s: float) -> list[int]:
        return self.reference(self.holder.outputs[room].prompt_ids)


class GrantsAll(Servers):
    """The owner asks for the whole request, whatever it has."""

    @override
    def offer(self, prompt: Any, room: str) -> None:
        self.owner.decode.engine.cache.search_prefix_match = lambda *_: 0
        super().offer(prompt, room)


class AcceptsAll(Servers):
    """The owner accepts offers that it has no pages for."""

    @override
    def decide(self, moved: Moved) -> None:
        self.owner.is_short = lambda num_tokens: False  # type: ignore[method-assign]
        super().decide(moved)


class DropsDeclined(Servers):
    """The holder forgets a request that is declined."""

    @override
    def stay(self, moved: Moved) -> None:
        self.cancel(str(moved.sender.room))


class FreesEarly(Servers):
    """The holder frees the pages of a request as soon as it is offered."""

    @override
    def decide(self, moved: Moved) -> None:
        raise StopIteration

    @override
    def offer(self, prompt: Any, room: str) -> None:
        with pytest.raises(StopIteration):  # nobody has decided yet
            super().offer(prompt, room)
        engine = self.holder.prefill.engine
        with engine.paused():
            engine.free(room)

    @override
    def cancel(self, room: str) -> None:
        pass


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        (RepeatsAToken, check_text_moves),
        (KeepsRequest, check_text_moves),
        (GrantsAll, check_only_what_lacks_moves),
        (AcceptsAll, check_short_owner_declines),
        (DropsDeclined, check_short_owner_declines),
        (FreesEarly, check_held_until_safe),
    ],
)
def test_a_wrong_adapter_fails(kind: type[Servers], check: Callable[..., None]) -> None:
    with kind() as wrong, pytest.raises((AssertionError, TimeoutError)):
        check(wrong, prompt(5, 45), timeout_s=1.0)

"""Checks that the adapter of an engine should pass. `docs/embedding.md` tells what each is for.

An adapter's tests drive two engines, one on each side, over real ranks, through an `AdapterUnderTest`. Each check takes
it as it is, with nothing under way, and leaves it so:

    check_same_output(adapter, prompts)
    check_wrong_pages_show(adapter, prompt)
    check_abort_frees_pages(adapter, prompt)
    check_restart(adapter, prompt)

Choose another page size on each side, prompts that end within a page and on its edge, and one longer than a chunk.
"""

import time
from collections.abc import Sequence
from typing import Any, Final, Literal, Protocol

from kvflow.errors import FailureReason

__all__ = [
    "AdapterUnderTest",
    "SideName",
    "check_abort_frees_pages",
    "check_restart",
    "check_same_output",
    "check_wrong_pages_show",
]

SideName = Literal["prefill", "decode"]
SIDES: Final[tuple[SideName, ...]] = ("prefill", "decode")
POLL_S: Final = 0.01


class AdapterUnderTest(Protocol):
    """Two engines with the adapter between them. Output is deterministic (greedy)."""

    def reference(self, prompt: Sequence[int]) -> list[int]:
        """Give the tokens that one engine alone generates."""

    def prefill(self, prompt: Sequence[int], room: str) -> Any:
        """Give a request to the prefill engine, and return the ticket at once."""

    def decode(self, prompt: Sequence[int], ticket: Any) -> None:
        """Give it to the decode engine, and return at once."""

    def result(self, room: str, timeout_s: float) -> list[int] | FailureReason:
        """Wait for the tokens that the decode engine generates, or for the reason why the request has failed there.

        Raises:
            TimeoutError: Neither has come.
        """

    def abort(self, side: SideName, room: str) -> None:
        """Have one engine give a request up, as it does when its client leaves. Returns at once."""

    def used_pages(self, side: SideName) -> int:
        """Count pages that are not free, those held for kvflow included, but not those kept as a cache of prefixes."""

    def spoil(self) -> None:
        """Zero the pages of the next request that arrives, before the decode engine reads them."""

    def restart(self, side: SideName) -> None:
        """End one engine and its rank, and start another one under the same name."""


def check_same_output(adapter: AdapterUnderTest, prompts: Sequence[Sequence[int]], *, timeout_s: float = 30) -> None:
    """All requests at once bring the tokens of one engine alone, and all pages are free afterwards."""
    expected = [adapter.reference(prompt) for prompt in prompts]
    rooms = [f"same-{number}" for number in range(len(prompts))]
    for room, prompt in zip(rooms, prompts, strict=True):
        adapter.decode(prompt, adapter.prefill(prompt, room))
    found = [adapter.result(room, timeout_s) for room in rooms]
    for room, tokens, wanted in zip(rooms, found, expected, strict=True):
        assert tokens == wanted, f"room {room}: {tokens} instead of {wanted}"
    _check_free(adapter, timeout_s)


def check_wrong_pages_show(adapter: AdapterUnderTest, prompt: Sequence[int], *, timeout_s: float = 30) -> None:
    """Zeroed pages change the output; otherwise that it is the same proves nothing."""
    expected = adapter.reference(prompt)
    adapter.spoil()
    assert _hand_over(adapter, prompt, "spoiled", timeout_s) != expected, "zeroed pages have made no difference"
    _check_free(adapter, timeout_s)


def check_abort_frees_pages(adapter: AdapterUnderTest, prompt: Sequence[int], *, timeout_s: float = 30) -> None:
    """Give requests up on either side: they end on both, their pages come back, and the next one is right.

    Wherever the abort meets it, a request either fails or ends with the right tokens. If decode gives it up, the engine
    need not tell how it ended.
    """
    expected = adapter.reference(prompt)
    for side in SIDES:
        room = f"aborted-by-{side}"
        ticket = adapter.prefill(prompt, room)
        adapter.decode(prompt, ticket)
        adapter.abort(side, room)
        if side == "prefill":
            found = adapter.result(room, timeout_s)
            assert found in (FailureReason.ABORTED, expected), f"the request ended with {found}"
        _check_free(adapter, timeout_s)
        assert _hand_over(adapter, prompt, f"after-{room}", timeout_s) == expected
        _check_free(adapter, timeout_s)


def check_restart(adapter: AdapterUnderTest, prompt: Sequence[int], *, timeout_s: float = 30) -> None:
    """After a restart of either side requests are right again, and a ticket of the process before is refused."""
    expected = adapter.reference(prompt)
    stale = adapter.prefill(prompt, "stale")
    for side in SIDES:
        adapter.restart(side)
        assert _hand_over(adapter, prompt, f"after-restart-of-{side}", timeout_s) == expected
    adapter.decode(prompt, stale)
    found = adapter.result("stale", timeout_s)
    reasons = (FailureReason.STALE_TICKET, FailureReason.UNREACHABLE)  # whether the port is the same one again
    assert found in reasons, f"a stale ticket has brought {found}"
    _check_free(adapter, timeout_s)


def _hand_over(
    adapter: AdapterUnderTest, prompt: Sequence[int], room: str, timeout_s: float
) -> list[int] | FailureReason:
    adapter.decode(prompt, adapter.prefill(prompt, room))
    return adapter.result(room, timeout_s)


def _check_free(adapter: AdapterUnderTest, timeout_s: float) -> None:
    for side in SIDES:
        deadline = time.monotonic() + timeout_s
        while used := adapter.used_pages(side):
            assert time.monotonic() < deadline, f"{used} pages of {side} have not come back within {timeout_s} s"
            time.sleep(POLL_S)

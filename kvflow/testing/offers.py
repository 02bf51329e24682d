"""Checks for an adapter that makes and takes offers, besides those of `kvflow.testing.adapter`.

    check_text_moves(adapter, prompt)
    check_only_what_lacks_moves(adapter, prompt)
    check_short_owner_declines(adapter, prompt)
    check_held_until_safe(adapter, prompt)

The requests of a check are offered by one engine, the holder, to another one, the owner. See `docs/offers.md`.
"""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Final, Literal, Protocol

from kvflow.geometry.ranges import TokenRange
from kvflow.state.tables import Memory

__all__ = [
    "OfferingAdapter",
    "ServerName",
    "check_held_until_safe",
    "check_only_what_lacks_moves",
    "check_short_owner_declines",
    "check_text_moves",
]

ServerName = Literal["holder", "owner"]
SERVERS: Final[tuple[ServerName, ...]] = ("holder", "owner")
POLL_S: Final = 0.001


class OfferingAdapter(Protocol):
    """Two engines with ranks of both roles. Output is deterministic (greedy)."""

    def reference(self, prompt: Sequence[int]) -> list[int]:
        """Return the tokens that one engine generates alone."""

    def offer(self, prompt: Sequence[int], room: str) -> None:
        """Submit a request to the holder, which offers it to the owner while it is answered. Returns once it has."""

    def result(self, room: str, timeout_s: float) -> list[int]:
        """Wait for the whole text of the request, wherever it was generated.

        Raises:
            TimeoutError: It is not complete.
        """

    def writer(self, room: str) -> ServerName:
        """Return which engine has generated the end of a text."""

    def granted(self, room: str) -> TokenRange | None:
        """Return the tokens that the owner has granted pages for (`wanted` of the holder's sender); None before."""

    def memory(self, room: str) -> Memory:
        """Return the `memory` of the holder's sender."""

    def cancel(self, room: str) -> None:
        """Make the holder cancel a request, as if its client had disconnected. Returns at once."""

    def cache_prefix(self, prompt: Sequence[int]) -> int:
        """Make the owner compute a prompt and keep its pages; return how many of its tokens it has then."""

    def short_owner(self) -> AbstractContextManager[object]:
        """Return a block in which the owner has no free pages."""

    def used_pages(self, server: ServerName) -> int:
        """Return the number of used pages, including those held for kvflow, but not those cached for prefixes."""


def check_text_moves(adapter: OfferingAdapter, prompt: Sequence[int], *, timeout_s: float = 30) -> None:
    """Move a request: the owner ends the text as one engine would have, and all pages are free afterwards."""
    _check_text(adapter, prompt, "moves", "owner", timeout_s)


def check_only_what_lacks_moves(adapter: OfferingAdapter, prompt: Sequence[int], *, timeout_s: float = 30) -> None:
    """Move a request whose prompt the owner has: it grants pages for what it lacks alone."""
    num_cached = adapter.cache_prefix(prompt)
    assert num_cached, "the owner keeps no pages of the prompt; use a longer one"
    _check_text(adapter, prompt, "lacks", "owner", timeout_s)
    granted = adapter.granted("lacks")
    assert granted is not None
    assert granted[0] >= num_cached, f"{num_cached} tokens are there already, and pages were granted for {granted}"


def check_short_owner_declines(adapter: OfferingAdapter, prompt: Sequence[int], *, timeout_s: float = 30) -> None:
    """Offer a request to an engine without free pages: the holder goes on with it. The next one moves again."""
    with adapter.short_owner():
        _check_text(adapter, prompt, "stays", "holder", timeout_s, ("holder",))
        assert adapter.granted("stays") is None, "pages were granted for a request that has stayed"
    _check_text(adapter, prompt, "after-the-shortage", "owner", timeout_s)


def check_held_until_safe(
    adapter: OfferingAdapter,
    prompt: Sequence[int],
    *,
    moments_s: Sequence[float | None] = (None, 0.0, 0.003, 0.01),
    timeout_s: float = 30,
) -> None:
    """Move requests, and cancel some of them at several moments: the holder frees pages only once they are safe.

    A transport whose writes take long finds more.
    """
    for number, moment_s in enumerate(moments_s):
        room = f"held-{number}"
        adapter.offer(prompt, room)
        if moment_s is not None:
            time.sleep(moment_s)  # no synchronization intended: the check holds whatever is interrupted
            adapter.cancel(room)
        deadline = time.monotonic() + timeout_s
        while adapter.used_pages("holder"):
            assert time.monotonic() < deadline, f"pages of the holder have not come back within {timeout_s} s"
            time.sleep(POLL_S)
        memory = adapter.memory(room)
        assert memory is Memory.SAFE, f"the holder has freed pages of room {room}, which are {memory.value}"
        _check_free(adapter, timeout_s)


def _check_text(
    adapter: OfferingAdapter,
    prompt: Sequence[int],
    room: str,
    writer: ServerName,
    timeout_s: float,
    free: Sequence[ServerName] = SERVERS,
) -> None:
    expected = adapter.reference(prompt)
    adapter.offer(prompt, room)
    found = adapter.result(room, timeout_s)
    assert found == expected, f"room {room}: {found} instead of {expected}"
    assert adapter.writer(room) == writer, f"the end of room {room} was not written by the {writer}"
    _check_free(adapter, timeout_s, free)


def _check_free(adapter: OfferingAdapter, timeout_s: float, servers: Sequence[ServerName] = SERVERS) -> None:
    for server in servers:
        deadline = time.monotonic() + timeout_s
        while used := adapter.used_pages(server):
            assert time.monotonic() < deadline, f"{used} pages of the {server} have not come back in {timeout_s} s"
            time.sleep(POLL_S)

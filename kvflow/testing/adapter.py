"""Checks that an engine adapter should pass. `docs/embedding.md` describes the purpose of each.

An adapter's tests drive two engines, one on each side, over real ranks, through an `AdapterUnderTest`. Each check
expects no transfers in flight, and leaves none:

    check_same_output(adapter, prompts)
    check_wrong_pages_show(adapter, prompt)
    check_more_than_fit(adapter, prompts)
    check_first_token_is_last(adapter, prompt)
    check_abort_frees_pages(adapter, prompt)
    check_refusal_is_told(adapter, prompt)
    check_restart(adapter, prompt)
    check_kill(adapter, prompt)  # of processes

Choose a different page size on each side, prompts that end within a page and at its edge, and one longer than a chunk.
"""

import time
from collections.abc import Sequence
from typing import Any, Final, Literal, Protocol

from kvflow.errors import FailureReason

__all__ = [
    "AdapterUnderTest",
    "KillableAdapter",
    "SideName",
    "check_abort_frees_pages",
    "check_first_token_is_last",
    "check_kill",
    "check_more_than_fit",
    "check_refusal_is_told",
    "check_restart",
    "check_same_output",
    "check_wrong_pages_show",
]

SideName = Literal["prefill", "decode"]
SIDES: Final[tuple[SideName, ...]] = ("prefill", "decode")
POLL_S: Final = 0.01

MOMENTS_S: Final = (0.0, 0.003, 0.01, 0.03, 0.1)
"""Seconds after which a request is aborted: before it is computed, between its chunks, after the last one."""

STALE: Final = (FailureReason.STALE_TICKET, FailureReason.UNREACHABLE)
"""Failures caused by a ticket of an earlier process; which one depends on whether the new process has its port."""

LOST: Final = (
    FailureReason.PEER_LOST,
    FailureReason.PEER_CLOSED,
    FailureReason.PEER_FAILING,
    FailureReason.UNREACHABLE,
)
"""Failures caused by the death of the prefill process; which one depends on what was in flight."""


class AdapterUnderTest(Protocol):
    """Two engines with the adapter between them. Output is deterministic (greedy)."""

    def reference(self, prompt: Sequence[int]) -> list[int]:
        """Return the tokens that one engine generates alone."""

    def prefill(self, prompt: Sequence[int], room: str) -> Any:
        """Submit a request to the prefill engine, and return the ticket at once."""

    def decode(self, prompt: Sequence[int], ticket: Any, *, max_tokens: int | None = None) -> None:
        """Submit the request to the decode engine, and return at once.

        Args:
            prompt: The prompt.
            ticket: Ticket from `prefill`.
            max_tokens: Tokens to generate, including the first; by default as many as `reference` returns.
        """

    def result(self, room: str, timeout_s: float) -> list[int] | FailureReason:
        """Wait for the tokens that the decode engine generates, or for the reason why the request has failed there.

        Raises:
            TimeoutError: Neither has arrived.
        """

    def abort(self, side: SideName, room: str) -> None:
        """Make one engine abort a request, as if its client had disconnected. Returns at once."""

    def refuse_next(self) -> None:
        """Make the prefill engine reject the next request by itself, after its ticket was returned."""

    def fits(self, side: SideName, prompts: Sequence[Sequence[int]]) -> bool:
        """Return whether the pool of a side can hold these requests at the same time."""

    def used_pages(self, side: SideName) -> int:
        """Return the number of used pages, including those held for kvflow, but not those cached for prefixes."""

    def spoil(self) -> None:
        """Zero the pages of the next request that arrives, before the decode engine reads them."""

    def restart(self, side: SideName) -> None:
        """End one engine and its rank, and start new ones under the same name."""


class KillableAdapter(AdapterUnderTest, Protocol):
    """Two engines that are processes."""

    def kill(self, side: SideName) -> None:
        """Kill one process with SIGKILL. `restart` starts a new one."""


def check_same_output(adapter: AdapterUnderTest, prompts: Sequence[Sequence[int]], *, timeout_s: float = 30) -> None:
    """Hand all requests over at once: they produce the tokens of a single engine, and all pages are free afterwards."""
    expected = [adapter.reference(prompt) for prompt in prompts]
    rooms = [f"same-{number}" for number in range(len(prompts))]
    for room, prompt in zip(rooms, prompts, strict=True):
        adapter.decode(prompt, adapter.prefill(prompt, room))
    found = [adapter.result(room, timeout_s) for room in rooms]
    for room, tokens, wanted in zip(rooms, found, expected, strict=True):
        assert tokens == wanted, f"room {room}: {tokens} instead of {wanted}"
    _check_free(adapter, timeout_s)


def check_wrong_pages_show(adapter: AdapterUnderTest, prompt: Sequence[int], *, timeout_s: float = 30) -> None:
    """Zero the pages of a request: its output must differ. Otherwise, equal outputs prove nothing.

    Use a prompt that no other check uses: an engine that caches prefixes may keep the zeroed pages.
    """
    expected = adapter.reference(prompt)
    adapter.spoil()
    assert _hand_over(adapter, prompt, "spoiled", timeout_s) != expected, "zeroed pages have made no difference"
    _check_free(adapter, timeout_s)


def check_more_than_fit(adapter: AdapterUnderTest, prompts: Sequence[Sequence[int]], *, timeout_s: float = 30) -> None:
    """Hand over more requests than either pool can hold: they wait, and all produce the right tokens."""
    for side in SIDES:
        assert not adapter.fits(side, prompts), f"all {len(prompts)} requests fit into the pool of {side}"
    check_same_output(adapter, prompts, timeout_s=timeout_s)


def check_first_token_is_last(adapter: AdapterUnderTest, prompt: Sequence[int], *, timeout_s: float = 30) -> None:
    """Hand over a request of one token: it ends when it arrives, and leaves no pages."""
    expected = adapter.reference(prompt)[:1]
    adapter.decode(prompt, adapter.prefill(prompt, "one-token"), max_tokens=1)
    found = adapter.result("one-token", timeout_s)
    assert found == expected, f"{found} instead of {expected}"
    _check_free(adapter, timeout_s)


def check_abort_frees_pages(
    adapter: AdapterUnderTest,
    prompt: Sequence[int],
    *,
    moments_s: Sequence[float] = MOMENTS_S,
    timeout_s: float = 30,
) -> None:
    """Abort requests on either side, at several moments: they end on both sides, and their pages are freed.

    Whenever the abort occurs, a request either fails or ends with the right tokens. If decode aborts it, the engine
    need not report how it ended. The next request succeeds.
    """
    expected = adapter.reference(prompt)
    for side in SIDES:
        for number, moment_s in enumerate(moments_s):
            room = f"aborted-by-{side}-{number}"
            adapter.decode(prompt, adapter.prefill(prompt, room))
            time.sleep(moment_s)  # no synchronization intended: the check holds whatever the abort interrupts
            adapter.abort(side, room)
            if side == "prefill":
                found = adapter.result(room, timeout_s)
                assert found in (FailureReason.ABORTED, expected), f"room {room} ended with {found}"
            _check_free(adapter, timeout_s)
        assert _hand_over(adapter, prompt, f"after-aborts-by-{side}", timeout_s) == expected
        _check_free(adapter, timeout_s)


def check_refusal_is_told(
    adapter: AdapterUnderTest,
    prompt: Sequence[int],
    *,
    reasons: Sequence[FailureReason] = (FailureReason.ABORTED,),
    timeout_s: float = 30,
) -> None:
    """Make prefill reject a request after its ticket was returned: it fails on decode, and the next one succeeds.

    `reasons` are allowed failures: if an engine does not tell the adapter of requests that it rejects, decode waits for
    its deadline.
    """
    expected = adapter.reference(prompt)
    adapter.refuse_next()
    found = _hand_over(adapter, prompt, "refused", timeout_s)
    assert found in reasons, f"the request ended with {found}"
    _check_free(adapter, timeout_s)
    assert _hand_over(adapter, prompt, "after-the-refusal", timeout_s) == expected
    _check_free(adapter, timeout_s)


def check_restart(
    adapter: AdapterUnderTest,
    prompt: Sequence[int],
    *,
    reasons: Sequence[FailureReason] = STALE,
    timeout_s: float = 30,
) -> None:
    """Restart either side: requests succeed again, and a ticket of the earlier process fails for one of `reasons`."""
    expected = adapter.reference(prompt)
    stale = adapter.prefill(prompt, "stale")
    for side in SIDES:
        adapter.restart(side)
        assert _hand_over(adapter, prompt, f"after-restart-of-{side}", timeout_s) == expected
    adapter.decode(prompt, stale)
    found = adapter.result("stale", timeout_s)
    assert found in reasons, f"a stale ticket has brought {found}"
    _check_free(adapter, timeout_s)


def check_kill(
    adapter: KillableAdapter, prompt: Sequence[int], *, moments_s: Sequence[float] = (0.02,), timeout_s: float = 30
) -> None:
    """Kill either process: the request fails or is computed on decode, and pages are freed once there is proof.

    After a restart, the next request succeeds. Each moment takes two restarts.
    """
    expected = adapter.reference(prompt)
    assert _hand_over(adapter, prompt, "before-kills", timeout_s) == expected  # to connect the two
    for side in SIDES:
        for number, moment_s in enumerate(moments_s):
            room = f"killed-{side}-{number}"
            adapter.decode(prompt, adapter.prefill(prompt, room))
            time.sleep(moment_s)  # as above
            adapter.kill(side)
            if side == "prefill":
                found = adapter.result(room, timeout_s)
                assert found == expected or found in LOST, f"room {room} ended with {found}"
                _check_free(adapter, timeout_s, ("decode",))
            else:
                _check_free(adapter, timeout_s, ("prefill",))
            adapter.restart(side)
            assert _hand_over(adapter, prompt, f"after-{room}", timeout_s) == expected
            _check_free(adapter, timeout_s)


def _hand_over(
    adapter: AdapterUnderTest, prompt: Sequence[int], room: str, timeout_s: float
) -> list[int] | FailureReason:
    adapter.decode(prompt, adapter.prefill(prompt, room))
    return adapter.result(room, timeout_s)


def _check_free(adapter: AdapterUnderTest, timeout_s: float, sides: Sequence[SideName] = SIDES) -> None:
    for side in sides:
        deadline = time.monotonic() + timeout_s
        while used := adapter.used_pages(side):
            assert time.monotonic() < deadline, f"{used} pages of {side} have not come back within {timeout_s} s"
            time.sleep(POLL_S)

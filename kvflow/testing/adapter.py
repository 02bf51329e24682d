"""Checks that the adapter of an engine should pass. `docs/embedding.md` tells what each is for.

An adapter's tests drive two engines, one on each side, over real ranks, through an `AdapterUnderTest`. Each check takes
it with nothing under way, and leaves it so:

    check_same_output(adapter, prompts)
    check_wrong_pages_show(adapter, prompt)
    check_more_than_fit(adapter, prompts)
    check_first_token_is_last(adapter, prompt)
    check_abort_frees_pages(adapter, prompt)
    check_refusal_is_told(adapter, prompt)
    check_restart(adapter, prompt)
    check_kill(adapter, prompt)  # of processes

Choose another page size on each side, prompts that end within a page and on its edge, and one longer than a chunk.
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
"""Seconds after which a request is given up: before it was computed, between its chunks, after the last one."""

STALE: Final = (FailureReason.STALE_TICKET, FailureReason.UNREACHABLE)
"""What a ticket of a former process brings, depending on whether the new one has its port."""

LOST: Final = (
    FailureReason.PEER_LOST,
    FailureReason.PEER_CLOSED,
    FailureReason.PEER_FAILING,
    FailureReason.UNREACHABLE,
)
"""What the death of the prefill process brings, depending on what was under way."""


class AdapterUnderTest(Protocol):
    """Two engines with the adapter between them. Output is deterministic (greedy)."""

    def reference(self, prompt: Sequence[int]) -> list[int]:
        """Return the tokens that one engine alone generates."""

    def prefill(self, prompt: Sequence[int], room: str) -> Any:
        """Give a request to the prefill engine, and return the ticket at once."""

    def decode(self, prompt: Sequence[int], ticket: Any, *, max_tokens: int | None = None) -> None:
        """Give it to the decode engine, and return at once.

        Args:
            prompt: The prompt.
            ticket: What `prefill` gave.
            max_tokens: Tokens to generate, the first included; as many as `reference` gives by default.
        """

    def result(self, room: str, timeout_s: float) -> list[int] | FailureReason:
        """Wait for the tokens that the decode engine generates, or for the reason why the request has failed there.

        Raises:
            TimeoutError: Neither has come.
        """

    def abort(self, side: SideName, room: str) -> None:
        """Have one engine give a request up, as it does when its client leaves. Returns at once."""

    def refuse_next(self) -> None:
        """Have the prefill engine refuse the next request by itself, once the ticket is out."""

    def fits(self, side: SideName, prompts: Sequence[Sequence[int]]) -> bool:
        """Return whether the pool of a side holds these requests at the same time."""

    def used_pages(self, side: SideName) -> int:
        """Count pages that are not free, those held for kvflow included, but not those kept as a cache of prefixes."""

    def spoil(self) -> None:
        """Zero the pages of the next request that arrives, before the decode engine reads them."""

    def restart(self, side: SideName) -> None:
        """End one engine and its rank, and start another one under the same name."""


class KillableAdapter(AdapterUnderTest, Protocol):
    """Two engines that are processes."""

    def kill(self, side: SideName) -> None:
        """End one process at once, by SIGKILL. `restart` starts another one."""


def check_same_output(adapter: AdapterUnderTest, prompts: Sequence[Sequence[int]], *, timeout_s: float = 30) -> None:
    """Hand all requests over at once: they bring the tokens of one engine alone, and all pages are free afterwards."""
    expected = [adapter.reference(prompt) for prompt in prompts]
    rooms = [f"same-{number}" for number in range(len(prompts))]
    for room, prompt in zip(rooms, prompts, strict=True):
        adapter.decode(prompt, adapter.prefill(prompt, room))
    found = [adapter.result(room, timeout_s) for room in rooms]
    for room, tokens, wanted in zip(rooms, found, expected, strict=True):
        assert tokens == wanted, f"room {room}: {tokens} instead of {wanted}"
    _check_free(adapter, timeout_s)


def check_wrong_pages_show(adapter: AdapterUnderTest, prompt: Sequence[int], *, timeout_s: float = 30) -> None:
    """Zero the pages of a request: its output is another one. Otherwise the same output proves nothing.

    Give it a prompt that no other check has: an engine that caches prefixes may keep the zeroed pages.
    """
    expected = adapter.reference(prompt)
    adapter.spoil()
    assert _hand_over(adapter, prompt, "spoiled", timeout_s) != expected, "zeroed pages have made no difference"
    _check_free(adapter, timeout_s)


def check_more_than_fit(adapter: AdapterUnderTest, prompts: Sequence[Sequence[int]], *, timeout_s: float = 30) -> None:
    """Hand over more requests than either pool holds: they wait, and all of them bring the right tokens."""
    for side in SIDES:
        assert not adapter.fits(side, prompts), f"all {len(prompts)} requests fit into the pool of {side}"
    check_same_output(adapter, prompts, timeout_s=timeout_s)


def check_first_token_is_last(adapter: AdapterUnderTest, prompt: Sequence[int], *, timeout_s: float = 30) -> None:
    """Hand over a request of one token: it is over when it arrives, and leaves no pages."""
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
    """Give requests up on either side, at several moments: they end on both, and their pages come back.

    Wherever the abort meets it, a request either fails or ends with the right tokens. If decode gives it up, the engine
    need not tell how it ended. The next request is right.
    """
    expected = adapter.reference(prompt)
    for side in SIDES:
        for number, moment_s in enumerate(moments_s):
            room = f"aborted-by-{side}-{number}"
            adapter.decode(prompt, adapter.prefill(prompt, room))
            time.sleep(moment_s)  # no order is meant: the check holds whatever the abort meets
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
    """Have prefill refuse a request when its ticket is out: it fails on decode, and the next one is right.

    Args:
        adapter: The adapter.
        prompt: The prompt.
        reasons: Why it may fail. An engine that tells the adapter of no request which it refuses has decode wait for
            its deadline.
        timeout_s: How long to wait.
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
    """Restart either side: requests are right again, and a ticket of the process before is refused.

    Args:
        adapter: The adapter.
        prompt: The prompt.
        reasons: Why such a ticket fails.
        timeout_s: How long to wait.
    """
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
    """Kill either process: on decode the request fails or is computed there, and pages come back with the proof.

    After a restart the next request is right. Each moment costs two restarts.
    """
    expected = adapter.reference(prompt)
    assert _hand_over(adapter, prompt, "before-kills", timeout_s) == expected  # so that the two are connected
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

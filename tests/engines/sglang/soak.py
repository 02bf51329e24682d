"""Many requests, some in parallel; one side or both abort a third of them at a random moment.

Every page holds content derived from its room, and is overwritten as soon as SGLang may reuse it: prefill overwrites
what it sent, and decode marks what it received or gave up and checks for later writes.
"""

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from sglang.srt.disaggregation.base.conn import KVPoll

from tests.engines.sglang.models import Held
from tests.engines.sglang.sides import FIRST_TOKEN, Side, leftovers, reason_of

__all__ = ["soak"]

LANES: Final = 4
PAGES_EACH: Final = 4
MARK: Final = -1.0
"""Content of pages without an owner."""

STUCK_S: Final = 30.0
ABORTED: Final = 0.35
LATEST: Final = 40
"""Polls after which a request is aborted at the latest."""


class Chance(NamedTuple):
    """Fate of a room; both sides draw the same.

    Attributes:
        asks_at: Poll in which decode asks for the pages.
        aborts_at: Polls in which prefill and decode abort; None if they do not.
    """

    asks_at: int
    aborts_at: dict[str, int | None]


def draw(room: int) -> Chance:
    random = np.random.default_rng(room)
    who = random.choice(["", "prefill", "decode", "prefill decode"], p=[1 - ABORTED, 0.15, 0.15, ABORTED - 0.3])
    at = {side: int(random.integers(LATEST)) for side in ("prefill", "decode")}
    return Chance(int(random.integers(10)), {side: at[side] if side in who else None for side in at})


class Request:
    """One request of a side, on all of its ranks.

    Args:
        side: The side.
        room: Room of the request.
        lane: Which pages it owns.
    """

    def __init__(self, side: Side, room: int, lane: int) -> None:
        self.side, self.room, self.lane = side, room, lane
        self.chance = draw(room)
        pages = np.arange(PAGES_EACH, dtype=np.int32) + lane * PAGES_EACH + 1
        self.held = Held(np.random.default_rng(room).permutation(pages), pages, 0)
        self.polls, self.is_offered = 0, False
        self.late = side.mode == "decode" and any((found != MARK).any() for _, found in self._cells())
        if side.mode == "prefill":
            self._fill()
        self.ends = [side.end(number, room) for number in range(len(side.ranks))]
        self.deadline = time.monotonic() + STUCK_S

    def _cells(self) -> Iterator[tuple[int, Any]]:
        """Yield the expected value and the content of each of its pages in each tensor."""
        size = self.side.model.page
        for pool in self.side.pools:
            for number, buffer in enumerate([*pool.k_buffer, *pool.v_buffer]):
                for place, page in enumerate(self.held.pages.tolist()):
                    yield (self.room + 3 * number + 7 * place) % 251, buffer[page * size : (page + 1) * size]

    def _fill(self) -> None:
        for value, cells in self._cells():
            cells.fill_(value)

    def _mark(self) -> None:
        for _, cells in self._cells():
            cells.fill_(MARK)

    def step(self) -> str:
        """Run one scheduler step; return how the request has ended, or ""."""
        statuses = [end.poll() for end in self.ends]
        if KVPoll.Failed in statuses or self.polls == self.chance.aborts_at[self.side.mode]:
            for end in self.ends:
                end.abort()
            statuses = [end.poll() for end in self.ends]
        elif not self.is_offered and self._is_time(statuses):
            self.is_offered = True
            self._offer()
        self.polls += 1
        if not all(status in (KVPoll.Failed, KVPoll.Success) for status in statuses) or not self._is_safe():
            return "stuck" if time.monotonic() > self.deadline else ""
        return self._end(has_succeeded=KVPoll.Failed not in statuses)

    def _is_time(self, statuses: list[Any]) -> bool:
        if self.side.mode == "prefill":
            return bool(min(statuses) >= KVPoll.WaitingForInput)
        return self.polls >= self.chance.asks_at

    def _offer(self) -> None:
        for number, end in enumerate(self.ends):
            if self.side.mode == "prefill":
                self.side.offer(number, end, self.held, (0, PAGES_EACH * self.side.model.page), 2)
            else:
                end.send_metadata(self.held.pages, self.lane, None, decode_prefix_len=0)

    def _is_safe(self) -> bool:
        return self.side.mode == "prefill" or all(end.is_abort_release_safe() for end in self.ends)

    def _end(self, *, has_succeeded: bool) -> str:
        is_right = True
        if has_succeeded and self.side.mode == "decode":
            is_right = all(bool((cells == value).all()) for value, cells in self._cells())
            row = self.side.metadata[0]
            found = (int(row.bootstrap_room[self.lane, 0]), int(row.output_ids[self.lane, 0]))
            is_right = is_right and found == (self.room, FIRST_TOKEN)
        self._mark()
        for end in self.ends:
            if end.poll() == KVPoll.Failed:
                reason_of(end)
            end.clear()
        if not is_right:
            return "wrong"
        return "received" if has_succeeded else "failed"


def _wait_for_the_rest(side: Side) -> list[dict[str, int]]:
    """Return the leftover state of each manager. Prefill may still wait for proofs of pages that were being read."""
    deadline = time.monotonic() + STUCK_S
    while any(left := [leftovers(manager) for manager in side.managers]) and time.monotonic() < deadline:
        time.sleep(2e-3)
    return left


def soak(side: Side, first_room: int, count: int) -> dict[str, Any]:
    """Send or receive rooms; count their outcomes, the managers' leftovers and the process's open files."""
    torch.set_num_threads(1)
    if side.mode == "decode":
        for number, manager in enumerate(side.managers):
            assert manager.try_ensure_parallel_info(side.address), number
        for pool in side.pools:
            for buffer in [*pool.k_buffer, *pool.v_buffer]:
                buffer.fill_(MARK)
    found: dict[str, Any] = dict.fromkeys(("received", "failed", "wrong", "late", "stuck"), 0)
    rooms, lanes = deque(range(first_room, first_room + count)), dict[int, Request]()
    while rooms or lanes:
        for lane in range(LANES):
            if lane not in lanes:
                if not rooms:
                    continue
                lanes[lane] = Request(side, rooms.popleft(), lane)
                found["late"] += lanes[lane].late
            if how := lanes[lane].step():
                found[how] += 1
                del lanes[lane]
        time.sleep(2e-4)
    left = _wait_for_the_rest(side)
    files, threads = (len(list(Path("/proc/self", name).iterdir())) for name in ("fd", "task"))
    return found | {"left": left, "files": files, "threads": threads}

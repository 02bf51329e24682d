"""Two prefill ranks, each in a process: they share the heads or are pipeline stages, and agree as SGLang's do."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.engines.sglang.processes import Process, free_port
from tests.engines.sglang.steps import TOKENS

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(200)]

SETTINGS = {"backend": "nixl", "timeouts": {"lease_s": 2.0, "drain_s": 1.0}}
ROOM = 1
STEPS = 20


class Instances:
    """A prefill instance of two ranks, and decode.

    Args:
        stack: Ends the processes.
        place: An empty directory.
        ranks: Both, as in `models.Rank`.
    """

    def __init__(self, stack: ExitStack, place: Path, ranks: Sequence[Sequence[int]]) -> None:
        self.prefill = [Process("prefill", SETTINGS, {}) for _ in range(2)]
        self.decode = Process("decode", SETTINGS, {})
        self._threads = stack.enter_context(ThreadPoolExecutor(2))
        for process in (*self.prefill, self.decode):
            stack.callback(process.kill)
        port, store = free_port(), str(place / "store")
        starting = [
            self._threads.submit(one.tell, "start", port=port, rank=rank, store=store)
            for rank, one in zip(ranks, self.prefill, strict=True)
        ]
        for one in starting:
            one.result()
        self.decode.tell("start", port=port)

    def both(self, do: str, **arguments: Any) -> list[Any]:
        """Have both prefill ranks do something at the same time."""
        return list(self._threads.map(lambda one: one.tell(do, **arguments), self.prefill))

    def until(self, what: str, timeout_s: float = 20) -> bool:
        """Take steps on both prefill ranks until both say yes."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.both("steps", count=STEPS)
            if all(self.both("ask", what=what, room=ROOM)):
                return True
        return False

    def begin(self) -> None:
        """Let a request arrive, and be computed."""
        self.both("ask", what="add", room=ROOM, tokens=TOKENS)
        self.decode.tell("ask", what="add", room=ROOM, tokens=TOKENS)
        assert self.decode.tell("until", what="is_asked_for", room=ROOM)
        assert self.until("is_bootstrapped")
        self.both("ask", what="compute", room=ROOM, tokens=TOKENS)


@pytest.fixture
def instances(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Instances]:
    with ExitStack() as stack:
        yield Instances(stack, tmp_path, request.param)


HEADS, STAGES = [(2, 0), (2, 1)], [(1, 0, 2, 0), (1, 0, 2, 1)]
either = pytest.mark.parametrize("instances", [HEADS, STAGES], indirect=True, ids=["heads", "stages"])


@either
def test_request_of_two_ranks(instances: Instances) -> None:
    instances.begin()
    instances.both("ask", what="send", room=ROOM, end=40, last=False)
    instances.both("ask", what="send", room=ROOM, end=TOKENS, last=True)
    assert instances.decode.tell("until", what="has_arrived", room=ROOM)
    assert instances.decode.tell("ask", what="wrong", room=ROOM, tokens=TOKENS) == []
    assert instances.until("is_over")
    assert instances.both("ask", what="was_told", room=ROOM) == ["", ""]


@either
def test_pages_of_all_ranks_stay_while_one_rank_reads_its_own(instances: Instances) -> None:
    """SGLang's consensus is that of the first failure, after which every rank gives its pages to other requests."""
    first, second = instances.prefill
    instances.begin()
    second.tell("ask", what="slow_down")
    instances.both("ask", what="send", room=ROOM, end=TOKENS, last=True)
    instances.both("steps", count=STEPS)
    first.tell("ask", what="break_off", room=ROOM)
    assert instances.decode.tell("until", what="was_told", room=ROOM)
    instances.both("steps", count=10 * STEPS)
    assert first.tell("ask", what="poll", room=ROOM) == 0
    assert instances.both("ask", what="is_over", room=ROOM) == [False, False]
    second.tell("ask", what="speed_up")
    assert instances.until("is_over")
    assert all("Prefill transfer failed" in told for told in instances.both("ask", what="was_told", room=ROOM))
    assert instances.decode.tell("until", what="is_over", room=ROOM)

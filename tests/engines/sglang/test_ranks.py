"""Two ranks of an instance, each a process on a host of its own, which agree as SGLang's ranks do.

They share the heads, or are pipeline stages, or serve requests of their own (data parallelism). The hosts are loopback
addresses.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.engines.sglang.processes import Process, free_port
from tests.engines.sglang.steps import TOKENS

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]  # starts six processes that load SGLang

SETTINGS = {"backend": "nixl", "timeouts": {"lease_s": 2.0, "drain_s": 1.0}}
ROOM = 1
STEPS = 20
ALONE = [(1, 0)]
HEADS, STAGES = [(2, 0), (2, 1)], [(1, 0, 2, 0), (1, 0, 2, 1)]
DP_ATTENTION = [(1, 0, 1, 0, 2, 0), (1, 0, 1, 0, 2, 1)]
REPLICAS = [(1, 0, 1, 0, 1, 0, 2, 0), (1, 0, 1, 0, 1, 0, 2, 1)]
FORCE_QUERY = "SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK"


class Instance:
    """The ranks of an instance, which step together.

    Args:
        mode: "prefill" or "decode".
        processes: One per rank.
        threads: Pool for commands to all ranks at the same time.
    """

    def __init__(self, mode: str, processes: list[Process], threads: ThreadPoolExecutor) -> None:
        self.mode, self.processes, self._threads = mode, processes, threads

    def start(self, port: int, ranks: Sequence[Sequence[int]], store: str) -> None:
        """Create the schedulers of these ranks, given as in `models.Rank`."""
        starting = [
            self._threads.submit(one.tell, "start", port=port, rank=rank, store=store)
            for rank, one in zip(ranks, self.processes, strict=True)
        ]
        for one in starting:
            one.result()

    def all(self, do: str, **arguments: Any) -> list[Any]:
        """Send a command to all ranks at the same time, and return their results."""
        return list(self._threads.map(lambda one: one.tell(do, **arguments), self.processes))

    def ask(self, what: str, **arguments: Any) -> list[Any]:
        """Ask all ranks about the request."""
        return self.all("ask", what=what, room=ROOM, **arguments)

    def until(self, what: str, timeout_s: float = 20) -> bool:
        """Run steps on all ranks until all confirm."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.all("steps", count=STEPS)
            if all(self.ask(what)):
                return True
        return False


class Instances:
    """A prefill and a decode instance.

    Attributes:
        prefill: The prefill instance.
        decode: The decode instance.
    """

    def __init__(self, prefill: Instance, decode: Instance) -> None:
        self.prefill, self.decode = prefill, decode

    def begin(self) -> None:
        """Add a request, and compute it."""
        self.prefill.ask("add", tokens=TOKENS)
        self.decode.ask("add", tokens=TOKENS)
        assert self.decode.until("is_asked_for")
        assert self.prefill.until("is_bootstrapped")
        self.prefill.ask("compute", tokens=TOKENS)

    def check_arrived(self) -> None:
        """Check that decode has what prefill sent, and that prefill is done."""
        assert self.decode.until("has_arrived")
        assert not any(self.decode.ask("wrong", tokens=TOKENS))
        assert self.prefill.until("is_over")
        assert not any(self.prefill.ask("was_told"))


@pytest.fixture(scope="module")
def every() -> Iterator[dict[tuple[str, int], Instance]]:
    """Start instances by role and size, each rank on a host of its own. Ranks of a group cannot run alone."""
    with ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(2))
        made = {}
        for mode in ("prefill", "decode"):
            for count in (1, 2):
                hosts = [{"SGLANG_HOST_IP": f"127.0.0.{number}"} for number in range(1, count + 1)]
                processes = [Process(mode, SETTINGS, host) for host in hosts]
                for process in processes:
                    stack.callback(process.kill)
                made[mode, count] = Instance(mode, processes, threads)
        yield made


@pytest.fixture
def instances(
    every: dict[tuple[str, int], Instance], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Instances:
    port, stores = free_port(), tmp_path_factory.mktemp("stores")
    both = [every[mode, len(ranks)] for mode, ranks in zip(("prefill", "decode"), request.param, strict=True)]
    for instance, ranks in zip(both, request.param, strict=True):
        instance.start(port, ranks, str(Path(stores, instance.mode)))
    return Instances(*both)


two_prefill_ranks = pytest.mark.parametrize(
    "instances", [(HEADS, ALONE), (STAGES, ALONE)], indirect=True, ids=["heads", "stages"]
)
two_decode_ranks = pytest.mark.parametrize("instances", [(ALONE, HEADS)], indirect=True, ids=["heads"])


@pytest.mark.parametrize(
    "instances",
    [(HEADS, ALONE), (STAGES, ALONE), (ALONE, HEADS), (STAGES, HEADS)],
    indirect=True,
    ids=["heads-alone", "stages-alone", "alone-heads", "stages-heads"],
)
def test_request_of_two_ranks(instances: Instances) -> None:
    instances.begin()
    instances.prefill.ask("send", end=40, last=False)
    instances.prefill.ask("send", end=TOKENS, last=True)
    instances.check_arrived()


@pytest.mark.parametrize("instances", [(HEADS, ALONE), (ALONE, HEADS)], indirect=True, ids=["prefill", "decode"])
def test_memory_that_was_released(instances: Instances) -> None:
    instances.begin()
    instances.prefill.ask("send", end=TOKENS, last=True)
    instances.check_arrived()
    both = (instances.prefill, instances.decode)
    for do in ("release_memory", "resume_memory"):
        for instance in both:
            instance.all("ask", what=do)
    for instance in both:
        instance.ask("forget")
    instances.decode.all("ask", what="blank")
    instances.begin()
    instances.prefill.ask("send", end=TOKENS, last=True)
    instances.check_arrived()


@two_prefill_ranks
def test_pages_of_all_ranks_stay_while_one_rank_reads_its_own(instances: Instances) -> None:
    """SGLang's ranks agree on the first failure, after which each gives its pages to other requests."""
    prefill, decode = instances.prefill, instances.decode
    first, second = prefill.processes
    instances.begin()
    second.tell("ask", what="slow_down")
    prefill.ask("send", end=TOKENS, last=True)
    prefill.all("steps", count=STEPS)
    first.tell("ask", what="break_off", room=ROOM)
    assert decode.until("was_told")
    prefill.all("steps", count=10 * STEPS)
    assert first.tell("ask", what="poll", room=ROOM) == 0
    assert prefill.ask("is_over") == [False, False]
    second.tell("ask", what="speed_up")
    assert prefill.until("is_over")
    assert all("Prefill transfer failed" in told for told in prefill.ask("was_told"))
    assert decode.until("is_over")


@two_decode_ranks
def test_decode_ranks_give_pages_back_together(instances: Instances) -> None:
    """No rank reuses its pages while the pages of any rank may still be written."""
    prefill, decode = instances.prefill, instances.decode
    instances.begin()
    prefill.all("ask", what="slow_down")
    prefill.ask("send", end=40, last=False)
    prefill.all("steps", count=STEPS)
    decode.ask("abort")
    assert decode.until("was_told")
    decode.all("steps", count=10 * STEPS)
    assert decode.ask("is_over") == [False, False]
    prefill.all("ask", what="speed_up")
    assert decode.until("is_over")
    assert decode.all("ask", what="outcomes") == [["drained"], ["drained"]]


@pytest.mark.parametrize(
    "instances",
    [(DP_ATTENTION, ALONE), (ALONE, DP_ATTENTION), (DP_ATTENTION, DP_ATTENTION), (ALONE, REPLICAS)],
    indirect=True,
    ids=["prefill", "decode", "both", "replicas-on-decode"],
)
@pytest.mark.parametrize("room", [2, 3])
def test_requests_with_data_parallelism(instances: Instances, room: int) -> None:
    """SGLang assigns each request to one rank: on prefill by its room, on decode to any."""
    check_one_rank_of_each(instances, room, room, room + 1)


@pytest.mark.parametrize("instances", [(DP_ATTENTION, ALONE)], indirect=True, ids=["prefill"])
@pytest.mark.parametrize("room", [2, 3])
def test_rank_that_decode_has_to_ask_for(instances: Instances, room: int) -> None:
    """Prefill registers the rank of each request at SGLang's bootstrap server."""
    both = (instances.prefill, instances.decode)
    for instance in both:
        instance.all("set_variable", name=FORCE_QUERY, value="1")
    try:
        check_one_rank_of_each(instances, room, room + 1, 0)
    finally:
        for instance in both:
            instance.all("set_variable", name=FORCE_QUERY, value="0")


@pytest.mark.parametrize("instances", [(REPLICAS, ALONE)], indirect=True, ids=["prefill"])
@pytest.mark.parametrize("room", [2, 3])
def test_replica_that_the_router_names(instances: Instances, room: int) -> None:
    check_one_rank_of_each(instances, room, room + 1, 0, dp_rank=(room + 1) % 2)


@pytest.mark.parametrize("instances", [(REPLICAS, ALONE)], indirect=True, ids=["prefill"])
def test_replica_that_nobody_names(instances: Instances) -> None:
    """SGLang's check of the room takes every replica for the first one. Only that request fails."""
    _, second = instances.prefill.processes
    second.tell("ask", what="add", room=3, tokens=TOKENS)
    assert second.tell("until", what="was_told", room=3)
    assert "follow_bootstrap_room conflict" in second.tell("ask", what="was_told", room=3)
    check_one_rank_of_each(instances, 5, 1, 0, dp_rank=1)


def check_one_rank_of_each(
    instances: Instances, room: int, prefill_rank: int, decode_rank: int, dp_rank: int | None = None
) -> None:
    prefill = instances.prefill.processes[prefill_rank % len(instances.prefill.processes)]
    decode = instances.decode.processes[decode_rank % len(instances.decode.processes)]
    for process in (prefill, decode):
        process.tell("ask", what="add", room=room, tokens=TOKENS, dp_rank=dp_rank)
    assert decode.tell("until", what="is_asked_for", room=room)
    assert prefill.tell("until", what="is_bootstrapped", room=room)
    prefill.tell("ask", what="compute", room=room, tokens=TOKENS)
    prefill.tell("ask", what="send", room=room, end=TOKENS, last=True)
    assert decode.tell("until", what="has_arrived", room=room)
    assert decode.tell("ask", what="wrong", room=room, tokens=TOKENS) == []
    assert prefill.tell("until", what="is_over", room=room)

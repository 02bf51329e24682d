"""Every public coroutine, cancelled at each of its await points: nothing leaks, and the other side is notified.

The real ranks run in virtual time, which makes the await points of a coroutine the same in each run. The tests cover
both kinds of cancellation: anyio's cancel scopes, and `asyncio.Task.cancel`, which ignores shielded scopes.
"""

import asyncio
import functools
import math
from collections.abc import Callable, Coroutine, Generator, Iterator
from typing import Any, Final

import anyio.lowlevel
import pytest

import kvflow
from kvflow.bounds import Bounds
from kvflow.config import Limits
from kvflow.errors import FailureReason, TransferFailed
from kvflow.ports import Ports
from kvflow.state.tables import Memory, Outcome
from simulation import NO_FAULTS, REGISTRY, Faults, Process, World
from simulation.loop import PROCESS
from tests.support.instances import QUICK, Deployment, decode_config, make_pool, prefill_config

pytestmark = pytest.mark.host_memory  # the simulation has its own transport

Act = Callable[[], Coroutine[Any, Any, object]]

KINDS: Final = ("task", "scope")
SIDES: Final = ("prefill", "decode")

MOST_AWAITS: Final = 100
"""Upper bound of the await points of any coroutine here."""

AMPLE_S: Final = 2 * (QUICK.drain_s + QUICK.handshake_s + QUICK.lease_s)
"""Virtual seconds after which everything with a deadline has ended."""


class Cancelling:
    """An awaitable that runs a coroutine, and calls a function at one of its await points.

    Args:
        work: The coroutine.
        at: Number of the await point, from 1.
        cancel: The function, which cancels the awaiting task.

    Attributes:
        was_reached: The coroutine has reached the await point.
    """

    def __init__(self, work: Coroutine[Any, Any, object], at: int, cancel: Callable[[], object]) -> None:
        self._work = work
        self._at = at
        self._cancel = cancel
        self.was_reached = False

    def __await__(self) -> Generator[Any, Any, None]:
        step: Callable[[], Any] = lambda: self._work.send(None)  # noqa: E731 - it is replaced at each step
        num_awaits = 0
        while True:
            try:
                awaited = step()
            except StopIteration:
                return
            num_awaits += 1
            if num_awaits == self._at:
                self.was_reached = True
                self._cancel()
            try:
                yield awaited
            except BaseException as error:  # noqa: BLE001 - it belongs to the coroutine
                step = lambda error=error: self._work.throw(error)  # type: ignore[misc] # noqa: E731
            else:
                step = lambda: self._work.send(None)  # noqa: E731


class Cancelled:
    """Result of an act that was cancelled at one of its await points.

    Attributes:
        was_reached: The act has reached the await point.
        error: The `TransferFailed` that it raised, if any.
    """

    def __init__(self) -> None:
        self.was_reached = False
        self.error: Exception | None = None


async def cancel_at(number: int, kind: str, act: Act) -> Cancelled:
    """Run an act in the current task, and cancel it at an await point."""
    result = Cancelled()
    with anyio.CancelScope() as scope:
        task = asyncio.current_task()
        assert task is not None
        cancelling = Cancelling(act(), number, task.cancel if kind == "task" else scope.cancel)
        try:
            await cancelling
        except TransferFailed as error:
            result.error = error
        except asyncio.CancelledError:
            if kind == "scope":
                raise
        finally:
            result.was_reached = cancelling.was_reached
    return result


class Bench:
    """A registry and two ranks, each in a process of its own.

    Attributes:
        world: The simulation that they run in.
        processes: Process of each side.
        ranks: Rank of each side, open or not.
        deployment: The same ranks with their pools, for requests.
    """

    def __init__(self, world: World, limits: Limits | None = None) -> None:
        self.world = world
        self.limits = limits or Limits()
        self._tasks = note_tasks(world)
        self.deployment = Deployment(registry=None)  # type: ignore[arg-type] # it is in a process of its own
        self.pools = {side: make_pool() for side in SIDES}
        self.processes = {side: world.start(side, sleep) for side in SIDES}
        world.start_registry()
        world.run(0.1)
        self.num_tasks = {side: len(self.tasks(side)) for side in SIDES}
        self.ranks = {side: self.make(side) for side in SIDES}
        self._rooms = iter(range(100, 200))

    def make(self, side: str) -> kvflow.PrefillRank | kvflow.DecodeRank:
        """Create a rank without opening it."""
        pool, process = self.pools[side], self.processes[side]
        settings: dict[str, Any] = {"staging_bytes": 0, "limits": self.limits, "timeouts": QUICK}
        backend, ports = self.world.backend(process), self.world.ports(process)
        if side == "prefill":
            return kvflow.PrefillRank(prefill_config(REGISTRY, **settings), pool.layout, backend, ports=ports)
        return kvflow.DecodeRank(decode_config(REGISTRY, **settings), pool.layout, backend, ports=ports)

    @property
    def prefill(self) -> kvflow.PrefillRank:
        rank = self.ranks["prefill"]
        assert isinstance(rank, kvflow.PrefillRank)
        return rank

    @property
    def decode(self) -> kvflow.DecodeRank:
        rank = self.ranks["decode"]
        assert isinstance(rank, kvflow.DecodeRank)
        return rank

    def open(self, *sides: str) -> None:
        """Open ranks, and make requests use them."""
        for side in sides:
            self.result(self.spawn(side, self.ranks[side].__aenter__()))
        self.deployment.prefill[:], self.deployment.decode[:] = [self.prefill], [self.decode]
        self.deployment.sources[:], self.deployment.targets[:] = [self.pools["prefill"]], [self.pools["decode"]]

    def spawn(self, side: str, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Start a task in the process of a side."""
        return self.processes[side].spawn(work)

    def result(self, task: "asyncio.Task[Any]") -> Any:
        """Let `AMPLE_S` pass, check that a task has ended, and return its result."""
        self.world.run(AMPLE_S)
        assert task.done(), task
        return task.result()

    def cancel(self, side: str, number: int, kind: str, act: Act) -> Cancelled:
        """Run an act on a side, and cancel it at an await point."""
        result: Cancelled = self.result(self.spawn(side, cancel_at(number, kind, act)))
        return result

    # Checks --------------------------------------------------------------------------------------------------------

    def tasks(self, side: str) -> list["asyncio.Task[Any]"]:
        """Return the tasks that run in the process of a side."""
        process = self.processes[side]
        return [task for owner, task in self._tasks if owner is process and not task.done()]

    def assert_works(self) -> None:
        """Check that another transfer succeeds, and that no transfer has left anything behind."""
        room = next(self._rooms)
        request = self.deployment.request(room, 10)
        sending, receiving = self.spawn("prefill", request.send(chunk=4)), self.spawn("decode", request.receive())
        self.result(sending)
        self.result(receiving)
        request.assert_arrived()
        self.deployment.give_back(request)
        for rank in (self.prefill, self.decode):
            counts = rank.statistics()
            left = [counts.rooms, counts.quarantined, counts.waiting_grants, counts.queued_chunks, counts.posted]
            assert not any(left), counts
            assert not rank._transfers.by_key
        assert not self.world.plane.num_active
        assert not self.prefill._core.line

    def assert_gone(self, side: str) -> None:
        """Check that nothing is left of a rank: no task, timer, socket, transport or record."""
        assert len(self.tasks(side)) == self.num_tasks[side], self.tasks(side)
        process, rank = self.processes[side], self.ranks[side]
        timers = [handle for at, _, handle in self.world.loop._timers if at < math.inf and not handle.cancelled()]
        assert not [handle for handle in timers if handle._context.get(PROCESS) is process]  # type: ignore[attr-defined]
        assert str(rank.me) not in self.world.plane.endpoints
        network = self.world.network
        assert not [one for one in network._dialers if one.process is process]
        assert not [one for one in network._listeners.values() if one.process is process]


def note_tasks(world: World) -> list[tuple[Process | None, "asyncio.Task[Any]"]]:
    """Return a list that collects every task created from now on, with the process that it runs in."""
    tasks: list[tuple[Process | None, asyncio.Task[Any]]] = []
    create_task = world.loop.create_task

    def noted(coro: Any, **options: Any) -> "asyncio.Task[Any]":
        task = create_task(coro, **options)
        tasks.append((PROCESS.get(None), task))
        return task

    world.loop.create_task = noted  # type: ignore[method-assign]
    return tasks


async def sleep(_: Process) -> None:
    await anyio.sleep_forever()


def benches(limits: Limits | None = None) -> Iterator[tuple[int, Bench]]:
    """Yield a new world for each await point; the caller breaks the loop when there are no more."""
    for number in range(1, MOST_AWAITS):
        with World(ends_with_process=True) as world:  # every world behaves the same
            yield number, Bench(world, limits)
    pytest.fail("the coroutine has no end")


# Ranks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", SIDES)
def test_opening_a_rank(side: str, kind: str) -> None:
    for number, bench in benches():
        rank, other = bench.ranks[side], "decode" if side == "prefill" else "prefill"

        async def use(rank: kvflow.PrefillRank | kvflow.DecodeRank = rank) -> None:
            async with rank:
                await anyio.lowlevel.checkpoint()

        if not bench.cancel(side, number, kind, use).was_reached:
            assert number > 1
            break
        bench.assert_gone(side)
        bench.ranks[side] = bench.make(side)
        bench.open(side, other)
        bench.assert_works()


class Room:
    """A room that is open on both sides, with one chunk sent.

    Attributes:
        sender: Sender of the prefill engine.
        receiver: Receiver of the decode engine.
    """

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._request = bench.deployment.request(1, 8)
        self.sender, self.receiver = bench.prefill.send(1), self._request.receiver()
        self._may_finish = asyncio.Event()
        self._tasks = [bench.spawn("prefill", self._send()), bench.spawn("decode", self._receive())]
        bench.world.run(0.5)
        assert self.sender.outcome is self.receiver.outcome is Outcome.PENDING

    async def _send(self) -> None:
        self._request.compute(0, 8)
        async with self.sender:
            await self.sender.chunk((0, 4), self._request.src_pages(0, (0, 4)))
            await self._may_finish.wait()
            await self.sender.finish((4, 8), self._request.src_pages(0, (4, 8)))

    async def _receive(self) -> None:
        async with self.receiver:
            await self.receiver.done()

    def finish(self) -> None:
        """Make the engine send the rest, and check that it arrives."""
        self._may_finish.set()
        for task in self._tasks:
            self._bench.result(task)
        self._request.assert_arrived()

    def assert_failed(self, by: str) -> None:
        """Check that both sides report a closed rank, and that the pages are safe."""
        self._may_finish.set()
        for task in self._tasks:
            with pytest.raises(TransferFailed) as caught:
                self._bench.result(task)
            assert (caught.value.reason, caught.value.detected_by) == (FailureReason.PEER_CLOSED, f"{by}/0")
        assert self.sender.memory is self.receiver.memory is Memory.SAFE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", SIDES)
def test_closing_a_rank(side: str, kind: str) -> None:
    for number, bench in benches():
        bench.open(*SIDES)
        room, rank = Room(bench), bench.ranks[side]

        async def leave(rank: kvflow.PrefillRank | kvflow.DecodeRank = rank) -> None:
            await rank.__aexit__(None, None, None)

        if not bench.cancel(side, number, kind, leave).was_reached:
            assert number > 1
            break
        room.assert_failed(by=side)
        bench.assert_gone(side)
        bench.ranks[side] = bench.make(side)
        bench.open(side)
        bench.assert_works()


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_is_closed_all_the_same_while_a_write_hangs(kind: str) -> None:
    """The close waits for the write until its deadline, and then for the transport to close."""
    for number, bench in benches():
        bench.open(*SIDES)
        bench.world.plane.hold_write = lambda _: True
        room = Room(bench)

        async def leave(rank: kvflow.PrefillRank = bench.prefill) -> None:
            await rank.__aexit__(None, None, None)

        if not bench.cancel("prefill", number, kind, leave).was_reached:
            assert number > 1
            break
        room.assert_failed(by="prefill")
        bench.assert_gone("prefill")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", SIDES)
def test_draining_a_rank(side: str, kind: str) -> None:
    """Cancellation ends the wait, but not the draining."""
    for number, bench in benches():
        bench.open(*SIDES)
        room, rank = Room(bench), bench.ranks[side]
        draining = bench.spawn(side, cancel_at(number, kind, rank.drain))
        bench.world.run(0.5)
        is_waiting = not draining.done()
        was_drained = rank.is_drained
        room.finish()
        assert (was_drained, rank.is_drained) == (False, True)
        if is_waiting:
            break
        assert draining.result().was_reached


# Transfers ---------------------------------------------------------------------------------------------------------

NARROW: Final = Bounds(posts_per_peer=1, queued_chunks=1)
"""Limits with which an engine waits for capacity before most of its chunks."""


class Engines:
    """Both engines of one room; a test cancels the task of one of them.

    Attributes:
        left_with: `memory` of each side's transfer when its engine left the block.
    """

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.request = bench.deployment.request(1, 40)
        self.request.compute(0, 40)
        self.sender = bench.prefill.send(1)
        self.receiver = self.request.receiver()
        self.left_with: dict[str, Memory] = {}
        self._is_posted = asyncio.Event()
        bench.world.plane.when_posted.append(lambda _: self._is_posted.set())

    async def deliver(self) -> None:
        """Send every chunk, and wait for delivery."""
        try:
            async with self.sender:
                for start in range(0, 36, 4):
                    tokens = (start, start + 4)
                    await self.sender.chunk(tokens, self.request.src_pages(0, tokens))
                await self.sender.finish((36, 40), self.request.src_pages(0, (36, 40)))
                await self.sender.delivered()
        finally:
            self.left_with["prefill"] = self.sender.memory

    async def give_up_sending(self) -> None:
        """Abort with posts in flight."""
        try:
            async with self.sender:
                await self.sender.chunk((0, 8), self.request.src_pages(0, (0, 8)))
                await self._is_posted.wait()
                self.sender.abort()
        finally:
            self.left_with["prefill"] = self.sender.memory

    async def receive(self) -> None:
        """Receive until done."""
        try:
            async with self.receiver:
                await self.receiver.done()
        finally:
            self.left_with["decode"] = self.receiver.memory

    async def give_up_receiving(self) -> None:
        """Leave the block with posts in flight."""
        try:
            async with self.receiver:
                await self._is_posted.wait()
        finally:
            self.left_with["decode"] = self.receiver.memory


def other_engine(engines: Engines, side: str) -> Act:
    return engines.receive if side == "prefill" else engines.deliver


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("side", "act"),
    [
        ("prefill", Engines.deliver),
        ("prefill", Engines.give_up_sending),
        ("decode", Engines.receive),
        ("decode", Engines.give_up_receiving),
    ],
    ids=["deliver", "give up sending", "receive", "give up receiving"],
)
def test_an_engine_that_is_cancelled(side: str, act: Callable[[Engines], Coroutine[Any, Any, None]], kind: str) -> None:
    """The engine leaves its block only with settled pages, both sides know the outcome, and the ranks still work."""
    most = 0
    for number, bench in benches(NARROW):
        bench.open(*SIDES)
        bench.world.faults = Faults(slow_write=1.0)
        engines = Engines(bench)
        of_other = other_engine(engines, side)
        other = bench.spawn("decode" if side == "prefill" else "prefill", cancel_at(0, kind, of_other))
        cancelled = bench.cancel(side, number, kind, functools.partial(act, engines))
        if not cancelled.was_reached:
            break
        most = number
        assert engines.left_with[side] in (Memory.SAFE, Memory.QUARANTINED)
        mine, theirs = engines.sender, engines.receiver
        if side == "decode":
            mine, theirs = engines.receiver, engines.sender  # type: ignore[assignment]
        error = bench.result(other).error
        if mine.outcome is Outcome.SUCCESS:
            assert (theirs.outcome, error) == (Outcome.SUCCESS, None)
            engines.request.assert_arrived()
        else:
            assert (mine.outcome, theirs.outcome) == (Outcome.ABORTED, Outcome.FAILED)
            assert (error.reason, error.detected_by) == (FailureReason.ABORTED, f"{side}/0")
        assert mine.memory is theirs.memory is Memory.SAFE
        bench.world.faults = NO_FAULTS
        bench.assert_works()
    assert most


# Registry ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_registry_that_is_cancelled_leaves_its_port(kind: str) -> None:
    for number, bench in benches():
        bench.world.processes["registry"].kill()
        ports = bench.world.ports(bench.processes["prefill"])

        async def serve(ports: Ports = ports) -> None:
            async with kvflow.Registry(bind=REGISTRY, ports=ports):
                await anyio.lowlevel.checkpoint()

        if not bench.cancel("prefill", number, kind, serve).was_reached:
            assert number > 1
            break
        assert len(bench.tasks("prefill")) == bench.num_tasks["prefill"]
        bench.world.start_registry()
        bench.open(*SIDES)
        bench.assert_works()

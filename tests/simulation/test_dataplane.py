"""The transport of the simulation, and the memory that it writes."""

from collections.abc import Iterator, Sequence

import anyio
import numpy as np
import pytest

from kvflow.backends.base import BackendEvent, NoticeArrived, PostEnded, PostInDoubt
from kvflow.errors import BackendError
from kvflow.geometry.layout import Component, KVLayout, Region
from kvflow.geometry.memory import MemoryRange
from kvflow.geometry.plan import Descriptors
from simulation import Faults, Process, Violation, World
from simulation.dataplane import Segment, SimulatedBackend, cut
from simulation.memory import Pool
from simulation.model import KV, MODELS, Shape, layout_of

BASE = 0xFFFF_8000_0000_0000
NUM_BYTES = 64


def layout() -> KVLayout:
    region = Region("k", 0, BASE, 4, 16, 2, 8, (0, 1), 8, 8, "int64")
    return KVLayout((Component("kv", (region,)),), "toy", (MemoryRange(BASE, NUM_BYTES),))


class End:
    """An endpoint in a process of its own."""

    def __init__(self, world: World, name: str) -> None:
        self.memory = bytearray(NUM_BYTES)
        self.events: list[BackendEvent] = []
        self.process = world.start(name, self._run)
        self.backend: SimulatedBackend = world.backend(self.process, {BASE: self.memory})
        self._stop = anyio.Event()
        world.run(0.0)

    async def _run(self, process: Process) -> None:
        await self.backend.open(process.name, self._on_events, self._on_broken)
        await self.backend.register(layout())
        await self._stop.wait()
        await self.backend.aclose()

    def _on_events(self, events: Sequence[BackendEvent]) -> None:
        self.events += events

    def _on_broken(self, error: BackendError) -> None:
        self.events.append(PostInDoubt(-1, str(error)))

    def stop(self) -> None:
        self.process.call(self._stop.set)


@pytest.fixture
def world() -> Iterator[World]:
    with World() as one:
        yield one


def pair(world: World) -> tuple[End, End]:
    ends = End(world, "one"), End(world, "other")
    ends[0].memory[:] = bytes(range(NUM_BYTES))
    connect(world, *ends)
    return ends


def connect(world: World, one: End, other: End) -> None:
    one.process.spawn(one.backend.connect("other", other.backend.metadata()))
    world.run(0.01)


def post(one: End, post_id: int = 1, num_bytes: int = 32) -> None:
    rows = [np.array([[BASE + offset, num_bytes, 0]], np.uint64) for offset in (0, 16)]
    one.process.call(one.backend.post, post_id, "other", Descriptors(*rows), b"notice")


def test_bytes_land_and_both_sides_hear_of_it(world: World) -> None:
    one, other = pair(world)
    post(one)
    world.run(1.0)
    assert other.memory[16:48] == bytes(range(32))
    assert one.events == [PostEnded(1, None)]
    assert other.events == [NoticeArrived(b"notice")]


def test_memory_that_is_not_registered_is_refused(world: World) -> None:
    one, _ = pair(world)
    post(one, num_bytes=64)
    with pytest.raises(Violation, match="memory range is not registered"):
        world.run(0.0)


def test_a_failed_write_may_linger(world: World) -> None:
    one, other = pair(world)
    world.faults = Faults(failed_write=1.0, lingering_write=1.0)
    for post_id in range(20):
        post(one, post_id)
    world.run(0.02)
    world.plane.is_prompt = True
    lingering = [event for event in one.events if isinstance(event, PostEnded) and event.lingers]
    world.run(5.0)
    assert lingering
    assert world.plane.lingered == {("one", "other"): None}
    assert world.plane.num_active == 0
    assert other.memory[16:48] == bytes(range(32))


@pytest.mark.parametrize("ends_with_process", [False, True])
def test_what_has_left_a_dead_process_lands_unless_that_is_fenced(ends_with_process: bool) -> None:
    with World(ends_with_process=ends_with_process) as world:
        one, other = pair(world)
        world.faults = Faults(writes_of_dead=1.0)
        post(one)
        world.run(0.0)
        one.process.kill()
        world.run(5.0)
        assert (other.memory[16:48] == bytes(range(32))) is not ends_with_process
        assert other.events == []


def test_closing_ends_every_post_and_lands_nothing_after_it(world: World) -> None:
    one, other = pair(world)
    world.faults = Faults(slow_write=1.0)
    for post_id in range(8):
        post(one, post_id)
    one.stop()
    world.run(0.05)
    before = bytes(other.memory)
    world.run(5.0)
    assert sorted(event.post_id for event in one.events if isinstance(event, PostEnded)) == list(range(8))
    assert bytes(other.memory) == before


def test_a_stopped_target_stalls_writes(world: World) -> None:
    one, other = pair(world)
    world.pause(other.process)
    post(one)
    world.run(5.0)
    assert one.events == []
    world.resume(other.process)
    world.run(1.0)
    assert one.events == [PostEnded(1, None)]


def test_a_breakdown_is_told_once_and_events_wait_for_the_end(world: World) -> None:
    one, _ = pair(world)
    post(one)
    one.process.call(one.backend.break_down)
    one.process.call(one.backend.break_down)
    world.run(1.0)
    assert [type(event) for event in one.events] == [PostInDoubt]
    one.stop()
    world.run(1.0)
    assert [type(event) for event in one.events] == [PostInDoubt, PostEnded]


def test_cuts_may_fall_within_a_segment() -> None:
    assert cut([Segment(0, 100, 8), Segment(50, 200, 8)], 0.75) == [
        [Segment(0, 100, 8), Segment(50, 200, 4)],
        [Segment(54, 204, 4)],
    ]


def new_pool() -> Pool:
    return Pool(layout_of(MODELS[0], Shape(slots=4), 0))


def touch(pool: Pool, page: int) -> None:
    word = pool.table.cells[page][0][0][0]
    pool.memory[word * 8] ^= 1


def test_a_page_that_was_written_while_free_is_found() -> None:
    pool = new_pool()
    lease = pool.take("a", 1, {KV: 1})
    assert lease is not None
    pool.give_back(lease)
    touch(pool, lease.pages[KV][0])
    with pytest.raises(Violation, match="while it was free"):
        pool.check_free_pages()
    with pytest.raises(Violation, match="while it was free"):
        pool.take("b", 2, {KV: 1})


def test_every_cell_of_a_lease_is_looked_at() -> None:
    pool = new_pool()
    lease = pool.take("a", 1, {KV: 2})
    assert lease is not None
    pool.compute(lease, KV, (0, 3), content=5)
    assert pool.find_wrong_cell(lease, KV, (0, 3), [5]) is None
    assert "token 3" in (pool.find_wrong_cell(lease, KV, (0, 4), [5]) or "")
    assert "expected (6,)" in (pool.find_wrong_cell(lease, KV, (0, 3), [6]) or "")
    assert "is not wanted" in (pool.find_wrong_cell(lease, KV, (0, 2), [5]) or "")
    touch(pool, lease.pages[KV][0])
    assert "token 0" in (pool.find_wrong_cell(lease, KV, (0, 3), [5]) or "")


def test_pools_run_full_and_know_their_owners() -> None:
    pool = new_pool()
    lease = pool.take("a", 1, {KV: 4})
    assert lease is not None
    assert pool.take("b", 2, {KV: 1}) is None
    region = pool.table.layout.components[0].regions[0]
    assert pool.owner_of(region.address, region.slot_stride * 4) is lease
    assert pool.owner_of(region.address, region.slot_stride * 4 + 8) is None  # past the region
    pool.give_back(lease)
    assert pool.owner_of(region.address, 8) is None
    assert pool.is_whole

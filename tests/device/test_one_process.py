"""Both roles in one process, with pools on the device."""

from collections.abc import Callable

import pytest

from benchmarks.pair.loads import TABLES, Table
from benchmarks.pool_memory import PoolMemory
from tests.device.devices import needs_device
from tests.device.handovers import BACKENDS, SHAPE, hand_over, new_tables, skip_unless_usable

pytestmark = [pytest.mark.anyio, pytest.mark.device]

DEVICE = needs_device()

MEMORY: dict[str, Callable[[int], PoolMemory]] = {"device": DEVICE.allocate_pool, "host": PoolMemory}

WAYS = [("device", "device"), ("device", "host"), ("host", "device")]


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(("source", "target"), WAYS)
@pytest.mark.parametrize("backend", BACKENDS)
async def test_pages_arrive(backend: str, source: str, target: str, table: Table) -> None:
    skip_unless_usable(backend, DEVICE)
    tables = new_tables(table)
    pool, _ = await hand_over(backend, (MEMORY[source], MEMORY[target]), tables)
    assert pool.holds(tables.dst, tables.src * SHAPE.page_size)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_packed_pages_arrive(backend: str) -> None:
    skip_unless_usable(backend, DEVICE)
    if not DEVICE.can_pack:
        pytest.skip("torch does not pack on this device")
    tables = new_tables("random")
    allocate = (DEVICE.allocate_pool, DEVICE.allocate_pool)
    staging = {"staging_bytes": 2**20, "staging_slot_bytes": 2**16}
    pool, statistics = await hand_over(backend, allocate, tables, settings=staging, sending={"packing": "always"})
    assert pool.holds(tables.dst, tables.src * SHAPE.page_size)
    assert statistics.staging.packed_posts

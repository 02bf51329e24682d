"""Both roles in processes of their own, with pools on the device."""

import itertools

import pytest

from benchmarks.pair import processes
from benchmarks.pair.loads import TABLES, WAYS, Load
from benchmarks.pair.processes import open_pair
from tests.device.devices import needs_device
from tests.device.handovers import BACKENDS, skip_unless_usable
from tests.device.pair_worker import MODULE

pytestmark = [pytest.mark.anyio, pytest.mark.device]

DEVICE = needs_device()

MEGABYTES = 16


@pytest.mark.parametrize("backend", BACKENDS)
async def test_pages_arrive(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests one at a time and four at once, through kvflow and through the transport alone."""
    skip_unless_usable(backend, DEVICE)
    if DEVICE.is_fake:
        monkeypatch.setattr(processes, "MODULE", MODULE)
    async with open_pair(backend, "tiny", num_bytes=MEGABYTES * 2**20, tokens=1024, memory="cuda") as pair:
        for way, table in itertools.product(WAYS, TABLES):
            await pair.check(Load(way=way, tokens=1024, table=table, count=4, tables=4))
            small = Load(way=way, tokens=64, table=table, count=16, tables=16, lanes=4, is_announced=False)
            await pair.check(small)

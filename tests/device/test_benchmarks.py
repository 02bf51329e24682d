"""What handovers and transfers take between pools on the device, through kvflow and through the transport alone."""

from collections.abc import Callable, Sequence

import pytest

from benchmarks.handover import HandoverSettings, measure_handovers
from benchmarks.pair import processes
from benchmarks.pair.loads import TABLES, Table
from benchmarks.rows import UNITS, Row
from benchmarks.transfer import TransferSettings, measure_transfers
from tests.device.devices import needs_device
from tests.device.pair_worker import MODULE

pytestmark = [pytest.mark.anyio, pytest.mark.device]

DEVICE = needs_device()

SHAPE = "tiny" if DEVICE.is_fake else "llama3-8b"

POOL_BYTES = 2**24 if DEVICE.is_fake else 2**28

ROUNDS = 2 if DEVICE.is_fake else 5

Record = Callable[[str, object], None]


@pytest.fixture(autouse=True)
def worker(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.is_fake:
        monkeypatch.setattr(processes, "MODULE", MODULE)


def record(record_property: Record, prefix: str, rows: Sequence[Row]) -> None:
    for row in rows:
        unit = UNITS.get(row.unit, row.unit)
        values = f"{row.kvflow:g} {unit}, bare {row.bare:g}, ratio {row.paired_ratio:g}"
        record_property(f"{prefix}{row.case}, {row.quantity}", values)


@pytest.mark.parametrize("table", TABLES)
async def test_handover(table: Table, record_property: Record) -> None:
    settings = HandoverSettings(
        shape=SHAPE,
        tokens=(16,),
        in_flight=(1, 16),
        rounds=ROUNDS,
        requests=64,
        pool_bytes=POOL_BYTES,
        memory="cuda",
        table=table,
    )
    record(record_property, f"{table} pages, 16 tokens, ", await measure_handovers(settings))


async def test_transfer(record_property: Record) -> None:
    tokens = (512,) if DEVICE.is_fake else (512, 2048)
    settings = TransferSettings(shapes=(SHAPE,), tokens=tokens, rounds=ROUNDS, pool_bytes=POOL_BYTES, memory="cuda")
    record(record_property, "", await measure_transfers(settings))

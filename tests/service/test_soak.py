"""A thousand transfers leave nothing behind."""

import gc
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.resources import num_files
from kvflow.observe.histograms import Histogram
from kvflow.observe.times import StageTimes
from kvflow.observe.totals import TransferTotals, WriteTotals
from kvflow.statistics import RankStatistics, StagingStatistics
from tests.support.instances import BACKENDS, Deployment, anomalies_of, deploy
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

WARM_UP = 50
TRANSFERS = 1_000
ROOM_FOR_ALLOCATOR_KIB = 4_096
"""Tolerance for the allocator between two measurements; a leak of 5 KiB per transfer exceeds it."""

REMEMBERED = ("Ended", "ClosedGeneration")
"""Types that may grow: a bounded number of ended transfers is remembered."""

SWEPT_LATE = 200
"""Objects of a type that may wait to be swept (cleared deadlines); one leak per transfer is far more."""


@dataclass
class Census:
    """Counts in which a leak would show."""

    descriptors: int
    threads: list[str]
    tables: list[RankStatistics]
    objects: Counter[str]
    resident_kib: int


def take_census(deployment: Deployment) -> Census:
    gc.collect()
    types = [type(item) for item in gc.get_objects()]
    objects = Counter(kind.__qualname__ for kind in types if str(kind.__module__).startswith("kvflow"))
    for name in REMEMBERED:
        del objects[name]
    status = Path("/proc/self/status").read_text().split()
    return Census(
        descriptors=num_files(),
        threads=sorted(thread.name for thread in threading.enumerate()),
        tables=[
            statistics._replace(
                anomalies=anomalies_of(statistics),  # this census itself holds the loop
                times=StageTimes(),
                transfers=TransferTotals(),
                writes=WriteTotals(),
                loop_lag=Histogram(),
                staging=StagingStatistics(),
            )
            for statistics in deployment.statistics()
        ],
        objects=objects,
        resident_kib=int(status[status.index("VmRSS:") + 1]),
    )


async def transfer_once(deployment: Deployment, room: int) -> None:
    request = deployment.request(room % 60_000, 8)
    await request.hand_over(chunk=4)
    request.assert_arrived()
    deployment.give_back(request)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_thousand_transfers_one_after_another(backend: str) -> None:
    async with deploy(backend, prefill_tp=2) as deployment:
        for room in range(WARM_UP):
            await transfer_once(deployment, room)
        await deployment.settle()
        before = take_census(deployment)
        for room in range(WARM_UP, WARM_UP + TRANSFERS):
            await transfer_once(deployment, room)
        await deployment.settle()
        after = take_census(deployment)
        await until(lambda: num_files() <= before.descriptors)
        assert after.threads == before.threads
        assert after.tables == before.tables
        assert {name: more for name, more in (after.objects - before.objects).items() if more > SWEPT_LATE} == {}
        assert after.resident_kib - before.resident_kib < ROOM_FOR_ALLOCATOR_KIB

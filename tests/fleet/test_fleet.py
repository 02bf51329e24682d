"""A fleet under load: instances are killed and replaced, and its directory fails.

`KVFLOW_FLEET_S=300 KVFLOW_FLEET_SEED=2 pytest tests/fleet -m slow -s` disturbs it for longer, in another order, and
prints what happened.
"""

import os
import random
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import anyio
import pytest

import kvflow
from tests.fleet.fleet import Fleet, count_reasons, open_fleet
from tests.support.etcd_server import NEEDS_ETCD, EtcdServer

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(900)]

DISTURBED_S: Final = float(os.environ.get("KVFLOW_FLEET_S", "20"))
SEED: Final = int(os.environ.get("KVFLOW_FLEET_SEED", "1"))
REPLACE_S: Final = 5.0
AT_ONCE: Final = 16

TYPED: Final = {*(reason.value for reason in kvflow.FailureReason), "killed", "not there"}
"""Why a room may fail: kvflow says so, or it was sent to a process that has ended."""


async def disturb(fleet: Fleet, act: Callable[[], Awaitable[None]]) -> dict[str, float]:
    """Load a fleet, first undisturbed, then while something acts; return the rates of both."""
    rng, over = random.Random(SEED), anyio.Event()  # noqa: S311 - repeatable
    rates = {}
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fleet.load, AT_ONCE, over, rng)
        await anyio.sleep(3.0)  # every pair has met
        for name, doing in (("undisturbed", lambda: anyio.sleep(DISTURBED_S / 2)), ("disturbed", act)):
            began, before = time.monotonic(), len(fleet.outcomes)
            await doing()
            rates[name] = (len(fleet.outcomes) - before) / (time.monotonic() - began)
        over.set()
    return rates


def tell(rates: dict[str, float], fleet: Fleet) -> None:
    """Print the requests a second, how many there were, and why rooms were sent again."""
    most = max(outcome.attempts for outcome in fleet.outcomes)
    sys.stdout.write(
        f"{rates} {len(fleet.outcomes)} requests, at most {most} rooms for one {count_reasons(fleet.outcomes)}\n"
    )


def check(fleet: Fleet) -> None:
    """Check that no page was wrong or lost, and that every failure has a reason."""
    assert not fleet.violations
    assert not set(count_reasons(fleet.outcomes)) - TYPED


async def test_instances_are_killed_and_replaced_under_load(tmp_path: Path) -> None:
    async with open_fleet(f"file://{tmp_path}", 3, 3) as fleet:

        async def replace_some() -> None:
            rng, began = random.Random(SEED + 1), time.monotonic()  # noqa: S311 - repeatable
            while time.monotonic() < began + DISTURBED_S:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(anyio.sleep, REPLACE_S)
                    for names in (fleet.prefill, fleet.decode):
                        tasks.start_soon(fleet.replace, rng.choice(names))

        rates = await disturb(fleet, replace_some)
        await fleet.settle()
        check(fleet)
        tell(rates, fleet)
        await fleet.close()
        check(fleet)


@NEEDS_ETCD
async def test_etcd_is_killed_under_load(tmp_path: Path) -> None:
    server = EtcdServer(tmp_path)
    server.start()
    try:
        await server.wait_until_ready()
        async with open_fleet(server.url, 4, 4) as fleet:

            async def kill_etcd() -> None:
                server.kill()
                await anyio.sleep(DISTURBED_S)
                server.start()
                await server.wait_until_ready()
                await anyio.sleep(DISTURBED_S / 4)

            rates = await disturb(fleet, kill_etcd)
            await fleet.settle()
            check(fleet)
            tell(rates, fleet)
            assert not count_reasons(fleet.outcomes)
            await fleet.close()
    finally:
        server.kill()

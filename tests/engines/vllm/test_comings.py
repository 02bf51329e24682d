"""vLLM servers join, are killed and replaced, drain and leave behind released routers, while clients go on asking."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tests.engines.vllm.fleet import Announcers, VllmFleet, Workers
from tests.engines.vllm.routers import empty_smg, vllm_router_of_announced
from tests.support.ports import unused_port

pytestmark = [pytest.mark.anyio, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

AT_ONCE = 2
WITHOUT_IT = 20  # requests after a server was killed, before it is replaced
FIRST = ["prefill-0", "decode-0"]


@pytest.fixture(params=["vllm-router", "smg"])
async def fleet(
    client: aiohttp.ClientSession, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[VllmFleet]:
    """Start a prefill and a decode server, and a router that knows them."""
    fleet = VllmFleet(tmp_path, client)
    address = f"127.0.0.1:{unused_port()}"
    announcers = Announcers(address, tmp_path)
    try:
        await fleet.start(*FIRST)
        if request.param == "smg":
            async with empty_smg(tmp_path) as fleet.router:
                fleet.registrar = Workers(client, fleet.router)
                for name in FIRST:
                    await fleet.registrar.admit(fleet[name])
                yield fleet
        else:
            fleet.registrar = announcers
            for name in FIRST:
                await announcers.admit(fleet[name])
            async with vllm_router_of_announced(address, tmp_path) as fleet.router:
                yield fleet
    finally:
        announcers.kill_all()
        fleet.kill_all()


async def test_servers_come_and_go(fleet: VllmFleet) -> None:
    """At most three at a time, for two cores. Every answer is right; a refusal has a type, and is right later."""
    async with fleet.loaded(AT_ONCE):
        await fleet.until_used(*FIRST)
        await join(fleet, "prefill-1")
        fleet.step = "prefill-0 is killed"
        fleet["prefill-0"].kill()
        await fleet.until_tried(WITHOUT_IT)
        await fleet.start("prefill-0")
        fleet.step = "prefill-0 is back"
        await fleet.until_used("prefill-0", "prefill-1", "decode-0")
        await leave(fleet, "decode-0")  # the only one
        await join(fleet, "decode-1")
        await leave(fleet, "prefill-1")
        fleet.step = "one pair is left"
        await fleet.until_used("prefill-0", "decode-1")
    sys.stdout.write(f"{len(fleet.texts)} answers, refused before: {dict(fleet.refusals)}\n")
    refused = [key for key in fleet.refusals if key[0] != "prefill-0 is killed"]
    # Not while prefill-1 leaves: vLLM gives tickets before it learns that its rank drains, so that decode would fail
    # requests if the router were not told in advance.
    assert {step for step, _ in refused} <= {"begin", "decode-0 leaves", "decode-1 joins"}
    assert all(kind.startswith("503 ") for _, kind in refused)  # the router's own: there is no decode server
    await fleet.until_free("prefill-0", "decode-1")
    assert await fleet.num_brought("decode-1")
    await fleet.check_texts("prefill-0")


async def join(fleet: VllmFleet, name: str) -> None:
    """Start a server, tell the router, and wait until it is used."""
    fleet.step = f"{name} joins"
    await fleet.start(name)
    await fleet.registrar.admit(fleet[name])
    await fleet.until_used(name)


async def leave(fleet: VllmFleet, name: str) -> None:
    """Drain a server, let the router forget it, and stop it."""
    fleet.step = f"{name} leaves"
    await fleet.drain(name)
    await fleet.until_left_out(name)
    await fleet.registrar.dismiss(fleet[name])
    await fleet.stop(name)

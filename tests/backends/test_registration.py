"""Drivers that register memory slowly, in part, or not at all: wrapped around the real library."""

import importlib
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import kvflow
from kvflow.backends.nixl import NixlBackend
from kvflow.errors import RegistrationError
from kvflow.geometry import Component, KVLayout, MemoryRange, Region
from kvflow.resources import SHARED_MEMORY
from kvflow.testing.device import FakeDevice, on_fake_device
from tests.support.instances import decode_config, prefill_config
from tests.support.pools import PagedShape, Pool

pytestmark = pytest.mark.anyio


REGION_BYTES = 4096
NUM_REGIONS = 5

Rows = list[tuple[int, int, int, str]]


class Driver:
    """Counts what is registered, and refuses some of it.

    Attributes:
        refuse: Returns whether memory is refused, given what is registered already, in bytes, and new rows.
        held: Memory that is registered, by the identity of NIXL's handle.
        delay_s: How long a registration takes.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refuse: Callable[[int, Rows], bool]) -> None:
        agent_class = importlib.import_module("nixl_cu12._api").nixl_agent
        self.refuse, self.delay_s = refuse, 0.0
        self.held: dict[int, int] = {}
        self._register, self._deregister = agent_class.register_memory, agent_class.deregister_memory
        monkeypatch.setattr(agent_class, "register_memory", lambda *given: self.register(*given))  # noqa: PLW0108 - becomes a method
        monkeypatch.setattr(agent_class, "deregister_memory", lambda *given: self.deregister(*given))  # noqa: PLW0108 - likewise

    def register(self, agent: Any, rows: Rows, kind: str) -> Any:
        time.sleep(self.delay_s)
        if self.refuse(sum(self.held.values()), rows):
            raise RuntimeError("NIXL_ERR_BACKEND")
        handle = self._register(agent, rows, kind)
        self.held[id(handle)] = sum(length for _, length, _, _ in rows)
        return handle

    def deregister(self, agent: Any, handle: Any) -> None:
        del self.held[id(handle)]
        self._deregister(agent, handle)


def make_layout() -> KVLayout:
    device = FakeDevice(2)
    pools = [device.allocate(REGION_BYTES) for _ in range(NUM_REGIONS)]
    regions = tuple(
        Region("k", layer, pool.address, 4, REGION_BYTES // 4, 1, 1, (0, 1), 1, 1, "uint8")
        for layer, pool in enumerate(pools)
    )
    allocations = tuple(sorted(MemoryRange(pool.address, REGION_BYTES) for pool in pools))
    layout = KVLayout((Component("kv", regions),), "test", allocations, memory_kind="VRAM", device_id=2)
    layout.keep(pools)
    return layout


def transport() -> NixlBackend:
    return on_fake_device(NixlBackend)()


async def refused(layout: KVLayout, backend: NixlBackend | None = None) -> RegistrationError:
    rank = kvflow.PrefillRank(prefill_config(None, backend="nixl"), layout, backend or transport())
    with pytest.raises(RegistrationError) as caught:
        await rank.__aenter__()
    return caught.value


async def test_the_region_that_a_driver_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = make_layout()
    third = sorted(one.address for one in layout.allocations)[2]
    at_alias = third + 2**44
    driver = Driver(monkeypatch, lambda _, rows: any(address == at_alias for address, *_ in rows))
    error = await refused(layout)
    assert (error.values["address"], error.values["length"]) == (hex(at_alias), REGION_BYTES)
    assert (error.values["ranges"], error.values["num_bytes"]) == (NUM_REGIONS, NUM_REGIONS * REGION_BYTES)
    assert driver.held == {}


async def test_more_than_a_driver_can_pin_is_named_and_nothing_of_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 3 * REGION_BYTES
    driver = Driver(monkeypatch, lambda held, rows: held + sum(length for _, length, *_ in rows) > most)
    layout = make_layout()
    error = await refused(layout)
    assert "together" in str(error.values["hint"])
    assert error.values["num_bytes"] == NUM_REGIONS * REGION_BYTES
    assert driver.held == {}
    driver.refuse = lambda *_: False
    async with kvflow.DecodeRank(decode_config(None, backend="nixl"), layout, transport()):
        assert sum(driver.held.values()) == NUM_REGIONS * REGION_BYTES
    assert driver.held == {}


@pytest.mark.skipif(sys.platform != "linux", reason="limits are those of Linux")
@pytest.mark.parametrize("is_limited", [True, False])
async def test_host_memory_that_is_refused_is_named_with_the_limit_of_this_process(
    monkeypatch: pytest.MonkeyPatch, *, is_limited: bool
) -> None:
    Driver(monkeypatch, lambda *_: True)
    most = REGION_BYTES if is_limited else resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda _: (most, most))
    error = await refused(Pool(PagedShape(4, 2, (0, 1), 8, 1), 0).layout, NixlBackend())
    limit = error.values.get("limit")
    assert limit == (f"RLIMIT_MEMLOCK is {REGION_BYTES} bytes (raise it: ulimit -l)" if is_limited else None)


FULL = """
import anyio, numpy as np, kvflow

async def main(layout):
    config = kvflow.PrefillConfig(instance="p", backend="nixl", bind="tcp://127.0.0.1:0")
    try:
        async with kvflow.PrefillRank(config, layout):
            print("opened")
    except kvflow.BackendUnavailable as error:
        print(error.values["shared_memory"])

pool = {"k": [np.zeros((8, 4, 2, 16), "float32")]}
anyio.run(main, kvflow.layout_from_tensors(pool, axes="page token head dim", heads=(0, 2), fingerprint="m"))
"""


def test_a_transport_that_needs_more_shared_memory_than_there_is_says_so() -> None:
    unshare = [shutil.which("unshare") or "false", "-m"]
    if subprocess.run([*unshare, "true"], check=False).returncode != 0:
        pytest.skip("needs mounts of its own")
    fill = "mount -t tmpfs -o size=4k tmpfs /dev/shm && head -c 4096 /dev/zero > /dev/shm/full"
    command = [*unshare, "sh", "-c", f'{fill} && exec "$0" -c "$1"', sys.executable, FULL]
    done = subprocess.run(
        command, env=os.environ | {"UCX_TLS": "posix"}, capture_output=True, text=True, timeout=50, check=True
    )
    assert f"{SHARED_MEMORY} has 0 bytes free" in done.stdout


async def test_slow_registration_does_not_hold_up_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, lambda *_: False)
    driver.delay_s = 0.5
    num_turns = 0

    async def count() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(count)
        config = decode_config(None, backend="nixl")
        async with kvflow.DecodeRank(config, make_layout(), transport()):
            assert num_turns > 100
            tasks.cancel_scope.cancel()

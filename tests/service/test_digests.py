"""Digests: decode compares the received bytes with those sent, across any re-sharding, before they count."""

import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress

import anyio
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from msgspec.structs import replace
from numpy.typing import NDArray
from typing_extensions import override

import kvflow
from kvflow import blocking
from kvflow.backends.base import Backend, BackendEvent, Capabilities, NoticeArrived, OnBroken, OnEvents
from kvflow.backends.memory import MemoryBackend
from kvflow.backends.nixl import NixlBackend
from kvflow.errors import ConfigError, FailureReason, PlanError, Stage, TransferFailed
from kvflow.geometry.memory import Location, MemoryRange
from kvflow.state.tables import Memory, Outcome
from tests.service.test_any_layout import hand_over, posts, small_worlds, stops_of_layers
from tests.support.examples import examples
from tests.support.failures import catch, receive_failure, undisturbed
from tests.support.faulty_memory import FaultScript, FaultyMemoryBackend
from tests.support.instances import (
    BACKENDS,
    SOON_QUARANTINED,
    Deployment,
    Request,
    decode_config,
    deploy,
    make_pool,
    prefill_config,
)
from tests.support.pools import Pool
from tests.support.registries import registry_in_thread
from tests.support.waiting import until
from tests.support.worlds import World

pytestmark = pytest.mark.anyio


@pytest.mark.host_memory
@settings(max_examples=examples(40), suppress_health_check=list(HealthCheck))
@given(world=small_worlds, post=posts, stops=stops_of_layers)
async def test_digests_agree_for_any_pair_of_layouts_over_memory(
    world: World, post: int, stops: tuple[int, ...]
) -> None:
    await hand_over(world, "memory", digest_every=1, bytes_per_post=post, stops=stops)


@settings(max_examples=examples(10), suppress_health_check=list(HealthCheck))
@given(world=small_worlds, post=posts, stops=stops_of_layers)
async def test_digests_agree_for_any_pair_of_layouts_over_nixl(world: World, post: int, stops: tuple[int, ...]) -> None:
    await hand_over(world, "nixl", digest_every=1, bytes_per_post=post, stops=stops)


@pytest.mark.parametrize("error", [PlanError("odd"), MemoryError()])
async def test_what_cannot_be_compared_fails_its_transfer_alone(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise error

    async with deploy(digest_every=1) as deployment:
        with monkeypatch.context() as patch:
            patch.setattr("kvflow.stages.aggregate.find_difference", fail)
            failure = await receive_failure(deployment.request(1, 12))
        assert (failure.reason, failure.stage) == (FailureReason.PROTOCOL, Stage.AGGREGATE)
        assert (str(error) or "out of memory") in failure.detail
        await undisturbed(deployment)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_good_transfer_passes(backend: str) -> None:
    async with deploy(backend, prefill_tp=2, decode_tp=3, digest_every=1) as deployment:
        request = deployment.request(1, 30)
        await request.hand_over(chunk=7, start=3)
        request.assert_arrived(3)
        await undisturbed(deployment)


async def end(request: Request, *, digest: bool | None = None) -> dict[str, TransferFailed]:
    """Send from every prefill rank in chunks of ten, receive on one decode rank; return the failures."""
    failures: dict[str, TransferFailed] = {}

    async def note(name: str, act: Callable[[], Awaitable[object]]) -> None:
        try:
            await act()
        except TransferFailed as failure:
            failures[name] = failure

    async with anyio.create_task_group() as tasks:
        for rank in range(len(request.deployment.prefill)):
            tasks.start_soon(note, f"prefill/{rank}", lambda rank=rank: request.send(rank, chunk=10))
        tasks.start_soon(note, "decode/0", lambda: request.receive(digest=digest))
    return failures


async def test_a_changed_byte_fails_both_sides_and_is_named() -> None:
    async with deploy(prefill_tp=2, digest_every=1) as deployment:
        deployment.faults[1].plan.extend([None, "corrupt"])
        failures = await end(deployment.request(1, 30))
        assert sorted(failures) == ["decode/0", "prefill/0", "prefill/1"]
        for failure in failures.values():
            assert failure.reason is FailureReason.CORRUPT
            assert (failure.stage, failure.detected_by) == (Stage.AGGREGATE, "decode/0")
            assert "prefill/1: tokens 10:20 of component kv" in failure.detail
            assert not failure.quarantined
        await undisturbed(deployment)


@pytest.mark.host_memory
@pytest.mark.parametrize("digest", [False, True], ids=["unnoticed without digests", "found by digests"])
async def test_a_notice_that_overtakes_its_bytes(digest: bool) -> None:
    """Transports promise that none does (`Capabilities.in_band_notices`).

    When digests differ, notices are no proof any more, and the pages wait for the end of the write.
    """
    async with deploy(timeouts=SOON_QUARANTINED) as deployment:
        (faults,) = deployment.faults
        faults.plan.append("overtake")
        faults.hold()
        request = deployment.request(1, 10)
        receiver, failures = request.receiver(digest=digest), []

        async def receive() -> None:
            try:
                async with receiver:
                    await receiver.done()
            except TransferFailed as failure:
                failures.append(failure.reason)

        async def send() -> None:
            with suppress(TransferFailed):
                await request.send()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send)
            await receive()
            assert failures == [FailureReason.CORRUPT] * digest
            with pytest.raises(AssertionError):
                request.assert_arrived()
            assert (receiver.memory is Memory.QUARANTINED) is digest
            faults.release()
        await until(lambda: receiver.memory is Memory.SAFE)
        request.assert_arrived()


class Corrupting(NixlBackend):
    """A transport that changes a byte of a page before it reports each notice, as bad memory would."""

    def __init__(self, pool: Pool, page: int) -> None:
        super().__init__()
        self.cell = pool.cell("v", 1, page, 0, 5)

    @override
    async def open(self, agent_name: str, on_events: OnEvents, on_broken: OnBroken) -> None:
        def corrupt(events: Sequence[BackendEvent]) -> None:
            if any(isinstance(event, NoticeArrived) for event in events):
                self.cell[3] ^= 1
            on_events(events)

        await super().open(agent_name, corrupt, on_broken)


async def open_decode(deployment: Deployment, stack: AsyncExitStack, pool: Pool, backend: Backend) -> None:
    config = decode_config(deployment.registry.endpoint, backend=backend.name, digest_every=1)
    rank = kvflow.DecodeRank(config, pool.layout, backend)
    deployment.decode.append(await deployment.open(rank, stack))
    deployment.targets.append(pool)


async def test_a_byte_that_changes_after_it_was_written_over_nixl_is_found() -> None:
    async with deploy("nixl", decode_tp=0) as deployment, AsyncExitStack() as stack:
        pool = make_pool()
        backend = Corrupting(pool, page=7)
        await open_decode(deployment, stack, pool, backend)
        deployment.free[id(pool)] = [7, 3, 9]
        failures = await end(deployment.request(1, 10))
        assert {failure.reason for failure in failures.values()} == {FailureReason.CORRUPT}
        assert "prefill/0: tokens 0:10 of component kv" in failures["decode/0"].detail
        backend.cell = np.zeros(8, np.uint8)
        deployment.free[id(pool)] = [7, 3, 9]
        assert await end(deployment.request(2, 10)) == {}


async def test_nobody_notices_a_changed_byte_without_digests() -> None:
    """This proves that only digests detect the errors in the tests above."""
    async with deploy() as deployment:
        deployment.faults[0].plan.extend(["corrupt"])
        request = deployment.request(1, 10)
        assert await end(request) == {}
        with pytest.raises(AssertionError):
            request.assert_arrived()


@pytest.mark.parametrize(("every", "found"), [(0, []), (1, [1, 2, 3, 4, 5, 6]), (2, [2, 4, 6]), (3, [3, 6])])
async def test_one_in_so_many_transfers_is_compared(every: int, found: list[int]) -> None:
    async with deploy(digest_every=every) as deployment:
        deployment.faults[0].plan.extend(["corrupt"] * 6)
        assert [room for room in range(1, 7) if await end(deployment.request(room, 4))] == found


async def test_a_transfer_can_ask_for_digests_or_do_without() -> None:
    async with deploy(digest_every=1) as deployment:
        deployment.faults[0].plan.extend(["corrupt"] * 2)
        assert await end(deployment.request(1, 4), digest=False) == {}
        assert await end(deployment.request(2, 4), digest=True)
    async with deploy() as deployment:
        deployment.faults[0].plan.extend(["corrupt"])
        assert await end(deployment.request(1, 4), digest=True)


class SlowView(MemoryBackend):
    """A transport that holds readers of its memory back, and records their threads."""

    def __init__(self) -> None:
        super().__init__()
        self.viewers: list[str] = []
        self.may_see = threading.Event()

    @override
    def view(self, memory: MemoryRange) -> NDArray[np.uint8]:
        self.viewers.append(threading.current_thread().name)
        self.may_see.wait()
        return super().view(memory)


async def test_pages_stay_held_until_nobody_reads_them() -> None:
    """The engine leaves while a worker thread compares its pages."""
    async with deploy(decode_tp=0) as deployment, AsyncExitStack() as stack:
        backend = SlowView()
        await open_decode(deployment, stack, make_pool(), backend)
        request = deployment.request(1, 10)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(catch, request.send)
            receiver = request.receiver()
            async with receiver:
                await until(lambda: backend.viewers)
                tasks.start_soon(release_when_draining, receiver, backend)
            assert (receiver.outcome, receiver.memory) == (Outcome.ABORTED, Memory.SAFE)
        assert threading.main_thread().name not in backend.viewers
        assert len(backend.viewers) == 4  # the regions of the one notice under comparison
        await undisturbed(deployment)


async def release_when_draining(receiver: kvflow.RoomReceiver, backend: SlowView) -> None:
    await until(lambda: receiver.memory is Memory.DRAINING)
    backend.may_see.set()


async def test_a_comparison_ends_soon_when_nobody_wants_to_know_any_more() -> None:
    async with deploy(decode_tp=0) as deployment, AsyncExitStack() as stack:
        backend = SlowView()
        await open_decode(deployment, stack, make_pool(), backend)
        request = deployment.request(1, 40)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(catch, lambda: request.send(chunk=4))
            receiver = request.receiver()
            async with receiver:
                await until(lambda: backend.viewers)
                tasks.start_soon(release_when_draining, receiver, backend)
        assert len(backend.viewers) == 4


async def test_closing_a_rank_waits_for_who_reads_its_memory() -> None:
    async with deploy(decode_tp=0) as deployment, AsyncExitStack() as stack:
        backend = SlowView()
        await open_decode(deployment, stack, make_pool(), backend)
        request = deployment.request(1, 10)
        failures: list[TransferFailed] = []

        async def fail() -> None:
            failures.append(await receive_failure(request))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fail)
            await until(lambda: backend.viewers)
            async with anyio.create_task_group() as closing:
                closing.start_soon(deployment.close, *deployment.decode)
                await until(lambda: not deployment.decode[0]._is_open)
                backend.may_see.set()
        assert [failure.reason for failure in failures] == [FailureReason.PEER_CLOSED]
        assert not failures[0].quarantined


class PretendedDevice(MemoryBackend):
    """A transport that accepts host memory as device memory."""

    capabilities = Capabilities(in_band_notices=True, memory_kinds=frozenset({"DRAM", "VRAM"}))


async def test_prefill_refuses_digests_of_device_memory() -> None:
    async with deploy(prefill_tp=0, digest_every=1) as deployment:
        source = make_pool()
        layout = replace(source.layout, memory_kind="VRAM")
        config = prefill_config(deployment.registry.endpoint)
        async with kvflow.PrefillRank(config, layout, PretendedDevice()) as rank:
            deployment.prefill.append(rank)
            deployment.sources.append(source)
            failures = await end(deployment.request(1, 10))
            assert {failure.reason for failure in failures.values()} == {FailureReason.INVALID_PAGES}
            assert "digests require host memory (memory_kind='VRAM')" in failures["decode/0"].detail
            assert await end(deployment.request(2, 10), digest=False) == {}


def test_decode_refuses_digests_if_some_memory_is_on_a_device() -> None:
    layout = make_pool().layout
    moved = tuple(replace(one, location=Location("VRAM", 0)) for one in layout.allocations)
    with pytest.raises(ConfigError, match="host memory"):
        kvflow.DecodeRank(decode_config("tcp://127.0.0.1:1", digest_every=4), replace(layout, allocations=moved))


def test_decode_refuses_digests_of_device_memory() -> None:
    layout = replace(make_pool().layout, memory_kind="VRAM")
    with pytest.raises(ConfigError, match="host memory") as caught:
        kvflow.DecodeRank(decode_config("tcp://127.0.0.1:1", digest_every=4), layout)
    assert caught.value.values == {"digest_every": 4, "memory_kind": "VRAM"}
    rank = kvflow.DecodeRank(decode_config("tcp://127.0.0.1:1"), layout)
    with pytest.raises(PlanError, match="digests require host memory"):
        rank.receive(1, prefill="prefill", tokens=(0, 4), pages={"kv": [1]}, digest=True)
    rank.receive(1, prefill="prefill", tokens=(0, 4), pages={"kv": [1]}, digest=False)


@pytest.mark.parametrize("every", [-1, 1.5, "3", None])
def test_the_setting_is_checked(every: object) -> None:
    with pytest.raises(ConfigError, match="integer") as caught:
        decode_config("tcp://127.0.0.1:1", digest_every=every)
    assert caught.value.values.items() >= {"setting": "digest_every", "value": every}.items()


def test_blocking_ranks_compare_too() -> None:
    source, target = make_pool(), make_pool()
    with ExitStack() as stack:
        endpoint = stack.enter_context(registry_in_thread())
        backend = FaultyMemoryBackend(faults=FaultScript(["corrupt", None]))
        prefill = stack.enter_context(blocking.PrefillRank(prefill_config(endpoint), source.layout, backend))
        decode = stack.enter_context(blocking.DecodeRank(decode_config(endpoint), target.layout))
        outcomes = []
        for room in range(2):
            receiver = decode.receive(room, prefill="prefill", tokens=(0, 4), pages={"kv": [1]}, digest=True)
            prefill.send(room).finish((0, 4), {"kv": [1]})
            outcomes.append(receiver.wait())
            if outcomes[-1] is Outcome.FAILED:
                with pytest.raises(TransferFailed, match="corrupt"):
                    receiver.result()
        assert outcomes == [Outcome.FAILED, Outcome.SUCCESS]

"""Packed pieces in the whole service: they arrive, and pages and slots are freed after every failure."""

import functools
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import anyio
import pytest
from hypothesis import HealthCheck, assume, given, settings

import kvflow
from kvflow.backends.memory import MemoryBackend
from kvflow.bounds import Bounds
from kvflow.config import Limits
from kvflow.errors import ConfigError, FailureReason, PlanError, Stage
from kvflow.geometry.plan import ExtentPlan, plan_extents
from kvflow.packing.copier import PackWork
from kvflow.stages.digests import DigestWork
from kvflow.state.packing import BLOCK_S
from kvflow.state.tables import Memory, Outcome
from kvflow.statistics import StagingStatistics
from tests.service.test_any_layout import hand_over, posts, small_worlds, stops_of_layers
from tests.support.examples import examples
from tests.support.failures import catch, receive_failure, undisturbed
from tests.support.instances import Deployment, deploy, make_pool, prefill_config
from tests.support.slow import on_backends
from tests.support.waiting import until
from tests.support.worlds import World

pytestmark = pytest.mark.anyio

SLOT_BYTES = 1024
"""Bytes of a slot; a page takes 768."""
PAGE_PIECES = Bounds(bytes_per_post=1)


@asynccontextmanager
async def packing(
    backend: str = "memory",
    *,
    prefill_tp: int = 1,
    decode_tp: int = 1,
    local_slots: int = 8,
    slots: int = 4,
    windows: int = 4,
    limits: Limits = PAGE_PIECES,
    digest_every: int = 0,
) -> AsyncIterator[Deployment]:
    """Open both instances; each piece is a page, and is packed if there is a slot."""
    slot = {"staging_slot_bytes": SLOT_BYTES}
    sending = {"packing": "always", "staging_bytes": local_slots * SLOT_BYTES, **slot}
    receiving = {"staging_bytes": windows * slots * SLOT_BYTES, "staging_slots": slots, **slot}
    async with deploy(
        backend,
        prefill_tp=prefill_tp,
        decode_tp=decode_tp,
        limits=limits,
        digest_every=digest_every,
        sending=sending,
        receiving=receiving,
    ) as deployment:
        yield deployment


def staging(rank: kvflow.PrefillRank | kvflow.DecodeRank) -> StagingStatistics:
    return rank.statistics().staging


def costly(overhead_s: float) -> MemoryBackend:
    """Return a transport with this declared overhead for each descriptor."""
    backend = MemoryBackend()
    backend.capabilities = replace(MemoryBackend.capabilities, descriptor_overhead_s=overhead_s)
    return backend


async def slots_are_back(deployment: Deployment) -> None:
    """Wait until all slots are free."""
    await deployment.settle()
    for rank in deployment.prefill:
        await until(functools.partial(_has_all_slots, rank))
        assert staging(rank).slots_taken == 0
        assert staging(rank).slots_lost == 0


def _has_all_slots(rank: kvflow.PrefillRank) -> bool:
    return not len(rank._core.slots)


@pytest.mark.host_memory
@settings(max_examples=examples(40), suppress_health_check=list(HealthCheck))
@given(world=small_worlds, post=posts, stops=stops_of_layers)
async def test_any_layout_is_packed_over_memory(world: World, post: int, stops: tuple[int, ...]) -> None:
    found = await hand_over(world, "memory", bytes_per_post=post, stops=stops, packing="always")
    assert found.direct_posts == 0


@settings(max_examples=examples(20), suppress_health_check=list(HealthCheck))
@given(world=small_worlds, post=posts, stops=stops_of_layers)
async def test_digests_agree_with_what_was_scattered(world: World, post: int, stops: tuple[int, ...]) -> None:
    await hand_over(world, "memory", bytes_per_post=post, stops=stops, packing="always", digest_every=1)


@settings(max_examples=examples(8), suppress_health_check=list(HealthCheck))
@given(world=small_worlds, post=posts)
async def test_any_layout_is_packed_over_nixl(world: World, post: int) -> None:
    assert (await hand_over(world, "nixl", bytes_per_post=post, packing="always")).direct_posts == 0


@pytest.mark.slow
@settings(max_examples=examples(4), suppress_health_check=list(HealthCheck))
@given(world=small_worlds, post=posts)
async def test_any_layout_is_packed_over_mooncake(world: World, post: int) -> None:
    assume(len(world.prefill) + len(world.decode) <= 4)
    assert (await hand_over(world, "mooncake", bytes_per_post=post, packing="always")).direct_posts == 0


@pytest.mark.parametrize(("backend", "prefill_tp", "decode_tp"), on_backends([(3, 2)], [(2, 1), (1, 2), (3, 2)]))
async def test_pieces_wait_for_slots_and_all_arrive(backend: str, prefill_tp: int, decode_tp: int) -> None:
    """Send 34 tokens without a prefix of 3, in chunks, through one slot of each window."""
    async with packing(backend, prefill_tp=prefill_tp, decode_tp=decode_tp, slots=1, windows=8) as deployment:
        request = deployment.request(1, 34)
        await request.hand_over(chunk=9, start=3)
        request.assert_arrived(3)
        request.assert_untouched(3)
        await slots_are_back(deployment)
        for rank in deployment.prefill:
            assert staging(rank).direct_posts == 0
            assert staging(rank).packed_posts >= 8


async def test_whoever_gets_no_window_goes_direct() -> None:
    async with packing(prefill_tp=2, windows=1) as deployment:
        request = deployment.request(1, 20)
        await request.hand_over()
        request.assert_arrived()
        assert sorted(staging(rank).packed_posts for rank in deployment.prefill) == [0, 5]
        assert sorted(staging(rank).direct_posts for rank in deployment.prefill) == [0, 5]
        assert (staging(deployment.decode[0]).windows_taken, staging(deployment.decode[0]).windows_free) == (1, 0)


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_without_staging_memory_everything_goes_direct(side: str) -> None:
    local_slots, windows = (0, 4) if side == "prefill" else (8, 0)
    async with packing(local_slots=local_slots, windows=windows) as deployment:
        request = deployment.request(1, 20)
        await request.hand_over()
        request.assert_arrived()
        assert (staging(deployment.prefill[0]).packed_posts, staging(deployment.prefill[0]).direct_posts) == (0, 5)


async def test_a_piece_that_is_larger_than_a_slot_goes_direct() -> None:
    """A token takes 192 bytes over all layers, tensors and heads; pages are split into tokens, but no further."""
    for slot_bytes, expected in [(768, 3), (400, 5), (192, 10), (191, 0)]:
        slot = {"staging_bytes": 1024, "staging_slot_bytes": slot_bytes}
        async with deploy(sending={"packing": "always", **slot}, receiving={"staging_slots": 1, **slot}) as deployment:
            request = deployment.request(1, 10)
            await request.hand_over()
            request.assert_arrived()
            found = staging(deployment.prefill[0])
            assert found.packed_posts == expected
            assert found.packed_bytes + found.direct_bytes == 10 * 192


@pytest.mark.host_memory
async def test_small_pieces_are_packed_when_that_is_quicker_and_large_ones_never() -> None:
    """The transport's `descriptor_overhead_s` decides."""

    class Costly(MemoryBackend):
        capabilities = kvflow.backends.base.Capabilities(
            in_band_notices=True, memory_kinds=frozenset({"DRAM"}), ends_with_process=True, descriptor_overhead_s=1.0
        )

    for costly, tp, expected in [(True, 2, True), (False, 2, False)]:
        async with deploy(prefill_tp=0, decode_tp=1) as deployment, AsyncExitStack() as stack:
            for rank in range(tp):
                pool = make_pool(tp, rank)
                config = prefill_config(deployment.registry.endpoint, rank, tp)
                opened = kvflow.PrefillRank(config, pool.layout, Costly() if costly else None)
                deployment.prefill.append(await deployment.open(opened, stack))
                deployment.sources.append(pool)
            request = deployment.request(1, 30)
            await request.hand_over()
            request.assert_arrived()
            assert bool(staging(deployment.prefill[0]).packed_posts) is expected


@pytest.mark.host_memory
@pytest.mark.parametrize("gathered_inline", [2**18, 1])
async def test_a_piece_whose_pages_happen_to_follow_each_other_goes_direct_and_gives_its_slots_back(
    gathered_inline: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The estimate of its descriptors exceeds the cost of packing; in fact there is one for each layer and tensor."""
    outlined: list[str] = []

    def noted(*args: object, **options: object) -> ExtentPlan:
        outlined.append(threading.current_thread().name)
        return plan_extents(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("kvflow.stages.planning.plan_extents", noted)
    monkeypatch.setattr("kvflow.state.prefill.posting.BYTES_GATHERED_INLINE", gathered_inline)
    async with deploy(prefill_tp=0) as deployment, AsyncExitStack() as stack:
        pool = make_pool()
        rank = kvflow.PrefillRank(prefill_config(deployment.registry.endpoint), pool.layout, costly(BLOCK_S / 8))
        deployment.prefill.append(await deployment.open(rank, stack))
        deployment.sources.append(pool)
        for side in (pool, *deployment.targets):
            deployment.free[id(side)] = list(range(20))
        request = deployment.request(1, 30)
        await request.hand_over()
        request.assert_arrived()
        found = staging(deployment.prefill[0])
        assert (found.packed_posts, found.direct_posts) == (0, 1)
        assert (deployment.prefill[0]._core.local_slots.is_whole, len(outlined)) == (True, 1)
        assert (outlined[0] == threading.current_thread().name) is (gathered_inline > 1)
        for side in (pool, *deployment.targets):
            deployment.free[id(side)] = list(range(50, 20, -2))
        scattered = deployment.request(2, 30)
        await scattered.hand_over()
        scattered.assert_arrived()
        assert staging(deployment.prefill[0]).packed_posts == 1


async def test_a_large_chunk_whose_pages_follow_each_other_is_not_cut_into_slots() -> None:
    """Descriptors are as long as the shorter of the runs on both sides."""
    together, apart = list(range(20)), list(range(60, 20, -2))
    slot = {"staging_slot_bytes": SLOT_BYTES, "staging_bytes": 8 * SLOT_BYTES}
    async with deploy(prefill_tp=0, receiving={**slot, "staging_slots": 2}) as deployment, AsyncExitStack() as stack:
        pool, (target,) = make_pool(), deployment.targets
        config = prefill_config(deployment.registry.endpoint, **slot)
        rank = await deployment.open(kvflow.PrefillRank(config, pool.layout, costly(BLOCK_S / 2)), stack)
        deployment.prefill.append(rank)
        deployment.sources.append(pool)
        before = 0
        for room, (ours, theirs) in enumerate([(together, together), (apart, together), (together, apart)], 1):
            deployment.free[id(pool)], deployment.free[id(target)] = list(ours), list(theirs)
            request = deployment.request(room, 30)
            await request.hand_over()
            request.assert_arrived()
            found = staging(rank)
            posts = found.packed_posts + found.direct_posts - before
            before += posts
            assert (posts == 1) is (ours is theirs), (ours, theirs)


async def test_who_packs_always_does_not_ask_what_the_direct_way_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    async with packing() as deployment:
        monkeypatch.setattr("kvflow.stages.planning.plan_extents", lambda *_, **__: 1 // 0)
        await undisturbed(deployment)
        assert staging(deployment.prefill[0]).packed_posts == 3
        scattering = deployment.decode[0]._aggregate._scattering
        assert scattering is not None
        assert not scattering.tables, "kept for transfers that are over"


@pytest.mark.parametrize("error", [PlanError("odd"), MemoryError()])
async def test_a_piece_whose_digests_cannot_be_worked_out_fails_its_transfer_and_gives_its_slots_back(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise error

    async with packing(digest_every=1, slots=1) as deployment:
        with monkeypatch.context() as patch:
            patch.setattr(DigestWork, "digest", fail)
            failure = await receive_failure(deployment.request(1, 12))
        assert (failure.reason, failure.stage) == (FailureReason.INVALID_PAGES, Stage.PLANNING)
        assert failure.detail == (str(error) or "out of memory")
        await until(lambda: not staging(deployment.prefill[0]).slots_taken)
        await slots_are_back(deployment)
        await undisturbed(deployment)


async def test_packing_can_be_refused_by_either_side() -> None:
    with pytest.raises(ConfigError, match="packing"):
        prefill_config("tcp://127.0.0.1:1", packing="sometimes")
    async with deploy(sending={"packing": "never"}) as deployment:
        request = deployment.request(1, 30)
        await request.hand_over()
        request.assert_arrived()
        assert staging(deployment.prefill[0]).packed_posts == 0
        assert deployment.prefill[0]._staging is None


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_an_engine_leaves_while_packed_pieces_are_under_way(side: str) -> None:
    async with packing(slots=2) as deployment:
        (faults,) = deployment.faults
        request = deployment.request(1, 40)
        receiver = request.receiver()

        async def receive() -> None:
            async with receiver:
                await receiver.done()

        faults.hold()
        async with anyio.create_task_group() as tasks:
            sending, receiving = anyio.CancelScope(), anyio.CancelScope()
            tasks.start_soon(_within, sending, request.send)
            tasks.start_soon(_within, receiving, receive)
            await until(lambda: len(faults.posted) == 2)
            (sending if side == "prefill" else receiving).cancel()
            await until(lambda: receiver.failure and request.senders[0].failure)  # what comes before is scattered
            faults.release()
        request.assert_untouched(40)
        await slots_are_back(deployment)
        await undisturbed(deployment)


async def _within(scope: anyio.CancelScope, act: object) -> None:
    with scope:
        try:
            await act()  # type: ignore[operator]
        except kvflow.TransferFailed:
            return


async def test_a_packed_write_that_fails_fails_the_room_and_its_slot_comes_back() -> None:
    async with packing(slots=1) as deployment:
        deployment.faults[0].plan.extend([None, "fail"])
        request = deployment.request(1, 40)
        failure = await receive_failure(request)
        assert failure.reason is FailureReason.WRITE_FAILED
        assert not failure.quarantined
        await slots_are_back(deployment)
        await undisturbed(deployment)
        assert staging(deployment.prefill[0]).direct_posts == 0


async def test_a_slot_in_doubt_is_never_used_again_and_without_slots_pieces_go_direct() -> None:
    async with packing(slots=1) as deployment:
        deployment.faults[0].plan.extend(["doubt"])
        request = deployment.request(1, 4)
        failure = await receive_failure(request)
        assert failure.reason is FailureReason.WRITE_FAILED
        await until(lambda: staging(deployment.prefill[0]).slots_lost == 2)  # one on each side
        another = deployment.request(2, 8)
        await another.hand_over()
        another.assert_arrived()
        assert staging(deployment.prefill[0]).packed_posts == 1
        assert staging(deployment.prefill[0]).direct_posts == 2


async def test_a_damaged_payload_is_found_by_digests() -> None:
    async with packing(digest_every=1) as deployment:
        deployment.faults[0].plan.extend([None, "corrupt"])
        request = deployment.request(1, 12)
        failure = await receive_failure(request)
        assert failure.reason is FailureReason.CORRUPT
        assert "tokens 4:8" in failure.detail
        await slots_are_back(deployment)


class SlowScatter:
    """A patch that holds worker threads back before they scatter."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.num_begun = 0
        self.may_go_on = threading.Event()
        original = PackWork.scatter

        def scatter_later(work: PackWork, num_bytes: int) -> None:
            self.num_begun += 1
            self.may_go_on.wait()
            original(work, num_bytes)

        patch.setattr(PackWork, "scatter", scatter_later)


async def test_nothing_counts_and_pages_stay_held_while_they_are_scattered(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowScatter(monkeypatch)
    async with packing(slots=4) as deployment:
        request = deployment.request(1, 4)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(catch, request.send)
            receiver = request.receiver()
            async with receiver:
                await until(lambda: slow.num_begun)
                await anyio.wait_all_tasks_blocked()
                assert receiver.outcome is Outcome.PENDING
                tasks.start_soon(_go_on_when_draining, receiver, slow)
            assert (receiver.outcome, receiver.memory) == (Outcome.ABORTED, Memory.SAFE)
        request.assert_arrived()  # the thread had begun, and the pages were held until it had ended
        await slots_are_back(deployment)
        await undisturbed(deployment)


async def _go_on_when_draining(receiver: kvflow.RoomReceiver, slow: SlowScatter) -> None:
    await until(lambda: receiver.memory is Memory.DRAINING)
    slow.may_go_on.set()


async def test_closing_a_rank_waits_for_who_scatters_into_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowScatter(monkeypatch)
    async with packing() as deployment:
        request = deployment.request(1, 4)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(catch, request.send)
            tasks.start_soon(catch, request.receive)
            await until(lambda: slow.num_begun)
            async with anyio.create_task_group() as closing:
                closing.start_soon(deployment.close, *deployment.decode)
                await until(lambda: not deployment.decode[0]._is_open)
                slow.may_go_on.set()
        request.assert_arrived()


async def test_the_next_incarnation_of_a_prefill_rank_gets_a_window_of_its_own() -> None:
    """The first incarnation's window is freed once its end is proved, which this transport allows."""
    async with packing(windows=2) as deployment, AsyncExitStack() as stack:
        await undisturbed(deployment)
        decode = deployment.decode[0]
        assert staging(decode).windows_taken == 1
        (first,) = deployment.prefill
        await deployment.close(first)
        await until(lambda: not decode.statistics().peers)  # otherwise the next room would go to the first one
        config = prefill_config(
            deployment.registry.endpoint,
            packing="always",
            staging_bytes=8 * SLOT_BYTES,
            staging_slot_bytes=SLOT_BYTES,
            limits=PAGE_PIECES,
        )
        again = kvflow.PrefillRank(config, deployment.sources[0].layout)
        deployment.prefill[:] = [await deployment.open(again, stack)]
        await undisturbed(deployment, 901)
        assert staging(again).packed_posts == 3
        await until(lambda: staging(decode).windows_taken == 1)

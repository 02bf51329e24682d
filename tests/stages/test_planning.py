"""Planning of pieces: thread, cost, and no leftovers of an ended delivery."""

import threading
from collections.abc import Mapping
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvflow.bounds import Bounds
from kvflow.geometry import ComponentSlice, Descriptors, build_page_table
from kvflow.geometry.expected import expected_bytes
from kvflow.geometry.pages import PageTable, TokenPages
from kvflow.geometry.split import split_policy_for
from kvflow.stages.planning import Planning, PlanWork, PreparedRoute
from kvflow.state.effects import Piece
from kvflow.state.events import DeliveryId, PeerRoute
from kvflow.state.prefill.pieces import ChunkPart, cost_of
from kvflow.wire.messages import Notice
from tests.support.cores import DECODE, grant
from tests.support.examples import examples
from tests.support.failures import catch, undisturbed
from tests.support.instances import Deployment, deploy
from tests.support.links import Link, links
from tests.support.waiting import until
from tests.support.worlds import Rank, World, worlds


class Planned:
    """Record of the planned pieces and the planning threads."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.works: list[PlanWork] = []
        self.threads: list[threading.Thread] = []
        plan = PlanWork.plan

        def noted(work: PlanWork) -> Any:
            self.works.append(work)
            self.threads.append(threading.current_thread())
            return plan(work)

        patch.setattr(PlanWork, "plan", noted)

    @property
    def num_inline(self) -> int:
        return self.threads.count(threading.current_thread())


@pytest.mark.anyio
@pytest.mark.parametrize(("descriptors_inline", "is_inline"), [(1, False), (20_000, True)])
async def test_small_plans_are_made_on_the_event_loop_and_large_ones_beside_it(
    monkeypatch: pytest.MonkeyPatch, descriptors_inline: int, is_inline: bool
) -> None:
    planned = Planned(monkeypatch)
    async with deploy(limits=Bounds(descriptors_planned_inline=descriptors_inline)) as deployment:
        request = deployment.request(1, 30)
        await request.hand_over(chunk=10)
        request.assert_arrived()
    assert (len(planned.works), planned.num_inline) == (3, 3 if is_inline else 0)


@pytest.mark.anyio
async def test_plans_with_digests_are_made_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = Planned(monkeypatch)
    async with deploy(digest_every=1) as deployment:
        request = deployment.request(1, 30)
        await request.hand_over(chunk=10)
        request.assert_arrived()
    assert (len(planned.works), planned.num_inline) == (3, 0)


def piece_of(link: Link, world: World) -> Piece:
    """Return everything that goes over a link as one piece."""
    route, bound, source, target = link
    ranges = {name: world.wanted[name] for name in bound.expected}
    policy = split_policy_for(bound, source.layout, target.layout, 2**30)
    prepared = PreparedRoute(blocks=None, packed={}, head_major=False)
    peer_route = PeerRoute(bound, target.layout, route.slices, policy, prepared=prepared)
    return Piece(
        delivery=DeliveryId(1, DECODE, 1),
        seq=0,
        ranges=ranges,
        pages={},
        grant=grant(),
        granted={},
        link=peer_route,
        notice=Notice(room=1, generation=1, token=99, engine_rank=0, seq=0, ranges=ranges, num_bytes=0),
        cost=cost_of(part_of(ranges, peer_route), peer_route, None),
    )


def part_of(ranges: Mapping[str, tuple[int, int]], link: PeerRoute) -> ChunkPart:
    num_bytes = expected_bytes(link.route.expected, ranges, ranges)
    return ChunkPart(ranges, None, num_bytes, last=True)


def table_of(rank: Rank, name: str, tokens: tuple[int, int]) -> PageTable:
    return build_page_table(rank.layout.component(name), TokenPages(tokens, rank.pages(name, tokens)))


@settings(max_examples=examples(100), suppress_health_check=list(HealthCheck))
@given(worlds(), st.sampled_from([None, 1, 7, 1_000]))
def test_no_plan_costs_more_than_was_counted_before_it_was_made(world: World, max_bytes: int | None) -> None:
    for link in links(world):
        piece = piece_of(link, world)
        components = {
            name: ComponentSlice(tokens, table_of(link.source, name, tokens), table_of(link.target, name, tokens))
            for name, tokens in piece.ranges.items()
        }
        cost = cost_of(part_of(piece.ranges, piece.link), piece.link, max_bytes)
        descriptors = PlanWork(piece, components, max_bytes, None, 0.0).plan().moves
        assert isinstance(descriptors, Descriptors)
        assert descriptors.num_bytes == cost.num_bytes
        assert len(descriptors.src) <= cost.num_descriptors


class Gate:
    """A device event that a test completes."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def synchronize(self) -> None:
        self.opened.wait()


def assert_nothing_kept(deployment: Deployment) -> None:
    for rank in deployment.prefill:
        planning: Planning = rank._planning
        assert planning._planned == {}
        assert rank._submit._posts == {}


@pytest.mark.anyio
async def test_nothing_is_kept_for_a_delivery_that_ended_before_its_data_was_ready() -> None:
    async with deploy() as deployment:
        (prefill,), request, gate = deployment.prefill, deployment.request(1, 8), Gate()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(catch, request.receive)
                await until(lambda: prefill.statistics().waiting_grants)
                async with prefill.send(1) as sender:
                    await sender.chunk((0, 4), request.src_pages(0, (0, 4)), ready=gate)
                    sender.abort()
        finally:
            gate.opened.set()
        await undisturbed(deployment)
        assert_nothing_kept(deployment)


@pytest.mark.anyio
async def test_nothing_is_kept_for_a_delivery_whose_last_chunk_was_ready_first() -> None:
    async with deploy() as deployment:
        (prefill,), request, gate = deployment.prefill, deployment.request(1, 8), Gate()
        request.compute(0, 8)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(request.receive)
            await until(lambda: prefill.statistics().waiting_grants)
            async with prefill.send(1) as sender:
                await sender.chunk((0, 4), request.src_pages(0, (0, 4)), ready=gate)
                await sender.finish((4, 8), request.src_pages(0, (4, 8)))
                await anyio.wait_all_tasks_blocked()
                gate.opened.set()
        request.assert_arrived()
        assert_nothing_kept(deployment)


@pytest.mark.anyio
async def test_nothing_is_kept_of_a_plan_whose_transfer_ended_while_it_was_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, planned = Gate(), Planned(monkeypatch)
    plan = PlanWork.plan

    def wait_and_plan(work: PlanWork) -> Any:
        gate.opened.wait()
        return plan(work)

    monkeypatch.setattr(PlanWork, "plan", wait_and_plan)
    async with deploy(limits=Bounds(descriptors_planned_inline=1)) as deployment:
        (prefill,), request = deployment.prefill, deployment.request(1, 8)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(catch, request.receive)
                async with prefill.send(1) as sender:
                    await sender.chunk((0, 4), request.src_pages(0, (0, 4)))
                    await until(lambda: prefill._core.posting._slow_plans)
                    sender.abort()
                    gate.opened.set()
        finally:
            gate.opened.set()
        await until(lambda: planned.works)
        request.assert_untouched(8)
        await undisturbed(deployment)
        assert_nothing_kept(deployment)

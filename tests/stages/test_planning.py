"""Grants are not trusted, and nothing is kept for a delivery that has ended."""

import threading
from collections.abc import Callable
from types import MethodType
from typing import Any, Final

import anyio
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvflow.config import Limits
from kvflow.errors import PlanError
from kvflow.geometry import Component, Descriptors, KVLayout, Share, check_part
from kvflow.geometry.pages import Part
from kvflow.stages.planning import PeerGeometry, PlanWork, granted_pages
from tests.support.cores import grant
from tests.support.failures import catch, undisturbed
from tests.support.instances import deploy
from tests.support.links import links
from tests.support.pools import Pool, PoolShape
from tests.support.waiting import until
from tests.support.worlds import World, worlds

SLOTS, PAGE_SIZE = 16, 4
POOL: Final = Pool(PoolShape(SLOTS, PAGE_SIZE, (0, 1), 8, 1), 0)
REGIONS: Final = POOL.layout.components[0].regions
TWO: Final = KVLayout((Component("kv", REGIONS), Component("swa", REGIONS)), "two")


def table(*pages: int) -> bytes:
    return np.array(pages, "<u4").tobytes()


@pytest.mark.parametrize(
    ("tokens", "pages"),
    [((0, 8), [3, 1]), ((2, 7), [15, 0]), ((4, 5), [9]), ((0, 0), []), ((7, 7), [])],
)
def test_good_grant(tokens: tuple[int, int], pages: list[int]) -> None:
    read = granted_pages(grant(tokens=tokens, pages={"kv": table(*pages)}), POOL.layout)["kv"]
    assert read.pages.tolist() == pages
    assert (read.first_token, read.page_size) == (tokens[0] - tokens[0] % PAGE_SIZE, PAGE_SIZE)
    assert not read.pages.flags.writeable


def test_page_indices_are_little_endian() -> None:
    pages = {"kv": b"\x02\0\0\0\x0f\0\0\0"}
    assert granted_pages(grant(pages=pages), POOL.layout)["kv"].pages.tolist() == [2, 15]


@pytest.mark.parametrize(
    ("pages", "message", "values"),
    [
        ({"kv": table(1, 2)[:-1]}, "cut off", {"components": ["kv"]}),
        ({"kv": b"\0", "x": table(1), "y": b"\0\0"}, "cut off", {"components": ["kv", "y"]}),
        ({}, "needs pages for what it wants", {"pages": [], "wanted": ["kv"]}),
        ({"other": table(1, 2)}, "needs pages", {"pages": ["other"], "wanted": ["kv"]}),
        ({"kv": table(1, 2), "x": table(1, 2)}, "needs pages", {"pages": ["kv", "x"]}),
        ({"kv": b""}, "does not match the token range", {"component": "kv", "pages": 0, "needed": 2}),
        ({"kv": table(1)}, "does not match the token range", {"pages": 1, "needed": 2, "page_size": PAGE_SIZE}),
        ({"kv": table(1, 2, 3)}, "does not match the token range", {"pages": 3, "needed": 2}),
        ({"kv": table(1, SLOTS)}, "outside the pool", {"position": 1, "page": SLOTS, "slots": SLOTS}),
        ({"kv": table(2**32 - 1, 1)}, "outside the pool", {"position": 0, "page": 2**32 - 1}),
        ({"kv": table(5, 5)}, "listed twice", {"component": "kv", "page": 5, "positions": [0, 1]}),
    ],
)
def test_malformed_table_is_refused_with_its_values(
    pages: dict[str, bytes], message: str, values: dict[str, object]
) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        granted_pages(grant(pages=pages), POOL.layout)
    assert caught.value.values.items() >= values.items()


@pytest.mark.parametrize("tokens", [(8, 0), (-4, 4), (0, 2**63), (2**63, 2**64 - 1), (-(2**63), 8)])
def test_impossible_token_range_is_refused(tokens: tuple[int, int]) -> None:
    with pytest.raises(PlanError, match="start <= stop") as caught:
        granted_pages(grant(tokens=tokens, pages={"kv": table(1, 2)}), POOL.layout)
    assert caught.value.values["tokens"] == tokens


def test_every_component_is_checked() -> None:
    both = grant(ranges={"kv": (0, 8), "swa": (0, 8)}, pages={"kv": table(1, 2), "swa": table(1, 99)})
    with pytest.raises(PlanError, match="outside the pool") as caught:
        granted_pages(both, TWO)
    assert caught.value.values["component"] == "swa"


@pytest.mark.anyio
async def test_large_plans_are_made_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = []
    to_thread = anyio.to_thread.run_sync

    async def run_sync(function: Callable[..., object], *args: object, **options: Any) -> object:
        functions.append(function)
        return await to_thread(function, *args, **options)

    async with deploy(limits=Limits(rows_planned_inline=1)) as deployment:
        monkeypatch.setattr("kvflow.stages.planning.anyio.to_thread.run_sync", run_sync)
        request = deployment.request(1, 30)
        await request.hand_over(chunk=10)
        request.assert_arrived()
    works = [function.__self__ for function in functions if isinstance(function, MethodType)]
    assert [type(work) for work in works] == [PlanWork] * 3


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(worlds(), st.sampled_from([None, 1, 7, 1_000]))
def test_no_plan_costs_more_than_was_counted_before_it_was_made(world: World, max_bytes: int | None) -> None:
    for route, bound, source, target in links(world):
        geometry = PeerGeometry(bound, target.layout, route.pieces)
        ranges = {name: world.wanted[name] for name in geometry.route.debts}
        shares = {
            name: Share(
                tokens,
                check_part(source.layout.component(name), Part(tokens, source.pages(name, tokens))),
                check_part(target.layout.component(name), Part(tokens, target.pages(name, tokens))),
            )
            for name, tokens in ranges.items()
        }
        cost = geometry.cost(ranges, ranges, max_bytes)
        descriptors = PlanWork(geometry.route, shares, max_bytes, None).plan().moves
        assert isinstance(descriptors, Descriptors)
        assert descriptors.num_bytes == cost.num_bytes
        assert len(descriptors.src) <= cost.num_rows


class Gate:
    """A device event that happens when the test says so."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def synchronize(self) -> None:
        self.opened.wait()


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
        finally:
            gate.opened.set()
        await undisturbed(deployment)
        assert prefill._planning._tables == {}
        assert prefill._submit._waiting == {}


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
        assert prefill._planning._tables == {}

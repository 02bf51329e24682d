"""Any layout to any layout: every wanted cell holds the sender's bytes afterwards, and no other byte has changed."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from kvflow.geometry import BoundRoute, Share, bind_route, check_part, compile_routes, plan
from kvflow.geometry.pages import Part
from tests.support.worlds import Rank, World, execute, worlds


@pytest.mark.timeout(0)
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(worlds())
def test_every_wanted_cell_arrives_and_nothing_else_changes(world: World) -> None:
    world.compute()
    layouts = {engine_rank: rank.layout for engine_rank, rank in world.prefill.items()}
    for decode_rank, target in world.decode.items():
        for route in compile_routes(layouts, target.layout, decode_rank=decode_rank):
            source = world.prefill[route.engine_rank]
            send(world, bind_route(route, source.layout, target.layout), source, target)
        np.testing.assert_array_equal(target.memory, world.expected(target, world.held()))


def send(world: World, bound: BoundRoute, source: Rank, target: Rank) -> None:
    """Plan and carry out each chunk of each component."""
    for name in bound.debts:
        start, stop = world.wanted[name]
        dst = check_part(target.layout.component(name), Part((start, stop), target.pages(name, (start, stop))))
        for chunk in pairwise([start, *world.cuts[name], stop]):
            src = check_part(source.layout.component(name), Part(chunk, source.pages(name, chunk)))
            closing = chunk[1] == stop
            share = {name: Share(chunk, src, dst, closing)}
            assert len(plan(bound, share).src) <= bound.max_rows(name, chunk[1] - chunk[0])
            descriptors = plan(bound, share, max_bytes=7)
            assert descriptors.num_bytes == bound.num_bytes(name, chunk, closing=closing)
            assert int(descriptors.src[:, 1].max(initial=0)) <= 7
            execute(descriptors, source, target)

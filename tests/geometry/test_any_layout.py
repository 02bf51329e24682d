"""Any layout to any layout: every wanted cell holds the sender's bytes afterwards, and no other byte has changed."""

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings

from kvflow.geometry import BoundRoute, Share, check_part, plan
from kvflow.geometry.pages import Part
from tests.support.links import links
from tests.support.worlds import Rank, World, execute, worlds


@pytest.mark.timeout(0)
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(worlds())
def test_every_wanted_cell_arrives_and_nothing_else_changes(world: World) -> None:
    world.compute()
    for _, bound, source, target in links(world):
        send(world, bound, source, target)
    world.assert_arrived()


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

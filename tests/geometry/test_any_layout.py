"""Any layout to any layout: every wanted cell holds the sender's bytes afterwards, and no other byte has changed."""

import pytest
from hypothesis import HealthCheck, given, settings

from kvflow.geometry import BoundRoute, plan
from tests.support.links import chunk_slices, links
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
    for name, component in chunk_slices(world, bound, source, target):
        start, stop = component.tokens
        assert len(plan(bound, {name: component}).src) <= bound.max_descriptors(name, stop - start)
        descriptors = plan(bound, {name: component}, max_bytes=7)
        assert descriptors.num_bytes == bound.num_bytes(name, component.tokens, final=component.final)
        assert int(descriptors.src[:, 1].max(initial=0)) <= 7
        execute(descriptors, source, target)

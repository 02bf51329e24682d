"""Any layout to any layout: every wanted cell holds the sender's bytes, and no other byte changes."""

import pytest
from hypothesis import HealthCheck, given, settings

from tests.support.links import links, send
from tests.support.worlds import World, worlds


@pytest.mark.timeout(0)
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(worlds())
def test_every_wanted_cell_arrives_and_nothing_else_changes(world: World) -> None:
    world.compute()
    for _, bound, source, target in links(world):
        send(world, bound, source, target)
    world.assert_arrived()

"""Thousands of requests, a third of them aborted; see `soak`. KVFLOW_SOAK_ROOMS sets their number, 300 by default."""

import os
from typing import Final

import pytest

from tests.engines.sglang.processes import Deployment

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(3000)]

ROOMS: Final = int(os.environ.get("KVFLOW_SOAK_ROOMS", "300"))
WARM_UP: Final = 50


@pytest.mark.parametrize("ranks", [1, 2, 4], ids="{} prefill ranks".format)
def test_nothing_is_wrong_or_stuck_or_left_over(pair: Deployment, ranks: int) -> None:
    pair.open("mha", {"tp_size": ranks}, {})
    before = pair.both("soak", first_room=1, count=WARM_UP)
    after = pair.both("soak", first_room=1 + WARM_UP, count=ROOMS)
    for was, found in zip(before, after, strict=True):
        assert (found["wrong"], found["late"], found["stuck"]) == (0, 0, 0)
        assert not any(found["left"]), found["left"]
        assert found["received"] + found["failed"] == ROOMS
        assert ROOMS // 20 < found["failed"] < ROOMS // 2
        assert found["files"] <= was["files"] + 4
        assert found["threads"] <= was["threads"] + 2

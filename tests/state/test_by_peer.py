"""An event of one peer costs nothing for the rooms of others."""

import sys
from collections.abc import Callable
from types import FrameType

import pytest
from msgspec.structs import replace

from kvflow.config import Limits
from kvflow.state import events as ev
from kvflow.wire.messages import Goodbye
from tests.support.cores import DECODE, PREFILL, DecodeDriver, PrefillDriver, connection_of, grant, peer
from tests.support.receiving import request

OTHER = peer("other")


def num_calls(act: Callable[[], object]) -> int:
    """Return the number of function calls that an act makes."""
    count = 0

    def note(_frame: FrameType, event: str, _arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


def cost_on_prefill(num_rooms: int) -> int:
    """Return the cost of losing a decode rank that has one room, while others have many."""
    core = PrefillDriver(limits=Limits(transfers=1_000, pending_grants=1_000))
    core.connect()
    core.connect(OTHER)
    for room in range(num_rooms):
        core(ev.SendOpened(room))
        core.hear(DECODE, grant(room, generation=room + 1))
        core.hear(DECODE, grant(500 + room, generation=500 + room))  # it waits for its room
    core(ev.SendOpened(900))
    core.hear(OTHER, grant(900, generation=1))
    event = ev.MessageArrived(connection_of(OTHER), Goodbye(peer=OTHER))
    return num_calls(lambda: core.core.handle(event, core.now))


def cost_on_decode(num_rooms: int) -> int:
    """Return the cost of losing a prefill rank that no room was granted to, while another one has many."""
    core = DecodeDriver(limits=Limits(transfers=1_000))
    core.connect(PREFILL)
    core.connect(OTHER)
    for room in range(num_rooms):
        core(replace(request(1 + room, room=100 + room), pages={"kv": b""}))
    return num_calls(lambda: core.core.handle(ev.MessageReceived(OTHER, Goodbye(peer=OTHER)), core.now))


@pytest.mark.parametrize("cost", [cost_on_prefill, cost_on_decode])
def test_an_event_of_a_peer_walks_only_its_own_rooms(cost: Callable[[int], int]) -> None:
    cost(1)
    assert cost(100) <= cost(10) + 20

"""An event of one peer costs nothing for the rooms of others, or for what is kept of others."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from kvflow.bounds import Bounds
from kvflow.config import Limits
from kvflow.errors import CapacityExceeded
from kvflow.state import events as ev
from kvflow.state.settings import LocalStagingSettings
from kvflow.wire.messages import Goodbye, PeerId, Ping, StagingWindow
from tests.support.cores import ABORTED, DECODE, PREFILL, DecodeDriver, PrefillDriver, connection_of, grant, peer
from tests.support.receiving import request
from tests.support.sending import chunk
from tests.support.steps import num_steps

OTHER = peer("other")


def cost_on_prefill(num_rooms: int) -> int:
    """Return the cost of losing a decode rank that has one room, while others have many."""
    core = PrefillDriver(limits=Bounds(transfers=1_000, pending_grants=1_000))
    core.connect()
    core.connect(OTHER)
    for room in range(num_rooms):
        core(ev.SendOpened(room))
        core.hear(DECODE, grant(room, generation=room + 1))
        core.hear(DECODE, grant(500 + room, generation=500 + room))  # it waits for its room
    core(ev.SendOpened(900))
    core.hear(OTHER, grant(900, generation=1))
    event = ev.MessageArrived(connection_of(OTHER), Goodbye(peer=OTHER))
    return num_steps(lambda: core.core.handle(event, core.now))


def cost_on_decode(num_rooms: int) -> int:
    """Return the cost of losing a prefill rank that no room was granted to, while another one has many."""
    core = DecodeDriver(limits=Limits(transfers=1_000))
    core.connect(PREFILL)
    core.connect(OTHER)
    for room in range(num_rooms):
        core(replace(request(1 + room, room=100 + room), pages={"kv": b""}))
    return num_steps(lambda: core.core.handle(ev.MessageReceived(OTHER, Goodbye(peer=OTHER)), core.now))


def decode_ranks(core: PrefillDriver, number: int) -> list[PeerId]:
    """Connect some decode ranks, to each of which bytes may still land, and each of which has a window."""
    ranks = [peer("decode", engine_rank) for engine_rank in range(number)]
    for room, decode in enumerate(ranks):
        core.connect(decode, window=StagingWindow(4096, 512, 2))
        core(ev.SendOpened(room))
        core.hear(decode, grant(room, generation=1))
    for room, decode in enumerate(ranks):
        core(chunk(0, 8, room=room, last=True))
        core(ev.PostEnded(ev.DeliveryId(room, decode, 1), 0, ABORTED, lingers=True))
    assert len(core.core.rooms.unfenced) == number
    return ranks


def cost_of_a_first_message(num_ranks: int) -> int:
    """Return the cost of the first message of a decode rank, which ends earlier incarnations of it."""
    core = PrefillDriver(staging=LocalStagingSettings(4, 1024, 0.0, "never", gathers_inline=True))
    decode_ranks(core, num_ranks)
    core.connect(OTHER, window=StagingWindow(4096, 512, 2))
    event = ev.MessageArrived(connection_of(OTHER), Ping(peer=OTHER))
    return num_steps(lambda: core.core.handle(event, core.now))


def cost_of_a_refused_room(num_ranks: int) -> int:
    """Return the cost of a room that is refused because bytes may still land at too many decode ranks."""
    core = PrefillDriver(limits=Bounds(unfenced=num_ranks))
    decode_ranks(core, num_ranks)

    def open_room() -> None:
        with pytest.raises(CapacityExceeded):
            core.core.handle(ev.SendOpened(900), core.now)

    return num_steps(open_room)


COSTS = [cost_on_prefill, cost_on_decode, cost_of_a_first_message, cost_of_a_refused_room]


@pytest.mark.parametrize("cost", COSTS)
def test_an_event_of_a_peer_walks_only_what_is_its_own(cost: Callable[[int], int]) -> None:
    assert cost(100) <= cost(10) + 10

"""The counts that a core reports for monitoring."""

from kvflow.bounds import Bounds
from kvflow.state import events as ev
from kvflow.state.settings import LocalStagingSettings, WindowSettings
from kvflow.wire.messages import Goodbye, StagingWindow
from tests.support.cores import (
    ABORTED,
    DECODE,
    OTHER_PREFILL,
    PREFILL,
    DecodeDriver,
    PrefillDriver,
    connection_of,
    grant,
)
from tests.support.receiving import request
from tests.support.sending import DELIVERY, ROOM, chunk, end

PACKED = LocalStagingSettings(4, 1024, 0.0, "always", gathers_inline=True)


def test_a_prefill_core_counts_rooms_grants_and_pieces() -> None:
    driver = PrefillDriver(limits=Bounds(posts_per_peer=1))
    core = driver.core
    driver.connect()
    driver.hear(DECODE, grant())
    counts = core.counts()
    assert (counts.peers, counts.rooms, counts.waiting_grants) == (1, 0, 1)
    driver(ev.SendOpened(ROOM))
    driver(chunk(0, 4))
    driver(chunk(4, 8, last=True))
    assert (
        core.counts().rooms,
        core.counts().waiting_grants,
        core.counts().queued_chunks,
        core.counts().quarantined,
    ) == (1, 0, 1, 0)
    driver(ev.PostInDoubt(DELIVERY, 0, ABORTED))
    counts = core.counts()
    assert (counts.rooms, counts.queued_chunks, counts.quarantined) == (0, 0, 1)
    assert core.rooms.rooms
    end(driver, 0)
    counts = core.counts()
    assert (counts.rooms, counts.quarantined) == (0, 0)
    assert not core.rooms.rooms


def test_a_prefill_core_counts_slots() -> None:
    driver = PrefillDriver(staging=PACKED)
    driver.connect(window=StagingWindow(4096, 1024, 4))
    driver(ev.SendOpened(ROOM))
    driver.hear(DECODE, grant())
    driver(chunk(0, 4))
    counts = driver.core.counts()
    assert (counts.slots_taken, counts.slots_lost) == (1, 0)
    driver(ev.PostInDoubt(DELIVERY, 0, ABORTED))
    counts = driver.core.counts()
    assert (counts.slots_taken, counts.slots_lost) == (0, 2), "here and at the decode rank"
    end(driver, 0)
    counts = driver.core.counts()
    assert (counts.slots_taken, counts.slots_lost) == (0, 0)


def test_a_prefill_core_names_connections_and_the_peers_of_a_room() -> None:
    driver = PrefillDriver()
    driver.connect()
    driver(ev.SendOpened(ROOM))
    assert driver.core.rooms.peers_of(ROOM) == driver.core.rooms.peers_of(99) == []
    driver.hear(DECODE, grant())
    assert driver.core.rooms.peers_of(ROOM) == [DECODE]
    assert list(driver.core.peers.connections()) == [connection_of(DECODE)]


def test_a_decode_core_counts_rooms_peers_and_windows() -> None:
    driver = DecodeDriver(staging=WindowSettings(4096, 600, slot_bytes=100, num_slots=2))
    core = driver.core
    driver(request())
    counts = core.counts()
    assert (counts.rooms, counts.peers, counts.windows_taken, counts.windows_free) == (
        1,
        0,
        0,
        3,
    )
    driver.connect(PREFILL, OTHER_PREFILL)
    counts = core.counts()
    assert (counts.peers, counts.windows_taken, counts.windows_free) == (2, 2, 1)
    assert core.peers_reachable() == [PREFILL, OTHER_PREFILL]
    driver.hear(PREFILL, Goodbye(peer=PREFILL))
    assert core.peers_reachable() == [OTHER_PREFILL]
    driver(ev.ReceiveAborted(ROOM, ABORTED))
    counts = core.counts()
    assert (counts.rooms, counts.quarantined) == (1, 0), "its pages drain"
    driver.sleep(6.0)
    counts = core.counts()
    assert (counts.rooms, counts.quarantined) == (0, 1)
    assert core.rooms.rooms

"""Large chunks in the core: each piece is numbered, followed and announced on its own."""

import pytest

from kvflow.geometry.cutting import Cutting
from kvflow.state import events as ev
from kvflow.state.effects import DropChunks, Effect, EnqueueChunk
from kvflow.state.events import Chunk
from kvflow.wire.messages import Notice, Received
from tests.support.cores import DECODE, PREFILL, CoreDriver, abort_failure, debts, grant, reports
from tests.support.receiving import Wire, wish
from tests.support.sending import DELIVERY, ROOM, chunk, enqueued, post, settle

CUTTING = Cutting(debts(2), {"kv": 2}, 8)
"""Four tokens to a piece."""


class Device:
    def synchronize(self) -> None:
        pass


@pytest.fixture
def core() -> CoreDriver:
    driver = CoreDriver(PREFILL)
    driver.meet_decode(cutting=CUTTING)
    driver(ev.SendOpened(ROOM))
    return driver


def offered(effects: list[Effect]) -> list[Chunk]:
    return [effect.chunk for effect in effects if isinstance(effect, EnqueueChunk)]


def test_each_piece_has_a_number_and_tokens_of_its_own(core: CoreDriver) -> None:
    core.hear(DECODE, grant(tokens=(0, 14)))
    assert enqueued(core(chunk(0, 9))) == [(0, (0, 4)), (1, (4, 8)), (2, (8, 9))]
    assert enqueued(core(chunk(9, 14, last=True))) == [(3, (9, 12)), (4, (12, 14))]


def test_pieces_are_of_what_is_wanted(core: CoreDriver) -> None:
    core.hear(DECODE, grant(tokens=(3, 12)))
    assert enqueued(core(chunk(0, 20, last=True))) == [(0, (3, 6)), (1, (6, 10)), (2, (10, 12))]


def test_chunks_before_the_grant_are_cut_for_whoever_asks(core: CoreDriver) -> None:
    core(chunk(0, 8, last=True))
    assert enqueued(core.hear(DECODE, grant())) == [(0, (0, 4)), (1, (4, 8))]


def test_the_first_piece_waits_for_the_device_and_the_last_one_ends_the_transfer(core: CoreDriver) -> None:
    core.hear(DECODE, grant(tokens=(0, 12)))
    device = Device()
    whole = Chunk((0, 12), {"kv": (0, 12)}, ready=device, last=True, metadata=b"m")
    pieces = offered(core(ev.ChunkOffered(ROOM, whole)))
    assert [(piece.ready, piece.last, piece.metadata) for piece in pieces] == [
        (device, False, b""),
        (None, False, b""),
        (None, True, b"m"),
    ]
    notices = [post(core, seq, 8) for seq in range(3)]
    assert [(notice.ranges["kv"], notice.last, notice.metadata) for notice in notices] == [
        ((0, 4), False, b""),
        ((4, 8), False, b""),
        ((8, 12), True, b"m"),
    ]


def test_a_chunk_that_is_small_enough_is_offered_as_it_is(core: CoreDriver) -> None:
    core.hear(DECODE, grant(tokens=(0, 4)))
    whole = Chunk((0, 4), {"kv": (0, 4)}, ready=Device(), last=True, metadata=b"m")
    assert offered(core(ev.ChunkOffered(ROOM, whole))) == [whole]


def test_no_piece_of_a_chunk_that_is_not_the_last_one_ends_the_transfer(core: CoreDriver) -> None:
    core.hear(DECODE, grant())
    assert [piece.last for piece in offered(core(chunk(0, 8)))] == [False, False]


def test_a_delivery_is_written_when_every_piece_is(core: CoreDriver) -> None:
    core.hear(DECODE, grant())
    core(chunk(0, 8, last=True))
    post(core, 1, 8)
    assert reports(settle(core, 1)) == []
    post(core, 0, 8)
    assert reports(settle(core, 0)) == [("pending", "safe")]
    assert reports(core.hear(DECODE, Received(room=ROOM, generation=1))) == [("success", "safe")]


def test_an_end_drops_the_pieces_that_wait(core: CoreDriver) -> None:
    core.hear(DECODE, grant())
    core(chunk(0, 8, last=True))
    post(core, 0, 8)
    assert DropChunks(DELIVERY) in core(ev.SendAborted(ROOM, abort_failure()))


def test_a_peer_without_a_rule_gets_whole_chunks() -> None:
    core = CoreDriver(PREFILL)
    core.meet_decode()
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant(tokens=(0, 1_000)))
    assert enqueued(core(chunk(0, 1_000, last=True))) == [(0, (0, 1_000))]


def test_a_rule_may_change_with_the_next_hello(core: CoreDriver) -> None:
    core.meet_decode(cutting=CUTTING._replace(piece_bytes=16))
    core.hear(DECODE, grant())
    assert enqueued(core(chunk(0, 8, last=True))) == [(0, (0, 8))]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_the_receiver_takes_the_pieces_in_any_order(order: tuple[int, ...]) -> None:
    decode = CoreDriver(DECODE)
    decode(wish(tokens=(0, 10)))
    wire = Wire(decode, decode.meet_prefill(PREFILL))
    ranges = [(0, 4), (4, 8), (8, 10)]
    found = [
        reports(wire.notice(PREFILL, seq, ranges[seq], last=seq == 2, metadata=b"m" if seq == 2 else b""))
        for seq in order
    ]
    assert found == [[], [], [("success", "safe")]]


def test_repeated_notices_are_those_of_the_pieces(core: CoreDriver) -> None:
    core.hear(DECODE, grant())
    core(chunk(0, 8, last=True))
    for seq in (0, 1):
        post(core, seq, 8)
        settle(core, seq)
    said = [effect.message for effect in core.sleep(1.5) if hasattr(effect, "message")]
    notices = [message for message in said if isinstance(message, Notice)]
    assert [(notice.seq, notice.ranges["kv"], notice.last) for notice in notices] == [
        (0, (0, 4), False),
        (1, (4, 8), True),
    ]

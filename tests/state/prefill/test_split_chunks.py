"""Large chunks: each piece has a number, a write and a notice of its own."""

import pytest
from msgspec.structs import replace

from kvflow.bounds import Bounds
from kvflow.config import Limits
from kvflow.geometry.binding import bind_route
from kvflow.geometry.layout import Component, KVLayout
from kvflow.geometry.memory import Location, MemoryRange
from kvflow.geometry.ranges import TokenShard
from kvflow.geometry.routes import compile_routes
from kvflow.geometry.split import split_policy_for
from kvflow.state import events as ev
from kvflow.state.effects import AwaitData
from kvflow.state.events import Chunk
from kvflow.state.prefill.pieces import split_chunk
from kvflow.wire.messages import Ack, Notice
from tests.support.cores import (
    DECODE,
    PREFILL,
    DecodeDriver,
    PrefillDriver,
    abort_failure,
    grant,
    messages,
    of_kind,
    pages_for,
    reports,
)
from tests.support.receiving import Transfer, request
from tests.support.sending import DELIVERY, ROOM, chunk, end, pieces, posted
from tests.support.small_routes import MODEL, layout, peer_route, small_pieces

FOUR_TOKENS = small_pieces(8)
"""Pieces of four tokens."""


class Device:
    def synchronize(self) -> None:
        pass


def connected(limits: Limits | None = None) -> PrefillDriver:
    driver = PrefillDriver(limits=limits)
    driver.connect(split_policy=FOUR_TOKENS)
    driver(ev.SendOpened(ROOM))
    return driver


@pytest.fixture
def core() -> PrefillDriver:
    return connected()


def test_each_piece_has_a_number_and_tokens_of_its_own(core: PrefillDriver) -> None:
    core.hear(DECODE, grant(tokens=(0, 14)))
    assert posted(core(chunk(0, 9))) == [(0, (0, 4)), (1, (4, 8)), (2, (8, 9))]
    assert posted(core(chunk(9, 14, last=True))) == [(3, (9, 12)), (4, (12, 14))]


def test_pieces_are_of_what_is_wanted(core: PrefillDriver) -> None:
    core.hear(DECODE, grant(tokens=(3, 12)))
    assert posted(core(chunk(0, 20, last=True))) == [(0, (3, 6)), (1, (6, 10)), (2, (10, 12))]


def test_chunks_before_the_grant_are_split_for_whoever_asks(core: PrefillDriver) -> None:
    core(chunk(0, 8, last=True))
    assert posted(core.hear(DECODE, grant())) == [(0, (0, 4)), (1, (4, 8))]


def test_the_first_piece_waits_for_the_device_and_the_last_one_ends_the_transfer(core: PrefillDriver) -> None:
    core.hear(DECODE, grant(tokens=(0, 12)))
    device = Device()
    whole = Chunk((0, 12), {"kv": (0, 12)}, ready=device, last=True, metadata=b"m")
    assert core(ev.ChunkOffered(ROOM, whole)) == [AwaitData(DELIVERY, 0, device)]
    notices = [piece.notice for piece in pieces(core(ev.DataReady(DELIVERY, 0)))]
    assert [(notice.ranges["kv"], notice.last, notice.metadata) for notice in notices] == [
        ((0, 4), False, b""),
        ((4, 8), False, b""),
        ((8, 12), True, b"m"),
    ]


def test_what_is_in_other_memory_is_a_piece_of_its_own() -> None:
    """Pages are on a device and states on the host; the last piece ends the transfer."""
    kv, state = layout().components[0], layout("state").components[0]
    gap = 2**20
    moved = replace(state, regions=tuple(replace(one, address=one.address + gap) for one in state.regions))
    both = KVLayout(
        (kv, moved),
        MODEL,
        (*layout().allocations, MemoryRange(4096 + gap, layout().allocations[0].length, Location("VRAM", 0))),
    )
    (route,) = compile_routes({0: both}, both, decode_rank=0)
    link = peer_route(both, both, route)
    device, ranges = Device(), {"kv": (0, 4), "state": (0, 4)}
    whole = Chunk((0, 4), {}, ready=device, last=True)
    parts = split_chunk(whole, ranges, ranges, {}, link)
    assert [(part.ranges, part.ready, part.last) for part in parts] == [
        ({"kv": (0, 4)}, device, False),
        ({"state": (0, 4)}, device, True),
    ]
    assert len(split_chunk(whole, {"kv": (0, 4)}, ranges, {}, link)) == 1


def test_a_chunk_that_is_small_enough_is_one_piece(core: PrefillDriver) -> None:
    core.hear(DECODE, grant(tokens=(0, 4)))
    device = Device()
    whole = Chunk((0, 4), {"kv": (0, 4)}, ready=device, last=True, metadata=b"m")
    assert core(ev.ChunkOffered(ROOM, whole)) == [AwaitData(DELIVERY, 0, device)]
    (piece,) = pieces(core(ev.DataReady(DELIVERY, 0)))
    assert (piece.ranges, piece.notice.last, piece.notice.metadata) == ({"kv": (0, 4)}, True, b"m")


def test_no_piece_of_a_chunk_that_is_not_the_last_one_ends_the_transfer(core: PrefillDriver) -> None:
    core.hear(DECODE, grant())
    assert [piece.notice.last for piece in pieces(core(chunk(0, 8)))] == [False, False]


def test_a_delivery_is_written_when_every_piece_is(core: PrefillDriver) -> None:
    core.hear(DECODE, grant())
    core(chunk(0, 8, last=True))
    assert reports(end(core, 1)) == []
    assert reports(end(core, 0)) == [("pending", "safe")]
    assert reports(core.hear(DECODE, Ack(room=ROOM, generation=1))) == [("success", "safe")]


def test_an_end_drops_the_pieces_that_wait() -> None:
    core = connected(Bounds(posts_per_peer=1))
    core.hear(DECODE, grant(tokens=(0, 12)))
    core(chunk(0, 12, last=True))
    assert len(core.core.queue) == 2
    core(ev.SendAborted(ROOM, abort_failure()))
    assert len(core.core.queue) == 0
    assert posted(end(core, 0)) == []


def test_the_next_piece_goes_when_the_one_before_has_ended() -> None:
    core = connected(Bounds(posts_per_peer=1))
    core.hear(DECODE, grant())
    assert posted(core(chunk(0, 8, last=True))) == [(0, (0, 4))]
    assert posted(end(core, 0)) == [(1, (4, 8))]


def test_a_policy_may_change_with_the_next_hello(core: PrefillDriver) -> None:
    core.connect(split_policy=FOUR_TOKENS._replace(piece_bytes=16))
    core.hear(DECODE, grant())
    assert posted(core(chunk(0, 8, last=True))) == [(0, (0, 8))]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_the_receiver_takes_the_pieces_in_any_order(order: tuple[int, ...]) -> None:
    decode = DecodeDriver()
    decode(request(tokens=(0, 10)))
    transfer = Transfer(decode, decode.connect(PREFILL))
    ranges = [(0, 4), (4, 8), (8, 10)]
    found = [
        reports(transfer.notice(PREFILL, seq, ranges[seq], last=seq == 2, metadata=b"m" if seq == 2 else b""))
        for seq in order
    ]
    assert found == [[], [], [("success", "safe")]]


def test_retransmitted_notices_are_those_of_the_pieces(core: PrefillDriver) -> None:
    core.hear(DECODE, grant())
    core(chunk(0, 8, last=True))
    for seq in (0, 1):
        end(core, seq)
    notices = [message for _, message in messages(core.sleep(1.5), Notice) if isinstance(message, Notice)]
    assert [(notice.seq, notice.ranges["kv"], notice.last) for notice in notices] == [
        (0, (0, 4), False),
        (1, (4, 8), True),
    ]


def test_a_transport_with_short_descriptors_is_charged_for_the_splits() -> None:
    """Credit counts descriptors, and a long one that the transport splits counts as several."""
    plain, short = PrefillDriver(), PrefillDriver(max_descriptor_bytes=4)
    costs = []
    for core in (plain, short):
        core.connect()
        core(ev.SendOpened(ROOM))
        core.hear(DECODE, grant())
        (piece,) = pieces(core(chunk(0, 8, last=True)))
        assert piece.cost.num_bytes == 16
        costs.append(piece.cost.num_descriptors)
    assert costs[1] == costs[0] + 4


def test_nothing_waits_for_a_device_where_nothing_is_wanted() -> None:
    core = PrefillDriver()
    core.connect(wants=False)
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant(pages={}))
    effects = core(ev.ChunkOffered(ROOM, Chunk((0, 8), {"kv": (0, 8)}, ready=Device(), last=True)))
    assert of_kind(effects, AwaitData) == []
    assert reports(effects) == [("success", "safe")]


def test_source_pages_are_not_safe_because_the_first_piece_of_the_last_chunk_has_no_bytes() -> None:
    side = layout()
    (component,) = side.components
    shard = TokenShard(size=2, rank=1, interleave=4)
    target = replace(side, components=(Component(component.name, component.regions, shard=shard),))
    (route,) = compile_routes({0: side}, target, decode_rank=0)
    policy = split_policy_for(bind_route(route, side, target), side, target, piece_bytes=1)
    core = PrefillDriver(side=side)
    core.connect(target=target, split_policy=policy)
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant(pages={"kv": pages_for((0, 4))}))
    effects = core(chunk(0, 8, last=True))
    assert [said.ranges for _, said in messages(effects, Notice) if isinstance(said, Notice)] == [{"kv": (0, 4)}]
    assert (posted(effects), reports(effects)) == ([(1, (4, 8))], [])
    assert reports(end(core, 1)) == [("pending", "safe")]

"""Chunks that are streamed layer by layer, in the cores of both sides."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.geometry.ranges import LayerRange
from kvflow.state import events as ev
from kvflow.state.effects import AwaitData, CountAnomaly, DecodeEffect, Piece
from kvflow.state.events import Chunk, LayersReady
from tests.support.cores import DECODE, PREFILL, DecodeDriver, PrefillDriver, grant, of_kind, reports
from tests.support.receiving import Transfer, request
from tests.support.sending import DELIVERY, ROOM, pieces
from tests.support.small_routes import layout, small_pieces

NUM_LAYERS = 4
SIDE = layout(num_layers=NUM_LAYERS, head_bytes=1)
"""One byte per layer of a token."""


class Device:
    def synchronize(self) -> None:
        pass


DEVICES = [Device() for _ in range(NUM_LAYERS)]


def groups(*stops: int) -> tuple[LayersReady, ...]:
    return tuple(LayersReady(stop, DEVICES[number]) for number, stop in enumerate(stops))


def granted(least: int | None = 8, *, piece_bytes: int = 2**20) -> PrefillDriver:
    core = PrefillDriver(side=SIDE)
    core.connect(split_policy=small_pieces(piece_bytes, least, of=SIDE))
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant())
    return core


def offer(
    core: PrefillDriver, layers: tuple[LayersReady, ...], tokens: tuple[int, int] = (0, 8), *, last: bool = True
) -> list[tuple[Piece, Device | None]]:
    """Offer a chunk, and answer each wait at once; return each piece and what it waited for."""
    metadata = b"m" if last else b""
    chunk = Chunk(tokens, {"kv": tokens}, layers=layers, last=last, metadata=metadata)
    effects, found = core(ev.ChunkOffered(ROOM, chunk)), []
    while waits := of_kind(effects, AwaitData):
        (wait,) = waits
        effects = core(ev.DataReady(DELIVERY, wait.wait))
        found += [(piece, None if number else wait.ready) for number, piece in enumerate(pieces(effects))]
    return found


def test_each_piece_has_its_layers_and_waits_for_its_own_event() -> None:
    found = offer(granted(), groups(1, 3, 4))
    assert [(piece.seq, piece.ranges, piece.layers) for piece, _ in found] == [
        (0, {"kv": (0, 8)}, (0, 1)),
        (1, {"kv": (0, 8)}, (1, 3)),
        (2, {"kv": (0, 8)}, (3, None)),
    ]
    assert [device for _, device in found] == DEVICES[:3]
    notices = [piece.notice for piece, _ in found]
    assert [notice.layers for notice in notices] == [(0, 1), (1, 3), (3, None)]
    assert [notice.num_bytes for notice in notices] == [8, 16, 8]
    assert [(notice.last, notice.metadata) for notice in notices] == [(False, b""), (False, b""), (True, b"m")]


def test_a_short_chunk_waits_for_its_last_event_only() -> None:
    ((piece, device),) = offer(granted(33), groups(1, 2, 3, 4))
    assert (piece.layers, device, piece.notice.last, piece.notice.layers) == ((0, None), DEVICES[3], True, None)


def test_a_chunk_that_is_streamed_is_not_split_by_tokens_too() -> None:
    assert [piece.ranges["kv"] for piece, _ in offer(granted(piece_bytes=4), groups(2, 4))] == [(0, 8), (0, 8)]


def test_a_chunk_that_is_not_worth_streaming_is_split_by_tokens() -> None:
    found = offer(granted(33, piece_bytes=16), groups(2, 4))
    assert [(piece.ranges["kv"], device) for piece, device in found] == [((0, 4), DEVICES[1]), ((4, 8), None)]


def test_a_policy_without_layers_sends_whole_chunks_after_the_last_event() -> None:
    ((piece, device),) = offer(granted(None), groups(1, 2, 4))
    assert (piece.layers, device) == ((0, None), DEVICES[2])


def test_an_empty_chunk_with_layers_carries_the_metadata() -> None:
    core = granted()
    offer(core, groups(2, 4), last=False)
    assert offer(core, groups(2, 4), (8, 8)) == []


# The receiving side ------------------------------------------------------------------------------------------------

NoticeRange = tuple[tuple[int, int], LayerRange | None]
"""Tokens and layers of a notice."""


class Receiving:
    def __init__(self) -> None:
        self.core = DecodeDriver()
        self.core(request())
        effects = self.core.connect(PREFILL, head_bytes=1, num_layers=NUM_LAYERS)
        self.transfer = Transfer(self.core, effects)

    def notice(self, seq: int, part: NoticeRange, **changes: object) -> list[DecodeEffect]:
        (start, stop), layers = part
        first, end = layers or (0, None)
        num_layers = max(0, min(NUM_LAYERS, NUM_LAYERS if end is None else end) - first)
        fields: dict[str, object] = {"num_bytes": (stop - start) * num_layers, "layers": layers}
        return self.transfer.notice(PREFILL, seq, (start, stop), **(fields | changes))

    def take(self, parts: list[NoticeRange]) -> list[tuple[str, str]]:
        """Deliver notices in order, the last of which ends the transfer; return the reports."""
        found = []
        for seq, part in enumerate(parts):
            found += reports(self.notice(seq, part, last=seq == len(parts) - 1))
        return found


SUCCESS = [("success", "safe")]


def test_layers_of_a_chunk_add_up_to_the_whole() -> None:
    assert Receiving().take([((0, 8), (0, 1)), ((0, 8), (1, 3)), ((0, 8), (3, None))]) == SUCCESS


def test_streamed_and_whole_chunks_follow_each_other() -> None:
    assert Receiving().take([((0, 2), None), ((2, 5), (0, 2)), ((2, 5), (2, None)), ((5, 8), None)]) == SUCCESS


@pytest.mark.parametrize(
    "parts",
    [
        [((0, 8), (0, 2))],
        [((0, 8), (0, 4))],
        [((0, 8), (2, None))],
        [((0, 8), (0, 2)), ((0, 8), (3, None))],
        [((0, 8), (0, 2)), ((0, 8), (1, None))],
        [((0, 8), (0, 2)), ((0, 8), None)],
        [((0, 8), None), ((0, 8), (2, None))],
        [((0, 8), (0, 0)), ((0, 8), (0, None))],
        [((0, 8), (0, 2)), ((0, 8), (2, 1)), ((0, 8), (1, None))],
        [((0, 4), (0, 2)), ((4, 8), (2, None))],
        [((0, 4), (0, 2)), ((0, 8), (2, None))],
        [((0, 4), (0, 2)), ((4, 8), None), ((0, 4), (2, None))],
        [((0, 8), (0, 2)), ((0, 8), (2, None)), ((0, 8), (2, None))],
    ],
)
def test_anything_else_is_no_success(parts: list[NoticeRange]) -> None:
    assert ("failed", "draining") in Receiving().take(parts)


def test_a_piece_of_layers_with_the_bytes_of_all_is_no_success() -> None:
    receiving = Receiving()
    receiving.notice(0, ((0, 8), (0, 2)), num_bytes=32)
    assert ("failed", "draining") in reports(receiving.notice(1, ((0, 8), (2, None)), num_bytes=0, last=True))


def test_more_notices_than_layers_of_tokens_are_impossible() -> None:
    receiving = Receiving()
    assert receiving.notice(8 * NUM_LAYERS, ((0, 8), None)) == []
    assert [type(effect) for effect in receiving.notice(8 * NUM_LAYERS + 1, ((0, 8), None))] == [CountAnomaly]


@st.composite
def right_parts(draw: st.DrawFn) -> list[NoticeRange]:
    """Draw notices that cover everything."""
    edges = [0, *sorted(draw(st.sets(st.integers(1, 7), max_size=3))), 8]
    parts: list[NoticeRange] = []
    for tokens in pairwise(edges):
        cuts = sorted(draw(st.sets(st.integers(1, NUM_LAYERS - 1))))
        stops = [*cuts, None]
        whole = not cuts and draw(st.booleans())
        parts += [(tokens, None if whole else (start, stop)) for start, stop in zip([0, *cuts], stops, strict=True)]
    return parts


@given(right_parts(), st.randoms(use_true_random=False))
def test_a_right_set_succeeds_in_any_order_and_however_often_it_is_said(
    parts: list[NoticeRange], rng: random.Random
) -> None:
    receiving = Receiving()
    order = [*range(len(parts)), *rng.choices(range(len(parts)), k=3)]
    rng.shuffle(order)
    missing = dict.fromkeys(range(len(parts)))
    for seq in order:
        found = reports(receiving.notice(seq, parts[seq], last=seq == len(parts) - 1))
        was_missing = seq in missing
        missing.pop(seq, None)
        assert found == (SUCCESS if was_missing and not missing else [])


@given(right_parts(), st.data())
def test_a_set_with_a_hole_never_succeeds(parts: list[NoticeRange], data: st.DataObject) -> None:
    """Any notice may be missing, with or without a gap in the numbers."""
    gone = data.draw(st.integers(0, len(parts) - 1))
    renumbers = data.draw(st.booleans())
    kept = [(seq, part) for seq, part in enumerate(parts) if seq != gone]
    if renumbers:
        kept = list(enumerate(part for _, part in kept))
    receiving = Receiving()
    for seq, part in data.draw(st.permutations(kept)):
        found = reports(receiving.notice(seq, part, last=seq == max(number for number, _ in kept)))
        assert ("success", "safe") not in found


@given(right_parts(), st.data())
def test_a_changed_notice_never_leads_to_success(parts: list[NoticeRange], data: st.DataObject) -> None:
    changed = data.draw(st.integers(0, len(parts) - 1))
    start = data.draw(st.integers(0, NUM_LAYERS))
    layers = data.draw(st.none() | st.tuples(st.just(start), st.none() | st.integers(0, NUM_LAYERS)))
    tokens = data.draw(st.tuples(st.integers(0, 8), st.integers(0, 8)).filter(lambda pair: pair[0] <= pair[1]))
    before = parts[changed]
    parts[changed] = (tokens, layers)
    if parts[changed][0] == before[0] and (layers or (0, None)) == (before[1] or (0, None)):
        return
    assert ("success", "safe") not in Receiving().take(parts)

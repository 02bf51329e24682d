"""An engine takes its pages back in the middle of a room, and resumes later; what was not posted is sent again."""

import numpy as np
import pytest
from msgspec.structs import replace

from kvflow.bounds import Bounds
from kvflow.config import Limits, Timeouts
from kvflow.errors import LocalProtocolError
from kvflow.geometry.layout import Component
from kvflow.geometry.pages import WIRE_PAGES, TokenPages, build_page_table
from kvflow.geometry.ranges import TokenShard
from kvflow.geometry.split import SplitPolicy
from kvflow.state import events as ev
from kvflow.state.effects import AwaitData, PrefillEffect, ReportQuiesced
from kvflow.state.events import Chunk, LayersReady
from kvflow.state.prefill.pieces import resume_at
from kvflow.state.quarantine import NO_MEMORY, Footprint
from kvflow.wire.messages import Ack, Cancel, Failed, Notice
from tests.support.cores import (
    ABORTED,
    DECODE,
    OTHER_DECODE,
    PrefillDriver,
    grant,
    messages,
    of_kind,
    pages_for,
    reports,
)
from tests.support.sending import DELIVERY, ROOM, chunk, delivery, end, pieces, planned, posted
from tests.support.small_routes import layout, small_pieces

OTHER = delivery(OTHER_DECODE)
ASKED = ev.QuiesceAsked(ROOM)
TIMEOUTS = Timeouts(drain_s=4.0, grant_s=10.0, progress_s=30.0)
ONE_POST = Bounds(posts_per_peer=1)


class Device:
    def synchronize(self) -> None:
        pass


def opened(limits: Limits | None = None, *, split_policy: SplitPolicy | None = None) -> PrefillDriver:
    core = PrefillDriver(TIMEOUTS, limits)
    core.connect(split_policy=split_policy)
    core(ev.SendOpened(ROOM))
    return core


def granted(
    limits: Limits | None = None, *, split_policy: SplitPolicy | None = None, **changes: object
) -> PrefillDriver:
    core = opened(limits, split_policy=split_policy)
    core.hear(DECODE, grant(**changes))  # type: ignore[arg-type]
    return core


def quiesced(effects: list[PrefillEffect]) -> list[int | None]:
    """Return where the engine is told to resume, each time that it is."""
    return [effect.resume_at for effect in of_kind(effects, ReportQuiesced)]


# Forgotten pieces, and where to resume -------------------------------------------------------------------------------


def test_what_is_posted_is_waited_for_and_what_waits_for_credit_comes_again() -> None:
    core = granted(ONE_POST)
    assert posted(core(chunk(0, 2))) == [(0, (0, 2))]
    core(chunk(2, 4))
    core(chunk(4, 8, last=True, metadata=b"m"))
    assert quiesced(core(ASKED)) == []
    assert len(core.core.queue) == 0
    assert quiesced(end(core, 0)) == [2]
    assert posted(core(chunk(2, 7))) == [(1, (2, 7))], "numbers go on without a gap"
    end(core, 1)
    (piece,) = pieces(core(chunk(7, 8, last=True, metadata=b"n")))
    assert (piece.seq, piece.notice.last, piece.notice.metadata) == (2, True, b"n")
    assert reports(end(core, 2)) == [("pending", "safe")]
    assert reports(core.hear(DECODE, Ack(room=ROOM, generation=1))) == [("success", "safe")]


def test_nothing_has_to_be_waited_for_when_nothing_is_posted() -> None:
    core = granted()
    core(chunk(0, 4))
    end(core, 0)
    assert quiesced(core(ASKED)) == [4]
    assert posted(core(chunk(4, 8))) == [(1, (4, 8))]


def test_a_large_chunk_goes_on_in_the_middle() -> None:
    core = granted(ONE_POST, split_policy=small_pieces(4))
    core(chunk(0, 8, last=True))
    end(core, 0)
    core(ASKED)
    assert quiesced(end(core, 1)) == [4]


def test_chunks_are_kept_for_nobody_who_grants_later() -> None:
    core = granted(num_decode_ranks=2, tokens=(2, 8))
    core(chunk(2, 8, last=True))
    end(core, 0)
    assert quiesced(core(ASKED)) == [2], "the other rank has had nothing yet"
    core.connect(OTHER_DECODE)
    assert pieces(core.hear(OTHER_DECODE, grant(num_decode_ranks=2, tokens=(2, 8)))) == []
    assert core.core.rooms.rooms[ROOM].state.is_pending


def test_no_grant_is_missing_while_there_is_no_last_chunk() -> None:
    core = opened()
    core(chunk(0, 8, last=True))
    assert quiesced(core(ASKED)) == [0]
    assert reports(core.pass_time(20)) == []
    core(chunk(0, 8, last=True))
    assert ("failed", "draining") in reports(core.pass_time(20))


def test_who_is_further_ahead_ignores_what_it_has() -> None:
    core = granted(ONE_POST, num_decode_ranks=2)
    core.connect(OTHER_DECODE)
    core.hear(OTHER_DECODE, grant(num_decode_ranks=2))
    core(chunk(0, 4))
    end(core, 0)
    core(chunk(4, 8, last=True, metadata=b"m"))  # sent to one rank, and queued for the other
    assert quiesced(core(ASKED)) == []
    assert quiesced(end(core, 1)) == []
    assert quiesced(end(core, 0, OTHER)) == [4]
    (piece,) = pieces(core(chunk(3, 8, last=True, metadata=b"m")))
    assert (piece.delivery, piece.seq, piece.ranges["kv"], piece.notice.last) == (OTHER, 1, (4, 8), True)
    end(core, 1, OTHER)
    core.hear(DECODE, Ack(room=ROOM, generation=1))
    assert reports(core.hear(OTHER_DECODE, Ack(room=ROOM, generation=1))) == [("success", "safe")]


def test_a_finish_that_is_posted_stands() -> None:
    core = granted()
    core(chunk(0, 8, last=True))
    assert quiesced(core(ASKED)) == []
    effects = end(core, 0)
    assert (quiesced(effects), reports(effects)) == ([None], [("pending", "safe")])
    with pytest.raises(LocalProtocolError, match="after the last one"):
        core(chunk(8, 9))
    assert reports(core.hear(DECODE, Ack(room=ROOM, generation=1))) == [("success", "safe")]


def test_a_finish_without_tokens_is_taken_back_with_what_it_waits_behind() -> None:
    """Its notice brings no bytes. Sent before the pieces, it would keep them from being forgotten."""
    core = granted(ONE_POST)
    core(chunk(0, 4))
    core(chunk(4, 8))
    assert messages(core(chunk(8, 8, last=True)), Notice) == []
    core(ASKED)
    assert quiesced(end(core, 0)) == [4]
    core(chunk(4, 8))
    effects = core(chunk(8, 8, last=True))
    (notice,) = [message for _, message in messages(effects, Notice)]
    assert isinstance(notice, Notice)
    assert (notice.seq, notice.last) == (2, True)


def test_a_notice_without_bytes_leaves_when_the_piece_before_it_does() -> None:
    core = granted(ONE_POST)
    core(chunk(0, 4))
    core(chunk(4, 8))
    core(chunk(8, 8, last=True))
    effects = end(core, 0)
    assert posted(effects) == [(1, (4, 8))]
    assert len(messages(effects, Notice)) == 1


def test_a_slot_comes_again_with_its_whole_chunk() -> None:
    """The tokens of a slot are not those of the chunk, so they do not tell where the chunk starts."""
    plain = Chunk((4, 8), {"kv": (4, 8), "window": (2, 8), "state": (0, 1)})
    assert resume_at(plain, {"kv": (6, 8)}) == 6
    assert resume_at(plain, {"kv": (6, 8), "window": (7, 8)}) == 4
    assert resume_at(plain, {"state": (0, 1)}) == 4
    assert resume_at(plain, {}) == 4


# Devices and layers --------------------------------------------------------------------------------------------------


def test_data_that_is_not_ready_is_forgotten_and_its_event_changes_nothing_later() -> None:
    core, device = granted(), Device()
    core(ev.ChunkOffered(ROOM, Chunk((0, 4), {"kv": (0, 4)}, ready=device)))
    core(chunk(4, 6))
    assert quiesced(core(ASKED)) == [0]
    assert core(ev.ChunkOffered(ROOM, Chunk((0, 8), {"kv": (0, 8)}, ready=device))) == [AwaitData(DELIVERY, 1, device)]
    assert core(ev.DataReady(DELIVERY, 0)) == [], "of the pages that were given back"
    assert core(ev.DataReady(DELIVERY, 0, ABORTED)) == [], "whatever has become of it"
    assert posted(core(ev.DataReady(DELIVERY, 1))) == [(0, (0, 8))]


def streaming() -> tuple[PrefillDriver, Chunk]:
    side = layout(num_layers=4, head_bytes=1)
    core = PrefillDriver(TIMEOUTS, side=side)
    core.connect(split_policy=small_pieces(2**20, 4, of=side))
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant())
    layers = (LayersReady(1, Device()), LayersReady(3, Device()), LayersReady(4, Device()))
    return core, Chunk((0, 4), {"kv": (0, 4)}, layers=layers)


def test_tokens_of_which_layers_have_left_are_sent_to_their_last_layer() -> None:
    """The notices of a range cover all layers, and no bytes are sent twice."""
    core, streamed = streaming()
    core(ev.ChunkOffered(ROOM, streamed))
    core(chunk(4, 8, last=True))
    assert posted(core(ev.DataReady(DELIVERY, 0))) == [(0, (0, 4))]
    assert quiesced(core(ASKED)) == []
    assert quiesced(end(core, 0)) == []
    assert [piece.layers for piece in pieces(core(ev.DataReady(DELIVERY, 1)))] == [(1, 3)]
    assert quiesced(end(core, 1)) == []
    assert [piece.layers for piece in pieces(core(ev.DataReady(DELIVERY, 2)))] == [(3, None)]
    assert quiesced(end(core, 2)) == [4]
    assert posted(core(chunk(4, 8, last=True))) == [(3, (4, 8))]


def test_tokens_of_which_no_layer_has_left_are_forgotten() -> None:
    core, streamed = streaming()
    core(ev.ChunkOffered(ROOM, streamed))
    assert quiesced(core(ASKED)) == [0]
    assert core(ev.DataReady(DELIVERY, 0)) == []


def test_layers_that_never_come_fail_the_room() -> None:
    core, streamed = streaming()
    core(ev.ChunkOffered(ROOM, streamed))
    core(ev.DataReady(DELIVERY, 0))
    core(ASKED)
    end(core, 0)
    effects = core.pass_time(4)
    assert (quiesced(effects), reports(effects)) == ([], [("failed", "draining"), ("failed", "safe")])


# Plans and packing ---------------------------------------------------------------------------------------------------


def test_a_plan_that_is_being_made_is_posted_and_waited_for() -> None:
    core = granted(Bounds(descriptors_planned_inline=1))
    assert [piece.seq for piece in planned(core(chunk(0, 4)))] == [0]
    core(chunk(4, 8))
    assert quiesced(core(ASKED)) == []
    assert quiesced(core(ev.PlanFinished(DELIVERY, 0))) == []
    assert quiesced(end(core, 0)) == [4]


def test_a_piece_that_was_planned_directly_is_not_overtaken_by_forgotten_ones() -> None:
    """A later, smaller piece may be posted while a larger one is still being planned."""
    core = granted(Bounds(descriptors_planned_inline=3))
    core(chunk(0, 4))
    assert posted(core(chunk(4, 5))) == [(1, (4, 5))]
    core(ASKED)
    core(ev.PlanFinished(DELIVERY, 0))
    assert quiesced(end(core, 0)) == []
    assert quiesced(end(core, 1)) == [5]


# Failures ------------------------------------------------------------------------------------------------------------


def test_a_post_that_does_not_end_fails_the_room_and_its_pages_go_to_quarantine() -> None:
    core = granted()
    table = build_page_table(layout().components[0], TokenPages((0, 4), [5, 3]))
    core(ev.ChunkOffered(ROOM, Chunk((0, 4), {"kv": (0, 4)}, {"kv": table}), Footprint(2, 16)))
    core(ASKED)
    assert reports(core.pass_time(3)) == []
    effects = core.pass_time(2)
    assert (quiesced(effects), reports(effects)) == ([], [("failed", "draining")])
    (failed,) = [message for _, message in messages(effects, Failed)]
    assert isinstance(failed, Failed)
    assert "still need their pages" in failed.failure.detail
    assert reports(core.pass_time(5)) == [("failed", "quarantined")]
    assert core.core.quarantine.total == Footprint(2, 16)
    assert np.frombuffer(core.core.pages_of(ROOM)["kv"], WIRE_PAGES).tolist() == [3, 5]


def test_a_grant_that_comes_meanwhile_gets_what_is_sent_again() -> None:
    core = PrefillDriver(TIMEOUTS)
    core.connect()
    core.connect(OTHER_DECODE)
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant(num_decode_ranks=2))
    core(chunk(0, 4))
    core(ASKED)
    assert pieces(core.hear(OTHER_DECODE, grant(num_decode_ranks=2))) == []
    assert quiesced(end(core, 0)) == [0]
    again = pieces(core(chunk(0, 8, last=True)))
    assert [(piece.delivery.peer, piece.ranges["kv"]) for piece in again] == [(DECODE, (4, 8)), (OTHER_DECODE, (0, 8))]


def test_pages_that_were_given_back_are_in_no_quarantine_later() -> None:
    core = granted()
    core(chunk(0, 4, footprint=Footprint(2, 16)))
    core(ASKED)
    end(core, 0)
    assert core.core.rooms.rooms[ROOM].footprint == NO_MEMORY


@pytest.mark.parametrize(
    "event",
    [ev.SendAborted(ROOM, ABORTED), ev.CloseStarted(ABORTED), ev.PostInDoubt(DELIVERY, 0, ABORTED)],
    ids=["abort", "close", "doubt"],
)
def test_a_room_that_ends_meanwhile_is_not_quiet(event: ev.PrefillEvent) -> None:
    core = granted()
    core(chunk(0, 4))
    core(ASKED)
    assert quiesced(core(event)) == []
    assert quiesced(end(core, 0)) == []
    assert ROOM not in core.core.rooms.rooms


def test_a_cancel_meanwhile_ends_it() -> None:
    core = granted()
    core(chunk(0, 4))
    core(ASKED)
    effects = core.hear(DECODE, Cancel(room=ROOM, generation=1, failure=ABORTED))
    assert (quiesced(effects), reports(effects)) == ([], [("failed", "draining")])
    assert reports(end(core, 0)) == [("failed", "safe")]


def test_chunks_wait_until_it_is_done_and_go_on_without_a_gap() -> None:
    core = granted()
    core(chunk(0, 4))
    core(ASKED)
    with pytest.raises(LocalProtocolError, match="is being quiesced"):
        core(chunk(4, 8))
    assert core(ASKED) == [], "once is enough"
    end(core, 0)
    with pytest.raises(LocalProtocolError, match="chunk must not start after"):
        core(chunk(5, 8))
    assert quiesced(core(ASKED)) == [4], "again, with nothing offered since"
    assert posted(core(chunk(4, 8))) == [(1, (4, 8))]


def test_a_room_that_is_not_open_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="not open"):
        PrefillDriver()(ASKED)


def test_notices_without_bytes_are_forgotten_with_the_pieces_before_them() -> None:
    """Tokens that the decode rank does not want are counted like others."""
    side = layout()
    (component,) = side.components
    target = replace(side, components=(Component(component.name, component.regions, shard=TokenShard(2, 0, 4)),))
    core = PrefillDriver(TIMEOUTS, ONE_POST, side=side)
    core.connect(target=target)
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant(tokens=(0, 12), pages={"kv": pages_for((0, 8))}))
    core(chunk(0, 2))
    core(chunk(2, 4))
    assert messages(core(chunk(4, 8)), Notice) == []
    core(ASKED)
    assert quiesced(end(core, 0)) == [2]
    assert posted(core(chunk(2, 4))) == [(1, (2, 4))]
    (said,) = messages(core(chunk(4, 8)), Notice)
    assert isinstance(said[1], Notice)
    assert (said[1].seq, said[1].ranges) == (2, {"kv": (4, 8)})

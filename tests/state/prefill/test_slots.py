"""Slots on the prefill side: which delivery may write to them, and what frees them."""

import pytest
from msgspec.structs import replace

from kvflow.config import Limits
from kvflow.errors import FailureReason, Stage
from kvflow.state import events as ev
from kvflow.state.effects import DropPlan, PieceSlots, PostPlan, PrefillEffect
from kvflow.state.packing import BLOCK_S, COPY_S_PER_BYTE, pays_off
from kvflow.state.prefill.slots import SlotPool
from kvflow.state.settings import LocalStagingSettings
from kvflow.wire.messages import (
    Ack,
    Cancel,
    Failure,
    Goodbye,
    Message,
    Notice,
    Ping,
    Refuse,
    SlotQuery,
    SlotReleased,
    Staged,
    StagingWindow,
    Stamps,
)
from tests.support.cores import (
    ABORTED,
    DECODE,
    LEASE_S,
    PrefillDriver,
    grant,
    messages,
    of_kind,
    peer,
    reports,
)
from tests.support.sending import DELIVERY, ROOM, chunk, end, pieces, planned

WINDOW = StagingWindow(4096, 1024, 2)
BROKEN = Failure(FailureReason.WRITE_FAILED, Stage.SUBMIT, "prefill/0", "broken")
ALWAYS = LocalStagingSettings(4, 1024, 0.0, "always", gathers_inline=True)
IN_A_THREAD = ALWAYS._replace(gathers_inline=False)
PAUSE_S = 1.0


def packing(
    staging: LocalStagingSettings = ALWAYS, *, window: StagingWindow | None = WINDOW, limits: Limits | None = None
) -> PrefillDriver:
    """Open a room of eight tokens, all of which are wanted and packed."""
    core = PrefillDriver(limits=limits, staging=staging)
    core.connect(window=window)
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant())
    return core


@pytest.fixture
def core() -> PrefillDriver:
    """Four tokens are in flight to the first slot."""
    core = packing()
    (piece,) = pieces(core(chunk(0, 4)))
    assert piece.slots == PieceSlots(0, 0)
    return core


def pool(core: PrefillDriver) -> SlotPool:
    found = core.core.slots.pool(DECODE)
    assert found is not None
    return found


def released(seq: int = 0, generation: int = 1) -> SlotReleased:
    return SlotReleased(room=ROOM, generation=generation, engine_rank=0, seq=seq)


def keep_alive(core: PrefillDriver, seconds: float) -> list[PrefillEffect]:
    """Let time pass while the decode rank keeps pinging."""
    effects: list[PrefillEffect] = []
    for _ in range(int(seconds / PAUSE_S)):
        effects += core.sleep(PAUSE_S)
        core.hear(DECODE, Ping(peer=DECODE))
    return effects


# Packing -------------------------------------------------------------------------------------------------------------


def test_a_packed_piece_says_where_it_will_be(core: PrefillDriver) -> None:
    (piece,) = pieces(core(chunk(4, 8, last=True)))
    assert piece.slots == PieceSlots(1, 1)
    assert piece.notice.staged == Staged(1, head_major=False)
    assert piece.must_pack


def test_pieces_go_directly_where_there_is_no_window() -> None:
    core = packing(window=None)
    (piece,) = pieces(core(chunk(0, 8, last=True)))
    assert (piece.slots, piece.notice.staged) == (None, None)


def test_pieces_larger_than_a_slot_go_directly() -> None:
    core = packing(window=StagingWindow(4096, 15, 2))
    (piece,) = pieces(core(chunk(0, 8, last=True)))
    assert piece.slots is None


def test_a_piece_waits_for_a_slot_that_will_come_back() -> None:
    core = packing(window=StagingWindow(4096, 1024, 1))
    core(chunk(0, 4))
    assert pieces(core(chunk(4, 8, last=True))) == []
    assert pieces(end(core, 0)) == []
    (piece,) = pieces(core.hear(DECODE, released()))
    assert (piece.seq, piece.slots) == (1, PieceSlots(0, 0))


def test_pieces_are_gathered_beside_the_event_loop_if_that_waits_for_a_device() -> None:
    core = packing(IN_A_THREAD)
    (piece,) = planned(core(chunk(0, 4)))
    assert piece.slots == PieceSlots(0, 0)
    (post,) = of_kind(core(ev.PlanFinished(DELIVERY, 0, {}, Staged(0, head_major=False))), PostPlan)
    assert post.notice.staged == Staged(0, head_major=False)
    end(core, 0)
    core.hear(DECODE, released())
    assert pool(core).is_whole
    assert core.core.local_slots.is_whole


def test_a_planned_piece_that_goes_directly_gives_its_slots_back_at_once() -> None:
    core = packing(IN_A_THREAD)
    core(chunk(0, 4))
    (post,) = of_kind(core(ev.PlanFinished(DELIVERY, 0)), PostPlan)
    assert post.notice.staged is None
    assert pool(core).is_whole
    assert core.core.local_slots.is_whole
    end(core, 0)
    assert messages(keep_alive(core, 4), SlotQuery) == []


def test_a_piece_that_went_direct_gives_its_slots_back_at_once(core: PrefillDriver) -> None:
    core(ev.PieceWentDirect(DELIVERY, 0))
    assert pool(core).is_whole
    assert core.core.local_slots.is_whole
    end(core, 0)
    assert messages(keep_alive(core, 4), SlotQuery) == []


def test_slots_of_a_piece_that_cannot_be_planned_are_free_again(core: PrefillDriver) -> None:
    assert reports(core(ev.PlanFailed(DELIVERY, 0, BROKEN)))[-1] == ("failed", "safe")
    assert pool(core).is_whole
    assert core.core.local_slots.is_whole


def test_a_retransmitted_notice_of_a_packed_piece_says_that_it_is_packed() -> None:
    """Otherwise a decode rank that missed the first notice would assume that its pages were written."""
    core = packing()
    (piece,) = pieces(core(chunk(0, 8, last=True)))
    end(core, 0)
    core.hear(DECODE, released())
    assert messages(keep_alive(core, 1), Notice) == [(DECODE, piece.notice)]
    assert piece.notice.staged == Staged(0, head_major=False)


def test_a_retransmitted_notice_of_a_piece_that_went_direct_does_not_say_that_it_is_packed() -> None:
    core = packing()
    (piece,) = pieces(core(chunk(0, 8, last=True)))
    core(ev.PieceWentDirect(DELIVERY, 0))
    end(core, 0)
    assert messages(keep_alive(core, 1), Notice) == [(DECODE, replace(piece.notice, staged=None))]


def test_without_notices_in_band_a_packed_piece_says_so_when_its_post_has_ended() -> None:
    core = PrefillDriver(staging=ALWAYS, in_band_notices=False)
    core.connect(window=WINDOW)
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant())
    (piece,) = pieces(core(chunk(0, 8, last=True)))
    assert messages(end(core, 0), Notice) == [(DECODE, piece.notice)]
    assert piece.notice.staged is not None


# Freeing slots -------------------------------------------------------------------------------------------------------


def test_a_slot_is_free_when_its_write_has_ended_and_it_is_not_read_any_more(core: PrefillDriver) -> None:
    assert pool(core).num_free == 1
    assert end(core, 0) == []
    assert pool(core).num_free == 1
    core.hear(DECODE, released())
    assert pool(core).is_whole
    core.hear(DECODE, released())
    assert pool(core).is_whole


def test_the_word_may_come_before_the_end_of_the_write_is_seen(core: PrefillDriver) -> None:
    core.hear(DECODE, released())
    assert pool(core).num_free == 1
    end(core, 0)
    assert pool(core).is_whole


@pytest.mark.parametrize("word", [released(seq=1), released(generation=2)])
def test_words_about_other_notices_free_nothing(core: PrefillDriver, word: SlotReleased) -> None:
    end(core, 0)
    core.hear(DECODE, word)
    assert pool(core).num_free == 1


@pytest.mark.parametrize(
    "word",
    [Ack(room=ROOM, generation=1), Cancel(room=ROOM, generation=1, failure=ABORTED)],
    ids=["ack", "cancel"],
)
@pytest.mark.parametrize("ends_first", [True, False])
def test_the_end_of_the_transfer_at_the_decode_rank_frees_its_slots(
    core: PrefillDriver, word: Message, ends_first: bool
) -> None:
    if ends_first:
        end(core, 0)
    core.hear(DECODE, word)
    if not ends_first:
        assert pool(core).num_free == 1
        end(core, 0)
    assert pool(core).is_whole


def test_a_slot_that_does_not_come_back_is_asked_for_until_it_does(core: PrefillDriver) -> None:
    end(core, 0)
    effects = keep_alive(core, 8)
    asked = messages(effects, SlotQuery)
    assert len(asked) >= 4
    assert asked[0] == (DECODE, SlotQuery(room=ROOM, generation=1, engine_rank=0, seq=0))
    again = [message for _, message in messages(effects, Notice) if isinstance(message, Notice)]
    assert len(again) == len(asked)  # in case the notice was lost, and not the answer
    assert again[0].staged == Staged(0, head_major=False)
    core.hear(DECODE, released())
    assert messages(keep_alive(core, 8), SlotQuery) == []


def test_the_notice_that_goes_with_the_question_says_when_the_piece_was_written(core: PrefillDriver) -> None:
    """Otherwise a receiver that has missed it could not tell where the time went."""
    stamps = Stamps(1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    core(ev.PostEnded(DELIVERY, 0, None, stamps=stamps))
    ((_, again), *_) = messages(keep_alive(core, 4), Notice)
    assert isinstance(again, Notice)
    assert again.stamps == stamps


def test_a_slot_of_a_failed_write_is_asked_for_without_saying_that_its_bytes_are_there(core: PrefillDriver) -> None:
    end(core, 0, failure=BROKEN)
    effects = keep_alive(core, 4)
    assert messages(effects, SlotQuery)
    assert not messages(effects, Notice)
    assert pool(core).num_free == 1
    core.hear(DECODE, released())
    assert pool(core).is_whole


def test_a_slot_in_doubt_is_out_of_use_until_the_doubt_is_over(core: PrefillDriver) -> None:
    core(ev.PostInDoubt(DELIVERY, 0, BROKEN))
    core.hear(DECODE, released())
    assert (pool(core).num_free, pool(core).num_lost) == (1, 1)
    assert core.core.local_slots.num_lost == 1
    assert messages(keep_alive(core, 8), SlotQuery) == []
    end(core, 0, failure=BROKEN)
    assert pool(core).is_whole
    assert core.core.local_slots.is_whole


def test_a_slot_in_which_bytes_linger_is_never_used_again(core: PrefillDriver) -> None:
    end(core, 0, failure=BROKEN, lingers=True)
    core.hear(DECODE, released())
    keep_alive(core, 20)
    assert (pool(core).num_free, pool(core).num_lost) == (1, 1)
    assert core.core.slots.num_lost == 1


def test_whoever_waits_for_a_slot_that_is_lost_goes_directly() -> None:
    core = packing(window=StagingWindow(4096, 1024, 1))
    core.connect(peer("decode", 1), window=WINDOW)
    core(chunk(0, 4))
    core(ev.SendOpened(8))
    core.hear(DECODE, grant(room=8, generation=2))
    assert pieces(core(chunk(0, 8, room=8, last=True))) == []
    (piece,) = pieces(end(core, 0, failure=BROKEN, lingers=True))
    assert (piece.delivery.room, piece.slots) == (8, None)


# Decode ranks that leave ---------------------------------------------------------------------------------------------


def test_a_decode_rank_that_is_disconnected_and_returns_finds_its_slots_as_they_were(core: PrefillDriver) -> None:
    end(core, 0)
    core.sleep(LEASE_S + 1)
    assert core.core.slots.pool(DECODE) is None
    assert messages(core.sleep(60.0), SlotQuery) == []
    core.connect(window=WINDOW)
    assert pool(core).num_free == 1
    assert messages(core.sleep(0.1), SlotQuery)
    core.hear(DECODE, released())
    assert pool(core).is_whole


def test_another_incarnation_of_a_decode_rank_has_slots_of_its_own(core: PrefillDriver) -> None:
    again = peer("decode", 0, 2)
    core.connect(again, window=WINDOW)
    assert DECODE in core.core.slots._windows, "it may be the one that lives"
    core.hear(again, Ping(peer=again))
    assert DECODE not in core.core.slots._windows
    found = core.core.slots.pool(again)
    assert found is not None
    assert found.is_whole
    end(core, 0)
    core.hear(DECODE, released())
    assert found.num_free == 2


def test_slots_of_a_rank_that_a_dead_incarnation_had_replaced_stay_taken(core: PrefillDriver) -> None:
    core.connect(peer("decode", 0, 2), window=WINDOW)
    core.connect(DECODE, window=WINDOW)
    core.hear(DECODE, Ping(peer=DECODE))
    found = pool(core)
    assert not found.is_whole
    assert len(core.core.slots._windows) == 1


def test_an_incarnation_that_said_goodbye_is_forgotten(core: PrefillDriver) -> None:
    end(core, 0)
    core.hear(DECODE, Goodbye(peer=DECODE))
    assert (len(core.core.slots), len(core.core.slots._windows)) == (0, 0)
    assert messages(core.sleep(60.0), SlotQuery) == []


def test_an_incarnation_that_said_goodbye_does_not_come_back() -> None:
    """Its former slot would be returned to a window that has it already, and be used twice at once."""
    core = packing(IN_A_THREAD)
    core(chunk(0, 4))
    late = core.hello(window=WINDOW)
    core.hear(DECODE, Goodbye(peer=DECODE))
    ((_, refusal),) = messages(core.hear(DECODE, late), Refuse)
    assert isinstance(refusal, Refuse)
    assert "said goodbye" in refusal.detail
    assert core(ev.PlanFinished(DELIVERY, 0)) == [DropPlan(DELIVERY, 0)]
    assert core.core.slots.pool(DECODE) is None


@pytest.mark.parametrize("is_connected_again", [False, True], ids=["away", "back"])
def test_a_word_about_a_slot_that_is_free_already_frees_none(core: PrefillDriver, is_connected_again: bool) -> None:
    """The message may have been in flight since an earlier connection."""
    end(core, 0)
    core.sleep(LEASE_S + 1)
    if is_connected_again:
        core.connect(window=WINDOW)
        core.hear(DECODE, released())
        core.hear(DECODE, released())
        assert pool(core).num_free == WINDOW.num_slots
    else:
        core.hear(DECODE, released())
        core.connect(window=WINDOW)
        assert pool(core).num_free == WINDOW.num_slots - 1


def test_a_window_of_which_every_slot_is_free_is_forgotten_with_its_decode_rank() -> None:
    core = packing()
    assert len(core.core.slots._windows) == 1
    core.sleep(LEASE_S + 1)
    assert len(core.core.slots._windows) == 0


def test_a_taken_slot_that_is_given_back_after_its_decode_rank_left_does_not_leak_the_window() -> None:
    core = packing(IN_A_THREAD)
    core(chunk(0, 4))
    core.sleep(LEASE_S + 1)
    assert len(core.core.slots._windows) == 1, "a slot of it is taken"
    assert core(ev.PlanFinished(DELIVERY, 0)) == [DropPlan(DELIVERY, 0)]
    assert len(core.core.slots._windows) == 0
    assert core.core.local_slots.is_whole


def test_whoever_gave_no_window_has_no_slots() -> None:
    core = packing(window=None)
    assert core.core.slots.pool(DECODE) is None


def test_a_window_may_be_given_with_a_later_hello() -> None:
    """It is used for what is granted from then on."""
    core = packing(window=None)
    core.connect(window=WINDOW)
    (piece,) = pieces(core(chunk(0, 8, last=True)))
    assert piece.slots is None
    core(ev.SendOpened(ROOM + 1))
    core.hear(DECODE, grant(ROOM + 1, 2))
    (piece,) = pieces(core(chunk(0, 8, room=ROOM + 1, last=True)))
    assert piece.slots == PieceSlots(0, 0)


def test_a_pool_knows_whether_a_slot_may_come() -> None:
    pool = SlotPool(2)
    assert (pool.num_free, pool.may_come, pool.is_whole) == (2, False, True)
    first, second = pool.take_slot(), pool.take_slot()
    assert (pool.num_free, pool.may_come) == (0, True)
    pool.lose(first)
    assert (pool.may_come, pool.num_lost) == (True, 1)
    pool.lose(second)
    assert not pool.may_come
    pool.find(first)
    pool.give_back(first)
    pool.give_back(second)
    assert (pool.num_lost, pool.is_whole) == (0, True)


def test_packing_pays_off_where_descriptors_cost_more_than_copies() -> None:
    num_bytes = 2 * 2**20
    enough = int((num_bytes * COPY_S_PER_BYTE + BLOCK_S) / 2.3e-6) + 1
    assert pays_off(num_bytes, enough, 2.3e-6)
    assert not pays_off(num_bytes, enough - 1, 2.3e-6)
    assert not pays_off(num_bytes, 10**6, 0.0)
    assert not pays_off(num_bytes, 10**6, 1.0, "never")
    assert pays_off(num_bytes, 1, 0.0, "always")
    assert not pays_off(0, 1, 1.0, "always")

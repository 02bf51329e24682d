"""Messages of what is over: never obeyed, answered as often as they come, however many transfers lie between."""

import pytest

from kvflow.errors import FailureReason
from kvflow.state import events as ev
from kvflow.state.acquaintances import MAX_ENDINGS
from kvflow.state.effects import CountOddity, EnqueueChunk, PostPlan
from kvflow.state.events import Chunk, DeliveryId
from kvflow.wire.messages import (
    Cancel,
    Drained,
    Failed,
    Goodbye,
    Grant,
    Message,
    Notice,
    PeerId,
    Ping,
    Pong,
    Received,
)
from tests.support.cores import ABORTED, DECODE, PREFILL, CoreDriver, grant, messages, peer, reports
from tests.support.receiving import Wire, wish

ROOM = 7
DELIVERY = DeliveryId(ROOM, DECODE, 1)
WHOLE = ev.ChunkOffered(ROOM, Chunk((0, 8), {"kv": (0, 8)}, last=True))
OTHER = peer("prefill", 1)


@pytest.fixture
def prefill() -> CoreDriver:
    driver = CoreDriver(PREFILL)
    driver.meet_decode()
    return driver


def answer(prefill: CoreDriver, asked: Grant, sender: PeerId = DECODE) -> Failed | None:
    """What a prefill rank says to a grant, if it only says something."""
    effects = prefill.hear(sender, asked)
    if not effects:
        return None
    ((to, failed),) = messages(effects, Failed)
    assert len(effects) == 1
    assert to == sender
    assert isinstance(failed, Failed)
    return failed


def cancel(prefill: CoreDriver, generation: int, room: int = ROOM) -> None:
    ((_, drained),) = messages(prefill.hear(DECODE, Cancel(room=room, generation=generation, failure=ABORTED)), Drained)
    assert isinstance(drained, Drained)
    assert (drained.room, drained.generation) == (room, generation)


def forget_endings(prefill: CoreDriver, *, first: int) -> None:
    """End more generations than a rank remembers."""
    for generation in range(first, first + MAX_ENDINGS + 1):
        cancel(prefill, generation, room=8)


def deliver(prefill: CoreDriver) -> None:
    """Everything from the open room to the word of the decode rank."""
    prefill(WHOLE)
    prefill(ev.PlanFinished(DELIVERY, 0, 16))
    prefill(ev.PostSettled(DELIVERY, 0, None))
    assert reports(prefill.hear(DECODE, Received(room=ROOM, generation=1))) == [("success", "safe")]


# Grants ----------------------------------------------------------------------------------------------------------


def test_a_grant_that_comes_after_its_cancel_is_not_obeyed(prefill: CoreDriver) -> None:
    cancel(prefill, 1)
    prefill(ev.SendOpened(ROOM))
    failed = answer(prefill, grant())
    assert failed is not None
    assert (failed.failure, failed.drained) == (ABORTED, True)
    assert prefill(WHOLE) == []


def test_a_grant_of_a_delivery_that_succeeded_is_not_obeyed_again(prefill: CoreDriver) -> None:
    prefill(ev.SendOpened(ROOM))
    prefill.hear(DECODE, grant())
    deliver(prefill)
    assert answer(prefill, grant()) is None
    prefill(ev.SendOpened(ROOM))
    assert answer(prefill, grant()) is None
    assert prefill(WHOLE) == []


def test_a_grant_of_a_delivery_that_failed_is_told_so_every_time(prefill: CoreDriver) -> None:
    prefill(ev.SendOpened(ROOM))
    prefill.hear(DECODE, grant())
    prefill(ev.SendAborted(ROOM, ABORTED))
    for _ in range(3):
        failed = answer(prefill, grant())
        assert failed is not None
        assert (failed.failure, failed.drained) == (ABORTED, True)


def test_a_grant_that_was_replaced_by_a_newer_one_is_over(prefill: CoreDriver) -> None:
    prefill.hear(DECODE, grant(generation=1))
    prefill.hear(DECODE, grant(generation=2))
    assert answer(prefill, grant(generation=2)) is None
    prefill(ev.SendOpened(ROOM))
    failed = answer(prefill, grant(generation=1))
    assert failed is not None
    assert failed.failure.detail == "asked anew"


def test_an_older_grant_does_not_take_the_place_of_a_newer_one(prefill: CoreDriver) -> None:
    prefill.hear(DECODE, grant(generation=2))
    assert answer(prefill, grant(generation=1)) is None
    prefill(ev.SendOpened(ROOM))
    (effect,) = prefill(WHOLE)
    assert isinstance(effect, EnqueueChunk)
    assert effect.delivery.generation == 2


def test_a_grant_older_than_anything_remembered_is_refused_and_not_obeyed(prefill: CoreDriver) -> None:
    cancel(prefill, 1)
    forget_endings(prefill, first=2)
    prefill(ev.SendOpened(ROOM))
    failed = answer(prefill, grant(generation=1))
    assert failed is not None
    assert (failed.failure.reason, failed.drained) == (FailureReason.PROTOCOL, True)
    assert prefill(WHOLE) == []


def test_a_waiting_grant_is_not_refused_because_thousands_of_later_ones_are_over(prefill: CoreDriver) -> None:
    """A refusal would say that nothing can be written, and then the room would open and write."""
    prefill.hear(DECODE, grant(generation=1))
    forget_endings(prefill, first=2)
    assert answer(prefill, grant(generation=1)) is None
    prefill(ev.SendOpened(ROOM))
    assert [type(effect) for effect in prefill(WHOLE)] == [EnqueueChunk]


def test_an_open_delivery_is_not_refused_because_thousands_of_later_ones_are_over(prefill: CoreDriver) -> None:
    prefill(ev.SendOpened(ROOM))
    prefill.hear(DECODE, grant(generation=1))
    forget_endings(prefill, first=2)
    assert answer(prefill, grant(generation=1)) is None
    deliver(prefill)


def test_a_rank_that_owes_nothing_never_fails_a_transfer_that_outlives_its_memory(prefill: CoreDriver) -> None:
    """It is asked again and again until others have written everything, long after it has done its part."""
    prefill.meet_decode(owed=())
    prefill(ev.SendOpened(ROOM))
    prefill.hear(DECODE, grant(pages={}))
    assert reports(prefill(WHOLE)) == [("success", "safe")]
    forget_endings(prefill, first=2)
    assert answer(prefill, grant(pages={})) is None


def test_greeting_again_forgets_no_ending(prefill: CoreDriver) -> None:
    cancel(prefill, 1)
    prefill.meet_decode(owed=("kv", "aux"))
    prefill(ev.SendOpened(ROOM))
    assert answer(prefill, grant()) is not None


def test_greeting_anew_after_a_parting_forgets_no_ending(prefill: CoreDriver) -> None:
    """Its Drained has given the pages back, so that a grant that was overtaken must not be served."""
    cancel(prefill, 1)
    prefill.sleep(10.0)
    assert DECODE not in prefill.core.peers
    prefill.meet_decode()
    prefill(ev.SendOpened(ROOM))
    failed = answer(prefill, grant())
    assert failed is not None
    assert (failed.failure.reason, failed.drained) == (FailureReason.PEER_LOST, True)
    assert prefill(WHOLE) == []


def test_what_was_granted_before_a_parting_is_not_served_after_it(prefill: CoreDriver) -> None:
    prefill.hear(DECODE, grant())
    prefill.sleep(10.0)
    prefill.meet_decode()
    prefill(ev.SendOpened(ROOM))
    failed = answer(prefill, grant())
    assert failed is not None
    assert failed.failure.reason is FailureReason.PEER_LOST
    prefill.hear(DECODE, grant(generation=2))
    assert any(isinstance(effect, EnqueueChunk) for effect in prefill(WHOLE))


def test_a_rank_that_owes_nothing_fails_no_transfer_that_outlives_a_parting() -> None:
    prefill = CoreDriver(PREFILL)
    prefill.meet_decode(owed=())
    prefill.hear(DECODE, grant())
    prefill.sleep(10.0)
    prefill.meet_decode(owed=())
    assert prefill.hear(DECODE, grant()) == []
    for _ in range(40):
        assert messages(prefill.sleep(1.0), Failed) == []
        prefill.hear(DECODE, Ping(peer=DECODE))


def test_another_life_of_a_decode_rank_begins_with_its_first_generation(prefill: CoreDriver) -> None:
    cancel(prefill, 1)
    prefill.sleep(10.0)
    reborn = peer("decode", incarnation=2)
    prefill.meet_decode(reborn)
    prefill(ev.SendOpened(ROOM))
    prefill.hear(reborn, grant())
    assert any(isinstance(effect, EnqueueChunk) for effect in prefill(WHOLE))


def test_another_life_may_try_a_room_again_that_failed_with_the_former_one(prefill: CoreDriver) -> None:
    prefill(ev.SendOpened(ROOM))
    prefill.hear(DECODE, grant())
    reborn = peer("decode", incarnation=2)
    prefill.meet_decode(reborn)
    assert prefill.core.is_idle, "the room has failed with the former life"
    assert prefill.hear(reborn, grant()) == []
    prefill(ev.SendOpened(ROOM))
    assert any(isinstance(effect, EnqueueChunk) for effect in prefill(WHOLE))


def test_endings_of_one_decode_rank_say_nothing_about_another(prefill: CoreDriver) -> None:
    other = peer("decode", 1)
    prefill.meet_decode(other)
    cancel(prefill, 1)
    prefill(ev.SendOpened(ROOM))
    assert answer(prefill, grant(), sender=other) is None


# What else can be late ---------------------------------------------------------------------------------------------


def test_a_late_word_that_everything_was_received_is_nothing_odd(prefill: CoreDriver) -> None:
    prefill(ev.SendOpened(ROOM))
    prefill.hear(DECODE, grant())
    deliver(prefill)
    assert prefill.hear(DECODE, Received(room=ROOM, generation=1)) == []


def test_a_plan_that_is_late_is_dropped_and_a_post_is_never_made(prefill: CoreDriver) -> None:
    prefill(ev.SendOpened(ROOM))
    prefill.hear(DECODE, grant())
    prefill(WHOLE)
    prefill.hear(DECODE, Cancel(room=ROOM, generation=1, failure=ABORTED))
    effects = prefill(ev.PlanFinished(DELIVERY, 0, 16))
    assert not [effect for effect in effects if isinstance(effect, PostPlan)]


@pytest.fixture
def decode() -> CoreDriver:
    return CoreDriver(DECODE)


@pytest.fixture
def wire(decode: CoreDriver) -> Wire:
    decode(wish())
    return Wire(decode, decode.meet_prefill(PREFILL, OTHER))


def finish(wire: Wire) -> Notice:
    """Complete the transfer; give the last notice."""
    wire.notice(PREFILL, 0, (0, 8), last=True)
    assert reports(wire.notice(OTHER, 0, (0, 8), last=True)) == [("success", "safe")]
    return wire.said


def test_a_notice_of_a_transfer_that_succeeded_is_answered_with_received(wire: Wire) -> None:
    last = finish(wire)
    for _ in range(2):
        assert messages(wire.core.hear(OTHER, last), Received) == [(OTHER, Received(room=ROOM, generation=1))]


def test_a_notice_in_band_is_not_answered(wire: Wire) -> None:
    """It says nothing that proves where it came from."""
    assert wire.core(ev.NoticeDelivered(finish(wire))) == []


def test_a_notice_of_a_transfer_that_failed_is_answered_with_cancel(wire: Wire) -> None:
    wire.notice(PREFILL, 0, (0, 4))
    wire.core(ev.ReceiveAborted(ROOM, ABORTED))
    for rank, sender in enumerate((PREFILL, OTHER)):
        wire.core.hear(sender, Drained(room=ROOM, generation=1, engine_rank=rank))
    effects = wire.core.hear(PREFILL, wire.said)
    assert messages(effects, Cancel) == [(PREFILL, Cancel(room=ROOM, generation=1, failure=ABORTED))]


def test_failed_of_a_transfer_that_succeeded_is_answered_with_received(wire: Wire) -> None:
    finish(wire)
    failed = Failed(room=ROOM, generation=1, engine_rank=0, failure=ABORTED, drained=True)
    assert messages(wire.core.hear(PREFILL, failed), Received) == [(PREFILL, Received(room=ROOM, generation=1))]


def test_a_late_drained_is_nothing_odd(wire: Wire) -> None:
    finish(wire)
    assert wire.core.hear(PREFILL, Drained(room=ROOM, generation=1, engine_rank=0)) == []


@pytest.mark.parametrize(("room", "sender"), [(8, OTHER), (ROOM, peer("prefill", 2))])
def test_nobody_else_is_told_how_a_transfer_ended(wire: Wire, room: int, sender: PeerId) -> None:
    finish(wire)
    wire.core.meet_prefill(PREFILL, OTHER, peer("prefill", 2))
    failed = Failed(room=room, generation=1, engine_rank=sender.rank.engine_rank, failure=ABORTED, drained=True)
    assert wire.core.hear(sender, failed) == [CountOddity("failed_of_unknown_transfer", sender, room)]


@pytest.mark.parametrize(
    "message",
    [
        Pong(peer=OTHER),
        Goodbye(peer=PREFILL._replace(incarnation=9)),
        Drained(room=ROOM, generation=1, engine_rank=1),
        Failed(room=ROOM, generation=1, engine_rank=1, failure=ABORTED, drained=True),
    ],
    ids=lambda message: type(message).__name__,
)
def test_nobody_speaks_in_the_name_of_another(wire: Wire, message: Message) -> None:
    odd = CountOddity("message_in_the_name_of_another", PREFILL, None)
    assert wire.core.hear(PREFILL, message) == [odd]
    assert {PREFILL, OTHER} == set(wire.core.core.peers)

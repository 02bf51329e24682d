"""Late messages are never obeyed, and are answered each time, however many transfers lie between."""

import pytest

from kvflow.bounds import Bounds
from kvflow.errors import FailureReason, Stage
from kvflow.state import events as ev
from kvflow.state.effects import CountAnomaly, ReportGranted
from kvflow.state.events import Chunk, DeliveryId
from kvflow.state.prefill.peers import MAX_CLOSED
from kvflow.wire.messages import (
    Ack,
    Cancel,
    Drained,
    Failed,
    Failure,
    Goodbye,
    Grant,
    Message,
    Notice,
    PeerId,
    Ping,
    Pong,
)
from tests.support.cores import (
    ABORTED,
    DECODE,
    PREFILL,
    DecodeDriver,
    PrefillDriver,
    grant,
    messages,
    peer,
    reports,
)
from tests.support.receiving import Transfer, request
from tests.support.sending import chunk, end, pieces, posted

ROOM = 7
DELIVERY = DeliveryId(ROOM, DECODE, 1)
WHOLE = ev.ChunkOffered(ROOM, Chunk((0, 8), {"kv": (0, 8)}, last=True))
OTHER = peer("prefill", 1)
WRITE_FAILED = Failure(FailureReason.WRITE_FAILED, Stage.SUBMIT, "prefill/0", "disconnected")


@pytest.fixture
def prefill() -> PrefillDriver:
    driver = PrefillDriver()
    driver.connect()
    return driver


def answer(prefill: PrefillDriver, asked: Grant, sender: PeerId = DECODE) -> Failed | None:
    """Return the Failed with which a prefill rank answers a grant; None if it accepts."""
    effects = [effect for effect in prefill.hear(sender, asked) if not isinstance(effect, ReportGranted)]
    if not effects:
        return None
    ((to, failed),) = messages(effects, Failed)
    assert len(effects) == 1
    assert to == sender
    assert isinstance(failed, Failed)
    return failed


def cancel(prefill: PrefillDriver, generation: int, room: int = ROOM) -> None:
    ((_, drained),) = messages(prefill.hear(DECODE, Cancel(room=room, generation=generation, failure=ABORTED)), Drained)
    assert isinstance(drained, Drained)
    assert (drained.room, drained.generation) == (room, generation)


def forget_closed_generations(prefill: PrefillDriver) -> None:
    """Close more generations than a rank remembers."""
    for generation in range(2, 2 + MAX_CLOSED + 1):
        cancel(prefill, generation, room=8)


def deliver(prefill: PrefillDriver) -> None:
    """Run a transfer from the open room to the Ack of the decode rank."""
    prefill(WHOLE)
    end(prefill, 0)
    assert reports(prefill.hear(DECODE, Ack(room=ROOM, generation=1))) == [("success", "safe")]


@pytest.mark.parametrize("failure", [None, WRITE_FAILED], ids=["written", "the peer closed its end"])
def test_what_decode_has_acknowledged_succeeds_although_it_leaves_before_the_write_ends_here(
    prefill: PrefillDriver, failure: Failure | None
) -> None:
    """A transport may report the end of a write after the Ack and the Goodbye, above all in a busy process."""
    prefill(ev.SendOpened(ROOM))
    prefill.hear(DECODE, grant())
    prefill(WHOLE)
    assert reports(prefill.hear(DECODE, Ack(room=ROOM, generation=1))) == []
    assert reports(prefill.hear(DECODE, Goodbye(peer=DECODE))) == []
    assert reports(end(prefill, 0, failure=failure)) == [("success", "safe")]


def test_an_early_ack_of_what_is_not_all_sent_saves_no_room(prefill: PrefillDriver) -> None:
    prefill(ev.SendOpened(ROOM))
    prefill.hear(DECODE, grant())
    prefill(chunk(0, 4))
    prefill.hear(DECODE, Ack(room=ROOM, generation=1))
    assert reports(prefill.hear(DECODE, Goodbye(peer=DECODE))) == [("failed", "draining")]


# Grants ----------------------------------------------------------------------------------------------------------


def test_a_grant_that_comes_after_its_cancel_is_not_obeyed(prefill: PrefillDriver) -> None:
    cancel(prefill, 1)
    prefill(ev.SendOpened(ROOM))
    failed = answer(prefill, grant())
    assert failed is not None
    assert (failed.failure, failed.drained) == (ABORTED, True)
    assert prefill(WHOLE) == []


def test_a_grant_of_a_delivery_that_succeeded_is_not_obeyed_again(prefill: PrefillDriver) -> None:
    prefill(ev.SendOpened(ROOM))
    prefill.hear(DECODE, grant())
    deliver(prefill)
    assert answer(prefill, grant()) is None
    prefill(ev.SendOpened(ROOM))
    assert answer(prefill, grant()) is None
    assert prefill(WHOLE) == []


def test_a_grant_of_a_delivery_that_failed_is_told_so_every_time(prefill: PrefillDriver) -> None:
    prefill(ev.SendOpened(ROOM))
    prefill.hear(DECODE, grant())
    prefill(ev.SendAborted(ROOM, ABORTED))
    for _ in range(3):
        failed = answer(prefill, grant())
        assert failed is not None
        assert (failed.failure, failed.drained) == (ABORTED, True)


def test_a_grant_that_was_replaced_by_a_newer_one_is_over(prefill: PrefillDriver) -> None:
    prefill.hear(DECODE, grant(generation=1))
    prefill.hear(DECODE, grant(generation=2))
    assert answer(prefill, grant(generation=2)) is None
    prefill(ev.SendOpened(ROOM))
    failed = answer(prefill, grant(generation=1))
    assert failed is not None
    assert failed.failure.detail == "replaced by a later grant"


def test_an_older_grant_does_not_take_the_place_of_a_newer_one(prefill: PrefillDriver) -> None:
    prefill.hear(DECODE, grant(generation=2))
    assert answer(prefill, grant(generation=1)) is None
    prefill(ev.SendOpened(ROOM))
    (piece,) = pieces(prefill(WHOLE))
    assert piece.delivery.generation == 2


def test_a_grant_older_than_anything_remembered_is_refused_and_not_obeyed(prefill: PrefillDriver) -> None:
    cancel(prefill, 1)
    forget_closed_generations(prefill)
    prefill(ev.SendOpened(ROOM))
    failed = answer(prefill, grant(generation=1))
    assert failed is not None
    assert (failed.failure.reason, failed.drained) == (FailureReason.PROTOCOL, True)
    assert prefill(WHOLE) == []


def test_a_waiting_grant_is_not_refused_because_thousands_of_later_ones_are_over(prefill: PrefillDriver) -> None:
    """A refusal would promise that nothing can be written, and then the room would open and write."""
    prefill.hear(DECODE, grant(generation=1))
    forget_closed_generations(prefill)
    assert answer(prefill, grant(generation=1)) is None
    prefill(ev.SendOpened(ROOM))
    assert len(posted(prefill(WHOLE))) == 1


def test_an_open_delivery_is_not_refused_because_thousands_of_later_ones_are_over(prefill: PrefillDriver) -> None:
    prefill(ev.SendOpened(ROOM))
    prefill.hear(DECODE, grant(generation=1))
    forget_closed_generations(prefill)
    assert answer(prefill, grant(generation=1)) is None
    deliver(prefill)


def test_a_rank_that_sends_nothing_never_fails_a_transfer_that_outlives_its_memory() -> None:
    """The decode rank repeats its grant until all others have written, long after this rank has done its part."""
    prefill = PrefillDriver()
    prefill.connect(wants=False)
    prefill(ev.SendOpened(ROOM))
    prefill.hear(DECODE, grant(pages={}))
    assert reports(prefill(WHOLE)) == [("success", "safe")]
    forget_closed_generations(prefill)
    assert answer(prefill, grant(pages={})) is None


def test_connecting_again_forgets_no_ending(prefill: PrefillDriver) -> None:
    cancel(prefill, 1)
    prefill.connect()
    prefill(ev.SendOpened(ROOM))
    assert answer(prefill, grant()) is not None


def test_connecting_anew_after_a_disconnection_forgets_no_ending(prefill: PrefillDriver) -> None:
    """Its Drained has released the pages, so a grant that it overtook must not be served."""
    cancel(prefill, 1)
    prefill.sleep(10.0)
    assert DECODE not in prefill.core.peers
    prefill.connect()
    prefill(ev.SendOpened(ROOM))
    failed = answer(prefill, grant())
    assert failed is not None
    assert (failed.failure.reason, failed.drained) == (FailureReason.PEER_LOST, True)
    assert prefill(WHOLE) == []


def test_what_was_granted_before_a_disconnection_is_not_served_after_it(prefill: PrefillDriver) -> None:
    prefill.hear(DECODE, grant())
    prefill.sleep(10.0)
    prefill.connect()
    failed = answer(prefill, grant())
    assert failed is not None
    assert failed.failure.reason is FailureReason.PEER_LOST
    prefill.hear(DECODE, grant(generation=2))
    prefill(ev.SendOpened(ROOM))
    assert len(posted(prefill(WHOLE))) == 1


def test_a_rank_that_sends_nothing_fails_no_transfer_that_outlives_a_disconnection() -> None:
    prefill = PrefillDriver()
    prefill.connect(wants=False)
    prefill.hear(DECODE, grant())
    prefill.sleep(10.0)
    prefill.connect(wants=False)
    assert prefill.hear(DECODE, grant()) == []
    for _ in range(40):
        assert messages(prefill.sleep(1.0), Failed) == []
        prefill.hear(DECODE, Ping(peer=DECODE))


def test_another_incarnation_of_a_decode_rank_begins_with_its_first_generation(prefill: PrefillDriver) -> None:
    cancel(prefill, 1)
    prefill.sleep(10.0)
    again = peer("decode", incarnation=2)
    prefill.connect(again)
    prefill(ev.SendOpened(ROOM))
    prefill.hear(again, grant())
    assert len(posted(prefill(WHOLE))) == 1


def test_another_incarnation_may_try_a_room_again_that_failed_with_the_former_one(prefill: PrefillDriver) -> None:
    prefill(ev.SendOpened(ROOM))
    prefill.hear(DECODE, grant())
    again = peer("decode", incarnation=2)
    prefill.connect(again)
    assert not prefill.core.rooms.rooms, "the room has failed with the former incarnation"
    assert prefill.hear(again, grant()) == []
    prefill(ev.SendOpened(ROOM))
    assert len(posted(prefill(WHOLE))) == 1


def test_closed_generations_of_one_decode_rank_say_nothing_about_another(prefill: PrefillDriver) -> None:
    other = peer("decode", 1)
    prefill.connect(other)
    cancel(prefill, 1)
    prefill(ev.SendOpened(ROOM))
    assert answer(prefill, grant(), sender=other) is None


# Other late messages -----------------------------------------------------------------------------------------------


def test_a_late_word_that_everything_was_received_is_no_anomaly(prefill: PrefillDriver) -> None:
    prefill(ev.SendOpened(ROOM))
    prefill.hear(DECODE, grant())
    deliver(prefill)
    assert prefill.hear(DECODE, Ack(room=ROOM, generation=1)) == []


def test_a_piece_that_waits_is_never_posted_after_the_cancel() -> None:
    prefill = PrefillDriver(limits=Bounds(posts_per_peer=1))
    prefill.connect()
    prefill(ev.SendOpened(ROOM))
    prefill.hear(DECODE, grant())
    prefill(ev.ChunkOffered(ROOM, Chunk((0, 4), {"kv": (0, 4)})))
    prefill(ev.ChunkOffered(ROOM, Chunk((4, 8), {"kv": (4, 8)}, last=True)))
    prefill.hear(DECODE, Cancel(room=ROOM, generation=1, failure=ABORTED))
    assert posted(end(prefill, 0, DELIVERY)) == []


@pytest.fixture
def decode() -> DecodeDriver:
    return DecodeDriver()


@pytest.fixture
def transfer(decode: DecodeDriver) -> Transfer:
    decode(request())
    return Transfer(decode, decode.connect(PREFILL, OTHER))


def finish(transfer: Transfer) -> Notice:
    """Complete the transfer, and return the last notice."""
    transfer.notice(PREFILL, 0, (0, 8), last=True)
    assert reports(transfer.notice(OTHER, 0, (0, 8), last=True)) == [("success", "safe")]
    return transfer.said


def test_a_notice_of_a_transfer_that_succeeded_is_answered_with_ack(transfer: Transfer) -> None:
    last = finish(transfer)
    for _ in range(2):
        assert messages(transfer.core.hear(OTHER, last), Ack) == [(OTHER, Ack(room=ROOM, generation=1))]


def test_a_notice_in_band_is_not_answered(transfer: Transfer) -> None:
    """Nothing in an in-band notice proves where it came from."""
    assert transfer.core(ev.NoticeDelivered(finish(transfer))) == []


def test_a_notice_of_a_transfer_that_failed_is_answered_with_cancel(transfer: Transfer) -> None:
    transfer.notice(PREFILL, 0, (0, 4))
    transfer.core(ev.ReceiveAborted(ROOM, ABORTED))
    for rank, sender in enumerate((PREFILL, OTHER)):
        transfer.core.hear(sender, Drained(room=ROOM, generation=1, engine_rank=rank))
    effects = transfer.core.hear(PREFILL, transfer.said)
    cancel = Cancel(room=ROOM, generation=1, failure=ABORTED, has_landed=True)
    assert messages(effects, Cancel) == [(PREFILL, cancel)]


def test_failed_of_a_transfer_that_succeeded_is_answered_with_ack(transfer: Transfer) -> None:
    finish(transfer)
    failed = Failed(room=ROOM, generation=1, engine_rank=0, failure=ABORTED, drained=True)
    assert messages(transfer.core.hear(PREFILL, failed), Ack) == [(PREFILL, Ack(room=ROOM, generation=1))]


def test_a_late_drained_is_no_anomaly(transfer: Transfer) -> None:
    finish(transfer)
    assert transfer.core.hear(PREFILL, Drained(room=ROOM, generation=1, engine_rank=0)) == []


@pytest.mark.parametrize(("room", "sender"), [(8, OTHER), (ROOM, peer("prefill", 2))])
def test_nobody_else_is_told_how_a_transfer_ended(transfer: Transfer, room: int, sender: PeerId) -> None:
    finish(transfer)
    failed = Failed(room=room, generation=1, engine_rank=sender.rank.engine_rank, failure=ABORTED, drained=True)
    assert transfer.core.hear(sender, failed) == [CountAnomaly("failed_of_unknown_transfer", sender, room)]


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
def test_nobody_speaks_in_the_name_of_another(transfer: Transfer, message: Message) -> None:
    assert transfer.core.hear(PREFILL, message) == [CountAnomaly("message_in_the_name_of_another", PREFILL)]
    assert [peer.id for peer in transfer.core.core.peers._peers.values() if peer.is_connected] == [PREFILL, OTHER]

"""A decode rank to which writes keep failing must reconnect, with fresh native state."""

import pytest

from kvflow.bounds import Bounds
from kvflow.config import Timeouts
from kvflow.errors import FailureReason, Stage
from kvflow.state import events as ev
from kvflow.state.effects import DisconnectTransport, PrefillEffect
from kvflow.wire.messages import Drained, Failed, Failure, Ping, Refuse
from tests.support.cores import ABORTED, DECODE, OTHER_DECODE, PrefillDriver, grant, messages, reports
from tests.support.sending import chunk, delivery, end, posted

BROKEN = Failure(FailureReason.WRITE_FAILED, Stage.SUBMIT, "prefill/0", "it broke")


@pytest.fixture
def prefill() -> PrefillDriver:
    core = PrefillDriver(Timeouts(lease_s=30.0))
    core.connect(lease_s=30.0)
    return core


def send(core: PrefillDriver, room: int, failure: Failure | None) -> list[PrefillEffect]:
    """Send a room with one write, and end the write with `failure`."""
    core(ev.SendOpened(room))
    core.hear(DECODE, grant(room=room, generation=room))
    core(chunk(0, 8, room=room, last=True))
    core.sleep(1.0)
    return end(core, 0, delivery(DECODE, room, room), failure)


def test_a_decode_rank_to_which_writes_fail_must_connect_anew(prefill: PrefillDriver) -> None:
    """Disconnecting discards the transport's state for that peer."""
    for room in (1, 2):
        assert DisconnectTransport(DECODE) not in send(prefill, room, BROKEN)
    prefill(ev.SendOpened(8))
    prefill.hear(DECODE, grant(room=8, generation=8))
    prefill.hear(DECODE, grant(room=9, generation=9))
    effects = send(prefill, 3, BROKEN)
    assert DisconnectTransport(DECODE) in effects
    ((to, refusal),) = messages(effects, Refuse)
    assert (to, getattr(refusal, "to", None)) == (DECODE, DECODE)
    told = [message.room for _, message in messages(effects, Failed) if isinstance(message, Failed)]
    assert told == [3, 8]
    assert len(prefill.core.requests.waiting) == 0
    assert len(prefill.core.peers) == 0


def test_a_decode_rank_that_has_connected_anew_starts_with_a_clean_record(prefill: PrefillDriver) -> None:
    for room in (1, 2, 3):
        send(prefill, room, BROKEN)
    prefill.connect(lease_s=30.0)
    for room in (4, 5):
        assert DisconnectTransport(DECODE) not in send(prefill, room, BROKEN)
    send(prefill, 6, None)
    for room in (11, 12):
        assert DisconnectTransport(DECODE) not in send(prefill, room, BROKEN), (
            "a write that went well has forgiven the others"
        )


def test_a_write_in_doubt_counts_once_also_if_its_pages_were_released_meanwhile(prefill: PrefillDriver) -> None:
    for room in (1, 2):
        prefill(ev.SendOpened(room))
        prefill.hear(DECODE, grant(room=room, generation=room))
        prefill(chunk(0, 8, room=room, last=True))
        prefill(ev.PostInDoubt(delivery(DECODE, room, room), 0, BROKEN))
        prefill(ev.QuarantineReleased(room))
        prefill.sleep(1.0)
        end(prefill, 0, delivery(DECODE, room, room), BROKEN)
        prefill.sleep(1.0)
    assert DECODE in prefill.core.peers


def test_writes_that_fail_after_the_disconnection_change_nothing(prefill: PrefillDriver) -> None:
    prefill(ev.SendOpened(8))
    prefill.hear(DECODE, grant(room=8, generation=8))
    prefill(chunk(0, 8, room=8, last=True))
    late = delivery(DECODE, 8, 8)
    for room in (1, 2, 3):
        send(prefill, room, BROKEN)
    effects = end(prefill, 0, late, BROKEN)
    assert reports(effects) == [("failed", "safe")]
    assert messages(effects, Refuse) == []
    assert not prefill.core.rooms.rooms


def test_other_decode_ranks_are_not_disconnected(prefill: PrefillDriver) -> None:
    other = OTHER_DECODE
    prefill.connect(other, lease_s=30.0)
    for room in (1, 2, 3):
        send(prefill, room, BROKEN)
    assert list(prefill.core.peers._peers) == [other]
    assert len(prefill.hear(other, Ping(peer=other))) == 1


def test_an_engine_that_aborts_does_not_speak_against_the_peer(prefill: PrefillDriver) -> None:
    for room in range(1, 6):
        prefill(ev.SendOpened(room))
        prefill.hear(DECODE, grant(room=room, generation=room))
        prefill(chunk(0, 8, room=room, last=True))
        prefill(ev.SendAborted(room, ABORTED))
        end(prefill, 0, delivery(DECODE, room, room))
        prefill.sleep(1.0)
    assert DECODE in prefill.core.peers


# Writes that do not end ----------------------------------------------------------------------------------------------


def post(core: PrefillDriver, room: int) -> list[PrefillEffect]:
    """Send a room with one write that does not end."""
    core(ev.SendOpened(room))
    core.hear(DECODE, grant(room=room, generation=room))
    return core(chunk(0, 8, room=room, last=True))


def test_a_decode_rank_to_which_no_write_ends_must_connect_anew(prefill: PrefillDriver) -> None:
    """The rank's messages keep arriving; only its data connection drops everything."""
    post(prefill, 1)
    prefill.sleep(10.0)
    post(prefill, 2)
    effects = prefill.sleep(20.0)
    assert DisconnectTransport(DECODE) in effects
    assert len(messages(effects, Refuse)) == 1
    failed = [message for _, message in messages(effects, Failed) if isinstance(message, Failed)]
    assert {(message.room, message.failure.reason, message.drained) for message in failed} == {
        (1, FailureReason.STALLED, False),
        (2, FailureReason.STALLED, False),
    }


def test_a_write_that_does_not_end_fails_alone_while_others_end(prefill: PrefillDriver) -> None:
    post(prefill, 1)
    prefill.sleep(10.0)
    send(prefill, 2, None)
    effects = prefill.sleep(19.0)
    assert messages(effects, Failed)
    assert messages(effects, Refuse) == []
    assert DECODE in prefill.core.peers


def test_a_rank_that_leaves_disconnects_nobody(prefill: PrefillDriver) -> None:
    """A leaving rank serves nothing new, and the decode rank waits for the proof that its writes have ended."""
    post(prefill, 1)
    prefill(ev.DrainStarted(ABORTED))
    prefill.sleep(10.0)
    prefill.hear(DECODE, Ping(peer=DECODE))
    effects = prefill.sleep(20.0)
    assert messages(effects, Failed)
    assert messages(effects, Refuse) == []
    told = messages([*end(prefill, 0, delivery(DECODE, 1, 1), BROKEN), *prefill(ev.TransportClosed())], Drained)
    assert [to for to, _ in told] == [DECODE]


def test_writes_that_run_on_after_a_disconnection_hold_up_nobody() -> None:
    """After a partition, old writes may last a minute, until TCP retransmits, but the rank is back at once."""
    core = PrefillDriver(Timeouts(lease_s=30.0), Bounds(posts_per_peer=2))
    core.connect(lease_s=30.0)
    assert posted(post(core, 1))
    assert posted(post(core, 2))
    core.sleep(30.0)
    assert DECODE not in core.core.peers
    core.connect(lease_s=30.0)
    assert posted(post(core, 3))
    assert posted(post(core, 4))
    assert not posted(post(core, 5)), "the bound holds for what was posted since"
    for room in (1, 2):
        effects = end(core, 0, delivery(DECODE, room, room), BROKEN)
        assert ("failed", "safe") in reports(effects)
        assert not posted(effects)
    assert posted(end(core, 0, delivery(DECODE, 3, 3)))

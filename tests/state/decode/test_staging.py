"""Staged notices on the decode side: scattered once, then counted; the pages stay held meanwhile."""

import pytest
from msgspec.structs import replace

from kvflow.config import Timeouts
from kvflow.errors import FailureReason, LocalProtocolError, Stage
from kvflow.state import events as ev
from kvflow.state.effects import DecodeEffect, Disconnect, LogEvent, ProbePeer, ScatterStaged, VerifyDigests
from kvflow.state.settings import WindowSettings
from kvflow.wire.messages import (
    Ack,
    Drained,
    Failed,
    Failure,
    Goodbye,
    Grant,
    Hello,
    Notice,
    PeerId,
    Refuse,
    SlotQuery,
    SlotReleased,
    Staged,
)
from tests.support.cores import (
    ABORTED,
    DECODE,
    OTHER_PREFILL,
    PREFILL,
    DecodeDriver,
    endpoint_of,
    messages,
    of_kind,
    peer,
    reports,
)
from tests.support.receiving import ROOM, request

GENERATION = 1
TIMEOUTS = Timeouts()
BROKEN = Failure(FailureReason.PROTOCOL, Stage.AGGREGATE, "decode/0", "payload has the wrong size")
RELEASED = SlotReleased(room=ROOM, generation=GENERATION, engine_rank=0, seq=0)
QUERY = SlotQuery(room=ROOM, generation=GENERATION, engine_rank=0, seq=0)
GONE = ev.ProbeFinished(PREFILL, is_gone=True)
AGAIN = peer("prefill", incarnation=2)

REQUEST = request(GENERATION)


def windows(num_windows: int) -> WindowSettings:
    return WindowSettings(4096, num_windows * 200, slot_bytes=100, num_slots=2)


class Receiving:
    """A decode core that has granted a room, and notices of each half of it."""

    def __init__(
        self, opened: ev.ReceiveOpened = REQUEST, *, ends_with_process: bool = True, num_windows: int = 1
    ) -> None:
        self.core = DecodeDriver(ends_with_process=ends_with_process, staging=windows(num_windows))
        self.core(opened)
        ((_, granted),) = messages(self.core.connect(PREFILL), Grant)
        assert isinstance(granted, Grant)
        self.first = Notice(
            room=ROOM,
            generation=GENERATION,
            token=granted.token,
            engine_rank=0,
            seq=0,
            ranges={"kv": (0, 4)},
            num_bytes=8,
            staged=Staged(1, head_major=False),
        )
        self.last = replace(self.first, seq=1, ranges={"kv": (4, 8)}, last=True, staged=Staged(0, head_major=False))

    def notice(self, notice: Notice) -> list[DecodeEffect]:
        return self.core(ev.NoticeDelivered(notice))

    def scattered(self, notice: Notice, failure: Failure | None = None) -> list[DecodeEffect]:
        return self.core(ev.Scattered(GENERATION, notice, failure))

    @property
    def num_counted(self) -> int:
        return self.core.core.rooms.rooms[GENERATION].tally.num_notices


@pytest.fixture
def receiving() -> Receiving:
    return Receiving()


def scatters(effects: list[DecodeEffect]) -> list[int]:
    return [effect.notice.seq for effect in effects if isinstance(effect, ScatterStaged)]


def test_a_staged_notice_counts_when_it_is_scattered_in_any_order(receiving: Receiving) -> None:
    for notice in (receiving.last, receiving.first):
        effects = receiving.notice(notice)
        assert scatters(effects) == [notice.seq]
        assert not reports(effects)
    assert receiving.num_counted == 0
    assert messages(receiving.scattered(receiving.last), SlotReleased) == [(PREFILL, replace(RELEASED, seq=1))]
    assert receiving.num_counted == 1
    effects = receiving.scattered(receiving.first)
    assert messages(effects, SlotReleased) == [(PREFILL, RELEASED)]
    assert reports(effects) == [("success", "safe")]
    assert messages(effects, Ack)


def test_what_arrives_is_progress_before_it_is_scattered_and_again_when_it_has_been() -> None:
    receiving = Receiving(request(GENERATION, timeout_s=600.0))
    receiving.core.pass_time(TIMEOUTS.progress_s + 1)
    receiving.notice(receiving.first)
    assert reports(receiving.core.pass_time(TIMEOUTS.progress_s - 1)) == []
    receiving.scattered(receiving.first)
    assert reports(receiving.core.pass_time(TIMEOUTS.progress_s - 1)) == []
    assert reports(receiving.core.pass_time(1)) == [("failed", "draining")]


def test_a_duplicate_is_scattered_once_and_answered_again_when_it_has_been(receiving: Receiving) -> None:
    assert scatters(receiving.notice(receiving.first)) == [0]
    assert receiving.notice(receiving.first) == []
    assert receiving.core.hear(PREFILL, receiving.first) == []
    receiving.scattered(receiving.first)
    assert receiving.core.hear(PREFILL, receiving.first) == receiving.notice(receiving.first)
    assert messages(receiving.notice(receiving.first), SlotReleased) == [(PREFILL, RELEASED)]
    assert receiving.num_counted == 1


@pytest.mark.parametrize(
    ("changes", "anomaly"),
    [
        ({"token": 1}, "notice_with_wrong_token"),
        ({"staged": Staged(2, head_major=False)}, "notice_staged_nowhere"),
        ({"num_bytes": 101}, "notice_staged_nowhere"),
        ({"ranges": {"kv": (0, 9)}}, "notice_of_other_tokens"),
        ({"ranges": {"kv": (4, 3)}}, "notice_of_other_tokens"),
        ({"ranges": {"swa": (0, 1)}}, "notice_of_other_tokens"),
        ({"ranges": {"swa": (0, 0)}}, "notice_of_other_tokens"),
        ({"seq": 99}, "notice_seq_impossible"),
    ],
)
def test_what_cannot_be_true_is_never_scattered(receiving: Receiving, changes: dict[str, object], anomaly: str) -> None:
    (effect,) = receiving.notice(replace(receiving.first, **changes))
    assert getattr(effect, "kind", None) == anomaly


def test_a_slot_that_is_read_for_one_notice_is_not_read_for_another(receiving: Receiving) -> None:
    receiving.notice(receiving.first)
    (effect,) = receiving.notice(replace(receiving.last, staged=receiving.first.staged))
    assert getattr(effect, "kind", None) == "notice_of_taken_slot"
    receiving.scattered(receiving.first)
    assert scatters(receiving.notice(replace(receiving.last, staged=receiving.first.staged))) == [1]


def test_a_rank_that_gets_a_window_only_when_it_connects_again_may_stage_for_what_it_was_granted_before() -> None:
    core = DecodeDriver(staging=windows(1))
    other = ev.ReceiveOpened(8, 1, "other", {"kv": (0, 8)}, {"kv": b""}, 1, 60.0, b"secret of the test")
    core(other)
    core.connect(peer("other"))
    core(request(2))
    ((_, granted), _) = messages(core.connect(PREFILL, OTHER_PREFILL, silent=[OTHER_PREFILL]), Grant)
    assert isinstance(granted, Grant)
    notice = Notice(
        room=ROOM,
        generation=2,
        token=granted.token,
        engine_rank=0,
        seq=0,
        ranges={"kv": (0, 4)},
        num_bytes=8,
        staged=Staged(1, head_major=False),
    )
    (effect,) = core(ev.NoticeDelivered(notice))
    assert getattr(effect, "kind", None) == "notice_staged_nowhere"
    core.hear(peer("other"), Goodbye(peer=peer("other"), fenced=True))
    core.hear(OTHER_PREFILL, Refuse(peer=OTHER_PREFILL, to=None, detail="handshake required"))
    core.connect(PREFILL, OTHER_PREFILL, silent=[OTHER_PREFILL])
    assert scatters(core(ev.NoticeDelivered(notice))) == [0]


def test_a_notice_that_cannot_be_scattered_fails_the_transfer(receiving: Receiving) -> None:
    receiving.notice(receiving.first)
    effects = receiving.scattered(receiving.first, BROKEN)
    assert reports(effects) == [("failed", "draining")]
    assert messages(effects, SlotReleased) == [(PREFILL, RELEASED)]


@pytest.mark.parametrize("how", ["drained", "failed", "gone"])
def test_pages_are_held_until_nothing_is_scattered_into_them(receiving: Receiving, how: str) -> None:
    receiving.notice(receiving.first)
    assert reports(receiving.core(ev.ReceiveAborted(ROOM, ABORTED))) == [("aborted", "draining")]
    drained = Drained(room=ROOM, generation=GENERATION, engine_rank=0, failure=ABORTED)
    failed = Failed(room=ROOM, generation=GENERATION, engine_rank=0, failure=ABORTED, drained=True)
    proofs: dict[str, ev.DecodeEvent] = {
        "drained": ev.MessageReceived(PREFILL, drained),
        "failed": ev.MessageReceived(PREFILL, failed),
        "gone": GONE,
    }
    assert not reports(receiving.core(proofs[how]))
    assert reports(receiving.scattered(receiving.first)) == [("aborted", "safe")]


def test_pages_in_quarantine_are_not_released_while_they_are_written_from_here(receiving: Receiving) -> None:
    receiving.notice(receiving.first)
    receiving.core(ev.ReceiveAborted(ROOM, ABORTED))
    assert reports(receiving.core.sleep(6.0)) == [("aborted", "quarantined")]
    with pytest.raises(LocalProtocolError, match="staging"):
        receiving.core(ev.QuarantineReleased(GENERATION))
    receiving.scattered(receiving.first)
    assert reports(receiving.core(ev.QuarantineReleased(GENERATION))) == [("aborted", "safe")]


def test_a_notice_of_a_transfer_that_is_over_is_never_scattered(receiving: Receiving) -> None:
    receiving.core(ev.ReceiveAborted(ROOM, ABORTED))
    assert receiving.notice(receiving.first) == []
    receiving.core.hear(PREFILL, Drained(room=ROOM, generation=GENERATION, engine_rank=0))
    assert scatters(receiving.notice(receiving.first)) == []


def test_a_slot_that_is_asked_for_is_given_back_as_soon_as_it_is_not_read_any_more(receiving: Receiving) -> None:
    assert receiving.core.hear(PREFILL, QUERY) == []  # its notice may still come
    receiving.notice(receiving.first)
    assert receiving.core.hear(PREFILL, QUERY) == []
    receiving.scattered(receiving.first)
    for _ in range(2):
        assert messages(receiving.core.hear(PREFILL, QUERY), SlotReleased) == [(PREFILL, RELEASED)]
    receiving.core(ev.ReceiveAborted(ROOM, ABORTED))
    assert messages(receiving.core.hear(PREFILL, replace(QUERY, seq=1)), SlotReleased)
    receiving.core.hear(PREFILL, Drained(room=ROOM, generation=GENERATION, engine_rank=0))
    assert messages(receiving.core.hear(PREFILL, replace(QUERY, seq=5)), SlotReleased)
    assert not messages(receiving.core.hear(PREFILL, replace(QUERY, generation=2)), SlotReleased)
    assert not messages(receiving.core.hear(PREFILL, replace(QUERY, engine_rank=1)), SlotReleased)


def test_digests_are_compared_after_everything_is_scattered() -> None:
    receiving = Receiving(replace(REQUEST, digest=True))
    for notice in (receiving.first, receiving.last):
        receiving.notice(notice)
    assert not [effect for effect in receiving.scattered(receiving.first) if isinstance(effect, VerifyDigests)]
    assert [effect for effect in receiving.scattered(receiving.last) if isinstance(effect, VerifyDigests)]


def test_digests_are_not_compared_while_anything_is_scattered() -> None:
    """This holds even if a rank reports in the meantime that it has written the same tokens directly."""
    receiving = Receiving(replace(REQUEST, digest=True))
    receiving.notice(receiving.first)
    for notice in (receiving.first, receiving.last):
        effects = receiving.notice(replace(notice, staged=None))
        assert not [effect for effect in effects if isinstance(effect, VerifyDigests)]
    effects = receiving.scattered(replace(receiving.first, staged=None))
    assert [effect for effect in effects if isinstance(effect, VerifyDigests)]


# Windows -------------------------------------------------------------------------------------------------------------


def shake_hands(core: DecodeDriver, *others: PeerId) -> tuple[list[DecodeEffect], list[Hello]]:
    """Start a handshake with an instance; return the effects, and the Hellos to all of its ranks."""
    core.core.instances.reconnect(others[0].rank.instance, core.now)
    effects = core.compiled(core.found(*others))
    instance = core.core.instances._instances.named(others[0].rank.instance)
    assert instance is not None
    return effects, list(instance.hellos.values())


def test_each_rank_has_a_window_of_its_own_and_keeps_it() -> None:
    core = DecodeDriver(staging=windows(3))
    _, (first, second) = shake_hands(core, PREFILL, OTHER_PREFILL)
    assert first.staging is not None
    assert second.staging is not None
    assert (first.staging.address, second.staging.address) == (4096, 4296)
    assert (first.staging.slot_bytes, first.staging.num_slots) == (100, 2)
    assert core.core.windows.owners == [PREFILL, OTHER_PREFILL]
    _, (again, other) = shake_hands(core, AGAIN, OTHER_PREFILL)
    assert other.staging == second.staging
    assert again.staging is not None
    assert again.staging.address == 4496


def test_a_rank_that_sends_nothing_gets_no_window() -> None:
    core = DecodeDriver(staging=windows(2))
    core(request())
    core.connect(PREFILL, OTHER_PREFILL, silent=[OTHER_PREFILL])
    assert core.core.windows.owners == [PREFILL]


def test_a_rank_that_has_never_accepted_a_hello_gives_its_window_back_at_once() -> None:
    """It was granted nothing, so it has written nothing, and a proof might never come."""
    core = DecodeDriver(staging=windows(1))
    shake_hands(core, PREFILL)
    _, (hello,) = shake_hands(core, AGAIN)
    assert hello.staging is not None
    assert core.core.windows.owners == [AGAIN]


def test_exhausted_windows_are_logged_once_and_their_owners_are_probed() -> None:
    core = DecodeDriver(staging=windows(1))
    core.connect(PREFILL)
    core.hear(PREFILL, Goodbye(peer=PREFILL))
    found = core.found(AGAIN)
    while core(ev.ProbeFinished(PREFILL, is_gone=False)):
        pass  # probed because of Goodbye, and again when the rank was looked up
    effects = core.compiled(found)
    ((_, hello),) = messages(effects, Hello)
    assert isinstance(hello, Hello)
    assert hello.staging is None
    assert ProbePeer(PREFILL, endpoint_of(PREFILL)) in effects
    logs = [log for log in of_kind(effects, LogEvent) if log.name == "staging_windows_exhausted"]
    assert [(log.is_warning, dict(log.values)) for log in logs] == [(True, {"peer": str(AGAIN), "windows": "1"})]
    effects, _ = shake_hands(core, peer("prefill", incarnation=3))
    assert of_kind(effects, LogEvent) == []


def test_a_rank_without_a_window_gets_one_when_its_owner_has_ended() -> None:
    core = DecodeDriver(staging=windows(1))
    shake_hands(core, PREFILL)
    shake_hands(core, AGAIN)
    core(GONE)
    _, (hello,) = shake_hands(core, peer("prefill", incarnation=3))
    assert hello.staging is not None


@pytest.mark.parametrize("ends_with_process", [True, False])
def test_a_window_is_given_to_another_rank_only_with_the_proof_that_nothing_lands_any_more(
    ends_with_process: bool,
) -> None:
    receiving = Receiving(ends_with_process=ends_with_process)
    receiving.core.sleep(60.0)
    assert receiving.core.core.windows.num_taken == 1, "silence proves nothing"
    receiving.core(GONE)
    assert bool(receiving.core.core.counts().windows_free) is ends_with_process
    receiving.core(ev.PeerFenced(PREFILL))
    assert receiving.core.core.counts().windows_free


@pytest.mark.parametrize("fenced", [True, False])
def test_a_goodbye_gives_the_window_back_only_if_nothing_lands_any_more(fenced: bool) -> None:
    receiving = Receiving()
    receiving.core.hear(PREFILL, Goodbye(peer=PREFILL, fenced=fenced))
    assert receiving.core.core.windows.num_taken == (0 if fenced else 1)


def test_a_rank_that_has_disconnected_this_one_can_still_give_its_window_back() -> None:
    core = DecodeDriver(ends_with_process=False, staging=windows(1))
    core(REQUEST)
    core.connect(PREFILL)
    core.hear(PREFILL, Drained(room=ROOM, generation=GENERATION, engine_rank=0))
    assert not core.core.rooms.rooms
    effects = core.hear(PREFILL, Refuse(peer=PREFILL, to=DECODE, detail="connect again"))
    assert Disconnect(PREFILL) not in effects
    assert Disconnect(PREFILL) in core.hear(PREFILL, Goodbye(peer=PREFILL, fenced=True))
    assert core.core.counts().windows_free


def test_a_window_of_an_ended_rank_is_kept_while_it_is_being_read(receiving: Receiving) -> None:
    receiving.notice(receiving.first)
    receiving.core(GONE)
    assert not receiving.core.core.counts().windows_free
    receiving.scattered(receiving.first)
    assert receiving.core.core.counts().windows_free


def test_who_is_being_read_is_looked_up_only_while_a_window_of_an_ended_rank_waits(
    receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms, looks = receiving.core.core.rooms, []
    look_up = rooms.scatter_from

    def scatter_from(peer: PeerId) -> bool:
        looks.append(peer)
        return look_up(peer)

    monkeypatch.setattr(rooms, "scatter_from", scatter_from)
    receiving.notice(receiving.first)
    receiving.notice(receiving.last)
    receiving.scattered(receiving.first)
    assert not looks
    receiving.core(GONE)
    receiving.scattered(receiving.last)
    assert looks == [PREFILL, PREFILL]
    receiving.core(ev.PeerFenced(PREFILL))
    assert looks == [PREFILL, PREFILL]

"""Staged notices on the decode side: scattered once, counted after that, and pages held meanwhile."""

import msgspec
import pytest
from msgspec.structs import replace

from kvflow.config import Timeouts
from kvflow.errors import FailureReason, LocalProtocolError, Stage
from kvflow.state import events as ev
from kvflow.state.effects import Effect, ScatterStaged, VerifyDigests
from kvflow.state.events import GreetedRank
from kvflow.state.staging import StagingArea
from kvflow.wire.messages import Drained, Failed, Failure, Grant, Notice, PeerId, Received, Staged, Unstage, Unstaged
from tests.support.cores import ABORTED, DECODE, PREFILL, CoreDriver, debts, messages, pass_time, peer, reports
from tests.support.receiving import ROOM, wish

GENERATION = 1
TIMEOUTS = Timeouts()
BROKEN = Failure(FailureReason.PROTOCOL, Stage.AGGREGATE, "decode/0", "payload has another size")
UNSTAGED = Unstaged(room=ROOM, generation=GENERATION, engine_rank=0, seq=0)
ASK = Unstage(room=ROOM, generation=GENERATION, engine_rank=0, seq=0)

WISH = wish(GENERATION)


def area(num_windows: int = 1) -> StagingArea:
    return StagingArea(4096, num_windows * 200, slot_bytes=100, num_slots=2)


class Receiving:
    """A decode core that has granted a room, and the notice of half of it."""

    def __init__(
        self, wish: ev.ReceiveOpened = WISH, *, ends_with_process: bool = True, window: int | None = 1
    ) -> None:
        self.core = CoreDriver(DECODE, ends_with_process=ends_with_process)
        self.core.core.staging = self.area = area()
        rank = GreetedRank(PREFILL, debts(), (), self.area.window(PREFILL) if window else None)
        self.core(ev.InstanceGreeted("prefill", (rank,)))
        ((_, granted),) = messages(self.core(wish), Grant)
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

    def notice(self, notice: Notice) -> list[Effect]:
        return self.core(ev.NoticeDelivered(notice))

    def scattered(self, notice: Notice, failure: Failure | None = None) -> list[Effect]:
        return self.core(ev.Scattered(GENERATION, notice, failure))

    @property
    def num_counted(self) -> int:
        return self.core.core.receivers.receivers[GENERATION].num_notices


@pytest.fixture
def receiving() -> Receiving:
    return Receiving()


def scatters(effects: list[Effect]) -> list[int]:
    return [effect.notice.seq for effect in effects if isinstance(effect, ScatterStaged)]


def test_a_staged_notice_counts_when_it_is_scattered_in_any_order(receiving: Receiving) -> None:
    for notice in (receiving.last, receiving.first):
        effects = receiving.notice(notice)
        assert scatters(effects) == [notice.seq]
        assert not reports(effects)
    assert receiving.num_counted == 0
    assert messages(receiving.scattered(receiving.last), Unstaged) == [(PREFILL, replace(UNSTAGED, seq=1))]
    assert receiving.num_counted == 1
    effects = receiving.scattered(receiving.first)
    assert messages(effects, Unstaged) == [(PREFILL, UNSTAGED)]
    assert reports(effects) == [("success", "safe")]
    assert messages(effects, Received)


def test_what_arrives_is_progress_before_it_is_scattered_and_again_when_it_has_been() -> None:
    receiving = Receiving(wish(GENERATION, timeout_s=600.0))
    pass_time(receiving.core, TIMEOUTS.first_bytes_s - 1)
    receiving.notice(receiving.first)
    assert reports(pass_time(receiving.core, TIMEOUTS.progress_s - 1)) == []
    receiving.scattered(receiving.first)
    assert reports(pass_time(receiving.core, TIMEOUTS.progress_s - 1)) == []
    assert reports(pass_time(receiving.core, 1)) == [("failed", "draining")]


def test_a_duplicate_is_scattered_once_and_answered_again_when_it_has_been(receiving: Receiving) -> None:
    assert scatters(receiving.notice(receiving.first)) == [0]
    assert receiving.notice(receiving.first) == []
    assert receiving.core.hear(PREFILL, receiving.first) == []
    receiving.scattered(receiving.first)
    assert receiving.core.hear(PREFILL, receiving.first) == receiving.notice(receiving.first)
    assert messages(receiving.notice(receiving.first), Unstaged) == [(PREFILL, UNSTAGED)]
    assert receiving.num_counted == 1


@pytest.mark.parametrize(
    ("changes", "oddity"),
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
def test_what_cannot_be_true_is_never_scattered(receiving: Receiving, changes: dict[str, object], oddity: str) -> None:
    (effect,) = receiving.notice(replace(receiving.first, **changes))
    assert getattr(effect, "kind", None) == oddity


def test_a_slot_that_is_read_for_one_notice_is_not_read_for_another(receiving: Receiving) -> None:
    receiving.notice(receiving.first)
    (effect,) = receiving.notice(replace(receiving.last, staged=receiving.first.staged))
    assert getattr(effect, "kind", None) == "notice_of_taken_slot"
    receiving.scattered(receiving.first)
    assert scatters(receiving.notice(replace(receiving.last, staged=receiving.first.staged))) == [1]


def test_a_rank_that_gets_a_window_only_when_it_is_greeted_again_may_stage_for_what_it_was_granted_before() -> None:
    receiving = Receiving(window=None)
    assert scatters(receiving.notice(receiving.first)) == []
    rank = GreetedRank(PREFILL, debts(), (), receiving.area.window(PREFILL))
    receiving.core(ev.InstanceGreeted("prefill", (rank,)))
    assert scatters(receiving.notice(receiving.first)) == [0]


def test_a_rank_without_a_window_cannot_stage() -> None:
    receiving = Receiving(window=None)
    (effect,) = receiving.notice(receiving.first)
    assert getattr(effect, "kind", None) == "notice_staged_nowhere"


def test_a_notice_that_cannot_be_scattered_fails_the_transfer(receiving: Receiving) -> None:
    receiving.notice(receiving.first)
    effects = receiving.scattered(receiving.first, BROKEN)
    assert reports(effects) == [("failed", "draining")]
    assert messages(effects, Unstaged) == [(PREFILL, UNSTAGED)]


@pytest.mark.parametrize("how", ["drained", "failed", "gone"])
def test_pages_are_held_until_nothing_is_scattered_into_them(receiving: Receiving, how: str) -> None:
    receiving.notice(receiving.first)
    assert reports(receiving.core(ev.ReceiveAborted(ROOM, ABORTED))) == [("aborted", "draining")]
    drained = Drained(room=ROOM, generation=GENERATION, engine_rank=0, failure=ABORTED)
    failed = Failed(room=ROOM, generation=GENERATION, engine_rank=0, failure=ABORTED, drained=True)
    proofs: dict[str, ev.Event] = {
        "drained": ev.MessageReceived(PREFILL, drained),
        "failed": ev.MessageReceived(PREFILL, failed),
        "gone": ev.PeerGone(PREFILL),
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
    assert receiving.core.hear(PREFILL, ASK) == []  # its notice may still come
    receiving.notice(receiving.first)
    assert receiving.core.hear(PREFILL, ASK) == []
    receiving.scattered(receiving.first)
    for _ in range(2):
        assert messages(receiving.core.hear(PREFILL, ASK), Unstaged) == [(PREFILL, UNSTAGED)]
    receiving.core(ev.ReceiveAborted(ROOM, ABORTED))
    assert messages(receiving.core.hear(PREFILL, replace(ASK, seq=1)), Unstaged)
    receiving.core.hear(PREFILL, Drained(room=ROOM, generation=GENERATION, engine_rank=0))
    assert messages(receiving.core.hear(PREFILL, replace(ASK, seq=5)), Unstaged)
    assert not messages(receiving.core.hear(PREFILL, replace(ASK, generation=2)), Unstaged)
    assert not messages(receiving.core.hear(PREFILL, replace(ASK, engine_rank=1)), Unstaged)


def test_digests_are_compared_after_everything_is_scattered() -> None:
    receiving = Receiving(msgspec.structs.replace(WISH, digest=True))
    for notice in (receiving.first, receiving.last):
        receiving.notice(notice)
    assert not [effect for effect in receiving.scattered(receiving.first) if isinstance(effect, VerifyDigests)]
    assert [effect for effect in receiving.scattered(receiving.last) if isinstance(effect, VerifyDigests)]


def test_digests_are_not_compared_while_anything_is_scattered() -> None:
    """Also if a rank says in the meantime that it has written the same tokens directly."""
    receiving = Receiving(msgspec.structs.replace(WISH, digest=True))
    receiving.notice(receiving.first)
    for notice in (receiving.first, receiving.last):
        effects = receiving.notice(replace(notice, staged=None))
        assert not [effect for effect in effects if isinstance(effect, VerifyDigests)]
    effects = receiving.scattered(replace(receiving.first, staged=None))
    assert [effect for effect in effects if isinstance(effect, VerifyDigests)]


def test_each_life_has_one_window_for_ever() -> None:
    found = area(num_windows=2)
    first, second = found.window(PREFILL), found.window(peer("prefill", 1))
    assert first is not None
    assert second is not None
    assert (first.address, second.address) == (4096, 4296)
    assert found.window(PREFILL) == first
    assert found.window(peer("prefill", 0, 2)) is None
    assert found.owner(second.slot_address(1) + 99) == peer("prefill", 1)


@pytest.mark.parametrize("ends_with_process", [True, False])
def test_a_window_goes_to_another_life_only_with_the_proof_that_nothing_lands_any_more(ends_with_process: bool) -> None:
    receiving = Receiving(ends_with_process=ends_with_process)
    receiving.core.sleep(60.0)
    receiving.core(ev.PeerLeft(PREFILL, ABORTED))
    assert receiving.area.window(peer("prefill", 0, 2)) is None
    receiving.core(ev.PeerGone(PREFILL))
    assert (receiving.area.window(peer("prefill", 0, 2)) is not None) is ends_with_process


def test_a_window_of_the_dead_is_kept_while_it_is_being_read(receiving: Receiving) -> None:
    receiving.notice(receiving.first)
    receiving.core(ev.PeerGone(PREFILL))
    assert receiving.area.window(peer("prefill", 0, 2)) is None
    receiving.scattered(receiving.first)
    assert receiving.area.window(peer("prefill", 0, 2)) is not None


def test_who_is_being_read_is_looked_up_only_while_a_window_of_the_dead_waits(
    receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    receivers, looks = receiving.core.core.receivers, []
    look_up = receivers.scattered_peers

    def scattered_peers() -> dict[PeerId, None]:
        looks.append(1)
        return look_up()

    monkeypatch.setattr(receivers, "scattered_peers", scattered_peers)
    receiving.notice(receiving.first)
    receiving.notice(receiving.last)
    receiving.scattered(receiving.first)
    assert not looks
    receiving.core(ev.PeerGone(PREFILL))
    receiving.scattered(receiving.last)
    assert len(looks) == 2
    receiving.scattered(receiving.last)
    assert len(looks) == 2

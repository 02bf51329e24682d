"""Offers between two cores, over a connection that loses, repeats and delays messages and may end."""

from collections import Counter
from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvflow.errors import CapacityExceeded, FailureReason
from kvflow.state import events as ev
from kvflow.state.decode import instances
from kvflow.state.decode.offers import MAX_OFFERS
from kvflow.state.effects import LookUp, PassOffer, ReportOffer, WithdrawOffer
from kvflow.state.prefill import offers as received
from kvflow.wire.messages import Failure, Goodbye, Message, Offer, OfferAnswered, PeerId, Refuse
from kvflow.wire.ticket import Ticket
from tests.support.cores import (
    ABORTED,
    DECODE,
    OTHER_DECODE,
    PREFILL,
    DecodeDriver,
    Effect,
    PrefillDriver,
    abort_failure,
    anomalies,
    connection_of,
    messages,
    of_kind,
    peer,
)

TIMEOUT_S = 30.0


def offer(number: int = 1, timeout_s: float = TIMEOUT_S) -> Offer:
    ticket = Ticket(7, "tcp://127.0.0.1:7000", peer("holder"), "model")
    return Offer(number=number, ticket=ticket.to_json(), tokens=(0, 8), timeout_s=timeout_s)


def made(number: int = 1, timeout_s: float = TIMEOUT_S) -> ev.OfferMade:
    return ev.OfferMade("prefill", offer(number, timeout_s=timeout_s))


def owner(*, takes_offers: bool = True) -> PrefillDriver:
    core = PrefillDriver(takes_offers=takes_offers)
    core.connect()
    return core


def sent(effects: Sequence[Effect], kind: type[Message] = Offer) -> list[Message]:
    return [message for _, message in messages(effects, kind)]


# The holder ----------------------------------------------------------------------------------------------------------


def test_an_offer_waits_for_the_handshake() -> None:
    core = DecodeDriver()
    assert of_kind(core(made()), LookUp)
    effects = core.connect(PREFILL)
    assert messages(effects, Offer) == [(PREFILL, offer())]
    effects = core.hear(PREFILL, OfferAnswered(number=1))
    assert of_kind(effects, ReportOffer) == [ReportOffer(1, None)]


def test_only_the_first_rank_is_asked() -> None:
    core = DecodeDriver()
    core.connect(PREFILL, peer("prefill", 1))
    assert [to for to, _ in messages(core(made()), Offer)] == [PREFILL]


def test_it_is_repeated_with_the_time_that_is_left_until_it_fails() -> None:
    core = DecodeDriver()
    core.connect(PREFILL)
    core(made())
    effects = core.pass_time(TIMEOUT_S)
    left = [message.timeout_s for message in sent(effects) if isinstance(message, Offer)]
    assert left == sorted(left, reverse=True)
    assert 0 < left[-1] < left[0] < TIMEOUT_S
    (report,) = of_kind(effects, ReportOffer)
    assert report.failure.reason is FailureReason.DEADLINE
    assert sent(core.pass_time(TIMEOUT_S)) == []


def test_it_is_repeated_ever_more_rarely() -> None:
    """An older version rejects all of them, and cuts connections with too many rejected messages."""
    core = DecodeDriver()
    core.connect(PREFILL)
    core(made(timeout_s=100.0))
    left = [message.timeout_s for message in sent(core.pass_time(100.0)) if isinstance(message, Offer)]
    assert left == pytest.approx([99, 97, 93, 85, 69, 53, 37, 21, 5], abs=0.5)


def test_an_instance_that_is_not_found_is_unreachable() -> None:
    core = DecodeDriver()
    core(made())
    (report,) = of_kind(core.sleep(TIMEOUT_S), ReportOffer)
    assert report.failure.reason is FailureReason.UNREACHABLE
    assert "registry" in report.failure.detail


def test_it_is_not_repeated_when_its_time_is_over() -> None:
    """Also if the clock has not been looked at since before a repetition."""
    core = DecodeDriver()
    core.connect(PREFILL)
    core(made(timeout_s=2.0))
    core.now += 2.0
    assert sent(core(ev.TimePassed())) == []


def test_an_instance_that_gives_way_to_another_one_fails_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instances, "MAX_REFS", 1)
    core = DecodeDriver()
    core(made())
    (report,) = of_kind(core(ev.OfferMade("elsewhere", offer(2))), ReportOffer)
    assert (report.number, report.failure.reason) == (1, FailureReason.CAPACITY)


def test_an_instance_that_refuses_fails_it_at_once_and_so_do_later_ones() -> None:
    core = DecodeDriver()
    core(made())
    compiled = core.compiled(core.found(PREFILL))
    assert compiled
    refuse = Refuse(peer=PREFILL, to=core.me, detail="other model", attempt=0)
    for effects in (core.hear(PREFILL, refuse), core(made(2))):
        (report,) = of_kind(effects, ReportOffer)
        assert report.failure.reason is FailureReason.REFUSED
        assert "other model" in report.failure.detail


@pytest.mark.parametrize("answerer", [peer("prefill", 1), peer("other")])
def test_only_the_rank_that_was_asked_can_answer(answerer: PeerId) -> None:
    core = DecodeDriver()
    core.connect(PREFILL, peer("prefill", 1))
    core(made())
    assert of_kind(core.hear(answerer, OfferAnswered(number=1)), ReportOffer) == []
    assert of_kind(core.hear(PREFILL, OfferAnswered(number=2)), ReportOffer) == []
    assert of_kind(core.hear(PREFILL, OfferAnswered(number=1, failure=ABORTED)), ReportOffer) == [
        ReportOffer(1, ABORTED)
    ]
    assert of_kind(core.hear(PREFILL, OfferAnswered(number=1)), ReportOffer) == []


def test_the_end_of_the_other_rank_fails_it() -> None:
    core = DecodeDriver()
    core.connect(PREFILL)
    core(made())
    (report,) = of_kind(core.hear(PREFILL, Goodbye(peer=PREFILL, failure=abort_failure("bye"))), ReportOffer)
    assert report.failure == abort_failure("bye")


def test_the_silence_of_the_other_rank_fails_it() -> None:
    core = DecodeDriver()
    core.connect(PREFILL)
    core(made(timeout_s=3_600.0))
    core(ev.ConnectionLost(PREFILL))
    (report,) = of_kind(core.sleep(60.0), ReportOffer)
    assert report.failure.reason is FailureReason.PEER_LOST


def test_a_withdrawn_one_is_forgotten() -> None:
    core = DecodeDriver()
    core.connect(PREFILL)
    core(made())
    assert core(ev.OfferWithdrawn(1)) == core(ev.OfferWithdrawn(1)) == []
    assert core.hear(PREFILL, OfferAnswered(number=1)) == []
    assert sent(core.pass_time(5)) == []


def test_closing_fails_all() -> None:
    core = DecodeDriver()
    core(made())
    core.connect(PREFILL)
    core(made(2))
    effects = core(ev.CloseStarted(ABORTED))
    assert of_kind(effects, ReportOffer) == [ReportOffer(1, ABORTED), ReportOffer(2, ABORTED)]


def test_there_may_not_be_too_many() -> None:
    core = DecodeDriver()
    for number in range(1, MAX_OFFERS + 1):
        core(made(number))
    with pytest.raises(CapacityExceeded):
        core(made(MAX_OFFERS + 1))
    core(ev.OfferWithdrawn(1))
    core(made(MAX_OFFERS + 1))


# The owner -----------------------------------------------------------------------------------------------------------


def answers(effects: Sequence[Effect]) -> list[Failure | None]:
    return [message.failure for message in sent(effects, OfferAnswered) if isinstance(message, OfferAnswered)]


def test_it_reaches_the_engine_once_and_its_answer_is_repeated() -> None:
    core = owner()
    assert of_kind(core.hear(DECODE, offer()), PassOffer) == [PassOffer(DECODE, offer())]
    assert core.hear(DECODE, offer(timeout_s=1.0)) == []
    assert answers(core(ev.OfferDecided(DECODE, 1, None))) == [None]
    assert answers(core.hear(DECODE, offer())) == [None]
    assert core(ev.OfferDecided(DECODE, 1, ABORTED)) == []
    core.hear(DECODE, offer(2))
    assert answers(core(ev.OfferDecided(DECODE, 2, ABORTED))) == [ABORTED]
    assert answers(core.hear(DECODE, offer(2))) == [ABORTED]


def test_only_the_latest_answers_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(received, "MAX_ANSWERS", 3)
    core = owner()
    for number in range(1, 5):
        core.hear(DECODE, offer(number))
        core(ev.OfferDecided(DECODE, number, None))
    for number in (2, 3, 4):
        assert answers(core.hear(DECODE, offer(number))) == [None]
    assert of_kind(core.hear(DECODE, offer(1)), PassOffer)


def test_one_that_is_denied_is_answered_and_counted() -> None:
    core = owner()
    effects = core(ev.MessageArrived(connection_of(DECODE), offer(), denied="its key is listed for nobody"))
    assert (anomalies(effects), of_kind(effects, PassOffer)) == (["offer_denied"], [])
    (failure,) = answers(effects)
    assert failure is not None
    assert (failure.reason, failure.detail) == (FailureReason.REFUSED, "its key is listed for nobody")


def test_a_rank_that_takes_none_declines() -> None:
    (failure,) = answers(owner(takes_offers=False).hear(DECODE, offer()))
    assert failure is not None
    assert failure.reason is FailureReason.REFUSED


def test_nobody_gets_more_than_a_share() -> None:
    core = owner()
    core.connect(OTHER_DECODE)
    passed = [of_kind(core.hear(DECODE, offer(number)), PassOffer) for number in range(300)]
    assert 100 < sum(map(len, passed)) < 200
    (failure,) = answers(core.hear(DECODE, offer(1_000)))
    assert failure is not None
    assert failure.reason is FailureReason.CAPACITY


def test_it_ends_with_the_patience_of_its_sender() -> None:
    core = owner()
    core.hear(DECODE, offer(timeout_s=2.0))
    assert of_kind(core.pass_time(3.0), WithdrawOffer) == [WithdrawOffer(DECODE, 1)]
    assert core(ev.OfferDecided(DECODE, 1, None)) == []


def test_it_ends_with_its_sender() -> None:
    core = owner()
    core.hear(DECODE, offer())
    assert of_kind(core.hear(DECODE, Goodbye(peer=DECODE)), WithdrawOffer) == [WithdrawOffer(DECODE, 1)]


@pytest.mark.parametrize("event", [ev.DrainStarted(ABORTED), ev.CloseStarted(ABORTED)])
def test_a_rank_that_leaves_declines_all(event: ev.PrefillEvent) -> None:
    core = owner()
    core.hear(DECODE, offer())
    effects = core(event)
    assert (of_kind(effects, WithdrawOffer), answers(effects)) == ([WithdrawOffer(DECODE, 1)], [ABORTED])
    assert answers(core.hear(DECODE, offer(2))) == [ABORTED]


# Both ----------------------------------------------------------------------------------------------------------------


class Offers(RuleBasedStateMachine):
    """A holder and an owner. Whatever is lost, late or repeated, both engines agree on each accepted offer."""

    def __init__(self) -> None:
        super().__init__()
        self.holder, self.owner = DecodeDriver(), owner()
        self.holder.connect(PREFILL)
        self.to_owner: list[Offer] = []
        self.to_holder: list[OfferAnswered] = []
        self.made = 0
        self.passed: Counter[int] = Counter()
        self.open: dict[int, None] = {}
        self.decided: dict[int, Failure | None] = {}
        self.reported: dict[int, Failure | None] = {}

    def follow_holder(self, effects: Sequence[Effect]) -> None:
        for to, message in messages(effects, Offer):
            assert to == PREFILL
            assert isinstance(message, Offer)
            self.to_owner.append(message)
        for report in of_kind(effects, ReportOffer):
            assert report.number not in self.reported
            self.reported[report.number] = report.failure

    def follow_owner(self, effects: Sequence[Effect]) -> None:
        self.to_holder += [it for it in sent(effects, OfferAnswered) if isinstance(it, OfferAnswered)]
        for passed in of_kind(effects, PassOffer):
            self.passed[passed.offer.number] += 1
            self.open[passed.offer.number] = None
        for withdrawn in of_kind(effects, WithdrawOffer):
            self.open.pop(withdrawn.number)

    @precondition(lambda self: self.made < 6)
    @rule(timeout_s=st.sampled_from([2.0, 30.0]))
    def make(self, timeout_s: float) -> None:
        self.made += 1
        self.follow_holder(self.holder(made(self.made, timeout_s)))

    @precondition(lambda self: self.to_owner)
    @rule(data=st.data(), is_kept=st.booleans())
    def deliver_offer(self, data: st.DataObject, is_kept: bool) -> None:
        index = data.draw(st.integers(0, len(self.to_owner) - 1))
        message = self.to_owner[index] if is_kept else self.to_owner.pop(index)
        self.follow_owner(self.owner.hear(DECODE, message))

    @precondition(lambda self: self.to_holder)
    @rule(data=st.data(), is_kept=st.booleans())
    def deliver_answer(self, data: st.DataObject, is_kept: bool) -> None:
        index = data.draw(st.integers(0, len(self.to_holder) - 1))
        message = self.to_holder[index] if is_kept else self.to_holder.pop(index)
        self.follow_holder(self.holder.hear(PREFILL, message))

    @precondition(lambda self: self.to_owner or self.to_holder)
    @rule()
    def lose_all(self) -> None:
        self.to_owner.clear()
        self.to_holder.clear()

    @precondition(lambda self: self.open)
    @rule(data=st.data(), accepts=st.booleans())
    def decide(self, data: st.DataObject, accepts: bool) -> None:
        number = data.draw(st.sampled_from(list(self.open)))
        del self.open[number]
        self.decided[number] = None if accepts else ABORTED
        self.follow_owner(self.owner(ev.OfferDecided(DECODE, number, self.decided[number])))

    @rule(seconds=st.sampled_from([1, 5]))
    def wait(self, seconds: int) -> None:
        self.follow_holder(self.holder.pass_time(seconds))
        self.follow_owner(self.owner.pass_time(seconds))

    @invariant()
    def engines_agree(self) -> None:
        assert all(count == 1 for count in self.passed.values())
        for number, failure in self.reported.items():
            if failure is None or failure == ABORTED:
                assert self.decided[number] == failure

    def teardown(self) -> None:
        """Every offer ends, on both sides, without any further message."""
        self.follow_holder(self.holder.pass_time(TIMEOUT_S + 1))
        self.follow_owner(self.owner.pass_time(TIMEOUT_S + 1))
        assert sorted(self.reported) == list(range(1, self.made + 1))
        assert not self.open
        assert (len(self.holder.core.offers), len(self.owner.core.offers)) == (0, 0)


TestOffers = Offers.TestCase
TestOffers.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

"""Budgets of senders: verdicts depend on nothing but what was asked, and an oracle with a whole history agrees."""

from typing import Final, NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from kvflow.gate import rates
from kvflow.gate.rates import BYTES_OF_REJECTION, HELLOS, REJECTIONS, STRANGERS, Budget, Budgets, ListenerGate
from kvflow.gate.sizes import LONG_BYTES, Unread
from kvflow.gate.verdict import ACCEPTED, Action, Verdict
from kvflow.trust import ANY
from kvflow.wire.messages import Decline, Hello, Message, Ping, SealedRegister

NAMES: Final = {b"a1": ("a",), b"a2": ("a",), b"b1": ("b", "c"), b"n1": (), b"*1": (ANY,), b"*2": (ANY,)}
KINDS: Final = (Hello, SealedRegister, Decline, Ping)


class Arrival(NamedTuple):
    """A message that arrives at a listener."""

    connection: bytes
    kind: type[Message]
    num_bytes: int
    is_known: bool
    pause_s: float


arrivals = st.builds(
    Arrival,
    st.sampled_from(sorted(NAMES)),
    st.sampled_from(KINDS),
    st.sampled_from((100, LONG_BYTES, LONG_BYTES + 1, 2**20, 2**21)),
    st.booleans(),
    st.sampled_from((0.0, 0.0, 0.5, 100.0)),
)


def judge(events: list[Arrival], times: int) -> list[Verdict]:
    """Return the verdicts of a new gate, to which each message arrives several times at once."""
    gate, now, verdicts = ListenerGate(NAMES.__getitem__), 1_000.0, []
    for one in events:
        now += one.pause_s
        unread = Unread(one.kind, bytes(one.num_bytes))
        verdicts += [gate.admit(one.connection, unread, now, is_known=one.is_known) for _ in range(times)]
    return verdicts


@given(st.lists(arrivals, max_size=40), st.sampled_from((1, 20)))
def test_a_recorded_sequence_gives_the_same_verdicts_again(events: list[Arrival], times: int) -> None:
    assert judge(events, times) == judge(events, times)


@given(st.lists(arrivals, max_size=40))
def test_a_sender_changes_no_verdict_about_another_principal(events: list[Arrival]) -> None:
    alone = [one for one in events if NAMES[one.connection] == ("a",)]
    pauses, waited = [], 0.0
    for one in events:
        waited += one.pause_s
        if NAMES[one.connection] == ("a",):
            pauses.append(waited)
            waited = 0.0
    alone = [one._replace(pause_s=pause_s) for one, pause_s in zip(alone, pauses, strict=True)]
    amid = [verdict for one, verdict in zip(events, judge(events, 1), strict=True) if NAMES[one.connection] == ("a",)]
    assert amid == judge(alone, 1)


def test_records_are_told_to_each_principal_within_its_own_budget() -> None:
    gate, most = ListenerGate(NAMES.__getitem__), rates.ANSWER_BYTES.at_once
    assert gate.may_tell(b"a1", most, 0.0) == ACCEPTED
    assert gate.may_tell(b"a2", 1, 0.0) == Verdict(Action.POSTPONE, "lookup_over_budget")
    assert gate.may_tell(b"b1", most, 0.0) == ACCEPTED
    assert gate.may_tell(b"a2", 1, 1.0) == ACCEPTED


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 8), st.integers(1, 12)), max_size=40))
def test_what_was_spent_never_exceeds_what_there_was(wishes: list[tuple[str, int, int]]) -> None:
    """The oracle simulates every second: refill, then spend."""
    budget, budgets, now = Budget(10, 2), Budgets(), 0
    left = dict.fromkeys("ab", 10)
    for taker, pause_s, amount in wishes:
        now += pause_s
        for _ in range(pause_s):
            left = {one: min(10, has + 2) for one, has in left.items()}
        is_within = left[taker] >= amount
        left[taker] -= amount if is_within else 0
        assert budgets.spend(budget, taker, float(now), amount) is is_within


def test_a_stranger_who_goes_on_is_cut_and_who_said_hello_is_not() -> None:
    gate, ping = ListenerGate(NAMES.__getitem__), Unread(Ping, b"")
    for _ in range(STRANGERS.at_once):
        assert gate.admit(b"*1", ping, 0.0, is_known=False) is ACCEPTED
    for _ in range(REJECTIONS.at_once):
        assert gate.admit(b"*1", ping, 0.0, is_known=False) == (Action.DROP, "stranger_over_budget", "")
    assert "too many rejected messages" in gate.admit(b"*1", ping, 0.0, is_known=False).cut
    assert gate.admit(b"*1", ping, 0.0, is_known=True) is ACCEPTED
    assert gate.admit(b"*2", ping, 0.0, is_known=False) is ACCEPTED, "without keys, each connection has its own"


def test_short_hellos_over_the_budget_never_cost_the_connection() -> None:
    gate, short = ListenerGate(NAMES.__getitem__), Unread(Hello, b"")
    verdicts = [gate.admit(b"a1", short, 0.0, is_known=False) for _ in range(HELLOS.at_once + 2 * REJECTIONS.at_once)]
    assert set(verdicts[: HELLOS.at_once]) == {ACCEPTED}
    assert set(verdicts[HELLOS.at_once :]) == {Verdict(Action.POSTPONE, "hello_over_budget")}


def test_long_ones_that_are_repeated_count_for_their_own_connection_only() -> None:
    gate, long = ListenerGate(NAMES.__getitem__), Unread(SealedRegister, bytes(2**21))
    while not (verdict := gate.admit(b"a1", long, 0.0, is_known=True)).cut:
        pass
    assert (verdict.action, verdict.kind) == (Action.POSTPONE, "register_over_budget")
    assert not gate.admit(b"a2", long, 0.0, is_known=True).cut
    assert not gate.reject("", b"a2", (REJECTIONS.at_once - 1) * BYTES_OF_REJECTION, 0.0).cut, (
        "its principal's is whole"
    )


def test_many_takers_take_no_memory() -> None:
    budgets = Budgets()
    for number in range(3 * rates.MAX_TAKERS):
        assert budgets.spend(HELLOS, str(number), 0.0)
    assert len(budgets._left[HELLOS]) <= rates.MAX_TAKERS

"""Connected decode ranks and their closed grants, compared with dictionaries."""

from hypothesis import given
from hypothesis import strategies as st

from kvflow.state.events import PeerRoute
from kvflow.state.prefill import peers as peers_module
from kvflow.state.prefill.deadlines import PrefillTimer
from kvflow.state.prefill.peers import MAX_CLOSED, MAX_DISCONNECTED, ClosedGeneration, DecodePeers, Kept
from kvflow.state.timers import Timers
from kvflow.wire.messages import Failure, PeerId
from tests.support.cores import DECODE, PrefillDriver, abort_failure, connection_of, peer
from tests.support.sending import delivery

PEERS = [peer("decode", rank) for rank in range(3)]
FAILURES = [None, abort_failure("one"), abort_failure("two")]
DISCONNECTED = abort_failure("disconnected")
DRIVER = PrefillDriver()
ROUTE = DRIVER.checked(DRIVER.hello()).link
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["admit", "close", "close", "close", "remove"]),
        st.sampled_from(PEERS),
        st.integers(1, 6),
        st.sampled_from(FAILURES),
    ),
    max_size=80,
)


def nobody() -> tuple[DecodePeers, Timers[PrefillTimer]]:
    timers: Timers[PrefillTimer] = Timers()
    return DecodePeers(timers, 2**20), timers


def admit(known: DecodePeers, who: PeerId, number: int = 0) -> None:
    """Admit a decode rank; each number is a connection of its own."""
    assert isinstance(ROUTE, PeerRoute)
    known.admit(connection_of(who, number), DRIVER.hello(who), ROUTE, Kept(who.rank.instance, 1), 0.0)


@given(STEPS)
def test_they_agree_with_dictionaries(steps: list[tuple[str, PeerId, int, Failure | None]]) -> None:
    known, timers = nobody()
    connections: dict[PeerId, bytes] = {}
    closed_as: dict[PeerId, dict[int, ClosedGeneration]] = {}
    highest: dict[PeerId, int] = {}
    closed_below: dict[PeerId, int] = {}
    for step, who, number, failure in steps:
        if step == "admit":
            admit(known, who, number)
            connections[who] = connection_of(who, number)
            closed_as.setdefault(who, {})
        elif step == "remove":
            assert (who in known) == (who in connections)
            if connections.pop(who, None) is not None:
                known.remove(who, DISCONNECTED)
                closed_as.pop(who)
                closed_below[who] = highest.get(who, -1) + 1
        else:
            known.close(delivery(who, generation=number), failure)
            if who in closed_as:
                closed_as[who].setdefault(number, ClosedGeneration(failure))
                highest[who] = max(highest.get(who, 0), number)
        assert len(known) == len(timers) == len(connections)
        assert {peer.id: peer.connection for peer in known._peers.values()} == connections
        for somebody in PEERS:
            found = known.find(somebody)
            assert (found is not None) == (somebody in connections) == (somebody in known)
            if found is None:
                continue
            assert known.at(connections[somebody]) is found
            before = closed_below.get(somebody, 0)
            for generation in range(1, 8):
                assert found.closed.result(generation) == closed_as[somebody].get(generation)
                assert (generation in found.closed) == (generation in closed_as[somebody] or generation < before)
                assert found.failure_before(generation) == (DISCONNECTED if generation < before else None)


def test_a_connection_that_was_replaced_is_nobodys() -> None:
    known, _ = nobody()
    admit(known, DECODE, 0)
    admit(known, DECODE, 1)
    assert known.at(connection_of(DECODE, 0)) is None
    assert known.at(connection_of(DECODE, 1)) is known[DECODE]


def test_another_incarnation_of_a_decode_rank_inherits_nothing() -> None:
    known, _ = nobody()
    admit(known, DECODE)
    known[DECODE].used(5)
    known.remove(DECODE, DISCONNECTED)
    again = peer("decode", incarnation=2)
    admit(known, again)
    assert 1 not in known[again].closed
    assert known[again].failure_before(1) is None


def test_disconnections_are_remembered_for_so_many_decode_ranks_and_no_more() -> None:
    known, _ = nobody()
    for engine_rank in range(MAX_DISCONNECTED + 1):
        admit(known, peer("decode", engine_rank))
        known[peer("decode", engine_rank)].used(5)
        known.remove(peer("decode", engine_rank), DISCONNECTED)
    for engine_rank, is_remembered in ((0, False), (1, True)):
        admit(known, peer("decode", engine_rank))
        assert (5 in known[peer("decode", engine_rank)].closed) == is_remembered


def test_the_memory_of_one_decode_rank_is_bounded_and_errs_to_the_safe_side() -> None:
    known, _ = nobody()
    admit(known, DECODE)
    for generation in range(1, MAX_CLOSED + 2):
        known.close(delivery(DECODE, generation=generation), None)
    closed = known[DECODE].closed
    assert closed.result(1) is None
    assert 1 in closed
    assert closed.result(2) == ClosedGeneration(None)
    assert MAX_CLOSED + 2 not in closed


def test_writes_that_fail_together_count_once() -> None:
    known, _ = nobody()
    admit(known, DECODE)
    for number in range(100):
        assert not known[DECODE].write_failed(number * peers_module.SAME_CAUSE_S / 100)


def test_a_write_that_succeeds_between_failures_forgives_them() -> None:
    known, _ = nobody()
    admit(known, DECODE)
    decode = known[DECODE]
    assert [decode.write_failed(now) for now in (0.0, 1.0)] == [False, False]
    decode.write_succeeded(1.5)
    assert [decode.write_failed(now) for now in (2.0, 3.0, 4.0)] == [False, False, True]

"""Decode ranks that are known, and the endings of their grants, against dictionaries."""

from hypothesis import given
from hypothesis import strategies as st

from kvflow.state.acquaintances import MAX_ENDINGS, MAX_PARTINGS, Acquaintances, Ending
from kvflow.state.events import DeliveryId
from kvflow.wire.messages import Failure, PeerId
from tests.support.cores import DECODE, abort_failure, peer

PEERS = [peer("decode", rank) for rank in range(3)]
FAILURES = [None, abort_failure("one"), abort_failure("two")]
PARTED = abort_failure("parted")
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["greeted", "end", "end", "end", "forget"]),
        st.sampled_from(PEERS),
        st.integers(1, 6),
        st.sampled_from(FAILURES),
    ),
    max_size=80,
)


@given(STEPS)
def test_they_agree_with_dictionaries(steps: list[tuple[str, PeerId, int, Failure | None]]) -> None:
    known = Acquaintances()
    owed: dict[PeerId, tuple[str, ...]] = {}
    endings: dict[PeerId, dict[int, Ending]] = {}
    highest: dict[PeerId, int] = {}
    parted_at: dict[PeerId, int] = {}
    for step, who, number, failure in steps:
        if step == "greeted":
            known.greeted(who, (f"component {number}",))
            owed[who] = (f"component {number}",)
            endings.setdefault(who, {})
        elif step == "forget":
            known.forget(who, PARTED)
            if owed.pop(who, None) is not None:
                endings.pop(who)
                parted_at[who] = highest.get(who, 0)
        else:
            known.end(DeliveryId(7, who, number), failure)
            if who in endings:
                endings[who].setdefault(number, Ending(failure))
                highest[who] = max(highest.get(who, 0), number)
        for somebody in PEERS:
            assert (somebody in known) == (somebody in owed)
            if somebody in owed:
                before = parted_at.get(somebody, 0)
                assert known.owed(somebody) == owed[somebody]
                found = {generation: known.ending(somebody, generation) for generation in range(1, 8)}
                assert {key: value for key, value in found.items() if value is not None} == endings[somebody]
                for generation in found:
                    is_over = generation in endings[somebody] or generation <= before
                    assert known.is_over(somebody, generation) == is_over
                    assert known.parting(somebody, generation) == (PARTED if generation <= before else None)


def test_another_life_of_a_decode_rank_inherits_nothing() -> None:
    known = Acquaintances()
    known.greeted(DECODE, ("kv",))
    known.asked(DECODE, 5)
    known.forget(DECODE, PARTED)
    reborn = peer("decode", incarnation=2)
    known.greeted(reborn, ("kv",))
    assert not known.is_over(reborn, 1)
    assert known.parting(reborn, 1) is None


def test_partings_are_remembered_for_so_many_decode_ranks_and_no_more() -> None:
    known = Acquaintances()
    for engine_rank in range(MAX_PARTINGS + 1):
        known.greeted(peer("decode", engine_rank), ("kv",))
        known.asked(peer("decode", engine_rank), 5)
        known.forget(peer("decode", engine_rank), PARTED)
    for engine_rank, is_remembered in ((0, False), (1, True)):
        known.greeted(peer("decode", engine_rank), ("kv",))
        assert known.is_over(peer("decode", engine_rank), 5) == is_remembered


def test_the_memory_of_one_decode_rank_is_bounded_and_errs_to_the_safe_side() -> None:
    known = Acquaintances()
    known.greeted(DECODE, ("kv",))
    for generation in range(1, MAX_ENDINGS + 2):
        known.end(DeliveryId(7, DECODE, generation), None)
    assert known.ending(DECODE, 1) is None
    assert known.is_over(DECODE, 1)
    assert known.ending(DECODE, 2) == Ending(None)
    assert not known.is_over(DECODE, MAX_ENDINGS + 2)

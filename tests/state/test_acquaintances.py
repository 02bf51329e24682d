"""Decode ranks that are known, and the endings of their grants, against dictionaries."""

from hypothesis import given
from hypothesis import strategies as st

from kvflow.state.acquaintances import MAX_ENDINGS, Acquaintances, Ending
from kvflow.state.events import DeliveryId
from kvflow.wire.messages import Failure, PeerId
from tests.support.cores import DECODE, abort_failure, peer

PEERS = [peer("decode", rank) for rank in range(3)]
FAILURES = [None, abort_failure("one"), abort_failure("two")]
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
    for step, who, number, failure in steps:
        if step == "greeted":
            known.greeted(who, (f"component {number}",))
            owed[who] = (f"component {number}",)
            endings.setdefault(who, {})
        elif step == "forget":
            known.forget(who)
            owed.pop(who, None)
            endings.pop(who, None)
        else:
            known.end(DeliveryId(7, who, number), failure)
            if who in endings:
                endings[who].setdefault(number, Ending(failure))
        for somebody in PEERS:
            assert (somebody in known) == (somebody in owed)
            if somebody in owed:
                assert known.owed(somebody) == owed[somebody]
                found = {generation: known.ending(somebody, generation) for generation in range(7)}
                assert {key: value for key, value in found.items() if value is not None} == endings[somebody]
                assert [known.is_over(somebody, generation) for generation in found] == [
                    generation in endings[somebody] for generation in found
                ]


def test_the_memory_of_one_decode_rank_is_bounded_and_errs_to_the_safe_side() -> None:
    known = Acquaintances()
    known.greeted(DECODE, ("kv",))
    for generation in range(1, MAX_ENDINGS + 2):
        known.end(DeliveryId(7, DECODE, generation), None)
    assert known.ending(DECODE, 1) is None
    assert known.is_over(DECODE, 1)
    assert known.ending(DECODE, 2) == Ending(None)
    assert not known.is_over(DECODE, MAX_ENDINGS + 2)

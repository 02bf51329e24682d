"""Shares of limited resources."""

from hypothesis import given
from hypothesis import strategies as st

from kvflow.gate.shares import FairShares


def test_one_alone_gets_half_and_leaves_the_rest_to_others() -> None:
    shares = FairShares(100)
    taken = dict.fromkeys(("greedy", "second", "third"), 0)
    for taker in taken:
        while shares.has_place(taker, 1):
            shares.add(taker, 1)
            taken[taker] += 1
    assert taken == {"greedy": 50, "second": 25, "third": 13}
    assert shares.has_place("fourth", 1)
    shares.add("greedy", -50)
    assert shares.has_place("second", 1)


@given(st.integers(1, 50), st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 20))))
def test_all_together_never_have_more_than_there_is(most: int, wishes: list[tuple[str, int]]) -> None:
    shares, total = FairShares(most), 0
    for taker, amount in wishes:
        if shares.has_place(taker, amount):
            shares.add(taker, amount)
            total += amount
    assert total <= most

"""Shares of limited resources."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvflow.gate.shares import FairShares


def test_one_alone_gets_half_and_leaves_the_rest_to_others() -> None:
    shares = FairShares(100)
    taken: Counter[str] = Counter()
    for taker in ("greedy", "second", "third"):
        while shares.has_place(taker, 1):
            shares.hold((taker, taken[taker]), taker, 1)
            taken[taker] += 1
    assert taken == {"greedy": 50, "second": 25, "third": 13}
    assert shares.has_place("fourth", 1)
    for number in range(50):
        shares.release(("greedy", number))
    assert shares.has_place("second", 1)


wishes = st.tuples(st.integers(0, 5), st.sampled_from("abc"), st.none() | st.integers(0, 20))
"""A key, a taker, and how much it wants to hold there; None to release it."""


@given(st.integers(1, 50), st.lists(wishes, max_size=40))
def test_shares_agree_with_an_oracle_that_adds_everything_up(
    most: int, events: list[tuple[int, str, int | None]]
) -> None:
    shares, held = FairShares(most), dict[int, tuple[str, int]]()
    for key, taker, amount in events:
        assert shares.taker_of(key) == held.get(key, (None,))[0]
        if amount is None:
            shares.release(key)
            held.pop(key, None)
        else:
            more = amount - held.get(key, ("", 0))[1]
            left = most - sum(has for _, has in held.values())
            has_place = more <= 0 or sum(has for one, has in held.values() if one == taker) + more <= left
            assert shares.has_place(taker, amount, key) is has_place
            if has_place:
                shares.hold(key, taker, amount)
                held[key] = taker, amount
        assert shares.total == sum(has for _, has in held.values()) <= most

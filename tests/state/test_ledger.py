"""The memory of ended generations against one that never forgets."""

from hypothesis import given
from hypothesis import strategies as st

from kvflow.state.ledger import Ledger

GENERATIONS = st.lists(st.integers(0, 40), max_size=80)


@given(GENERATIONS, st.integers(1, 10))
def test_what_has_ended_is_over_for_ever(ended: list[int], limit: int) -> None:
    ledger: Ledger[str] = Ledger(limit)
    first: dict[int, str] = {}
    for number, generation in enumerate(ended):
        ledger.end(generation, f"ending {number}")
        first.setdefault(generation, f"ending {number}")
        assert all(ledger.is_over(known) for known in first)
        assert len(ledger) <= limit


@given(GENERATIONS, st.integers(1, 10))
def test_what_is_newer_than_all_that_ended_is_never_over(ended: list[int], limit: int) -> None:
    ledger: Ledger[str] = Ledger(limit)
    for generation in ended:
        ledger.end(generation, "ended")
    newest = max(ended, default=-1)
    assert not any(ledger.is_over(generation) for generation in range(newest + 1, newest + 10))


@given(GENERATIONS)
def test_within_its_limit_it_knows_exactly_what_has_ended_and_how_first(ended: list[int]) -> None:
    ledger: Ledger[int] = Ledger(100)
    first: dict[int, int] = {}
    for number, generation in enumerate(ended):
        ledger.end(generation, number)
        first.setdefault(generation, number)
    for generation in range(41):
        assert ledger.find(generation) == first.get(generation)
        assert ledger.is_over(generation) == (generation in first)


@given(st.permutations(range(30)), st.integers(1, 29))
def test_the_longest_ended_are_forgotten_first(ended: list[int], limit: int) -> None:
    ledger: Ledger[int] = Ledger(limit)
    for generation in ended:
        ledger.end(generation, generation)
    assert {generation for generation in range(30) if ledger.find(generation) is not None} == set(ended[-limit:])


def test_an_open_generation_older_than_a_forgotten_one_counts_as_over() -> None:
    """So whoever asks must look among what is open first."""
    ledger: Ledger[str] = Ledger(1)
    ledger.end(5, "ended")
    assert not ledger.is_over(3)
    ledger.end(6, "ended")
    assert ledger.is_over(3)
    assert ledger.find(3) is None

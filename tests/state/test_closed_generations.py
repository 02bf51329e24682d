"""The memory of closed generations, compared with one that never forgets."""

from hypothesis import given
from hypothesis import strategies as st

from kvflow.state.closed import ClosedGenerations

GENERATIONS = st.lists(st.integers(0, 40), max_size=80)


@given(GENERATIONS, st.integers(1, 10))
def test_what_was_closed_stays_closed(ended: list[int], limit: int) -> None:
    closed: ClosedGenerations[str] = ClosedGenerations(limit)
    first: dict[int, str] = {}
    for number, generation in enumerate(ended):
        closed.close(generation, f"ending {number}")
        first.setdefault(generation, f"ending {number}")
        assert all(known in closed for known in first)
        assert len(closed._results) <= limit


@given(GENERATIONS, st.integers(1, 10))
def test_what_is_newer_than_all_closed_generations_is_open(ended: list[int], limit: int) -> None:
    closed: ClosedGenerations[str] = ClosedGenerations(limit)
    for generation in ended:
        closed.close(generation, "ended")
    newest = max(ended, default=-1)
    assert not any(generation in closed for generation in range(newest + 1, newest + 10))


@given(GENERATIONS)
def test_within_its_limit_it_knows_exactly_what_was_closed_and_how_first(ended: list[int]) -> None:
    closed: ClosedGenerations[int] = ClosedGenerations(100)
    first: dict[int, int] = {}
    for number, generation in enumerate(ended):
        closed.close(generation, number)
        first.setdefault(generation, number)
    for generation in range(41):
        assert closed.result(generation) == first.get(generation)
        assert (generation in closed) == (generation in first)


@given(st.permutations(range(30)), st.integers(1, 29))
def test_the_oldest_results_are_forgotten_first(ended: list[int], limit: int) -> None:
    closed: ClosedGenerations[int] = ClosedGenerations(limit)
    for generation in ended:
        closed.close(generation, generation)
    assert {generation for generation in range(30) if closed.result(generation) is not None} == set(ended[-limit:])


def test_an_open_generation_older_than_a_forgotten_one_counts_as_closed() -> None:
    """Callers must therefore look among the open generations first."""
    closed: ClosedGenerations[str] = ClosedGenerations(1)
    closed.close(5, "ended")
    assert 3 not in closed
    closed.close(6, "ended")
    assert 3 in closed
    assert closed.result(3) is None

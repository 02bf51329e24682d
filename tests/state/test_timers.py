"""The heap of timers, compared with a dictionary."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.state.timers import EXPIRED_AT_ONCE, MOVED_AT_ONCE, Timers

KEYS = st.integers(0, 5)
TIMES = st.integers(0, 50)
STEPS = st.one_of(
    st.tuples(st.just("set"), KEYS, TIMES),
    st.tuples(st.just("set_once"), KEYS, TIMES),
    st.tuples(st.just("clear"), KEYS, TIMES),
    st.tuples(st.just("pop"), KEYS, TIMES),
)


@given(st.lists(STEPS, max_size=200))
def test_heap_agrees_with_a_dictionary(steps: list[tuple[str, int, int]]) -> None:
    heap: Timers[int] = Timers()
    plain: dict[int, float] = {}
    for step, key, when in steps:
        if step == "set":
            heap.set(key, when)
            plain[key] = when
        elif step == "set_once":
            heap.set_once(key, when)
            plain.setdefault(key, when)
        elif step == "clear":
            heap.clear(key)
            plain.pop(key, None)
        else:
            popped = heap.pop_due(when)
            if popped is None:
                assert all(due > when for due in plain.values())
            else:
                assert plain[popped] == min(plain.values()) <= when
                del plain[popped]
        assert heap.next() == min(plain.values(), default=None)
        assert len(heap) == len(plain)


def test_due_keys_come_earliest_first() -> None:
    heap: Timers[str] = Timers()
    for key, when in (("late", 3.0), ("early", 1.0), ("middle", 2.0), ("future", 9.0)):
        heap.set(key, when)
    assert [heap.pop_due(3.0) for _ in range(4)] == ["early", "middle", "late", None]


def test_replaced_timers_do_not_pile_up() -> None:
    heap: Timers[int] = Timers()
    for number in range(100_000):
        heap.set(number % 3, float(number))
        assert len(heap._heap) + len(heap._old) < 200


def test_cleared_timers_do_not_pile_up() -> None:
    heap: Timers[int] = Timers()
    for key in range(1_000):
        heap.set(key, 1.0)
    for key in range(1_000):
        heap.clear(key)
        assert len(heap._heap) + len(heap._old) <= 3 * len(heap) + 1_000
    assert len(heap._heap) + len(heap._old) < 100


@pytest.mark.parametrize("times", [1, 2])
def test_no_call_moves_or_frees_more_than_a_few_timers(times: int) -> None:
    """Clearing, or replacing, thousands of timers: moving all that are left at once takes tens of milliseconds."""
    heap: Timers[int] = Timers()
    for _ in range(times):
        for key in range(10_000):
            before = len(heap._heap), len(heap._old)
            heap.set(key, 1.0)
            check_few_moved(heap, before)
    for key in range(10_000):
        before = len(heap._heap), len(heap._old)
        assert heap.clear(key)
        check_few_moved(heap, before)
    assert len(heap) == 0


def check_few_moved(heap: Timers[int], before: tuple[int, int]) -> None:
    """Check the sizes of both heaps, which change places when the second one is empty."""
    now = len(heap._heap), len(heap._old)
    earlier = before if before[1] or now[0] > now[1] else before[::-1]
    assert max(abs(size - other) for size, other in zip(now, earlier, strict=True)) <= MOVED_AT_ONCE + 1


def test_thousands_of_due_timers_are_taken_in_turns() -> None:
    heap: Timers[int] = Timers()
    for key in range(2 * EXPIRED_AT_ONCE):
        heap.set(key, 1.0)
    assert [key for key, _ in heap.expire(1.0)] == list(range(EXPIRED_AT_ONCE))
    assert heap.next() == 1.0
    assert len(list(heap.expire(1.0))) == EXPIRED_AT_ONCE
    assert len(heap) == 0

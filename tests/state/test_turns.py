"""Attempts that are never answered delay others by turns, and do not keep them out; in virtual time."""

import pytest

from kvflow.state.turns import Turns

PLACES, TURN_S, ASK_S = 64, 1.0, 0.25


def wait_of_a_newcomer(num_silent: int, num_hosts: int, host: str) -> float:
    """Return how long a newcomer waits. All ask in the same order, which must not decide who gets a place."""
    turns = Turns[int](PLACES, TURN_S)
    for step in range(400):
        for number in range(num_silent):
            turns.take_place(number, (f"host-{number % num_hosts}",), step * ASK_S)
        if step > 40 and turns.take_place(-1, (host,), step * ASK_S)[0]:
            return (step - 41) * ASK_S
        assert len(turns) <= PLACES
    raise AssertionError("never")


@pytest.mark.parametrize(
    ("num_silent", "num_hosts", "most_s"),
    [(64, 1, 0.0), (300, 9, 0.0), (300, 38, 2.0), (300, 300, 6.0)],
)
def test_a_newcomer_at_another_host_waits_for_one_turn_of_all_hosts(
    num_silent: int, num_hosts: int, most_s: float
) -> None:
    assert wait_of_a_newcomer(num_silent, num_hosts, "another") <= most_s


@pytest.mark.parametrize("num_hosts", [1, 38, 300])
def test_a_newcomer_at_a_host_of_many_waits_for_one_turn_of_all(num_hosts: int) -> None:
    assert wait_of_a_newcomer(300, num_hosts, "host-0") <= 300 / (PLACES / 2) * TURN_S


def test_an_owner_has_no_more_than_is_left() -> None:
    turns = Turns[int](PLACES, TURN_S)
    assert sum(turns.take_place(number, ("one",), 0.0)[0] for number in range(100)) == PLACES // 2
    turns.end_attempt(0)
    assert turns.take_place(100, ("one",), 0.0) == (True, None)


def test_each_kind_of_owner_has_shares() -> None:
    turns = Turns[int](PLACES, TURN_S)
    assert sum(turns.take_place(number, (f"host-{number}", "instance"), 0.0)[0] for number in range(100)) == PLACES // 2


def test_the_oldest_that_has_had_its_turn_makes_way() -> None:
    turns = Turns[int](2, TURN_S)
    for number in (0, 1):
        assert turns.take_place(number, (f"host-{number}",), number * 0.1)[0]
    assert turns.take_place(2, ("host-2",), 0.9) == (False, None)
    assert turns.take_place(2, ("host-2",), 1.0) == (True, 0)


def test_those_that_have_stopped_asking_are_not_waited_for() -> None:
    turns = Turns[int](1, TURN_S)
    turns.take_place(0, ("host-0",), 0.0)
    for number in range(1, 9):
        assert not turns.take_place(number, (f"host-{number}",), 0.1)[0]
    assert turns.take_place(9, ("host-9",), 1.2) == (True, 0)
    assert not turns._owners
    assert not turns._waiting

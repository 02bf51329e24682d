"""A peer is lost after a lease of silence, but not while this process was not running."""

import itertools
from collections.abc import Hashable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.config import PINGS_PER_LEASE
from kvflow.state.peers import BUSY_LEASES, LeaseCheck, Peer
from kvflow.state.tables import PeerState
from kvflow.state.timers import Timers
from tests.support.cores import PREFILL

LEASE_S = 3.0
THIRD_S = 1.0


@dataclass(frozen=True)
class Sleep:
    """An interval in which this process does not run."""

    start: float
    end: float

    def wake(self, due: float) -> float:
        """Return when something happens that is due at a given time."""
        return self.end if self.start <= due < self.end else due


class Checked:
    """A connected peer, and the timers of its checks."""

    def __init__(self) -> None:
        self.timers: Timers[Hashable] = Timers()
        self.peer = Peer(PREFILL, self.timers)
        self.peer.connected(LEASE_S, 0.0)

    def check(self, now: float, late_s: float) -> bool:
        """Check the peer; return whether it is lost."""
        self.timers.clear(LeaseCheck(PREFILL))
        return self.peer.check(now, late_s)

    @property
    def next_check(self) -> float:
        due = self.timers.next()
        assert due is not None
        return due


def lost_at(checked: Checked, words: list[float], sleep: Sleep, end: float) -> float | None:
    """Return when the peer is lost, checking when the timers say; messages during the sleep are read at its end.

    The peer's process and connection end with its last message.
    """
    heard = [sleep.wake(word) for word in words]
    while sleep.wake(due := checked.next_check) < end:
        now = sleep.wake(due)
        while heard and heard[0] < now:
            checked.peer.heard(heard.pop(0))
        if not heard:
            checked.peer.disconnected()
        if checked.check(now, now - due):
            return now
    return None


@given(pauses=st.lists(st.floats(0.01, 2.9), max_size=6))
def test_it_is_lost_one_lease_after_its_last_word(pauses: list[float]) -> None:
    words = list(itertools.accumulate(pauses))
    last = words[-1] if words else 0.0
    moment = lost_at(Checked(), words, Sleep(0.0, 0.0), end=100.0)
    assert moment is not None
    assert moment == pytest.approx(last + LEASE_S)


@given(start=st.floats(0.0, 6.0), length=st.floats(0.0, 20.0), offset=st.floats(0.05, 0.95))
def test_a_sleep_of_both_loses_nobody(start: float, length: float, offset: float) -> None:
    """Both may live in one process: no messages in the sleep, and one within a third of a lease after it."""
    sleep = Sleep(start, start + length)
    words = [offset + tick * THIRD_S for tick in range(40)]
    spoken = sorted({word for word in words if not sleep.start <= word < sleep.end} | {sleep.end + offset})
    assert lost_at(Checked(), spoken, sleep, end=30.0) is None


@given(start=st.floats(0.0, 6.0), length=st.floats(0.0, 20.0))
def test_a_peer_that_died_meanwhile_is_lost_after_the_sleep(start: float, length: float) -> None:
    sleep = Sleep(start, start + length)
    moment = lost_at(Checked(), [], sleep, end=100.0)
    assert moment is not None
    assert moment <= max(LEASE_S, sleep.end) + LEASE_S


def test_a_process_that_is_always_late_loses_dead_peers_too() -> None:
    checked, now, num_checks = Checked(), 0.0, 0
    checked.peer.disconnected()
    while not checked.check(now := now + 2 * THIRD_S, THIRD_S):
        num_checks += 1
    assert num_checks <= 6


def test_a_word_between_two_sleeps_lets_neither_be_counted() -> None:
    checked = Checked()
    checked.check(2 * THIRD_S, THIRD_S)
    checked.peer.heard(2.5 * THIRD_S)
    checked.peer.disconnected()
    num_checks, is_lost = 0, checked.check(10 * THIRD_S, 6 * THIRD_S)
    while not is_lost:
        num_checks, is_lost = num_checks + 1, checked.check(checked.next_check, 0.0)
    assert num_checks == PINGS_PER_LEASE


def test_a_peer_whose_connection_stands_is_busy_and_lost_only_after_ten_leases() -> None:
    checked, now = Checked(), 0.0
    while not checked.check(now := checked.next_check, 0.0):
        assert checked.peer.is_connected
    assert now == pytest.approx(BUSY_LEASES * LEASE_S)


def test_a_busy_peer_whose_connection_breaks_is_lost_at_the_next_check() -> None:
    checked = Checked()
    for _ in range(2 * PINGS_PER_LEASE):
        assert not checked.check(checked.next_check, 0.0)
    checked.peer.disconnected()
    assert checked.check(checked.next_check, 0.0)


def test_a_lost_peer_is_not_checked_until_it_is_heard_again() -> None:
    checked = Checked()
    while not checked.check(checked.next_check, 0.0):
        pass
    assert checked.peer.state is PeerState.LOST
    assert len(checked.timers) == 0
    assert checked.peer.heard(50.0)
    assert checked.peer.is_connected
    assert checked.next_check == 50.0 + THIRD_S


def test_a_peer_whose_connection_broke_is_back_with_its_next_word_and_lost_without_one() -> None:
    first, second = Checked(), Checked()
    for checked in (first, second):
        checked.peer.disconnected()
        assert checked.peer.state is PeerState.SUSPECT
    assert first.peer.heard(0.5)
    assert not first.peer.heard(0.6), "it is back already"
    assert lost_at(second, [], Sleep(0.0, 0.0), end=10.0) == pytest.approx(LEASE_S)


def test_a_peer_that_has_left_is_never_checked() -> None:
    checked = Checked()
    checked.peer.left()
    assert len(checked.timers) == 0
    assert not checked.peer.is_connected

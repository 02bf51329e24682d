"""A peer is lost after a lease of silence, but not because this process did not look."""

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.config import PINGS_PER_LEASE
from kvflow.state.peer import Peer
from kvflow.wire.messages import PeerId, RankId

LEASE_S = 3.0
THIRD_S = 1.0


@dataclass(frozen=True)
class Sleep:
    """A time in which this process does not run."""

    start: float
    end: float

    def wake(self, due: float) -> float:
        """When something happens that is due at some time."""
        return self.end if self.start <= due < self.end else due


def greeted() -> Peer:
    peer = Peer(PeerId(RankId("prefill", 0), 1))
    peer.greeted(LEASE_S, 0.0)
    return peer


def lost_at(peer: Peer, words: list[float], sleep: Sleep, end: float) -> float | None:
    """Look as often as the peer asks for until it is lost; what is said during the sleep is read at its end."""
    due, heard = THIRD_S, [sleep.wake(word) for word in words]
    while sleep.wake(due) < end:
        now = sleep.wake(due)
        while heard and heard[0] < now:
            peer.heard(heard.pop(0))
        next_look = peer.look(now, now - due)
        if next_look is None:
            return now
        due = next_look
    return None


@given(pauses=st.lists(st.floats(0.01, 2.9), max_size=6))
def test_it_is_lost_one_lease_after_its_last_word(pauses: list[float]) -> None:
    words = list(itertools.accumulate(pauses))
    last = words[-1] if words else 0.0
    moment = lost_at(greeted(), words, Sleep(0.0, 0.0), end=100.0)
    assert moment is not None
    assert moment == pytest.approx(last + LEASE_S)


@given(start=st.floats(0.0, 6.0), length=st.floats(0.0, 20.0), offset=st.floats(0.05, 0.95))
def test_a_sleep_of_both_loses_nobody(start: float, length: float, offset: float) -> None:
    """Both may live in one process: nothing is said in the sleep, and something within a third of a lease after it."""
    sleep = Sleep(start, start + length)
    words = [offset + tick * THIRD_S for tick in range(40)]
    spoken = sorted({word for word in words if not sleep.start <= word < sleep.end} | {sleep.end + offset})
    assert lost_at(greeted(), spoken, sleep, end=30.0) is None


@given(start=st.floats(0.0, 6.0), length=st.floats(0.0, 20.0))
def test_a_peer_that_died_meanwhile_is_lost_after_the_sleep(start: float, length: float) -> None:
    sleep = Sleep(start, start + length)
    moment = lost_at(greeted(), [], sleep, end=100.0)
    assert moment is not None
    assert moment <= max(LEASE_S, sleep.end) + LEASE_S


def test_a_process_that_is_always_late_loses_the_dead_too() -> None:
    peer, now, looks = greeted(), 0.0, 0
    while peer.look(now := now + 2 * THIRD_S, THIRD_S) is not None:
        looks += 1
    assert looks <= 6


def test_a_word_between_two_sleeps_lets_neither_be_counted() -> None:
    peer = greeted()
    peer.look(2 * THIRD_S, THIRD_S)
    peer.heard(2.5 * THIRD_S)
    looks, now = 0, 10 * THIRD_S
    next_look = peer.look(now, 6 * THIRD_S)
    while next_look is not None:
        looks, next_look = looks + 1, peer.look(next_look, 0.0)
    assert looks == PINGS_PER_LEASE

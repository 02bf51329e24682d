"""The tables are total, and say what the theory above them says."""

import enum
import itertools
from collections.abc import Mapping

import pytest

from kvflow.state.tables import (
    MEMORY,
    OUTCOME,
    PEER,
    RANK,
    Memory,
    Outcome,
    PeerSignal,
    PeerState,
    RankSignal,
    RankState,
    Signal,
    TransferState,
)


@pytest.mark.parametrize(
    ("table", "states", "signals"),
    [
        (OUTCOME, Outcome, Signal),
        (MEMORY, Memory, Signal),
        (RANK, RankState, RankSignal),
        (PEER, PeerState, PeerSignal),
    ],
)
def test_every_pair_is_decided(
    table: Mapping[tuple[enum.Enum, enum.Enum], enum.Enum], states: type[enum.Enum], signals: type[enum.Enum]
) -> None:
    assert set(table) == set(itertools.product(states, signals))
    assert set(table.values()) <= set(states)


@pytest.mark.parametrize("outcome", [Outcome.SUCCESS, Outcome.FAILED, Outcome.ABORTED])
@pytest.mark.parametrize("signal", list(Signal))
def test_outcome_is_decided_once(outcome: Outcome, signal: Signal) -> None:
    assert OUTCOME[outcome, signal] is outcome


def test_memory_becomes_safe_only_by_proof() -> None:
    proofs = {
        signal for (before, signal), after in MEMORY.items() if after is Memory.SAFE and before is not Memory.SAFE
    }
    assert proofs == {Signal.WRITTEN, Signal.COMPLETED, Signal.QUIET, Signal.RELEASED}


def test_only_what_is_in_quarantine_can_be_released() -> None:
    changed = {
        before for (before, signal), after in MEMORY.items() if signal is Signal.RELEASED and after is not before
    }
    assert changed == {Memory.QUARANTINED}


def test_doubt_never_releases() -> None:
    for before in (Memory.HELD, Memory.DRAINING, Memory.QUARANTINED):
        assert MEMORY[before, Signal.DOUBTED] is Memory.QUARANTINED


@pytest.mark.parametrize("signals", list(itertools.product(Signal, repeat=4)))
def test_facts_agree_after_any_history(signals: tuple[Signal, ...]) -> None:
    state = TransferState()
    for signal in signals:
        state.apply(signal)
    if state.outcome is Outcome.PENDING:
        assert state.memory is (Memory.SAFE if Signal.WRITTEN in signals else Memory.HELD)
    else:
        assert state.memory is not Memory.HELD
    if state.outcome is Outcome.SUCCESS:
        assert state.memory is Memory.SAFE


def test_only_proof_makes_a_lost_rank_quiet() -> None:
    quiet = {signal for signal in RankSignal if RANK[RankState.LOST, signal].is_quiet}
    assert quiet == {RankSignal.COMPLETED, RankSignal.DRAINED, RankSignal.FENCED}


def test_a_life_that_has_left_never_returns() -> None:
    assert {PEER[PeerState.LEFT, signal] for signal in PeerSignal} == {PeerState.LEFT}

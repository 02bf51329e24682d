"""The tables are total, and agree with the theory above them."""

import enum
import itertools
from collections.abc import Mapping

import pytest

from kvflow.state.tables import (
    FEED,
    INSTANCE,
    MEMORY,
    OUTCOME,
    PEER,
    QUIET,
    RANK,
    REQUEST,
    FeedSignal,
    FeedState,
    InstanceSignal,
    InstanceState,
    Memory,
    Outcome,
    PeerSignal,
    PeerState,
    RankSignal,
    RankState,
    RequestSignal,
    RequestState,
    Signal,
    TransferState,
)


@pytest.mark.parametrize(
    ("table", "states", "signals"),
    [
        (OUTCOME, Outcome, Signal),
        (MEMORY, Memory, Signal),
        (FEED, FeedState, FeedSignal),
        (REQUEST, RequestState, RequestSignal),
        (RANK, RankState, RankSignal),
        (PEER, PeerState, PeerSignal),
        (INSTANCE, InstanceState, InstanceSignal),
    ],
)
def test_every_pair_is_decided(
    table: Mapping[tuple[enum.Enum, enum.Enum], enum.Enum], states: type[enum.Enum], signals: type[enum.Enum]
) -> None:
    assert set(table) == set(itertools.product(states, signals))
    assert set(table.values()) <= set(states)


def test_outcome_is_decided_once() -> None:
    changed = {(before, signal) for (before, signal), after in OUTCOME.items() if after is not before}
    assert {before for before, _ in changed} == {Outcome.PENDING}


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


def test_a_missing_proof_never_releases() -> None:
    for before in (Memory.HELD, Memory.DRAINING, Memory.QUARANTINED):
        assert MEMORY[before, Signal.IN_DOUBT] is Memory.QUARANTINED


def test_facts_agree_after_any_history() -> None:
    histories = list(itertools.product(Signal, repeat=4))
    assert [signals for signals in histories if not facts_agree(signals)] == []


def facts_agree(signals: tuple[Signal, ...]) -> bool:
    state = TransferState()
    for signal in signals:
        state.apply(signal)
    if state.outcome is Outcome.PENDING:
        return state.memory is (Memory.SAFE if Signal.WRITTEN in signals else Memory.HELD)
    if state.outcome is Outcome.SUCCESS:
        return state.memory is Memory.SAFE
    return state.memory is not Memory.HELD


def test_nothing_is_granted_without_pages() -> None:
    into = {before for (before, _), after in REQUEST.items() if after is RequestState.GRANTED and before is not after}
    assert into == {RequestState.WAITING}
    assert REQUEST[RequestState.ANNOUNCED, RequestSignal.CONNECTED] is RequestState.ANNOUNCED


def test_only_proof_makes_a_lost_rank_quiet() -> None:
    quiet = {signal for signal in RankSignal if RANK[RankState.LOST, signal] in QUIET}
    assert quiet == {RankSignal.COMPLETED, RankSignal.DRAINED, RankSignal.FENCED}


def test_an_incarnation_that_has_left_never_returns() -> None:
    assert {PEER[PeerState.LEFT, signal] for signal in PeerSignal} == {PeerState.LEFT}


def test_only_what_proves_that_it_lives_brings_a_peer_back() -> None:
    for state in (PeerState.SUSPECT, PeerState.LOST):
        back = {signal for signal in PeerSignal if PEER[state, signal] is PeerState.CONNECTED}
        assert back == {PeerSignal.CONNECTED, PeerSignal.HEARD}


def test_a_peer_is_lost_by_silence_only() -> None:
    lost = {signal for (before, signal), after in PEER.items() if after is PeerState.LOST and before is not after}
    assert lost == {PeerSignal.EXPIRED}


def test_an_instance_is_connected_only_after_the_handshake_with_the_ranks_that_were_found_last() -> None:
    into = {
        (before, signal)
        for (before, signal), after in INSTANCE.items()
        if after is InstanceState.CONNECTED and before is not after
    }
    assert into == {(InstanceState.CONNECTING, InstanceSignal.CONNECTED)}


@pytest.mark.parametrize("state", list(InstanceState))
def test_an_instance_that_is_lost_or_refuses_is_looked_up_again(state: InstanceState) -> None:
    assert INSTANCE[state, InstanceSignal.LOST] is InstanceState.LOOKING_UP
    assert INSTANCE[state, InstanceSignal.REFUSED] is InstanceState.LOOKING_UP
    assert INSTANCE[state, InstanceSignal.FOUND] is InstanceState.COMPILING

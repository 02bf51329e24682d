"""A decode rank's memory of prefill ranks that have left is bounded."""

import pytest

from kvflow.state.decode.peers import MAX_ENDPOINTS, PrefillPeers
from kvflow.state.effects import ProbePeer
from kvflow.wire.messages import PeerId, Welcome
from tests.support.cores import DecodeDriver, endpoint_of, peer


@pytest.fixture
def peers() -> PrefillPeers:
    return DecodeDriver().core.peers


def welcome(peers: PrefillPeers, other: PeerId) -> None:
    """Complete the handshake with an incarnation that reports its endpoint and then leaves."""
    peers.handshake_done(other, 0.0, Welcome(peer=other, attempt=0, version=3, endpoint=endpoint_of(other)))
    peers.left(other)


def incarnations() -> list[PeerId]:
    """Return one incarnation more than the rank remembers."""
    return [peer("prefill", incarnation=number) for number in range(MAX_ENDPOINTS + 1)]


def test_the_address_of_the_oldest_is_forgotten(peers: PrefillPeers) -> None:
    oldest, second, *_ = others = incarnations()
    for other in others:
        welcome(peers, other)
    assert peers.probe(oldest) == []
    assert peers.probe(second) == [ProbePeer(second, endpoint_of(second))]


def test_an_address_that_is_used_again_is_not_the_oldest(peers: PrefillPeers) -> None:
    *others, newest = incarnations()
    for other in (*others, others[0], newest):
        welcome(peers, other)
    assert peers.probe(others[0]) == [ProbePeer(others[0], endpoint_of(others[0]))]
    assert peers.probe(others[1]) == []


def test_the_end_of_the_oldest_is_forgotten(peers: PrefillPeers) -> None:
    oldest, second, *_ = others = incarnations()
    for other in others:
        peers.said_goodbye(other)
    assert (peers.has_ended(oldest), peers.has_ended(second)) == (False, True)

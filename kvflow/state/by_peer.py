"""An index of items by peer, so that an event of one peer does not walk the items of all. Pure."""

from collections.abc import Hashable
from typing import Generic, TypeVar

from kvflow.wire.messages import PeerId, RankId

__all__ = ["ByPeer", "Incarnations"]

Key = TypeVar("Key", bound=Hashable)


class Incarnations:
    """Some peers, by rank."""

    def __init__(self) -> None:
        self._of: dict[RankId, dict[PeerId, None]] = {}

    def add(self, peer: PeerId) -> None:
        """Add a peer."""
        self._of.setdefault(peer.rank, {})[peer] = None

    def remove(self, peer: PeerId) -> None:
        """Remove a peer, which was added."""
        of_rank = self._of[peer.rank]
        del of_rank[peer]
        if not of_rank:
            del self._of[peer.rank]

    def others(self, peer: PeerId) -> list[PeerId]:
        """Return the other incarnations of the rank of a peer."""
        return [other for other in self._of.get(peer.rank, ()) if other != peer]


class ByPeer(Generic[Key]):
    """Keys of items by the peers that they concern, in the order in which they were added."""

    def __init__(self) -> None:
        self._keys: dict[PeerId, dict[Key, None]] = {}
        self._peers: dict[Key, dict[PeerId, None]] = {}

    def __contains__(self, peer: PeerId) -> bool:
        """Return whether there are items of a peer."""
        return peer in self._keys

    def keys_of(self, peer: PeerId) -> list[Key]:
        """Return the keys of a peer's items."""
        return list(self._keys.get(peer, ()))

    def count_of(self, peer: PeerId) -> int:
        """Return the number of a peer's items."""
        return len(self._keys.get(peer, ()))

    def add(self, peer: PeerId, key: Key) -> None:
        """Add an item of a peer."""
        self._keys.setdefault(peer, {})[key] = None
        self._peers.setdefault(key, {})[peer] = None

    def remove(self, key: Key) -> None:
        """Remove an item; does nothing if there is none."""
        for peer in self._peers.pop(key, ()):
            keys = self._keys[peer]
            del keys[key]
            if not keys:
                del self._keys[peer]

"""Deliveries of ended rooms whose bytes may still land at their decode ranks. Pure."""

from collections.abc import Iterator

from kvflow.errors import CapacityExceeded
from kvflow.state.by_peer import ByPeer, Incarnations
from kvflow.state.effects import PrefillEffect
from kvflow.state.events import DeliveryId
from kvflow.state.prefill.delivery import Delivery
from kvflow.state.prefill.peers import DecodePeers
from kvflow.wire.messages import PeerId

__all__ = ["UnfencedDeliveries"]

UNFENCED_SHARE = 8
"""One decode rank may have 1/8 of the unfenced deliveries, so that others are served if writes to it never end."""


class UnfencedDeliveries:
    """Deliveries that are kept without their pages until nothing of them can land any more.

    The source pages are free, but that proves nothing about the destination. The decode rank is sent Drained only once
    the last post has ended in a way that proves it. If there is no such way, only the end of one of the two processes
    is a proof. When there are too many unfenced deliveries, those of disconnected decode ranks are dropped; such a rank
    must not reconnect, and so is never sent Drained. While all decode ranks are connected, new work is refused instead.
    """

    def __init__(self, peers: DecodePeers, limit: int) -> None:
        self._peers = peers
        self._limit = limit
        self._deliveries: dict[DeliveryId, Delivery] = {}
        self._by_peer: ByPeer[DeliveryId] = ByPeer()
        self._incarnations = Incarnations()
        self._gone: dict[PeerId, None] = {}  # disconnected decode ranks with deliveries
        self.num_to_gone = 0

    def __len__(self) -> int:
        return len(self._deliveries)

    def __iter__(self) -> Iterator[Delivery]:
        return iter(self._deliveries.values())

    def __contains__(self, delivery_id: DeliveryId) -> bool:
        return delivery_id in self._deliveries

    def find(self, delivery_id: DeliveryId) -> Delivery | None:
        """Find a delivery."""
        return self._deliveries.get(delivery_id)

    def deliveries_to(self, peer: PeerId) -> list[Delivery]:
        """Return the deliveries to a decode rank."""
        return [self._deliveries[delivery_id] for delivery_id in self._by_peer.keys_of(peer)]

    def add(self, delivery: Delivery) -> None:
        """Keep a delivery, without its pages."""
        delivery.forget_pages()
        self._deliveries[delivery.id] = delivery
        self._by_peer.add(delivery.id.peer, delivery.id)
        self._incarnations.add(delivery.id.peer)
        if delivery.id.peer not in self._peers:
            self._gone[delivery.id.peer] = None
            self.num_to_gone += 1

    def find_connected(self, peer: PeerId) -> None:
        """Find out whether a decode rank has reconnected; the deliveries to it are kept then."""
        if peer in self._gone and peer in self._peers:
            del self._gone[peer]
            self.num_to_gone -= self._by_peer.count_of(peer)

    def peer_disconnected(self, peer: PeerId) -> None:
        """Drop the deliveries to a decode rank if there are too many."""
        if peer in self._by_peer:
            self._gone[peer] = None
            self.num_to_gone += self._by_peer.count_of(peer)

    def settle(self, delivery: Delivery, effects: list[PrefillEffect]) -> list[PrefillEffect]:
        """Forget a delivery if nothing of it can land any more; return the effects of the step that it took."""
        if delivery.is_fenced:
            self._forget(delivery.id)
        return effects

    def forget_peer(self, peer: PeerId) -> None:
        """Forget the deliveries to a terminated incarnation of a decode rank."""
        for delivery_id in self._by_peer.keys_of(peer):
            self._forget(delivery_id)

    def forget_earlier(self, peer: PeerId) -> list[PeerId]:
        """Forget the deliveries to earlier incarnations of a decode rank, whose pages no longer exist; return those."""
        earlier = self._incarnations.others(peer)
        for other in earlier:
            self.forget_peer(other)
        return earlier

    def check_place(self) -> None:
        """Raise CapacityExceeded if no other delivery may become unfenced."""
        if not self._has_place():
            raise CapacityExceeded(
                "too many ended transfers have writes that may still land at decode ranks",
                unfenced=len(self),
                limit=self._limit,
            )

    def excess(self, peer: PeerId) -> str | None:
        """Return why a decode rank may not be written to now; None if it may."""
        most = max(self._limit // UNFENCED_SHARE, 1)
        count = self._by_peer.count_of(peer)
        if count < most and self._has_place():
            return None
        found = f"{count} ended transfers may still land at {peer.rank}, of {len(self)} in all"
        return f"writes of {found}; a limit of {self._limit} allows {most} to one rank"

    def _has_place(self) -> bool:
        """Return whether there is place for another delivery.

        Those to disconnected ranks are dropped for it, in the order in which they left, unless that is not enough.
        """
        if len(self) < self._limit:
            return True
        if self._limit <= len(self) - self.num_to_gone:
            return False
        while len(self) >= self._limit:
            peer = next(iter(self._gone))
            self.forget_peer(peer)
            self._peers.mark_ended(
                peer, "writes to this incarnation are no longer tracked, because too many have not ended"
            )
        return True

    def _forget(self, delivery_id: DeliveryId) -> None:
        del self._deliveries[delivery_id]
        self._by_peer.remove(delivery_id)
        peer = delivery_id.peer
        self.num_to_gone -= peer in self._gone
        if peer not in self._by_peer:
            self._gone.pop(peer, None)
            self._incarnations.remove(peer)

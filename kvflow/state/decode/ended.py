"""Transfers of a decode rank that are over, to inform prefill ranks that missed the end. Pure."""

from typing import NamedTuple

from kvflow.room import RoomId
from kvflow.state.closed import ClosedGenerations
from kvflow.state.effects import CountAnomaly, DecodeEffect, SendMessage
from kvflow.wire.messages import Ack, Cancel, Failure, PeerId

__all__ = ["Ended", "EndedTransfers"]

MAX_CLOSED = 16_384
"""Maximum number of ended transfers that are remembered."""


class Ended(NamedTuple):
    """How a transfer ended, of which some ranks were told; `failure` is None for a success."""

    room: RoomId
    told: tuple[PeerId, ...]
    failure: Failure | None


class EndedTransfers(ClosedGenerations[Ended]):
    """Ended transfers by generation."""

    def __init__(self) -> None:
        super().__init__(MAX_CLOSED)

    def answer(self, room: RoomId, generation: int, peer: PeerId | None, anomaly: str) -> list[DecodeEffect]:
        """Answer a message about an ended transfer with the outcome.

        A message that arrived in band, without a peer, gets no answer, because what is missed is retransmitted over the
        control channel. The anomaly is counted if no such transfer is remembered, or the peer has no part in it.
        """
        ended = self.result(generation)
        if ended is None or ended.room != room or (peer is not None and peer not in ended.told):
            return [CountAnomaly(anomaly, peer, room)]
        if peer is None:
            return []
        if ended.failure is None:
            return [SendMessage(peer, Ack(room=room, generation=generation))]
        cancel = Cancel(room=room, generation=generation, failure=ended.failure, has_landed=True)
        return [SendMessage(peer, cancel)]

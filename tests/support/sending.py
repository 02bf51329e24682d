"""A prefill rank's core, and events of its engine and its transport."""

import functools
from collections.abc import Sequence

from kvflow.geometry.ranges import TokenRange
from kvflow.state import events as ev
from kvflow.state.effects import Cost, Piece, PlanPiece, PostPiece, PrefillEffect
from kvflow.state.events import Chunk, DeliveryId, PeerRoute
from kvflow.state.quarantine import NO_MEMORY, Footprint
from kvflow.wire.messages import Failure, Notice, PeerId
from tests.support.cores import DECODE, Effect, PrefillDriver, grant, peer
from tests.support.small_routes import layout, peer_route, rank_routes

__all__ = ["DELIVERY", "PEERS", "ROOM", "chunk", "delivery", "end", "piece", "pieces", "planned", "posted"]

ROOM = 7
DELIVERY = DeliveryId(ROOM, DECODE, 1)
PEERS = [peer("decode", rank) for rank in range(3)]


def delivery(to: PeerId, room: int = ROOM, generation: int = 1) -> DeliveryId:
    return DeliveryId(room, to, generation)


def chunk(
    start: int,
    stop: int,
    *,
    room: int = ROOM,
    last: bool = False,
    metadata: bytes = b"",
    footprint: Footprint = NO_MEMORY,
) -> ev.ChunkOffered:
    return ev.ChunkOffered(room, Chunk((start, stop), {"kv": (start, stop)}, last=last, metadata=metadata), footprint)


def pieces(effects: Sequence[Effect]) -> list[Piece]:
    """Return the pieces that are planned and posted at once."""
    return [effect.piece for effect in effects if isinstance(effect, PostPiece)]


def planned(effects: Sequence[Effect]) -> list[Piece]:
    """Return the pieces that are planned off the event loop."""
    return [effect.piece for effect in effects if isinstance(effect, PlanPiece)]


def posted(effects: Sequence[Effect]) -> list[tuple[int, TokenRange]]:
    """Return sequence number and tokens of each piece that is posted at once."""
    return [(piece.seq, piece.ranges["kv"]) for piece in pieces(effects)]


def end(
    core: PrefillDriver, seq: int, of: DeliveryId = DELIVERY, failure: Failure | None = None, *, lingers: bool = False
) -> list[PrefillEffect]:
    """Report the end of a post to a core."""
    return core(ev.PostEnded(of, seq, failure, lingers))


@functools.cache
def _route(*, is_background: bool) -> PeerRoute:
    side = layout()
    (compiled,) = rank_routes([side], side)
    route = peer_route(side, side, compiled.route)
    return route.send_in_background(1) if is_background else route


def piece(
    of: DeliveryId,
    seq: int = 0,
    num_bytes: int = 1,
    *,
    num_descriptors: int = 1,
    priority: int = 0,
    is_background: bool = False,
) -> Piece:
    """Return a piece with what the queue needs."""
    tokens = (seq, seq + 1)
    notice = Notice(
        room=of.room,
        generation=of.generation,
        token=0,
        engine_rank=0,
        seq=seq,
        ranges={"kv": tokens},
        num_bytes=num_bytes,
    )
    return Piece(
        delivery=of,
        seq=seq,
        ranges={"kv": tokens},
        pages={},
        grant=grant(of.room, of.generation, priority=priority),
        granted={},
        link=_route(is_background=is_background),
        notice=notice,
        cost=Cost(num_bytes, num_descriptors),
    )

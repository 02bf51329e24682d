"""Upper bounds that are no settings, because their values fit every deployment that was measured."""

from dataclasses import dataclass, fields
from typing import Self

from kvflow.config import Limits

__all__ = ["Bounds"]


@dataclass(frozen=True, kw_only=True)
class Bounds(Limits):
    """The limits of a rank, with the bounds that users do not set. Tests and the simulation use smaller ones.

    Attributes:
        pending_grants: Maximum number of grants and announcements for rooms that the prefill engine has not opened yet.
            One instance may never take more than is still free.
        unfenced: Maximum number of ended transfers that a prefill rank tracks because their bytes may still land at a
            decode rank. Beyond it, the rank stops tracking those to decode ranks that are gone; such a decode rank must
            restart before it is served again. If all of their decode ranks are connected, new transfers are refused. A
            decode rank that accounts for an eighth of the bound is refused new transfers.
        queued_chunks: Maximum number of pieces of granted chunks that may wait for one peer (for their data, their turn
            or credit). Beyond that, `chunk()` blocks for rooms that go to that peer, but not for others. A chunk is
            queued with all of its pieces or not at all.
        bytes_per_post: Size above which a chunk is split into pieces, each a write of its own. Splits fall between
            pages, so a single page that is larger, over all layers, is still sent.
        bytes_per_layer_piece: Layers that become ready at different times are merged into one piece up to this size;
            beyond it they are sent as separate pieces, so that the first layers are sent while the others are still
            being computed.
        bytes_per_background_post: The same for rooms in the background, because such a write may delay others.
        posts_per_peer: Writes posted to one peer and not yet ended.
        bytes_per_peer: Bytes of such writes; a single larger piece is still sent, alone.
        descriptors_per_peer: Maximum number of descriptors in such writes, estimated before planning; a single larger
            piece is still sent, alone.
        descriptors_planned_inline: Number of descriptors above which planning moves from the event loop to a worker
            thread.
        ageing_s: Waiting time that raises a chunk by one priority class, in seconds. In other words, each class has a
            head start of this much over the next one: with 0.1 s, the lowest of 8 classes waits 0.7 s before it takes
            turns with the highest.
    """

    pending_grants: int = 16_384
    unfenced: int = 16_384
    queued_chunks: int = 1_024
    bytes_per_post: int = 64 * 2**20
    bytes_per_layer_piece: int = 4 * 2**20
    bytes_per_background_post: int = 4 * 2**20
    posts_per_peer: int = 16
    bytes_per_peer: int = 128 * 2**20
    descriptors_per_peer: int = 2**21
    descriptors_planned_inline: int = 20_000
    ageing_s: float = 0.1

    def __post_init__(self) -> None:
        """Check nothing more: a rank's limits have been checked, and nobody else sets the bounds."""

    @classmethod
    def from_limits(cls, limits: Limits) -> Self:
        """Return a rank's limits with the default bounds, or the bounds themselves if that is what they are."""
        if isinstance(limits, cls):
            return limits
        return cls(**{item.name: getattr(limits, item.name) for item in fields(Limits)})

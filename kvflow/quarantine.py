"""Quarantined pages, as reported to engines and operators."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvflow.room import RoomId
from kvflow.state.quarantine import MissingProof
from kvflow.wire.messages import Failure

__all__ = ["QuarantineRecord"]


@dataclass(frozen=True, eq=False)
class QuarantineRecord:
    """A snapshot of an ended transfer whose pages may still be in use.

    Attributes:
        room: Room of the transfer.
        label: The engine's own ID for it, if it set one.
        key: Identifies the transfer within its rank; a room does not, because it may have been reused.
        pages: Pages of each component that must not be used, int32.
        num_bytes: Their size in the pools.
        since_s: How long they have been in quarantine, in seconds.
        failure: Why the transfer failed.
        missing: The missing proof of each peer that still has to provide one.
    """

    room: RoomId
    label: str | None
    key: RoomId
    pages: Mapping[str, NDArray[np.int32]]
    num_bytes: int
    since_s: float
    failure: Failure | None
    missing: tuple[MissingProof, ...]

    def __str__(self) -> str:
        pages = ", ".join(f"{len(pages)} of {name}" for name, pages in self.pages.items())
        proofs = "; ".join(proof.detail for proof in self.missing)
        return f"room {self.room}: pages {pages} ({self.num_bytes} bytes) for {self.since_s:.1f} s: {proofs}"

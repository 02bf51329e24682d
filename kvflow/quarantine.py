"""Pages in quarantine, as an engine and an operator see them."""

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
    """A transfer that has ended while somebody may still touch its pages. What it says is of the moment it was made.

    Attributes:
        room: Of the transfer.
        label: The engine's own id of it, if it gave one.
        key: Number of the transfer in its rank, which a room need not be: it may have been used again.
        pages: Pages of each component that must not be used, int32.
        num_bytes: Their size in the pools.
        since_s: Seconds that they have been in quarantine.
        failure: Why the transfer has failed.
        missing: For each peer of which a proof is missing, what would be one.
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

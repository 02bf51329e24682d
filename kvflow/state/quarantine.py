"""Pages that are not proved quiet: how many there are, which proofs are missing, and whether more fit. Pure."""

import enum
from collections.abc import Hashable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from kvflow.errors import CapacityExceeded

__all__ = ["NO_MEMORY", "Footprint", "MissingProof", "ProofKind", "Quarantine"]


class ProofKind(enum.StrEnum):
    """The proof that a peer can no longer touch pages in quarantine."""

    DRAINED = "drained"
    """Drained from a prefill rank that is connected."""
    PEER = "peer"
    """Drained from a prefill rank that is silent or has left, or the end of its process."""
    LANDING = "landing"
    """Its process has ended; the transport waits for its last bytes to land."""
    QUEUE_PAIRS = "queue_pairs"
    """Its process has ended; the time that the deployment has set for its queue pairs is running."""
    OPERATOR = "operator"
    """Its process has ended, and the transport cannot tell when its last bytes have landed."""
    WRITE_END = "write_end"
    """The end of this rank's own writes, as reported by its transport."""
    LOCAL = "local"
    """The end of this rank's own work on the pages, which it scatters or compares."""
    BROKEN = "broken"
    """This rank has failed or closed, and accepts no more proofs."""


SENTENCES: Final[Mapping[ProofKind, str]] = MappingProxyType(
    {
        ProofKind.DRAINED: "{peer} must send Drained, which it does when its writes have ended; if a write may still "
        "land, only the end of its process counts",
        ProofKind.PEER: "{peer} must be reached again and send Drained, or the host of {endpoint} must refuse "
        "connections because the process has ended",
        ProofKind.LANDING: "the process of {peer} has ended; the connections over which it may have written must "
        "become empty",
        ProofKind.QUEUE_PAIRS: "the process of {peer} has ended; the time that the deployment has set for its queue "
        "pairs must pass",
        ProofKind.OPERATOR: "the process of {peer} at {endpoint} has ended, no last message from it was received, and "
        "the transport cannot tell when its last bytes have landed; an operator must release the pages",
        ProofKind.WRITE_END: "the transport of this rank must report the end of its writes to {peer}, or be closed",
        ProofKind.LOCAL: "this rank must finish scattering or comparing what has arrived",
        ProofKind.BROKEN: "this rank no longer accepts proofs; an operator must release the pages",
    }
)


class MissingProof(NamedTuple):
    """A peer that may still touch pages in quarantine.

    Attributes:
        peer: "instance/rank@incarnation"; empty if unknown.
        endpoint: Address of its control socket; empty if it has none, or if unknown.
        awaited: The missing proof.
    """

    peer: str
    endpoint: str
    awaited: ProofKind

    @property
    def detail(self) -> str:
        """The missing proof as a sentence."""
        return SENTENCES[self.awaited].format(peer=self.peer, endpoint=self.endpoint or "an unknown address")


class Footprint(NamedTuple):
    """An amount of memory in the pools.

    Attributes:
        num_pages: Number of pages, added up over all components.
        num_bytes: Their size in this rank's pools, in bytes.
    """

    num_pages: int = 0
    num_bytes: int = 0

    def plus(self, other: "Footprint") -> "Footprint":
        """Return the sum of both."""
        return Footprint(self.num_pages + other.num_pages, self.num_bytes + other.num_bytes)


NO_MEMORY: Final = Footprint()


class Quarantine:
    """The memory in quarantine. When too much is in it, nothing new is admitted; nothing is released early."""

    def __init__(self, max_bytes: int) -> None:
        self.total = NO_MEMORY
        self._max_bytes = max_bytes
        self._held: dict[Hashable, Footprint] = {}

    def __len__(self) -> int:
        return len(self._held)

    def add_pages(self, key: Hashable, footprint: Footprint) -> None:
        """Add the pages of a transfer; adding them again changes nothing."""
        if key not in self._held:
            self._held[key] = footprint
            self.total = self.total.plus(footprint)

    def remove(self, key: Hashable) -> None:
        """Remove the pages of a transfer, if they are in quarantine."""
        held = self._held.pop(key, None)
        if held is not None:
            self.total = self.total.plus(Footprint(-held.num_pages, -held.num_bytes))

    def check_admission(self) -> None:
        """Refuse new work while too much memory is in quarantine, with CapacityExceeded."""
        pages, num_bytes = self.total
        if num_bytes >= self._max_bytes:
            raise CapacityExceeded(
                "too much memory is in quarantine",
                transfers=len(self),
                pages=pages,
                num_bytes=num_bytes,
                limit=self._max_bytes,
                setting="limits.quarantined_bytes",
            )

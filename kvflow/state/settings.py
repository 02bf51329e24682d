"""Settings of the cores, which do not change while a rank is open."""

from typing import NamedTuple

import msgspec

from kvflow.bounds import Bounds
from kvflow.config import Limits, Packing, Proofs, Timeouts
from kvflow.geometry.layout import KVLayout
from kvflow.wire.messages import PAGE_BYTES

__all__ = ["DecodeSettings", "LocalStagingSettings", "PrefillSettings", "WindowSettings"]


class LocalStagingSettings(NamedTuple):
    """Staging memory of a prefill rank, into which pieces are packed.

    Attributes:
        descriptor_overhead_s: Time that each descriptor costs the transport besides its bytes, in seconds.
        gathers_inline: Whether small pieces may be gathered on the event loop; False if gathering waits for a device.
    """

    num_slots: int
    slot_bytes: int
    descriptor_overhead_s: float
    packing: Packing
    gathers_inline: bool


class WindowSettings(NamedTuple):
    """Staging memory of a decode rank; each prefill rank writes packed pieces into a window of `num_slots`."""

    address: int
    num_bytes: int
    slot_bytes: int
    num_slots: int


class PrefillSettings(msgspec.Struct, frozen=True):
    """Settings of a `PrefillCore`.

    Attributes:
        in_band_notices: Whether the transport delivers notices with the bytes; otherwise they use the control channel.
        max_descriptor_bytes: Longest descriptor that the transport accepts; None for no limit.
        staging: Staging memory to pack pieces in; None to pack none.
        domain: Where writes that outlive the process can be observed; sent to decode ranks.
        endpoint: Address that the rank listens on; sent to decode ranks, which presume the process ended once nothing
            listens there.
        takes_offers: Whether the engine takes offers.
    """

    timeouts: Timeouts
    limits: Bounds
    layout: KVLayout
    backend: str
    in_band_notices: bool = True
    max_descriptor_bytes: int | None = None
    staging: LocalStagingSettings | None = None
    domain: bytes = b""
    endpoint: str = ""
    takes_offers: bool = False

    @property
    def max_pages(self) -> int:
        """Maximum number of pages of one grant."""
        return self.limits.pending_grant_bytes // (2 * PAGE_BYTES)


class DecodeSettings(msgspec.Struct, frozen=True):
    """Settings of a `DecodeCore`.

    Attributes:
        backend_metadata: What a peer's transport needs to write here.
        ends_with_process: Whether no write can land any more once the writing process has ended.
        staging: Staging memory for the windows of prefill ranks; None to receive no packed pieces.
        proofs: What proves that a prefill process can write nothing more.
        agent: Name of the transport's agent, if this rank shares it.
        registry: Address of the registry, for messages; empty if there is none.
        allowed_hosts: Hosts that this rank may connect to; empty for any.
    """

    timeouts: Timeouts
    limits: Limits
    layout: KVLayout
    backend: str
    backend_metadata: bytes
    ends_with_process: bool
    staging: WindowSettings | None = None
    proofs: Proofs = Proofs()
    agent: str | None = None
    registry: str = ""
    allowed_hosts: tuple[str, ...] = ()

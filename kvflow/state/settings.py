"""What a core is made with; it does not change while the rank is open."""

from typing import NamedTuple

import msgspec

from kvflow.config import Limits, Packing, Proofs, Timeouts
from kvflow.geometry.layout import KVLayout

__all__ = ["DecodeSettings", "LocalStagingSettings", "PrefillSettings", "WindowSettings"]


class LocalStagingSettings(NamedTuple):
    """Staging memory of a prefill rank, into which pieces are packed.

    Attributes:
        num_slots: Slots of its own.
        slot_bytes: Size of each.
        descriptor_overhead_s: What each descriptor costs the transport besides its bytes, in seconds.
        packing: When to pack.
        gathers_inline: Small pieces may be gathered on the event loop; not so if that waits for a device.
    """

    num_slots: int
    slot_bytes: int
    descriptor_overhead_s: float
    packing: Packing
    gathers_inline: bool


class WindowSettings(NamedTuple):
    """Staging memory of a decode rank, into which prefill ranks write packed pieces.

    Attributes:
        address: Of the first byte.
        num_bytes: Size of all of it.
        slot_bytes: Size of a slot.
        num_slots: Slots in the window of one prefill rank.
    """

    address: int
    num_bytes: int
    slot_bytes: int
    num_slots: int


class PrefillSettings(msgspec.Struct, frozen=True):
    """Settings of a `PrefillCore`.

    Attributes:
        timeouts: How long things may take.
        limits: Upper bounds on what the rank holds.
        layout: Of this rank's memory.
        backend: Name of the transport.
        in_band_notices: The transport delivers notices with the bytes; else they go over the control channel.
        max_descriptor_bytes: Longest descriptor that the transport takes; None for no limit.
        staging: To pack pieces in; none are packed if None.
        domain: Where what the transport leaves behind can be seen; decode ranks are told.
        endpoint: Where the rank listens; decode ranks are told, and take it for ended when nobody listens there.
    """

    timeouts: Timeouts
    limits: Limits
    layout: KVLayout
    backend: str
    in_band_notices: bool = True
    max_descriptor_bytes: int | None = None
    staging: LocalStagingSettings | None = None
    domain: bytes = b""
    endpoint: str = ""


class DecodeSettings(msgspec.Struct, frozen=True):
    """Settings of a `DecodeCore`.

    Attributes:
        timeouts: How long things may take.
        limits: Upper bounds on what the rank holds.
        layout: Of this rank's memory.
        backend: Name of the transport.
        backend_metadata: What a peer's transport needs to write here.
        ends_with_process: The transport lets nothing land any more once the process that wrote has ended.
        staging: For windows of prefill ranks; nobody packs if None.
        proofs: What proves that a prefill process can write nothing any more.
        agent: Name of the transport's agent, if this rank shares it.
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

"""What a small world consists of: its ranks, what they send each other, and what may go wrong."""

from typing import Final, Literal, NamedTuple, get_args

from kvflow.config import Timeouts
from kvflow.geometry.layout import Component, KVLayout, Region
from kvflow.geometry.memory import MemoryRange
from kvflow.room import RoomId
from kvflow.state.settings import LocalStagingSettings, WindowSettings

__all__ = ["FAULTS", "GIVE_UP_S", "LEASE_S", "MAX_TRIALS", "TOKEN_BYTES", "Setup", "make_layout", "make_staging"]

Fault = Literal["lose", "duplicate", "overtake", "fail", "doubt", "abort", "reclaim", "kill", "timeout"]

FAULTS: Final[tuple[Fault, ...]] = get_args(Fault)

TOKEN_BYTES: Final = 16
STAGING_ADDRESS: Final = 2**20
GIVE_UP_S: Final = 1.0
"""Limit of every phase, so that a timeout is one step."""

LEASE_S: Final = 100.0
TIMEOUTS: Final = Timeouts(
    handshake_s=GIVE_UP_S,
    transfer_s=GIVE_UP_S,
    open_s=GIVE_UP_S,
    grant_s=GIVE_UP_S,
    progress_s=GIVE_UP_S,
    drain_s=GIVE_UP_S,
    lease_s=LEASE_S,
)

MAX_TRIALS: Final = 2
"""Transfers attempted after the last fault. One of them must succeed; an earlier one may fail because of that fault."""


class Setup(NamedTuple):
    """What a world consists of.

    Attributes:
        num_prefill: Ranks of the prefill instance.
        num_decode: Ranks of the decode instance.
        rooms: Requests, each served by every rank.
        num_writes: Pieces of each room.
        max_faults: Faults in one run.
        faults: Kinds of faults.
        is_connected: The handshakes are done at the start; otherwise they are explored too.
        posts_per_peer: Limit of posts in flight to one decode rank.
        slots: Staging slots of each prefill rank, and of its window on each decode rank. If not zero, every piece is
            packed.
        quiesces: The prefill engines quiesce each room once, at any time after they have offered everything, and resume
            from the position that they get back.
        announces: The decode engines announce each room, and grant it pages at any later time.
        holds: For each prefill rank, whether it holds something that decode ranks want; empty if all do.
        spare_pages: Pages of each rank beyond those that the rooms take.
        timeouts: Time limits of every rank.
        planned_inline: Descriptors of the largest piece that is planned at once.
        offers: Each decode rank makes an offer to the prefill instance.
        accepts: The prefill engine accepts offers, at any later time; otherwise it declines them.
        has_pings: Pings are sent. Without them a world has fewer states, and leases expire in silence.
    """

    num_prefill: int = 1
    num_decode: int = 1
    rooms: tuple[RoomId, ...] = (1,)
    num_writes: int = 1
    max_faults: int = 1
    faults: tuple[Fault, ...] = FAULTS
    is_connected: bool = True
    posts_per_peer: int = 16
    slots: int = 0
    quiesces: bool = False
    announces: bool = False
    holds: tuple[bool, ...] = ()
    spare_pages: int = 0
    timeouts: Timeouts = TIMEOUTS
    planned_inline: int = 20_000
    offers: bool = False
    accepts: bool = True
    has_pings: bool = False


def make_layout(num_layers: int, num_tokens: int, *, component: str = "kv") -> KVLayout:
    """Return a layout with one head and `num_layers` layers, which prefill ranks share as replicas."""
    address, size = 4096, num_tokens * TOKEN_BYTES
    regions = tuple(
        Region(
            "k", layer, address + layer * size, num_tokens, TOKEN_BYTES, 1, TOKEN_BYTES, (0, 1), TOKEN_BYTES,
            TOKEN_BYTES, "uint8",
        )
        for layer in range(num_layers)
    )  # fmt: skip
    return KVLayout((Component(component, regions),), "explored", (MemoryRange(address, num_layers * size),))


def make_staging(setup: Setup) -> tuple[LocalStagingSettings | None, WindowSettings | None]:
    """Return the staging settings of both sides: a slot holds one write, and each prefill rank can get a window."""
    if not setup.slots:
        return None, None
    slot_bytes = TOKEN_BYTES * setup.num_prefill
    local = LocalStagingSettings(setup.slots, slot_bytes, 0.0, "always", gathers_inline=True)
    num_bytes = setup.num_prefill * setup.slots * slot_bytes
    return local, WindowSettings(STAGING_ADDRESS, num_bytes, slot_bytes, setup.slots)

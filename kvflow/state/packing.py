"""The choice between packing a piece (gathering, one write, scattering) and writing it to its pages directly.

A direct write pays an overhead for each descriptor. Packing copies each byte twice more, once on each side, and costs a
fixed time for each piece. The bytes of the write itself are the same either way. Pure.
"""

import math
from typing import Final

from kvflow.config import Packing
from kvflow.geometry.binding import BoundRoute
from kvflow.geometry.split import SplitPolicy

__all__ = ["BLOCK_S", "COPY_S_PER_BYTE", "descriptors_to_pay_off", "packed_policy", "pays_off"]

COPY_S_PER_BYTE: Final = 0.15e-9
"""Extra cost of a packed byte over a byte of a large descriptor, in seconds. Gathering and scattering take 0.3 ns each
(512 bytes at a time, uncached), but most of it overlaps with the writes of other pieces."""

BLOCK_S: Final = 600e-6
"""Extra cost of each packed piece, in seconds: finding its cells, two threads, the message that returns its slot.

Source of both: 256 MiB in random pages over NIXL between two processes on 2 cores, numpy 2.4. Packed pieces of 1, 2, 4
and 8 MiB took 1.35, 1.6, 2.5 and 4.5 ms; direct ones broke even at descriptors of 8 KiB.
"""

SAMPLE_TOKENS: Final = 2**14
"""Number of tokens by which a route is judged."""


def pays_off(num_bytes: int, num_descriptors: int, descriptor_overhead_s: float, packing: Packing = "auto") -> bool:
    """Return whether a piece is faster when it is packed.

    Args:
        num_bytes: Size of the piece.
        num_descriptors: Number of descriptors of a direct write.
        descriptor_overhead_s: Time that each of them costs besides its bytes, in seconds; 0 if unknown.
        packing: Configured packing mode.
    """
    if packing == "auto":
        return num_descriptors * descriptor_overhead_s > _cost_s(num_bytes)
    return packing == "always" and num_bytes > 0


def descriptors_to_pay_off(num_bytes: int, descriptor_overhead_s: float) -> float:
    """Return the number of descriptors at which packing breaks even; arguments as in `pays_off`."""
    return _cost_s(num_bytes) / descriptor_overhead_s if descriptor_overhead_s else math.inf


def packed_policy(
    split_policy: SplitPolicy, route: BoundRoute, slot_bytes: int, descriptor_overhead_s: float, packing: Packing
) -> SplitPolicy:
    """Return how to split chunks: into pieces that fit a slot, if packing pays off for most of the route.

    Chunks with contiguous pages need no packing, and are split as if there were no slots: small pieces would make their
    descriptors shorter.

    Args:
        split_policy: How to split chunks without slots.
        route: Route of the chunks.
        slot_bytes: Bytes that fit a slot on both sides.
        descriptor_overhead_s: As in `pays_off`.
        packing: As in `pays_off`.
    """
    num_bytes = sum(expected.num_bytes((0, SAMPLE_TOKENS), final=True) for expected in route.expected.values())
    num_descriptors = sum(group.max_descriptors(SAMPLE_TOKENS) for group in route.copy_groups)
    if not num_bytes:
        return split_policy
    num_per_slot = num_descriptors * slot_bytes // num_bytes
    if not pays_off(slot_bytes, num_per_slot, descriptor_overhead_s, packing):
        return split_policy
    of_layers = split_policy.layer_piece_bytes
    can_be_direct = route.pages_contiguous and packing != "always"
    return split_policy.allow_partial_pages(slot_bytes)._replace(
        piece_bytes=min(slot_bytes, split_policy.piece_bytes),
        layer_piece_bytes=None if of_layers is None else min(of_layers, max(1, slot_bytes // 2)),
        is_packed=True,
        direct=split_policy if can_be_direct else None,
        direct_run_bytes=slot_bytes
        * route.descriptors_per_run
        / descriptors_to_pay_off(slot_bytes, descriptor_overhead_s),
    )


def _cost_s(num_bytes: int) -> float:
    """Return the cost of packing a piece, in seconds."""
    return num_bytes * COPY_S_PER_BYTE + BLOCK_S

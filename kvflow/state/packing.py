"""How chunks are sent to a decode rank: packed (gathered, one write, scattered), or written to their pages directly.

A direct write pays an overhead for each descriptor. Packing copies each byte twice more, once on each side, and costs a
fixed time for each piece. The bytes of the write itself are the same either way. Pure.
"""

import math
from typing import Final

from kvflow.config import Packing
from kvflow.geometry.binding import BoundRoute, bind_route
from kvflow.geometry.split import SplitPolicy, split_policy_for
from kvflow.state.events import PeerRoute
from kvflow.state.settings import PrefillSettings
from kvflow.wire.messages import Hello

__all__ = ["BLOCK_S", "COPY_S_PER_BYTE", "descriptors_to_pay_off", "link_for", "packed_policy", "pays_off"]

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

    A direct write takes `num_descriptors`, each of which costs `descriptor_overhead_s` besides its bytes; 0 if unknown.
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

    Chunks with contiguous pages need no packing, and are split as if there were no slots, by `split_policy`: small
    pieces would make their descriptors shorter. A slot's bytes are those that fit on both sides.
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


def link_for(hello: Hello, settings: PrefillSettings) -> PeerRoute:
    """Bind the route of a Hello, which is not trusted, to both layouts, and choose how chunks for it are split.

    Raises:
        RouteError, PlanError: The route does not fit the two layouts.
    """
    route = bind_route(hello.route, settings.layout, hello.layout)
    limits, own = settings.limits, settings.staging
    policy = split_policy_for(route, settings.layout, hello.layout, limits.bytes_per_post, limits.bytes_per_layer_piece)
    staging = None if own is None else hello.staging
    if own is not None and staging is not None:
        slot_bytes = min(own.slot_bytes, staging.slot_bytes)
        policy = packed_policy(policy, route, slot_bytes, own.descriptor_overhead_s, own.packing)
    return PeerRoute(route, hello.layout, hello.route.slices, policy, staging)

"""Whether a piece is packed: gathered into one slot, written at once, and scattered, or written to its pages directly.

Directly, each descriptor costs its overhead. Packed, each byte is copied twice more, once on each side, and each piece
costs its share of planning, of the thread that scatters it and of the word that gives its slot back. The bytes of the
write itself are the same either way.
"""

from typing import Final

from kvflow.config import Packing

__all__ = ["BLOCK_S", "COPY_S_PER_BYTE", "pays_off"]

COPY_S_PER_BYTE: Final = 2 / 3.0e9
"""Gathering and scattering. Source: `kvflow.geometry.pack` on pieces of 512 bytes in random pages that are in no cache,
numpy 2.4 on a machine whose own copy takes 1/5.3e9 s: 2.4 to 3.5 GB/s to gather, 2.5 to 4.5 GB/s to scatter."""

BLOCK_S: Final = 400e-6
"""For each piece. Source: as above; 0.1 ms to find its cells on each side, the rest is threads and messages."""


def pays_off(num_bytes: int, num_rows: int, row_overhead_s: float, packing: Packing = "auto") -> bool:
    """Say whether a piece is quicker when it is packed.

    Args:
        num_bytes: Of the piece.
        num_rows: Descriptors that it takes otherwise.
        row_overhead_s: What each of them costs besides its bytes; 0 if that is not known.
        packing: As the settings say.
    """
    if packing == "auto":
        return num_rows * row_overhead_s > num_bytes * COPY_S_PER_BYTE + BLOCK_S
    return packing == "always" and num_bytes > 0

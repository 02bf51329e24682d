"""Whether a piece is packed: gathered into one slot, written at once, and scattered, or written to its pages directly.

Directly, each descriptor costs its overhead. Packed, each byte is copied twice more, once on each side, and each piece
costs a fixed time. The bytes of the write itself are the same either way.
"""

import math
from typing import Final

from kvflow.config import Packing

__all__ = ["BLOCK_S", "COPY_S_PER_BYTE", "pays_off", "rows_to_pay_off"]

COPY_S_PER_BYTE: Final = 0.15e-9
"""What a packed byte costs more than one of a large descriptor. Gathering and scattering take 0.3 ns each (512 bytes
at a time, in no cache), but most of it is hidden behind the writes of other pieces."""

BLOCK_S: Final = 600e-6
"""What each packed piece costs besides: finding its cells, two threads, the word that gives its slot back.

Source of both: 256 MiB in random pages over NIXL between two processes on 2 cores, numpy 2.4. Packed pieces of 1, 2, 4
and 8 MiB took 1.35, 1.6, 2.5 and 4.5 ms; direct ones broke even at descriptors of 8 KiB.
"""


def pays_off(num_bytes: int, num_rows: int, row_overhead_s: float, packing: Packing = "auto") -> bool:
    """Say whether a piece is quicker when it is packed.

    Args:
        num_bytes: Of the piece.
        num_rows: Descriptors that it takes otherwise.
        row_overhead_s: What each of them costs besides its bytes; 0 if that is not known.
        packing: As the settings say.
    """
    if packing == "auto":
        return num_rows * row_overhead_s > _cost_s(num_bytes)
    return packing == "always" and num_bytes > 0


def rows_to_pay_off(num_bytes: int, row_overhead_s: float) -> float:
    """How many descriptors a piece may take at most to be as quick without packing; arguments as in `pays_off`."""
    return _cost_s(num_bytes) / row_overhead_s if row_overhead_s else math.inf


def _cost_s(num_bytes: int) -> float:
    """What packing a piece costs."""
    return num_bytes * COPY_S_PER_BYTE + BLOCK_S

"""Ranges that are not registered, on which libraries crash, or write to the wrong place."""

import functools
import itertools
from typing import Final

from kvflow.testing.contract.base import ContractBase, check_only_this_arrives, is_refused
from kvflow.testing.endpoints import copies

__all__ = ["RangeContract"]

SIZE: Final = 4096

OUTSIDE: Final = {
    "one byte before": (-1, 64, 0),
    "one byte after": (SIZE - 63, 64, 0),
    "behind": (SIZE, 1, 0),
    "longer than all": (0, SIZE + 1, 0),
    "wraps around": (64, 2**64 - 64, 0),
    "other device": (0, 64, 1),
    "zero length": (0, 0, 0),
    "zero length at the end": (SIZE, 0, 0),
}
"""Start in the buffer, length, and an offset of the device id."""


class RangeContract(ContractBase):
    """Checks that `post` makes before anything moves."""

    async def test_a_range_that_is_not_registered_is_refused(self) -> None:
        """The bad descriptor is between good ones, and none of them is written."""
        accepted: list[str] = []
        async with self.open_some(SIZE) as (source, target):
            for side, (case, (start, length, device)) in itertools.product(("source", "target"), OUTSIDE.items()):
                descriptors = copies(source, target, (0, 128, 256))
                owner, bad = (source, descriptors.src) if side == "source" else (target, descriptors.dst)
                descriptors.src[1, 1] = descriptors.dst[1, 1] = 64
                bad[1] = (owner.address + start, length, owner.buffer.device_id + device)
                if not is_refused(functools.partial(source.post, 9, target, descriptors, b"bad")):
                    accepted.append(f"{case} of the {side}")
            assert accepted == []
            await check_only_this_arrives(source, target)

"""Ranges that are not registered. Libraries crash on them, or write to the wrong place."""

import pytest

from kvflow.errors import BackendError
from kvflow.testing.contract.base import ContractBase, check_only_this_arrives
from kvflow.testing.endpoints import copies

__all__ = ["RangeContract"]

SIZE = 4096


class RangeContract(ContractBase):
    """What `post` checks before anything moves."""

    @pytest.mark.parametrize("side", ["source", "destination"])
    @pytest.mark.parametrize(
        ("start", "length", "device"),
        [
            pytest.param(-1, 64, 0, id="one byte before"),
            pytest.param(SIZE - 63, 64, 0, id="one byte after"),
            pytest.param(SIZE, 1, 0, id="behind"),
            pytest.param(0, SIZE + 1, 0, id="longer than all"),
            pytest.param(64, 2**64 - 64, 0, id="wraps around"),
            pytest.param(0, 64, 1, id="other device"),
            pytest.param(0, 0, 0, id="zero length"),
            pytest.param(SIZE, 0, 0, id="zero length at the end"),
        ],
    )
    async def test_a_range_that_is_not_registered_is_refused(
        self, side: str, start: int, length: int, device: int
    ) -> None:
        """The bad row hides between good ones, and none of them is written."""
        async with self.open_some(SIZE) as (source, target):
            descriptors = copies(source, target, (0, 128, 256))
            owner, bad = (source, descriptors.src) if side == "source" else (target, descriptors.dst)
            descriptors.src[1, 1] = descriptors.dst[1, 1] = 64
            bad[1] = (owner.address + start, length, owner.buffer.device_id + device)
            with pytest.raises(BackendError):
                source.post(9, target, descriptors, b"bad")
            await check_only_this_arrives(source, target)

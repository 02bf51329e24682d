"""What peers tell each other, which is not trusted."""

from collections.abc import Callable

import pytest

from kvflow.backends.metadata import PeerMetadata, RegisteredMemory
from kvflow.errors import BackendError
from kvflow.geometry.layout import MemoryRange
from kvflow.testing.contract.base import ContractBase, check_only_this_arrives
from kvflow.testing.endpoints import copies, fresh_name, random_bytes, same

__all__ = ["MetadataContract"]

FOREIGN = PeerMetadata("carrier pigeon", b"loft 3", RegisteredMemory((MemoryRange(4096, 64),), "DRAM", 0)).pack()
"""As another transport would say it in kvflow's own form."""


def flipped(position: int) -> Callable[[bytes], bytes]:
    """Metadata with one bit changed."""

    def change(blob: bytes) -> bytes:
        changed = bytearray(blob)
        changed[position] ^= 0x40
        return bytes(changed)

    return change


class MetadataContract(ContractBase):
    """`metadata`, and what `connect` makes of it."""

    @pytest.mark.parametrize(
        "damage",
        [
            pytest.param(lambda _: b"", id="empty"),
            pytest.param(lambda blob: blob[:1], id="one byte"),
            pytest.param(lambda blob: blob[:4], id="four bytes"),
            pytest.param(lambda blob: blob[: len(blob) // 2], id="half"),
            pytest.param(lambda blob: blob[:-1], id="last byte cut"),
            pytest.param(lambda blob: blob[1:], id="first byte cut"),
            pytest.param(lambda blob: blob + b"\0", id="one byte more"),
            pytest.param(lambda blob: blob + blob, id="twice"),
            pytest.param(flipped(0), id="bit in the first byte"),
            pytest.param(flipped(-1), id="bit in the last byte"),
            pytest.param(lambda blob: flipped(len(blob) // 2)(blob), id="bit in the middle"),
            pytest.param(lambda blob: b"\0" * len(blob), id="zeros"),
            pytest.param(lambda blob: random_bytes(len(blob), seed=1).tobytes(), id="noise"),
            pytest.param(lambda _: FOREIGN, id="other transport"),
        ],
    )
    async def test_damaged_or_foreign_metadata_is_refused(self, damage: Callable[[bytes], bytes]) -> None:
        """The peer is not connected by it, and can be connected with the right one."""
        async with self.open_some() as (source, target):
            await source.backend.disconnect(target.name)
            with pytest.raises(BackendError):
                await source.backend.connect(target.name, damage(target.backend.metadata()))
            with pytest.raises(BackendError):
                source.post(9, target, copies(source, target))
            await source.connect(target)
            await check_only_this_arrives(source, target)

    async def test_metadata_of_another_agent_is_refused(self) -> None:
        async with self.open_some() as (source, target), self.open_one(seed=9) as third:
            for name in (third.name, "somebody else", source.name + "?"):
                with pytest.raises(BackendError):
                    await source.backend.connect(name, target.backend.metadata())
                with pytest.raises(BackendError):
                    source.backend.post(9, name, copies(source, target), b"")
            await source.connect(third)
            source.post(1, third, copies(source, third))
            source.post(2, target, copies(source, target))
            await source.take_ends(2)
            assert same(source, third, 0, 64)
            assert same(source, target, 0, 64)

    async def test_nothing_works_before_memory_is_registered(self) -> None:
        async with self.open_one() as peer, self.new_backend() as empty:
            for is_open in (False, True):
                if is_open:
                    await empty.open(fresh_name())
                    await empty.connect(peer.name, peer.backend.metadata())
                with pytest.raises(BackendError):
                    empty.metadata()
                with pytest.raises(BackendError):
                    empty.post(1, peer.name, copies(peer, peer), b"")

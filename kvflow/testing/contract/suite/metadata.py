"""Metadata from peers, which is not trusted."""

import functools
from collections.abc import Callable
from typing import Final

import pytest

from kvflow.backends.metadata import PeerMetadata, RegisteredMemory
from kvflow.errors import BackendError
from kvflow.geometry.memory import MemoryRange
from kvflow.testing.contract.base import ContractBase, check_only_this_arrives, is_refused
from kvflow.testing.endpoints import Endpoint, copies, fresh_name, random_bytes, same

__all__ = ["MetadataContract"]

FOREIGN = PeerMetadata("carrier pigeon", b"loft 3", RegisteredMemory((MemoryRange(4096, 64),), "DRAM", 0)).pack()
"""Metadata of another transport, in kvflow's own format."""


def flipped(position: int) -> Callable[[bytes], bytes]:
    """Return a function that flips one bit of metadata."""

    def change(blob: bytes) -> bytes:
        changed = bytearray(blob)
        changed[position] ^= 0x40
        return bytes(changed)

    return change


DAMAGES: Final[dict[str, Callable[[bytes], bytes]]] = {
    "empty": lambda _: b"",
    "one byte": lambda blob: blob[:1],
    "four bytes": lambda blob: blob[:4],
    "half": lambda blob: blob[: len(blob) // 2],
    "last byte cut": lambda blob: blob[:-1],
    "first byte cut": lambda blob: blob[1:],
    "one byte more": lambda blob: blob + b"\0",
    "twice": lambda blob: blob + blob,
    "bit in the first byte": flipped(0),
    "bit in the last byte": flipped(-1),
    "bit in the middle": lambda blob: flipped(len(blob) // 2)(blob),
    "zeros": lambda blob: b"\0" * len(blob),
    "noise": lambda blob: random_bytes(len(blob), seed=1).tobytes(),
    "other transport": lambda _: FOREIGN,
}
"""Ways to damage good metadata."""


class MetadataContract(ContractBase):
    """`metadata`, and its validation by `connect`."""

    async def test_damaged_or_foreign_metadata_is_refused(self) -> None:
        """Damaged metadata does not connect the peer; intact metadata still does."""
        accepted: list[str] = []
        async with self.open_some() as (source, target):
            await source.backend.disconnect(target.name)
            for case, damage in DAMAGES.items():
                if not await self._is_connect_refused(source, target, damage(target.backend.metadata())):
                    accepted.append(case)
            assert accepted == []
            await source.connect(target)
            await check_only_this_arrives(source, target)

    @staticmethod
    async def _is_connect_refused(source: Endpoint, target: Endpoint, metadata: bytes) -> bool:
        """Return whether connecting is refused, and posting afterwards."""
        try:
            await source.backend.connect(target.name, metadata)
        except BackendError:
            return is_refused(functools.partial(source.post, 9, target, copies(source, target)))
        return False

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
                    await Endpoint(fresh_name(), empty, peer.buffer).open()
                    await empty.connect(peer.name, peer.backend.metadata())
                with pytest.raises(BackendError):
                    empty.metadata()
                with pytest.raises(BackendError):
                    empty.post(1, peer.name, copies(peer, peer), b"")

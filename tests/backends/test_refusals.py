"""What kvflow's own transports refuse beyond the contract: well-formed metadata with false content."""

import zlib
from collections.abc import Callable
from typing import Final

import msgspec
import pytest
from msgspec.structs import force_setattr

from kvflow.backends import create_backend, known_backends
from kvflow.backends.metadata import PeerMetadata, RegisteredMemory
from kvflow.errors import BackendError, ConfigError
from kvflow.geometry.memory import MemoryRange
from tests.backends.endpoints import BACKENDS, copies, open_backend, open_endpoints, same

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("backend", BACKENDS)]

SIZE = 4096


async def test_a_range_that_is_not_registered_is_named(backend: str) -> None:
    async with open_endpoints(backend, SIZE) as (source, target):
        for side, owner in enumerate((source, target)):
            descriptors = copies(source, target, (0, 128, 256))
            descriptors[side][1, 0] = owner.address + SIZE
            with pytest.raises(BackendError) as caught:
                source.post(9, target, descriptors)
            assert caught.value.values == {
                "side": ("source", "destination")[side],
                "address": hex(owner.address + SIZE),
                "length": 64,
                "device": 0,
            }


async def test_a_peer_that_is_not_connected_is_named(backend: str) -> None:
    async with open_backend(create_backend(backend, {})) as source:
        with pytest.raises(BackendError) as caught:
            source.backend.post(9, "unknown", copies(source, source), b"")
        assert caught.value.values["peer"] == "unknown"


def with_fields(**fields: object) -> Callable[[bytes], bytes]:
    """Return a function that changes fields of well-formed metadata."""

    def change(blob: bytes) -> bytes:
        return msgspec.structs.replace(unsealed(blob), **fields).pack()

    return change


def unsealed(blob: bytes) -> PeerMetadata:
    return msgspec.msgpack.decode(blob[4:], type=PeerMetadata)


def without_memory(blob: bytes) -> bytes:
    metadata = unsealed(blob)
    return msgspec.structs.replace(metadata, memory=msgspec.structs.replace(metadata.memory, ranges=())).pack()


def sealed(body: bytes) -> bytes:
    return zlib.crc32(body).to_bytes(4, "little") + body


LIES: Final[dict[str, Callable[[bytes], bytes]]] = {
    "not metadata": lambda _: sealed(b"hello"),
    "cut before it was sealed": lambda blob: sealed(blob[4:-10]),
    "other transport": with_fields(backend="carrier pigeon"),
    "no agent": with_fields(agent=b""),
    "agent is garbage": with_fields(agent=b"\x93\0\xff" * 50),
    "no memory": without_memory,
}
"""Changes to good metadata."""


async def test_metadata_that_lies_under_a_good_checksum(backend: str) -> None:
    """The peer stays unconnected, and can be connected with correct metadata."""
    accepted: list[str] = []
    async with open_endpoints(backend, SIZE) as (source, target):
        await source.backend.disconnect(target.name)
        for case, damage in LIES.items():
            try:
                await source.backend.connect(target.name, damage(target.backend.metadata()))
            except BackendError:
                with pytest.raises(BackendError):
                    source.post(9, target, copies(source, target))
            else:
                accepted.append(case)
        assert accepted == []
        await source.connect(target)
        source.post(1, target, copies(source, target))
        await source.take_ends()
        assert same(source, target, 0, 64)


async def test_metadata_with_impossible_memory(backend: str) -> None:
    """An address below zero, one too high for its length, and a length below zero."""
    async with open_endpoints(backend, SIZE) as (source, target):
        await source.backend.disconnect(target.name)
        for address, length in ((-1, 64), (2**64 - 10, 64), (4096, -64)):
            memory = RegisteredMemory((MemoryRange(4096, 64),), "DRAM", 0)
            force_setattr(memory, "ranges", (MemoryRange(address, length),))
            lying = with_fields(memory=memory)(target.backend.metadata())
            with pytest.raises(BackendError, match=r"is invalid|out of range") as caught:
                await source.backend.connect(target.name, lying)
            assert caught.value.values == {"address": address, "length": length}


async def test_the_metadata_of_another_transport(backend: str) -> None:
    other = next(name for name in BACKENDS if name != backend)
    async with open_backend(create_backend(backend, {})) as source, open_backend(create_backend(other, {})) as foreign:
        with pytest.raises(BackendError) as caught:
            await source.connect(foreign)
        sides = (str(caught.value.values[side]).partition("/")[0] for side in ("mine", "theirs"))
        assert tuple(sides) == (backend, other)


async def test_names_and_options_that_do_not_exist(backend: str) -> None:
    with pytest.raises(ConfigError) as caught:
        create_backend(backend, {"speed": "high"})
    assert caught.value.values["unknown"] == ["speed"]
    with pytest.raises(ConfigError) as caught:
        create_backend(backend + "x", {})
    assert set(BACKENDS) <= set(known_backends())
    assert caught.value.values["known"] == known_backends()

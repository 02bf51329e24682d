"""What kvflow's own transports refuse beyond what the contract asks: metadata in their common form that lies."""

import zlib
from collections.abc import Callable

import msgspec
import pytest
from msgspec.structs import force_setattr

from kvflow.backends import create_backend, known_backends
from kvflow.backends.metadata import PeerMetadata, RegisteredMemory
from kvflow.errors import BackendError, ConfigError
from kvflow.geometry.layout import MemoryRange
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
            source.backend.post(9, "stranger", copies(source, source), b"")
        assert caught.value.values["peer"] == "stranger"


def with_fields(**fields: object) -> Callable[[bytes], bytes]:
    """Metadata that is well formed except for what it says."""

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


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda _: sealed(b"hello"), id="not metadata"),
        pytest.param(lambda blob: sealed(blob[4:-10]), id="cut before it was sealed"),
        pytest.param(with_fields(backend="carrier pigeon"), id="other transport"),
        pytest.param(with_fields(agent=b""), id="no agent"),
        pytest.param(with_fields(agent=b"\x93\0\xff" * 50), id="agent is garbage"),
        pytest.param(without_memory, id="no memory"),
    ],
)
async def test_metadata_that_lies_under_a_good_checksum(backend: str, damage: Callable[[bytes], bytes]) -> None:
    """The peer is not connected by it, and can be connected with the right one."""
    async with open_endpoints(backend, SIZE) as (source, target):
        await source.backend.disconnect(target.name)
        with pytest.raises(BackendError):
            await source.backend.connect(target.name, damage(target.backend.metadata()))
        with pytest.raises(BackendError):
            source.post(9, target, copies(source, target))
        await source.connect(target)
        source.post(1, target, copies(source, target))
        await source.take_ends()
        assert same(source, target, 0, 64)


@pytest.mark.parametrize(
    ("address", "length"),
    [
        pytest.param(-1, 64, id="negative address"),
        pytest.param(2**64 - 10, 64, id="over the top"),
        pytest.param(4096, -64, id="negative length"),
    ],
)
async def test_metadata_with_impossible_memory(backend: str, address: int, length: int) -> None:
    async with open_endpoints(backend, SIZE) as (source, target):
        await source.backend.disconnect(target.name)
        memory = RegisteredMemory((MemoryRange(4096, 64),), "DRAM", 0)
        force_setattr(memory, "ranges", (MemoryRange(address, length),))
        lying = with_fields(memory=memory)(target.backend.metadata())
        with pytest.raises(BackendError, match="impossible") as caught:
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
    assert caught.value.values["options"] == ["speed"]
    with pytest.raises(ConfigError) as caught:
        create_backend(backend + "x", {})
    assert set(BACKENDS) <= set(known_backends())
    assert caught.value.values["known"] == known_backends()

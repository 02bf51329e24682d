"""What every transport has to refuse, with nothing done."""

import zlib
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from msgspec.structs import force_setattr

from kvflow.backends import create_backend
from kvflow.backends.metadata import PeerMetadata, RegisteredMemory
from kvflow.errors import BackendError, ConfigError
from kvflow.geometry.layout import MemoryRange
from tests.backends.endpoints import BACKENDS, Endpoint, copies, fresh_name, open_backend, open_endpoints, same

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("backend", BACKENDS)]

SIZE = 4096


async def check_only_this_arrives(source: Endpoint, target: Endpoint) -> None:
    """The endpoints still work, and nothing else was written or has ended."""
    expected = target.memory.copy()
    expected[:64] = source.memory[:64]
    source.post(1, target, copies(source, target), b"good")
    await source.take_ends()
    await target.take_notices()
    await source.close()
    await target.close()
    assert [(end.post_id, end.error) for end in source.ends()] == [(1, None)]
    assert target.notices() == [b"good"]
    assert np.array_equal(target.memory, expected)


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
async def test_a_range_that_is_not_registered(backend: str, side: str, start: int, length: int, device: int) -> None:
    """The bad row hides between good ones, and the error names it."""
    async with open_endpoints(backend, SIZE) as (source, target):
        descriptors = copies(source, target, (0, 128, 256))
        owner, bad = (source, descriptors.src) if side == "source" else (target, descriptors.dst)
        descriptors.src[1, 1] = descriptors.dst[1, 1] = 64
        bad[1] = (owner.address + start, length, device)
        with pytest.raises(BackendError) as caught:
            source.post(9, target, descriptors, b"bad")
        values = caught.value.values
        assert (values["side"], values["address"], values["length"]) == (side, hex(owner.address + start), length)
        await check_only_this_arrives(source, target)


async def test_a_peer_that_is_not_connected(backend: str) -> None:
    async with (
        open_endpoints(backend, SIZE) as (source, target),
        open_backend(create_backend(backend, {}), seed=9) as third,
    ):
        with pytest.raises(BackendError) as caught:
            source.post(9, third, copies(source, third), b"bad")
        assert caught.value.values["peer"] == third.name
        await check_only_this_arrives(source, target)
        assert not same(source, third, 0, 64)


async def test_metadata_and_posts_before_anything_is_registered(backend: str) -> None:
    async with open_backend(create_backend(backend, {})) as peer, create_backend(backend, {}) as empty:
        for is_open in (False, True):
            if is_open:
                await empty.open(fresh_name())
                await empty.connect(peer.name, peer.backend.metadata())
            with pytest.raises(BackendError):
                empty.metadata()
            with pytest.raises(BackendError):
                empty.post(1, peer.name, copies(peer, peer), b"")


def flip_first(blob: bytes) -> bytes:
    return bytes([blob[0] ^ 1]) + blob[1:]


def flip_last(blob: bytes) -> bytes:
    return blob[:-1] + bytes([blob[-1] ^ 0x80])


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
        pytest.param(lambda _: b"", id="empty"),
        pytest.param(lambda blob: blob[:3], id="shorter than the checksum"),
        pytest.param(lambda blob: blob[:-1], id="last byte cut"),
        pytest.param(lambda blob: blob[: len(blob) // 2], id="half"),
        pytest.param(lambda blob: blob + b"\0", id="one byte more"),
        pytest.param(flip_first, id="bit in the checksum"),
        pytest.param(flip_last, id="bit in the body"),
        pytest.param(lambda _: sealed(b"hello"), id="not metadata"),
        pytest.param(lambda blob: sealed(blob[4:-10]), id="cut before it was sealed"),
        pytest.param(with_fields(backend="carrier pigeon"), id="other transport"),
        pytest.param(with_fields(agent=b""), id="no agent"),
        pytest.param(with_fields(agent=b"\x93\0\xff" * 50), id="agent is garbage"),
        pytest.param(without_memory, id="no memory"),
    ],
)
async def test_broken_metadata(backend: str, damage: Callable[[bytes], bytes]) -> None:
    """The peer is not connected by it, and can be connected with the right one."""
    async with open_endpoints(backend, SIZE) as (source, target):
        await source.backend.disconnect(target.name)
        with pytest.raises(BackendError):
            await source.backend.connect(target.name, damage(target.backend.metadata()))
        with pytest.raises(BackendError):
            source.post(9, target, copies(source, target))
        await source.connect(target)
        await check_only_this_arrives(source, target)


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


async def test_metadata_of_another_agent(backend: str) -> None:
    async with open_endpoints(backend, SIZE) as (source, target), open_backend(create_backend(backend, {})) as third:
        with pytest.raises(BackendError):
            await source.backend.connect(third.name, target.backend.metadata())
        with pytest.raises(BackendError):
            await source.backend.connect(source.name + "?", source.backend.metadata())
        await source.connect(third)
        source.post(1, third, copies(source, third))
        await source.take_ends()
        assert same(source, third, 0, 64)


async def test_the_metadata_of_another_transport(backend: str) -> None:
    other = next(name for name in BACKENDS if name != backend)
    async with open_backend(create_backend(backend, {})) as source, open_backend(create_backend(other, {})) as foreign:
        with pytest.raises(BackendError) as caught:
            await source.connect(foreign)
        assert (caught.value.values["mine"], caught.value.values["theirs"]) == (backend, other)


async def test_names_and_options_that_do_not_exist(backend: str) -> None:
    with pytest.raises(ConfigError) as caught:
        create_backend(backend, {"speed": "high"})
    assert caught.value.values["options"] == ["speed"]
    with pytest.raises(ConfigError) as caught:
        create_backend(backend + "x", {})
    assert caught.value.values["known"] == sorted([*BACKENDS, "ascend"])


@pytest.mark.parametrize(("start", "length"), [(-1, 8), (SIZE - 7, 8), (SIZE, 1), (0, 0), (8, 2**64 - 8)])
async def test_memory_that_is_not_registered_cannot_be_seen(backend: str, start: int, length: int) -> None:
    async with open_backend(create_backend(backend, {}), SIZE) as endpoint:
        with pytest.raises(BackendError, match="not registered"):
            endpoint.backend.view(MemoryRange(endpoint.address + start, length))


async def test_memory_cannot_be_seen_before_it_is_registered(backend: str) -> None:
    with pytest.raises(BackendError, match="registered"):
        create_backend(backend, {}).view(MemoryRange(4096, 8))

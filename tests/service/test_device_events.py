"""Chunks that are computed on several streams: no byte is read before its event.

`python -m tests.service.test_device_events` sends them from memory in which any access to a page that is not computed
yet ends the process, whoever makes it: kvflow, its kernels or the transport.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import anyio
import pytest

import kvflow
from kvflow import LayersReady
from kvflow.backends.base import Backend
from kvflow.backends.memory import MemoryBackend
from kvflow.backends.nixl import NixlBackend
from kvflow.bounds import Bounds
from kvflow.errors import FailureReason, TransferFailed
from kvflow.packing.copier import HostCopier
from kvflow.testing.buffers import Bytes
from kvflow.testing.device import FakeDevice
from tests.support import device
from tests.support.instances import Request, decode_config, deploy, prefill_config
from tests.support.pools import PagedShape, Pool
from tests.support.slow import slow_except
from tests.support.streams import Event, Stream, allow_access, forbid_access
from tests.support.waiting import until

SHAPE: Final = PagedShape(num_pages=12, page_size=16, heads=(0, 4), head_bytes=64, num_layers=4)
"""A page of a tensor of a layer is a page of the processor, which has rights of its own."""

UNTOUCHED: Final = 0xEE
STAGING: Final[dict[str, Any]] = {
    "staging_bytes": 2**20,
    "staging_slot_bytes": 2**17,
    "limits": Bounds(bytes_per_layer_piece=1),
}

PAGES: Final = [7, 3, 11, 0, 5, 2]
"""Pages of the request on both sides; two for each of its three chunks."""

FREE_PAGE: Final = 9
"""A page that is computed at the start."""

Layers = tuple[int, int]

ALL_LAYERS: Final = (0, SHAPE.num_layers)


def pages_of(chunk: int) -> list[int]:
    return PAGES[2 * chunk : 2 * chunk + 2]


def cells_of(pool: Pool, chunk: int, layers: Layers) -> list[tuple[Bytes, int]]:
    """Return each page of some layers of a chunk, and the value that all its bytes get."""
    found = []
    for layer in range(*layers):
        grid = pool.buffers[layer].reshape(2, SHAPE.num_pages, SHAPE.page_bytes)
        for page in pages_of(chunk):
            found += [(grid[tensor, page], 1 + 2 * (layer * SHAPE.num_pages + page) + tensor) for tensor in (0, 1)]
    return found


def compute(pool: Pool, chunk: int, layers: Layers) -> None:
    """Compute some layers of a chunk, and let everybody access them from now on."""
    for page, value in cells_of(pool, chunk, layers):
        allow_access(page)
        page[:] = value


def has_arrived(pool: Pool, chunk: int, layers: Layers = ALL_LAYERS) -> bool:
    return all((page == value).all() for page, value in cells_of(pool, chunk, layers))


def launch(pool: Pool, wrong: int | None) -> tuple[Stream, Stream, list[Event]]:
    """Launch the kernels of three chunks, and record their events.

    Args:
        pool: Where they compute.
        wrong: Number of an event that is recorded on another stream, while its kernels never run.

    Returns:
        A stream with the first chunk and then the two halves of the third one, a stream with the second chunk, and the
        events in the order of the chunks.
    """
    first, second, other = Stream(), Stream(), Stream()
    events = [Event() for _ in range(4)]
    work: list[tuple[Stream, int, Layers]] = [(first, 0, ALL_LAYERS), (second, 1, ALL_LAYERS)]
    work += [(first, 2, (0, 2)), (first, 2, (2, 4))]
    for number, (event, (stream, chunk, layers)) in enumerate(zip(events, work, strict=True)):
        stream.launch(partial(compute, pool, chunk, layers if number != wrong else (0, 0)))
        event.record(stream)
        if number == wrong:
            event.record(other)
            other.run()
    return first, second, events


def make_source() -> Pool:
    """Return a pool in which only one page may be accessed."""
    pool = Pool(SHAPE, UNTOUCHED)
    for buffer in pool.buffers:
        forbid_access(buffer)
        for page in buffer.reshape(2, SHAPE.num_pages, SHAPE.page_bytes)[:, FREE_PAGE]:
            allow_access(page)
    return pool


async def hand_over(backend: str, packing: str, wrong: int | None) -> None:
    """Send two chunks, the second of which is computed first, and a third one in two halves of its layers.

    Args:
        backend: Transport.
        packing: "never" or "always".
        wrong: As for `launch`.
    """
    source, target = make_source(), Pool(SHAPE, UNTOUCHED)
    first, second, events = launch(source, wrong)

    async def send() -> None:
        async with prefill.send(1) as sender:
            await sender.chunk((0, 32), {"kv": pages_of(0)}, ready=events[0])
            await sender.chunk((32, 64), {"kv": pages_of(1)}, ready=events[1])
            halves = [LayersReady(2, events[2]), LayersReady(4, events[3])]
            await sender.finish((64, 96), {"kv": pages_of(2)}, layers=halves)

    async with kvflow.Registry() as registry:
        sending = prefill_config(registry.endpoint, backend=backend, packing=packing, **STAGING)
        digest_every = int(target.layout.is_on_host)
        receiving = decode_config(registry.endpoint, backend=backend, digest_every=digest_every, **STAGING)
        async with (
            kvflow.PrefillRank(sending, source.layout) as prefill,
            kvflow.DecodeRank(receiving, target.layout) as decode,
            anyio.create_task_group() as tasks,
            decode.receive(1, prefill="prefill", tokens=(0, 96), pages={"kv": PAGES}) as receiver,
        ):
            tasks.start_soon(send)
            await until(lambda: events[0].num_waits)
            second.run()
            await pass_by(prefill, decode, 2)
            first.run(2)
            await until(lambda: has_arrived(target, 0) and has_arrived(target, 1) and events[2].num_waits)
            await pass_by(prefill, decode, 3)
            first.run(2)
            await until(lambda: has_arrived(target, 2, (0, 2)))
            await pass_by(prefill, decode, 4)
            assert all((page == UNTOUCHED).all() for page, _ in cells_of(target, 2, (2, 4)))
            first.run(2)
            assert (await receiver.done()).num_notices == 4
            assert has_arrived(target, 2)
            staging = prefill.statistics().staging
            assert (staging.packed_posts, staging.direct_posts) == ((7, 0) if packing == "always" else (0, 7))


async def pass_by(prefill: kvflow.PrefillRank, decode: kvflow.DecodeRank, room: int) -> None:
    """Hand over something else, during which whatever need not wait is read."""
    async with (
        prefill.send(room) as sender,
        decode.receive(room, prefill="prefill", tokens=(0, 16), pages={"kv": [FREE_PAGE]}) as receiver,
    ):
        await sender.finish((0, 16), {"kv": [FREE_PAGE]})
        await receiver.done()


def allocate_pages(num_bytes: int, fill: int) -> tuple[Bytes, int]:
    """Allocate host memory of whole pages of the processor."""
    memory = FakeDevice().allocate(num_bytes)
    memory.array[:] = fill
    return memory.array, int(memory.array.ctypes.data)


def main(arguments: Sequence[str]) -> None:
    if device.DEVICE is None:
        device.allocate = allocate_pages
    backends, packings, wrong = arguments
    for backend in backends.split():
        for packing in packings.split():
            anyio.run(hand_over, backend, packing, int(wrong) if wrong else None)


def run(fake_device: str, backends: str, packings: str, wrong: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.service.test_device_events"]
    environment = os.environ | {"FAKE_DEVICE": fake_device}
    return subprocess.run(
        [*command, backends, packings, wrong], env=environment, capture_output=True, check=False, timeout=50, text=True
    )


@pytest.mark.parametrize("fake_device", ["", "high"], ids=["host", "device"])
def test_no_byte_is_read_before_its_event(fake_device: str) -> None:
    done = run(fake_device, "memory nixl", "never always", "")
    assert done.returncode == 0, done.stderr


CAUGHT = [
    ("", "memory", "never", "0", "digest.py"),
    ("", "memory", "always", "2", "copier.py"),
    ("high", "memory", "never", "3", "memory.py"),
    ("high", "memory", "always", "0", "device.py"),
    ("high", "nixl", "never", "3", "write_failed"),  # the kernel refuses to read there
    ("high", "nixl", "always", "2", "device.py"),
]
"""Device, transport, packing, number of the event that is on the wrong stream, and a word about who reads too early."""


@pytest.mark.parametrize(("fake_device", "backend", "packing", "wrong", "told"), slow_except([CAUGHT[2]], CAUGHT))
def test_a_read_before_an_event_is_caught(fake_device: str, backend: str, packing: str, wrong: str, told: str) -> None:
    done = run(fake_device, backend, packing, wrong)
    assert done.returncode == (1 if told == "write_failed" else -signal.SIGSEGV)
    assert told in done.stderr


# Kernels that still write after their event --------------------------------------------------------------------------


Method = Callable[..., None]


def running_first(stream: Stream, method: Method) -> Method:
    def call(*given: object, **named: object) -> None:
        stream.run()
        method(*given, **named)

    return call


def running_last(stream: Stream, method: Method) -> Method:
    def call(*given: object, **named: object) -> None:
        method(*given, **named)
        stream.run()

    return call


@pytest.mark.host_memory
@pytest.mark.anyio
@pytest.mark.parametrize("backend", [MemoryBackend, NixlBackend])
@pytest.mark.parametrize(
    ("packing", "moment", "is_found"),
    [
        ("never", "before the write", True),
        ("always", "before the digest", True),
        ("never", "after the write", False),
        ("always", "before the write", False),
    ],
)
async def test_a_kernel_that_writes_after_its_event(
    backend: type[Backend], packing: str, moment: str, is_found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Digests find it if it writes between the digest and the last read of the pages. Later, nothing does."""
    stream, other, event = Stream(), Stream(), Event()
    event.record(other)
    other.run()
    if moment == "before the write":
        for name in ("post", "post_blocks"):
            monkeypatch.setattr(backend, name, running_first(stream, getattr(backend, name)))
    if moment == "before the digest":
        monkeypatch.setattr(HostCopier, "copy", running_last(stream, HostCopier.copy))
    outcomes: list[FailureReason | None] = []

    async def receive(request: Request) -> None:
        try:
            await request.receive()
        except TransferFailed as failure:
            outcomes.append(failure.reason)
        else:
            outcomes.append(None)

    async with deploy(backend.name, digest_every=1, sending={"packing": packing}) as deployment:
        request = deployment.request(1, 8)
        stream.launch(lambda: request.compute(0, 8))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(receive, request)
            with suppress(TransferFailed):
                async with deployment.prefill[0].send(1) as sender:
                    await sender.finish((0, 8), request.src_pages(0, (0, 8)), ready=event)
        assert outcomes == [FailureReason.CORRUPT if is_found else None]
        stream.run()
        if (packing, moment) == ("never", "before the write"):
            request.assert_arrived()
        else:
            with pytest.raises(AssertionError):
                request.assert_arrived()


if __name__ == "__main__":
    main(sys.argv[1:])

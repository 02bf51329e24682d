"""Random pairs of instances in the whole service: real messages, real transports, real memory."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import pairwise
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import kvflow
from kvflow.backends import nixl
from kvflow.backends.base import Backend
from kvflow.bounds import Bounds
from kvflow.geometry.memory import Location
from kvflow.geometry.pages import TokenPages
from kvflow.statistics import StagingStatistics
from kvflow.testing.device import FakeDevice, on_fake_device
from tests.support.examples import examples
from tests.support.faulty_memory import MappedMemoryBackend
from tests.support.instances import decode_config, prefill_config
from tests.support.worlds import Rank, World, worlds

pytestmark = pytest.mark.anyio

MAX_RANKS = 8

small_worlds = worlds().filter(lambda world: len(world.prefill) + len(world.decode) <= MAX_RANKS)

posts = st.sampled_from([1, 50, 300, 2**20])
"""Limits of the bytes of a write: one page, a few pages, everything."""

stops_of_layers = st.just(()) | st.sets(st.integers(1, 5), min_size=1).map(lambda stops: tuple(sorted(stops)))
"""Ends of the groups of layers that get ready together; empty if a chunk gets ready as a whole."""

ordinals = st.none() | st.tuples(*[st.sampled_from([0, 3])] * 3)
"""Numbers of the devices that hold the components of a rank; None for host memory."""

ROOM = 1

STAGING = {"staging_bytes": 2**24, "staging_slot_bytes": 2**18}
"""Staging memory for tests that pack everything; there is none by default on devices."""


@pytest.mark.host_memory
@settings(max_examples=examples(60), suppress_health_check=list(HealthCheck))
@given(world=small_worlds, post=posts, stops=stops_of_layers)
async def test_over_memory_at_any_address(world: World, post: int, stops: tuple[int, ...]) -> None:
    await hand_over(world, "memory", bytes_per_post=post, stops=stops)


@settings(max_examples=examples(12), suppress_health_check=list(HealthCheck))
@given(world=small_worlds, post=posts, stops=stops_of_layers, source=ordinals, target=ordinals)
async def test_over_nixl(
    world: World, post: int, stops: tuple[int, ...], source: Sequence[int] | None, target: Sequence[int] | None
) -> None:
    """On devices, whose addresses may have bit 63, the host must not touch anything."""
    for side, devices in ((world.prefill, source), (world.decode, target)):
        for rank in side.values():
            if devices is not None:
                put_on_devices(rank, devices)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nixl, "NixlBackend", on_fake_device(nixl.NixlBackend))
        await hand_over(world, "nixl", bytes_per_post=post, stops=stops)


def put_on_devices(rank: Rank, ordinals: Sequence[int]) -> None:
    """Move the memory of a rank, each component to the device with the next of some numbers."""
    memory = FakeDevice(ordinals[0], is_high=rank.base >= 2**63).allocate(len(rank.memory))
    memory.write(0, rank.memory)
    rank.memory = memory.array
    rank.move(memory.address)
    rank.layout = replace(rank.layout, memory_kind="VRAM", device_id=ordinals[0])
    rank.scatter([Location("VRAM", ordinal) for ordinal in ordinals])


async def hand_over(world: World, backend: str, **options: Any) -> StagingStatistics:
    """Compute and `transfer` the request, and compare all memory with the model."""
    if backend != "memory":  # it maps any address
        for rank in (*world.prefill.values(), *world.decode.values()):
            if rank.layout.is_on_host:
                rank.move(rank.memory.ctypes.data)
    world.compute()
    found = await transfer(world, backend, **options)
    for rank in world.decode.values():
        np.testing.assert_array_equal(rank.memory, world.expected(rank, world.held()))
    return found


async def transfer(
    world: World,
    backend: str,
    *,
    digest_every: int = 0,
    bytes_per_post: int = 2**20,
    stops: tuple[int, ...] = (),
    packing: str = "auto",
) -> StagingStatistics:
    """Open every rank, send and receive the request; return the statistics of packing."""
    totals = [0, 0]
    staging = STAGING if packing == "always" else {}
    async with kvflow.Registry() as registry, AsyncExitStack() as stack:
        senders, receivers = [], []
        for number, (_, rank) in enumerate(sorted(world.prefill.items())):
            limits = Bounds(bytes_per_post=bytes_per_post, bytes_per_layer_piece=bytes_per_post)
            sending = {"backend": backend, "limits": limits, "packing": packing, **staging}
            config = prefill_config(registry.endpoint, number, len(world.prefill), **sending)
            opened = kvflow.PrefillRank(config, rank.layout, transport(backend, rank))
            senders.append((await stack.enter_async_context(opened), rank))
        for number, (_, rank) in enumerate(sorted(world.decode.items())):
            receiving = {"backend": backend, "digest_every": digest_every, **staging}
            settings_ = decode_config(registry.endpoint, number, len(world.decode), **receiving)
            receiver = kvflow.DecodeRank(settings_, rank.layout, transport(backend, rank))
            receivers.append((await stack.enter_async_context(receiver), rank))
        async with anyio.create_task_group() as tasks:
            for prefill, rank in senders:
                tasks.start_soon(send, world, prefill, rank, stops)
            for decode, rank in receivers:
                tasks.start_soon(receive, world, decode, rank)
        for prefill, _ in senders:
            found = prefill.statistics().staging
            totals = [totals[0] + found.packed_posts, totals[1] + found.direct_posts]
    return StagingStatistics(packed_posts=totals[0], direct_posts=totals[1])


async def send(
    world: World,
    prefill: kvflow.PrefillRank,
    rank: Rank,
    stops: tuple[int, ...],
) -> None:
    """Send the paged main component chunk by chunk, and everything else with the last chunk."""
    num_tokens = world.num_tokens["kv"]
    names = [component.name for component in rank.layout.components]
    edges = [0, *world.cuts["kv"], num_tokens]
    layers = [kvflow.LayersReady(stop) for stop in stops]
    async with prefill.send(ROOM) as sender:
        for start, stop in pairwise(edges[:-1]):
            if start < stop:
                pages = {"kv": rank.pages("kv", (start, stop))} if "kv" in names else {}
                await sender.chunk((start, stop), pages, layers=layers)
        last = (edges[-2], num_tokens)
        parts = {name: TokenPages((0, world.num_tokens[name]), rank.tables[name]) for name in names}
        if "kv" in names:
            parts["kv"] = TokenPages(last, rank.pages("kv", last))
        parts = {name: with_all_pages(rank, name, part) for name, part in parts.items()}
        await sender.finish(last, parts, layers=layers)


def with_all_pages(rank: Rank, name: str, part: TokenPages) -> TokenPages:
    """Return a part with the pages of the tokens that the rank holds."""
    return TokenPages(part.tokens, rank.pages(name, part.tokens))


async def receive(world: World, decode: kvflow.DecodeRank, rank: Rank) -> None:
    pages = {
        component.name: TokenPages(
            world.wanted[component.name], rank.pages(component.name, world.wanted[component.name])
        )
        for component in rank.layout.components
    }
    tokens = world.wanted["kv"]
    async with decode.receive(ROOM, prefill="prefill", tokens=tokens, pages=pages) as receiver:
        handover = await receiver.done()
    held = {name[:3] for name in world.held()}
    assert handover.num_bytes == int((world.expected(rank, held) != world.expected(rank, set())).sum())


def transport(backend: str, rank: Rank) -> Backend | None:
    if backend != "memory":
        return None
    return MappedMemoryBackend(rank.base, len(rank.memory), rank.memory.ctypes.data)

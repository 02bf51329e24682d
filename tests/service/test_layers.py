"""Layer-wise sending: layers are sent while others are computed, and no layer is read before it is ready.

The device events of these tests compute the layers that they stand for: the cells of a group of layers exist when
`synchronize` returns, and not before. A complete transfer proves that no layer was read too early.
"""

import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
import torch

import kvflow
from kvflow import LayersReady, blocking
from kvflow.bounds import Bounds
from kvflow.config import Limits
from kvflow.errors import FailureReason, PlanError, TransferFailed
from kvflow.geometry import head_range
from kvflow.stages.enqueue import make_chunk
from tests.support.failures import catch
from tests.support.instances import BACKENDS, NUM_HEADS, NUM_PAGES, PAGE_SIZE, decode_config, prefill_config
from tests.support.pools import PagedShape, Pool
from tests.support.registries import registry_in_thread
from tests.support.slow import on_backends
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

NUM_LAYERS = 4
NUM_TOKENS = 19
UNTOUCHED = 0xEE
PAGES = [7, 3, 40, 11, 29]
STREAMING = Bounds(bytes_per_layer_piece=1)
BYTES = 2 * NUM_LAYERS * NUM_TOKENS * NUM_HEADS * 8


def value(tensor: str, layer: int, token: int, head: int) -> int:
    return 1 + (("kv".index(tensor) * NUM_LAYERS + layer) * 31 + token * NUM_HEADS + head) % 200


@dataclass
class Device:
    """A device event that computes some layers of some tokens in `synchronize`, once allowed; or raises."""

    pool: Pool
    layers: tuple[int, int]
    tokens: tuple[int, int]
    may_run: threading.Event | None = None
    error: Exception | None = None
    num_waits: int = 0

    def synchronize(self) -> None:
        self.num_waits += 1
        if self.may_run is not None:
            self.may_run.wait()
        if self.error is not None:
            raise self.error
        fill(self.pool, self.layers, self.tokens)


def fill(pool: Pool, layers: tuple[int, int], tokens: tuple[int, int]) -> None:
    for layer in set(range(*layers)) & set(layers_of(pool)):
        for token in range(*tokens):
            for head in range(*pool.shape.heads):
                for tensor in "kv":
                    pool.cell(tensor, layer, PAGES[token // PAGE_SIZE], token % PAGE_SIZE, head)[:] = value(
                        tensor, layer, token, head
                    )


def layers_of(pool: Pool) -> range:
    return range(pool.shape.first_layer, pool.shape.first_layer + pool.shape.num_layers)


def make_pool(tp: int = 1, tp_rank: int = 0, layers: range = range(NUM_LAYERS)) -> Pool:
    shape = PagedShape(NUM_PAGES, PAGE_SIZE, head_range(NUM_HEADS, tp, tp_rank), 8, len(layers), layers.start)
    return Pool(shape, UNTOUCHED)


def table(tokens: tuple[int, int]) -> dict[str, list[int]]:
    return {"kv": PAGES[tokens[0] // PAGE_SIZE : -(-tokens[1] // PAGE_SIZE)] if tokens[0] < tokens[1] else []}


def groups(pool: Pool, tokens: tuple[int, int], stops: tuple[int, ...] = (1, 2, 3, 4)) -> list[LayersReady]:
    starts = (0, *stops[:-1])
    return [LayersReady(stop, Device(pool, (start, stop), tokens)) for start, stop in zip(starts, stops, strict=True)]


def has_arrived(pool: Pool, layers: tuple[int, int], tokens: tuple[int, int] = (0, NUM_TOKENS)) -> bool:
    expected = make_pool_like(pool)
    fill(expected, layers, tokens)
    wanted = [layer - pool.shape.first_layer for layer in range(*layers)]
    return all(np.array_equal(pool.buffers[index], expected.buffers[index]) for index in wanted)


def make_pool_like(pool: Pool) -> Pool:
    return Pool(pool.shape, UNTOUCHED)


@dataclass
class Instances:
    prefill: list[kvflow.PrefillRank] = field(default_factory=list)
    decode: list[kvflow.DecodeRank] = field(default_factory=list)
    sources: list[Pool] = field(default_factory=list)
    targets: list[Pool] = field(default_factory=list)

    def receiver(self, rank: int = 0, *, timeout_s: float | None = None) -> kvflow.RoomReceiver:
        whole = (0, NUM_TOKENS)
        return self.decode[rank].receive(1, prefill="prefill", tokens=whole, pages=table(whole), timeout_s=timeout_s)

    async def send(self, rank: int, stops: tuple[int, ...]) -> None:
        """Send two chunks, each layer by layer."""
        async with self.prefill[rank].send(1) as sender:
            source = self.sources[rank]
            await sender.chunk((0, 10), table((0, 10)), layers=groups(source, (0, 10), stops))
            rest = (10, NUM_TOKENS)
            await sender.finish(rest, table(rest), metadata=b"token", layers=groups(source, rest, stops))


@asynccontextmanager
async def instances(
    backend: str = "memory",
    *,
    stages: int = 1,
    tp: int = 1,
    decode_stages: int = 1,
    decode_tp: int = 1,
    limits: Limits = STREAMING,
    digest_every: int = 0,
) -> AsyncIterator[Instances]:
    found = Instances()
    async with kvflow.Registry() as registry, AsyncExitStack() as stack:
        for number in range(stages * tp):
            pool = make_pool(tp, number % tp, stage(number // tp, stages))
            config = prefill_config(registry.endpoint, number, stages * tp, backend=backend, limits=limits)
            found.prefill.append(await stack.enter_async_context(kvflow.PrefillRank(config, pool.layout)))
            found.sources.append(pool)
        for number in range(decode_stages * decode_tp):
            pool = make_pool(decode_tp, number % decode_tp, stage(number // decode_tp, decode_stages))
            settings = decode_config(
                registry.endpoint, number, decode_stages * decode_tp, backend=backend, digest_every=digest_every
            )
            found.decode.append(await stack.enter_async_context(kvflow.DecodeRank(settings, pool.layout)))
            found.targets.append(pool)
        yield found


def stage(number: int, count: int) -> range:
    size = NUM_LAYERS // count
    return range(number * size, (number + 1) * size)


@pytest.mark.parametrize(
    ("backend", "split", "stops", "num_notices"),
    on_backends(
        [({"tp": 2, "decode_tp": 3}, (2, 4), 8)],
        [
            ({}, (1, 2, 3, 4), 8),
            ({}, (3, 4), 4),
            ({"tp": 2, "decode_tp": 3}, (2, 4), 8),
            ({"stages": 2}, (1, 2, 3, 4), 8),
            ({"stages": 2, "tp": 2, "decode_tp": 1}, (1, 2, 3, 4), 16),
            ({"decode_stages": 2}, (1, 2, 3, 4), 4),
            ({"stages": 2, "decode_stages": 4}, (1, 2, 3, 4), 2),
        ],
    ),
    ids=str,
)
async def test_every_layer_arrives_whatever_the_split(
    backend: str, split: dict[str, int], stops: tuple[int, ...], num_notices: int
) -> None:
    async with instances(backend, digest_every=1, **split) as ranks:  # type: ignore[arg-type]
        handovers: list[kvflow.Handover] = []

        async def receive(rank: int) -> None:
            async with ranks.receiver(rank) as receiver:
                handovers.append(await receiver.done())

        async with anyio.create_task_group() as tasks:
            for rank in range(len(ranks.prefill)):
                tasks.start_soon(ranks.send, rank, stops)
            for rank in range(len(ranks.decode)):
                tasks.start_soon(receive, rank)
        for target in ranks.targets:
            layers = layers_of(target)
            assert has_arrived(target, (layers.start, layers.stop))
        assert sum(handover.num_bytes for handover in handovers) == BYTES
        assert all(handover.metadata == b"token" for handover in handovers)
        assert max(handover.num_notices for handover in handovers) == num_notices


@pytest.mark.parametrize("backend", BACKENDS)
async def test_first_layers_arrive_while_the_last_ones_are_computed(backend: str) -> None:
    async with instances(backend) as ranks, anyio.create_task_group() as tasks:
        source, target = ranks.sources[0], ranks.targets[0]
        layers = groups(source, (0, NUM_TOKENS), (2, 4))
        last = layers[1].ready
        assert isinstance(last, Device)
        last.may_run = threading.Event()
        async with ranks.receiver() as receiver:

            async def send() -> None:
                async with ranks.prefill[0].send(1) as sender:
                    await sender.finish((0, NUM_TOKENS), table((0, NUM_TOKENS)), layers=layers)

            tasks.start_soon(send)
            await until(lambda: has_arrived(target, (0, 2)))
            assert receiver.outcome is kvflow.Outcome.PENDING
            assert all((target.buffers[layer] == UNTOUCHED).all() for layer in (2, 3))
            last.may_run.set()
            assert (await receiver.done()).num_notices == 2
        assert has_arrived(target, (0, 4))


async def test_a_short_chunk_goes_in_one_piece_and_waits_for_its_last_layer_only() -> None:
    async with instances(limits=Limits()) as ranks, anyio.create_task_group() as tasks:
        source = ranks.sources[0]
        last = Device(source, (0, 4), (0, NUM_TOKENS))
        early = [Device(source, (0, 0), (0, 0)) for _ in range(3)]
        layers = [*(LayersReady(stop, event) for stop, event in zip((1, 2, 3), early, strict=True))]

        async def send() -> None:
            async with ranks.prefill[0].send(1) as sender:
                whole = (0, NUM_TOKENS)
                await sender.finish(whole, table(whole), layers=[*layers, LayersReady(4, last)])

        tasks.start_soon(send)
        async with ranks.receiver() as receiver:
            assert (await receiver.done()).num_notices == 1
        assert ([event.num_waits for event in early], last.num_waits) == ([0, 0, 0], 1)
        assert has_arrived(ranks.targets[0], (0, 4))


async def test_layers_that_break_fail_both_sides_and_leave_the_pages_safe() -> None:
    async with instances() as ranks, anyio.create_task_group() as tasks:
        layers = groups(ranks.sources[0], (0, NUM_TOKENS))
        broken = layers[2].ready
        assert isinstance(broken, Device)
        broken.error = RuntimeError("kernel failed")

        async def send() -> None:
            async with ranks.prefill[0].send(1) as sender:
                await sender.finish((0, NUM_TOKENS), table((0, NUM_TOKENS)), layers=layers)

        async def receive() -> None:
            async with ranks.receiver() as receiver:
                await receiver.done()

        async def fail_to_send() -> None:
            failure = await catch(send)
            assert (failure.reason, failure.quarantined) == (FailureReason.NOT_READY, False)

        tasks.start_soon(fail_to_send)
        failure = await catch(receive)
        assert (failure.reason, failure.quarantined) == (FailureReason.NOT_READY, False)
        assert "kernel failed" in failure.detail


async def test_decode_may_leave_while_layers_are_computed() -> None:
    async with instances() as ranks, anyio.create_task_group() as tasks:
        source, target = ranks.sources[0], ranks.targets[0]
        layers = groups(source, (0, NUM_TOKENS), (2, 4))
        last = layers[1].ready
        assert isinstance(last, Device)
        last.may_run = threading.Event()

        async def fail_to_send() -> None:
            with pytest.raises(TransferFailed, match="aborted the transfer"):
                async with ranks.prefill[0].send(1) as sender:
                    await sender.finish((0, NUM_TOKENS), table((0, NUM_TOKENS)), layers=layers)
            assert sender.memory is kvflow.Memory.SAFE

        tasks.start_soon(fail_to_send)
        async with ranks.receiver() as receiver:
            await until(lambda: has_arrived(target, (0, 2)))
        assert receiver.memory is kvflow.Memory.SAFE
        last.may_run.set()
        await until(lambda: not ranks.prefill[0].statistics().queued_chunks)
        assert all((target.buffers[layer] == UNTOUCHED).all() for layer in (2, 3))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([LayersReady(2), LayersReady(2)], "ascending order"),
        ([LayersReady(0), LayersReady(2)], "ascending order"),
        ([LayersReady(3), LayersReady(2)], "ascending order"),
        ([4], "must contain LayersReady values"),
        ([("2", None)], "must contain LayersReady values"),
    ],
)
def test_layers_out_of_order_are_refused(layers: list[LayersReady], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make_chunk(make_pool().layout, (0, 4), table((0, 4)), layers=layers)


class Unrecorded:
    """What `torch.cuda.Event` and `torch.xpu.Event` are before `record`: `synchronize` returns at once."""

    def __init__(self, handle: str, value: int = 0) -> None:
        setattr(self, handle, value)

    def synchronize(self) -> None:
        """Return, as torch does when there is nothing to wait for."""


@pytest.mark.parametrize(("kind", "handle"), [(torch.cuda.Event, "cuda_event"), (torch.xpu.Event, "sycl_event")])
def test_an_event_that_was_never_recorded_is_refused(kind: Any, handle: str) -> None:
    event: Any = Unrecorded(handle)
    assert "uninitialized" in kind.__repr__(event), "torch calls it so"
    layout = make_pool().layout
    with pytest.raises(PlanError, match="never recorded"):
        make_chunk(layout, (0, 4), table((0, 4)), ready=event)
    with pytest.raises(PlanError, match="never recorded"):
        make_chunk(layout, (0, 4), table((0, 4)), layers=[LayersReady(2), LayersReady(4, event)])
    with pytest.raises(PlanError, match="synchronize"):
        make_chunk(layout, (0, 4), table((0, 4)), layers=[LayersReady(4, 4)])  # type: ignore[arg-type]
    recorded: Any = Unrecorded(handle, 0x7F00)
    assert make_chunk(layout, (0, 4), table((0, 4)), ready=recorded).ready is recorded


def test_an_event_of_any_accelerator_that_was_never_recorded_is_refused() -> None:
    with pytest.raises(PlanError, match="never recorded"):
        make_chunk(make_pool().layout, (0, 4), table((0, 4)), ready=torch.Event())


@pytest.mark.slow
async def test_an_event_that_never_fires_ends_both_sides_and_nothing_of_its_layers_is_read() -> None:
    async with instances() as ranks, anyio.create_task_group() as tasks:
        source, target = ranks.sources[0], ranks.targets[0]
        layers = groups(source, (0, NUM_TOKENS), (2, 4))
        last = layers[1].ready
        assert isinstance(last, Device)
        last.may_run = threading.Event()

        async def send() -> None:
            async with ranks.prefill[0].send(1) as sender:
                await sender.finish((0, NUM_TOKENS), table((0, NUM_TOKENS)), layers=layers)

        failures: list[FailureReason] = []

        async def fail_to_send() -> None:
            failures.append((await catch(send)).reason)

        tasks.start_soon(fail_to_send)
        receiver = ranks.receiver(timeout_s=4.0)

        async def receive() -> None:
            async with receiver:
                await receiver.done()

        failure = await catch(receive)
        await until(lambda: bool(failures))
        assert (failure.reason, failures) == (FailureReason.DEADLINE, [FailureReason.DEADLINE])
        assert receiver.memory is kvflow.Memory.SAFE
        last.may_run.set()
        await until(lambda: not ranks.prefill[0].statistics().queued_chunks)
        assert all((target.buffers[layer] == UNTOUCHED).all() for layer in (2, 3))


async def test_ranks_close_while_an_event_does_not_fire() -> None:
    may_run, waits = threading.Event(), threading.Event()

    class Never(Device):
        def synchronize(self) -> None:
            waits.set()
            may_run.wait()

    try:
        async with anyio.create_task_group() as tasks, instances() as ranks:
            pool = ranks.sources[0]
            never = Never(pool, (0, NUM_LAYERS), (0, NUM_TOKENS))

            async def send() -> None:
                async with ranks.prefill[0].send(1) as sender:
                    await sender.finish((0, NUM_TOKENS), table((0, NUM_TOKENS)), ready=never)

            async def receive() -> None:
                async with ranks.receiver() as receiver:
                    await receiver.done()

            tasks.start_soon(catch, send)
            tasks.start_soon(catch, receive)
            await until(waits.is_set)
        assert not may_run.is_set()
    finally:
        may_run.set()  # or the thread would keep the process from ending


def test_layers_and_an_event_for_all_of_them_are_refused() -> None:
    pool = make_pool()
    with pytest.raises(PlanError, match="are mutually exclusive"):
        make_chunk(pool.layout, (0, 4), table((0, 4)), ready=Device(pool, (0, 4), (0, 4)), layers=[LayersReady(4)])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_scheduler_streams_layers_too(backend: str) -> None:
    source, target = make_pool(), make_pool()
    with registry_in_thread() as endpoint:
        config = prefill_config(endpoint, backend=backend, limits=STREAMING)
        with (
            blocking.PrefillRank(config, source.layout) as prefill,
            blocking.DecodeRank(decode_config(endpoint, backend=backend), target.layout) as decode,
        ):
            whole = (0, NUM_TOKENS)
            receiver = decode.receive(1, prefill="prefill", tokens=whole, pages=table(whole))
            sender = prefill.send(1)
            sender.chunk((0, 10), table((0, 10)), layers=groups(source, (0, 10), (2, 4)))
            rest = (10, NUM_TOKENS)
            sender.finish(rest, table(rest), metadata=b"token", layers=groups(source, rest, (1, 4)))
            assert (receiver.wait(), sender.wait()) == (blocking.Outcome.SUCCESS, blocking.Outcome.SUCCESS)
            assert receiver.result().num_notices == 4
            assert has_arrived(target, (0, 4))

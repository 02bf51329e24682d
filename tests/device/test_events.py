"""kvflow reads no page before its event, on a device."""

import pytest
import torch

import kvflow
from benchmarks.pair.loads import Tables
from benchmarks.pools import PagePool
from kvflow.bounds import Bounds
from kvflow.state.events.prefill import ReadyEvent
from tests.device.devices import needs_device
from tests.device.handovers import SHAPE, TOKENS, Send, hand_over, new_tables

pytestmark = [pytest.mark.anyio, pytest.mark.device]

DEVICE = needs_device()


class LatePool:
    """Computes the pool of prefill while it is sent, one tensor after another."""

    def __init__(self) -> None:
        self._pool: PagePool

    def prepare(self, pool: PagePool) -> None:
        """Take the pool, which stays empty."""
        self._pool = pool

    def compute(self, *layers: int, after: ReadyEvent | None = None) -> ReadyEvent:
        """Start to compute some layers on a stream of their own, after an event; return the event of the last."""
        pool = self._pool
        wanted = PagePool(SHAPE, pool.num_pages)
        wanted.fill()
        size = len(SHAPE.tensors) * pool.tensor_bytes
        start, stop = min(layers) * size, (max(layers) + 1) * size
        return DEVICE.compute_late(pool.place, start, wanted.memory[start:stop], after)


async def hand_over_late(send: Send, late: LatePool, **limits: int) -> None:
    """Hand over a request that is computed while it is sent, and check what has arrived."""
    allocate = (DEVICE.allocate_pool, DEVICE.allocate_pool)
    tables = new_tables("random")
    sending = {"limits": Bounds(**limits)}
    pool, _ = await hand_over("nixl", allocate, tables, send=send, prepare=late.prepare, sending=sending)
    assert pool.holds(tables.dst, tables.src * SHAPE.page_size)


async def test_a_chunk_is_read_after_its_event() -> None:
    late = LatePool()

    async def send(sender: kvflow.RoomSender, tables: Tables) -> None:
        await sender.finish((0, TOKENS), {"kv": tables.src}, ready=late.compute(0, 1))

    await hand_over_late(send, late)


@pytest.mark.parametrize("piece", [1, 2**20], ids=["in pieces", "at once"])
async def test_layers_are_read_after_their_own_events(piece: int) -> None:
    """Each layer is computed on a stream of its own; short ones are sent together, after the last event."""
    late = LatePool()

    async def send(sender: kvflow.RoomSender, tables: Tables) -> None:
        first = late.compute(0)
        second = late.compute(1, after=first)
        layers = [kvflow.LayersReady(1, first), kvflow.LayersReady(2, second)]
        await sender.finish((0, TOKENS), {"kv": tables.src}, layers=layers)

    await hand_over_late(send, late, bytes_per_layer_piece=piece)


async def test_an_event_that_was_never_recorded_is_refused() -> None:
    if not DEVICE.has_events:
        pytest.skip("torch has no events here")
    late = LatePool()

    async def send(sender: kvflow.RoomSender, tables: Tables) -> None:
        never = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch's
        with pytest.raises(kvflow.PlanError, match="never recorded"):
            await sender.finish((0, TOKENS), {"kv": tables.src}, ready=never)
        await sender.finish((0, TOKENS), {"kv": tables.src}, ready=late.compute(0, 1))

    await hand_over_late(send, late)

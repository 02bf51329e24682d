"""Second stage: checks the engine's chunks, and waits until their data has been computed."""

import itertools
import operator
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import anyio
import msgspec

from kvflow.errors import FailureReason, PlanError, Stage, describe
from kvflow.geometry.layout import KVLayout
from kvflow.geometry.pages import Pages, build_page_tables, normalize
from kvflow.geometry.ranges import TokenRange, check_range
from kvflow.stages.context import StageContext
from kvflow.state.effects import AwaitData
from kvflow.state.events import Chunk, DataReady, LayersReady, PrefillEvent, ReadyEvent
from kvflow.wire.messages import Failure

__all__ = ["DeviceWaits", "finish_chunk", "make_chunk"]

DEVICE_WAITS_AT_ONCE: Final = 48
"""Maximum number of threads that wait for devices; less than the number of worker threads, to leave some for other
work."""


EVENT_HANDLES: Final = ("cuda_event", "sycl_event", "event_id")
"""Attributes of `torch.cuda.Event`, `torch.xpu.Event` and `torch.Event` that are 0 until the event is recorded. The
first that an event has counts."""


def make_chunk(
    layout: KVLayout,
    tokens: TokenRange,
    pages: Mapping[str, Pages],
    *,
    ready: ReadyEvent | None = None,
    layers: Sequence[LayersReady] = (),
) -> Chunk:
    """Check the arguments of `RoomSender.chunk`, which describes them, and return the chunk.

    Raises:
        PlanError: A page table does not match the pool or the tokens, layers are out of order, or an event was never
            recorded.
    """
    tokens = check_range(tokens)
    parts = normalize(pages, layout, tokens)
    tables = build_page_tables(parts, layout)
    ranges = {name: part.tokens for name, part in parts.items()}
    if ready is not None:
        _check_event(ready)
    groups = _check_layers(layers, ready) if len(layers) else ()
    return Chunk(tokens, ranges, tables, ready=ready, layers=groups)


def finish_chunk(chunk: Chunk, metadata: bytes, max_bytes: int) -> Chunk:
    """Return a copy of a chunk from `make_chunk` that is marked as the last one, with metadata for the decode engine.

    Raises:
        PlanError: The metadata is not bytes, or too long.
    """
    if not isinstance(metadata, (bytes, bytearray, memoryview)):
        raise PlanError("metadata must be bytes", type=type(metadata).__name__)
    metadata = bytes(metadata)
    if len(metadata) > max_bytes:
        raise PlanError(
            "metadata is too long", num_bytes=len(metadata), limit=max_bytes, setting="limits.metadata_bytes"
        )
    return msgspec.structs.replace(chunk, last=True, metadata=metadata)


def _check_event(ready: ReadyEvent) -> None:
    """Raise PlanError unless something can be waited for: an event, which was recorded if it is torch's."""
    if not callable(getattr(ready, "synchronize", None)):
        raise PlanError("`ready` must have a `synchronize` method", type=type(ready).__name__)
    handles = [getattr(ready, handle) for handle in EVENT_HANDLES if hasattr(ready, handle)]
    if handles and not handles[0]:
        raise PlanError(
            "event was never recorded, so it would count as done: record it before the chunk is sent",
            type=type(ready).__name__,
        )


def _check_layers(layers: Sequence[LayersReady], ready: ReadyEvent | None) -> tuple[LayersReady, ...]:
    """Return groups of layers; raise PlanError unless they ascend, are used without `ready`, and can be waited for."""
    if ready is not None:
        raise PlanError("`ready` and `layers` are mutually exclusive", groups=len(layers))
    try:
        groups = tuple(LayersReady(operator.index(stop), event) for stop, event in layers)
    except (TypeError, ValueError):
        raise PlanError("`layers` must contain LayersReady values", layers=layers) from None
    for group in groups:
        if group.ready is not None:
            _check_event(group.ready)
    stops = [0, *(group.stop for group in groups)]
    if any(stop <= start for start, stop in itertools.pairwise(stops)):
        raise PlanError("`layers` must be in ascending order", stops=stops[1:])
    return groups


class DeviceWaits:
    """Waits for devices in worker threads."""

    def __init__(self, context: StageContext[PrefillEvent]) -> None:
        self._context = context
        self._threads = anyio.CapacityLimiter(DEVICE_WAITS_AT_ONCE)

    def start(self, effect: AwaitData) -> None:
        """Wait in a worker thread until a device has computed the data, and dispatch DataReady."""
        self._context.start_task(self._wait, effect)

    async def _wait(self, effect: AwaitData) -> None:
        failure: Failure | None = None
        async with self._threads:
            try:
                wait = partial(_synchronize, effect.ready)
                await self._context.ports.run_in_thread(wait, abandon_on_cancel=True)  # it may never fire
            except Exception as error:  # noqa: BLE001 - raised by the engine's object; fail only this transfer
                failure = self._context.failure(FailureReason.NOT_READY, Stage.ENQUEUE, describe(error))
        self._context.dispatch(DataReady(effect.delivery, effect.wait, failure))


def _synchronize(ready: ReadyEvent) -> None:
    """Wait for the engine's event in a worker thread. A SystemExit that it raises would end the event loop."""
    try:
        ready.synchronize()
    except Exception:
        raise
    except BaseException as error:
        raise RuntimeError(describe(error)) from error

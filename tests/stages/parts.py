"""Pieces that a stage works on, without a rank around them."""

from collections.abc import Callable, Coroutine
from typing import Any

import anyio
from anyio.abc import TaskGroup

from kvflow.config import Limits, PrefillConfig
from kvflow.observe.logs import get_logger
from kvflow.observe.times import StageTimes
from kvflow.observe.trace import OddityLog
from kvflow.stages.context import StageContext
from kvflow.state.effects import EnqueueChunk
from kvflow.state.events import Chunk, DeliveryId, Event, ReadyEvent
from kvflow.state.queue import ChunkJob
from kvflow.state.window import Cost
from kvflow.wire.messages import PeerId
from tests.support.cores import PREFILL, grant, peer

__all__ = ["PEERS", "context", "delivery", "effect", "job"]

PEERS = [peer("decode", rank) for rank in range(3)]


def context(events: list[Event], tasks: TaskGroup, *, limits: Limits | None = None) -> StageContext:
    """A rank that notes what the core would be told."""
    config = PrefillConfig(instance="prefill", registry="tcp://127.0.0.1:1", limits=limits or Limits())
    log = get_logger()

    def start_task(run: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        tasks.start_soon(run, *args)

    return StageContext(
        me=PREFILL,
        config=config,
        dispatch=events.append,
        start_task=start_task,
        now=anyio.current_time,
        times=StageTimes(),
        log=log,
        oddities=OddityLog(log, lambda: 0.0),
    )


def delivery(to: PeerId = PEERS[0], room: int = 1) -> DeliveryId:
    return DeliveryId(room, to, 1)


def job(
    of: DeliveryId, seq: int = 0, num_bytes: int = 1, *, num_rows: int = 1, priority: int = 0, at: float = 0.0
) -> ChunkJob:
    tokens = (seq, seq + 1)
    return ChunkJob(
        delivery=of,
        seq=seq,
        ranges={"kv": tokens},
        pages={},
        grant=grant(priority=priority),
        cost=Cost(num_bytes, num_rows),
        is_last=False,
        enqueued_at=at,
    )


def effect(of: DeliveryId, seq: int = 0, ready: ReadyEvent | None = None, *, last: bool = False) -> EnqueueChunk:
    tokens = (seq, seq + 1)
    return EnqueueChunk(of, seq, {"kv": tokens}, Chunk(tokens=tokens, ready=ready, last=last), grant())

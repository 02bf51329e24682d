"""What connected ranks cost while they have nothing to do."""

import time
from contextlib import AsyncExitStack

import anyio
import msgspec
import torch

import kvflow

__all__ = ["IdleResult", "measure_idle"]

PAGES, PAGE_SIZE, HEADS, HEAD_DIM, LAYERS = 8, 16, 2, 16, 4
SETTLE_S = 1.0
"""Between the transfer and the measurement, so that what the transfer left behind has ended."""


class IdleResult(msgspec.Struct, kw_only=True):
    """One row of `kvflow bench idle --json`.

    Attributes:
        ranks: Connected ranks in the measured process, half prefill and half decode.
        seconds: For how long it was measured.
        cpu_percent_per_rank: CPU time of the whole process (every thread, registry included) as a share of one core,
            divided by the number of ranks.
    """

    case: str = "idle"
    backend: str
    ranks: int
    seconds: float
    cpu_percent_per_rank: float


class _Pool:
    def __init__(self) -> None:
        self._tensors = {
            name: [torch.zeros(PAGES, PAGE_SIZE, HEADS, HEAD_DIM) for _ in range(LAYERS)] for name in ("k", "v")
        }
        self.layout = kvflow.layout_from_tensors(
            self._tensors, axes="page token head dim", heads=(0, HEADS), fingerprint="bench"
        )


async def measure_idle(backend: str, pairs: int, seconds: float) -> IdleResult:
    """Connect pairs of ranks by one transfer each, then measure this process while nothing happens.

    Args:
        backend: Transport of every rank.
        pairs: Prefill instances of one rank, each with a decode rank of its own.
        seconds: How long to measure.
    """
    async with kvflow.Registry() as registry, AsyncExitStack() as stack:
        pools: list[_Pool] = []
        for index in range(pairs):
            source, target = _Pool(), _Pool()
            pools += [source, target]
            prefill_config = kvflow.PrefillConfig(
                instance=f"prefill-{index}", registry=registry.endpoint, backend=backend
            )
            decode_config = kvflow.DecodeConfig(instance=f"decode-{index}", registry=registry.endpoint, backend=backend)
            prefill = await stack.enter_async_context(kvflow.PrefillRank(prefill_config, source.layout))
            decode = await stack.enter_async_context(kvflow.DecodeRank(decode_config, target.layout))
            await _transfer_once(prefill, decode)
        await anyio.sleep(SETTLE_S)
        began, cpu_began = time.monotonic(), time.process_time()
        await anyio.sleep(seconds)
        elapsed, used = time.monotonic() - began, time.process_time() - cpu_began
    return IdleResult(
        backend=backend,
        ranks=2 * pairs,
        seconds=round(elapsed, 3),
        cpu_percent_per_rank=round(100 * used / elapsed / (2 * pairs), 3),
    )


async def _transfer_once(prefill: kvflow.PrefillRank, decode: kvflow.DecodeRank) -> None:
    tokens = (0, PAGES * PAGE_SIZE)
    pages = {"kv": range(PAGES)}
    name = prefill.config.instance
    async with prefill.send(1) as sender, decode.receive(1, prefill=name, tokens=tokens, pages=pages) as receiver:
        await sender.finish(tokens, pages)
        await receiver.done()

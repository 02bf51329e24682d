"""What connected ranks cost while they have nothing to do."""

import time
from contextlib import AsyncExitStack

import anyio
import torch

import kvflow
from kvflow.cli.bench.rows import Measured, Row, compare

__all__ = ["measure_idle"]

PAGES, PAGE_SIZE, HEADS, HEAD_DIM, LAYERS = 8, 16, 2, 16, 4
SETTLE_S = 1.0
"""Between the transfer and the measurement, so that what the transfer left behind has ended."""


class _Pool:
    def __init__(self) -> None:
        self._tensors = {
            name: [torch.zeros(PAGES, PAGE_SIZE, HEADS, HEAD_DIM) for _ in range(LAYERS)] for name in ("k", "v")
        }
        self.layout = kvflow.layout_from_tensors(
            self._tensors, axes="page token head dim", heads=(0, HEADS), fingerprint="bench"
        )


async def measure_idle(backend: str, pairs: int, seconds: float) -> Row:
    """Connect pairs of ranks by one transfer each, then measure this process while nothing happens.

    Args:
        backend: Transport of every rank.
        pairs: Prefill instances of one rank, each with a decode rank of its own.
        seconds: How long to measure.

    Returns:
        CPU time of the whole process (every thread, registry included) as a share of one core, divided by the number of
        ranks.
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
    measured = Measured(
        bench="idle",
        group=f"connected ranks over {backend}",
        case=f"{2 * pairs} with nothing to do for {elapsed:.1f} s",
        quantity="CPU of a rank",
        unit="% of a core",
        better="lower",
    )
    share = 100 * used / elapsed / (2 * pairs)
    return compare(measured, [share], facts={"ranks": 2 * pairs, "seconds": round(elapsed, 3)})


async def _transfer_once(prefill: kvflow.PrefillRank, decode: kvflow.DecodeRank) -> None:
    tokens = (0, PAGES * PAGE_SIZE)
    pages = {"kv": range(PAGES)}
    name = prefill.config.instance
    async with prefill.send(1) as sender, decode.receive(1, prefill=name, tokens=tokens, pages=pages) as receiver:
        await sender.finish(tokens, pages)
        await receiver.done()

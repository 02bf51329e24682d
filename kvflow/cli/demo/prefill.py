"""The prefill side: computes a prompt chunk by chunk, and sends pages while later chunks are computed."""

import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack

import anyio
import anyio.to_thread

import kvflow
from kvflow.cli.demo.cache import RankPool, make_pools
from kvflow.cli.demo.models import LanguageModel, load_model
from kvflow.cli.demo.options import DemoOptions
from kvflow.cli.processes import Line

__all__ = ["INSTANCE", "run", "slowest_rank"]

INSTANCE = "prefill"


def run(options: DemoOptions, line: Line) -> None:
    """Serve one request, then compute it again in this process alone, for comparison."""
    anyio.run(_serve, options, line)


async def _serve(options: DemoOptions, line: Line) -> None:
    async with kvflow.Registry() as registry, AsyncExitStack() as stack:
        line.report("registry", endpoint=registry.endpoint)
        model = await anyio.to_thread.run_sync(load_model, options.model, lambda text: line.report("note", text=text))
        prompt = model.encode(options.prompt)
        pools = make_pools(model, options, len(prompt), tp_size=options.prefill_tp, seed=options.seed)
        ranks = []
        for engine_rank, pool in enumerate(pools):
            config = kvflow.PrefillConfig(
                instance=INSTANCE,
                engine_rank=engine_rank,
                num_ranks=options.prefill_tp,
                registry=registry.endpoint,
                backend=options.backend,
            )
            ranks.append(await stack.enter_async_context(kvflow.PrefillRank(config, pool.layout)))
        line.report("ready", prompt_tokens=len(prompt))
        request = await anyio.to_thread.run_sync(line.receive)
        await _send(_Request(options, model, prompt, pools), ranks, request["room"], line)
        line.report("stages", seconds=slowest_rank([rank.statistics() for rank in ranks]))
        await anyio.to_thread.run_sync(line.receive)  # decode may still send messages; leave when it has ended
    line.report("reference", tokens=await anyio.to_thread.run_sync(_reference, options, model, prompt))


class _Request:
    """The demo's one request, as seen by the prefill engine."""

    def __init__(self, options: DemoOptions, model: LanguageModel, prompt: list[int], pools: list[RankPool]) -> None:
        self.prompt = prompt
        self.pools = pools
        self.chunk_tokens = options.chunk_tokens
        self._model = model
        self._cache = model.new_cache()

    def compute(self, start: int, stop: int) -> int:
        """Compute one chunk into the pools; return the token that would follow it."""
        token = self._model.step(self.prompt[start:stop], self._cache)
        for pool in self.pools:
            pool.write(self._cache, start, stop)
        return token


async def _send(request: _Request, ranks: list[kvflow.PrefillRank], room: int, line: Line) -> None:
    async with AsyncExitStack() as stack:
        senders = [await stack.enter_async_context(rank.send(room)) for rank in ranks]
        for start, stop in _chunks(len(request.prompt), request.chunk_tokens):
            token = await anyio.to_thread.run_sync(request.compute, start, stop)
            is_last = stop == len(request.prompt)
            if is_last:
                line.report("last_chunk_ready", at_s=time.monotonic())
            for sender, pool in zip(senders, request.pools, strict=True):
                pages = {"kv": pool.pages(start, stop)}
                if is_last:
                    await sender.finish((start, stop), pages, metadata=token.to_bytes(4, "little"))
                else:
                    await sender.chunk((start, stop), pages)
            line.report("chunk", computed=stop, of=len(request.prompt))


def _chunks(num_tokens: int, chunk_tokens: int) -> Iterator[tuple[int, int]]:
    for start in range(0, num_tokens, chunk_tokens):
        yield start, min(start + chunk_tokens, num_tokens)


def _reference(options: DemoOptions, model: LanguageModel, prompt: list[int]) -> list[int]:
    """Compute the same prompt in one process, without kvflow."""
    cache = model.new_cache()
    for start, stop in _chunks(len(prompt), options.chunk_tokens):
        token = model.step(prompt[start:stop], cache)
    return list(model.generate(token, cache, options.tokens))


def slowest_rank(ranks: Sequence[kvflow.RankStatistics]) -> dict[str, float]:
    """Return, for each stage, the most seconds that one rank spent in it."""
    times = [statistics.times.stages for statistics in ranks]
    return {stage.value: max(stages[stage].total_s for stages in times) for stage in times[0]}

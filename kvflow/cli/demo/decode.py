"""The decode side: receives pages into its own pools, and continues from them.

It uses the blocking API, like an engine with a synchronous scheduler loop.
"""

import time
from contextlib import ExitStack

import kvflow
import kvflow.blocking
from kvflow.cli.demo.cache import RankPool, make_pools, rebuild_cache
from kvflow.cli.demo.models import load_model
from kvflow.cli.demo.options import DemoOptions
from kvflow.cli.demo.prefill import INSTANCE, slowest_rank
from kvflow.cli.processes import Line

__all__ = ["run"]

SCHEDULER_STEP_S = 100e-6
"""Stands for the work of a scheduler between two checks of its transfers."""


def run(options: DemoOptions, line: Line) -> None:
    """Receive one request and answer it."""
    registry = line.receive()["endpoint"]
    model = load_model(options.model)
    num_tokens = len(model.encode(options.prompt))
    pools = make_pools(model, options, num_tokens, tp_size=options.decode_tp, seed=options.seed + options.prefill_tp)
    with ExitStack() as stack:
        loop = stack.enter_context(kvflow.blocking.LoopThread())
        ranks = []
        for engine_rank, pool in enumerate(pools):
            config = kvflow.DecodeConfig(
                instance="decode",
                engine_rank=engine_rank,
                num_ranks=options.decode_tp,
                registry=registry,
                backend=options.backend,
            )
            ranks.append(stack.enter_context(kvflow.blocking.DecodeRank(config, pool.layout, loop=loop)))
        line.report("ready")
        room = line.receive()["room"]
        handovers = _receive(ranks, pools, room, num_tokens)
        line.report(
            "handover",
            at_s=time.monotonic(),
            num_bytes=sum(handover.num_bytes for handover in handovers),
            notices=sum(handover.num_notices for handover in handovers),
            stages=slowest_rank([rank.statistics() for rank in ranks]),
        )
        first_token = int.from_bytes(handovers[0].metadata, "little")
        cache = rebuild_cache(model, pools, num_tokens)
        tokens: list[int] = []
        for token in model.generate(first_token, cache, options.tokens):
            tokens.append(token)
            line.report("token", count=len(tokens), of=options.tokens)
        line.report("answer", tokens=tokens, text=model.decode(tokens))


def _receive(
    ranks: list[kvflow.blocking.DecodeRank], pools: list[RankPool], room: int, num_tokens: int
) -> list[kvflow.Handover]:
    """Wait for the pages of every rank.

    Raises:
        TransferFailed: A rank did not receive them.
    """
    receivers = [
        rank.receive(room, prefill=INSTANCE, tokens=(0, num_tokens), pages={"kv": pool.pages(0, num_tokens)})
        for rank, pool in zip(ranks, pools, strict=True)
    ]
    while not all(receiver.is_settled for receiver in receivers):
        time.sleep(SCHEDULER_STEP_S)
    return [receiver.result() for receiver in receivers]

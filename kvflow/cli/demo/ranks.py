"""Both sides of the demo, with the blocking API and an engine's own pools; prefill sends while it computes."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import msgspec

import kvflow
from kvflow import blocking
from kvflow.cli.demo.migration import move_request, take_request_over
from kvflow.cli.demo.models import load_model
from kvflow.cli.demo.options import DemoOptions, SideName
from kvflow.cli.demo.pools import RankPool, make_pools, rebuild_cache

__all__ = ["run_side"]

AnyRank = TypeVar("AnyRank", blocking.PrefillRank, blocking.DecodeRank)
Tell = Callable[..., None]
Receive = Callable[[], dict[str, Any]]

SCHEDULER_STEP_S = 100e-6
"""Stands for the work of a scheduler between two checks of its transfers."""


def run_side(side: SideName, pipe: Any, options: DemoOptions) -> None:
    """Run a side to its end, and tell the router about an error."""

    def report(event: str, **values: Any) -> None:
        pipe.send_bytes(msgspec.json.encode({"event": event, **values}))

    def receive() -> dict[str, Any]:
        order: dict[str, Any] = msgspec.json.decode(pipe.recv_bytes())
        return order

    if options.log != "none":
        kvflow.configure_logging(options.log)
    try:
        if side == "second":
            _run_second(options, report, pipe.poll)
        else:
            (_run_prefill if side == "prefill" else _run_decode)(options, report, receive)
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the router has ended
        return
    except kvflow.KvflowError as error:
        report("failed", error=str(error))
    finally:
        pipe.close()


def _run_prefill(options: DemoOptions, report: Tell, receive: Receive) -> None:
    """Serve one request, then compute it again in this process alone, for comparison."""
    model = load_model(options.model)
    prompt = model.encode(options.prompt)
    pools = make_pools(model, options, "prefill", len(prompt))
    with ExitStack() as stack:
        ranks = _open_ranks(stack, blocking.PrefillRank, kvflow.PrefillConfig, "prefill", options, pools)
        report("ready", news="ready", prompt_tokens=len(prompt))
        room = receive()["room"]
        senders = [rank.send(room) for rank in ranks]
        cache, began_s = model.new_cache(), time.monotonic()
        for start, stop in _chunks(len(prompt), options):
            token = model.step(prompt[start:stop], cache)
            for pool in pools:
                pool.write(cache, start, stop)
            if stop == len(prompt):
                at_s = time.monotonic()
                report("last_chunk_ready", at_s=at_s, compute_s=at_s - began_s)
            for sender, pool in zip(senders, pools, strict=True):
                if stop == len(prompt):
                    sender.finish((start, stop), {"kv": pool.pages(start, stop)}, metadata=token.to_bytes(4, "little"))
                else:
                    sender.chunk((start, stop), {"kv": pool.pages(start, stop)})
            report("chunk", news=f"{stop} of {len(prompt)} prompt tokens computed and sent")
        for sender in senders:
            sender.wait()
            sender.result()
        news = "all pages delivered; computing a single-process reference"
        report("stages", news=news, seconds=_slowest_rank([rank.statistics() for rank in ranks]))
        receive()  # decode may still send messages; leave when it has ended
    cache = model.new_cache()
    for start, stop in _chunks(len(prompt), options):
        token = model.step(prompt[start:stop], cache)
    report("reference", news="done", tokens=list(model.generate(token, cache, options.tokens)))


def _run_decode(options: DemoOptions, report: Tell, receive: Receive) -> None:
    """Receive one request, and answer it."""
    model = load_model(options.model)
    num_tokens = len(model.encode(options.prompt))
    pools = make_pools(model, options, "decode", num_tokens + (options.tokens if options.migrate else 0))
    with ExitStack() as stack:
        ranks = _open_ranks(stack, blocking.DecodeRank, kvflow.DecodeConfig, "decode", options, pools)
        report("ready", news="ready")
        room = receive()["room"]
        receivers = [
            rank.receive(room, prefill="prefill", tokens=(0, num_tokens), pages={"kv": pool.pages(0, num_tokens)})
            for rank, pool in zip(ranks, pools, strict=True)
        ]
        while not all(receiver.is_settled for receiver in receivers):
            time.sleep(SCHEDULER_STEP_S)
        handovers = [receiver.result() for receiver in receivers]
        at_s, num_bytes = time.monotonic(), sum(handover.num_bytes for handover in handovers)
        news = f"{num_bytes / 1e6:.1f} MB received in {sum(handover.num_notices for handover in handovers)} pieces"
        stages = _slowest_rank([rank.statistics() for rank in ranks])
        report("handover", news=news, at_s=at_s, num_bytes=num_bytes, stages=stages)
        token = int.from_bytes(handovers[0].metadata, "little")
        if options.migrate:
            receive()  # once the second server is there
            senders = _open_ranks(stack, blocking.PrefillRank, kvflow.PrefillConfig, "decode", options, pools)
            text = move_request(model, pools, (senders, ranks), token, num_tokens, options.tokens)
            news = "done" if text.is_complete else f"{len(text.tokens)} tokens written; the request has moved"
            report("moved", news=news, **text._asdict(), text=model.decode(text.tokens))
            receive()  # the second server may still send messages
            return
    cache = rebuild_cache(model, pools, num_tokens)
    tokens = list(model.generate(token, cache, options.tokens))
    report("answer", news="done", tokens=tokens, text=model.decode(tokens))


def _run_second(options: DemoOptions, report: Tell, is_over: Callable[[], bool]) -> None:
    """Take the request over from the decode server, and complete its answer; nothing if it ends there."""
    model = load_model(options.model)
    pools = make_pools(model, options, "second", len(model.encode(options.prompt)) + options.tokens)
    with ExitStack() as stack:
        receivers = _open_ranks(stack, blocking.DecodeRank, kvflow.DecodeConfig, "second", options, pools)
        config = partial(kvflow.PrefillConfig, takes_offers=True)
        offered = _open_ranks(stack, blocking.PrefillRank, config, "second", options, pools)
        report("ready", news="ready")
        text = take_request_over(model, pools, (offered, receivers), options.tokens, is_over)
        if text is not None:
            report("answer", news="done", **text._asdict(), text=model.decode(text.tokens))


def _open_ranks(
    stack: ExitStack,
    kind: Callable[..., AnyRank],
    config: Callable[..., Any],
    side: SideName,
    options: DemoOptions,
    pools: Sequence[RankPool],
) -> list[AnyRank]:
    settings = {"instance": side, "num_ranks": len(pools), "registry": options.registry, "backend": options.backend}
    loop = stack.enter_context(blocking.LoopThread())
    return [
        stack.enter_context(kind(config(engine_rank=number, **settings), pool.layout, loop=loop))
        for number, pool in enumerate(pools)
    ]


def _chunks(num_tokens: int, options: DemoOptions) -> Iterator[tuple[int, int]]:
    for start in range(0, num_tokens, options.chunk):
        yield start, min(start + options.chunk, num_tokens)


def _slowest_rank(ranks: Sequence[kvflow.RankStatistics]) -> dict[str, float]:
    """Return, for each stage, the most seconds that one rank spent in it."""
    times = [statistics.times.stages for statistics in ranks]
    return {stage.value: max(stages[stage].total for stages in times) for stage in times[0]}

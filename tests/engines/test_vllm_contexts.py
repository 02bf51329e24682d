"""vLLM's decode context parallelism: servers of several workers that share the tokens, driven as vLLM drives them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import numpy as np
import pytest

from kvflow.engines.vllm.groups import Group, describe_groups
from kvflow.engines.vllm.layout import describe_caches
from kvflow.engines.vllm.options import read_options
from kvflow.engines.vllm.ranks import Place, open_ranks
from kvflow.engines.vllm.scheduler import ConnectorScheduler
from kvflow.engines.vllm.worker import ConnectorWorker
from kvflow.geometry import TokenShard
from tests.engines.test_vllm_adapter import TIMEOUTS, Pool, asked, group, scheduled

BLOCK, BLOCKS, CONTENT, WINDOW, PROMPT = 4, 32, 8, 6, 45
LAYERS: Final = ("layer0", "layer1", "layer2")
GROUPS: Final = (
    group("MLAAttentionSpec", [0, 1], dcp_sharded=True),
    group("SlidingWindowSpec", [2], num_kv_heads=1, sliding_window=WINDOW),
)
"""Latents, which workers share, and a layer that each worker has for itself."""


class Server:
    """A scheduler and its workers.

    Attributes:
        cells: Caches of each worker.
        sent: Requests that all workers have sent.
        received: Requests that all workers have received.
        failed: Requests that some worker has not received.
    """

    def __init__(self, stack: ExitStack, shards: Sequence[TokenShard], *, is_prefill: bool) -> None:
        self.shards, self.groups = shards, describe_groups(GROUPS, dcp_size=shards[0].size)
        self.cells = np.zeros((len(shards), len(LAYERS), BLOCKS, 1, BLOCK, CONTENT), np.uint8)
        options = read_options({"backend": "memory", "timeouts": TIMEOUTS})
        shared: list[str] = []

        def share(value: str | None) -> str:
            shared.extend([] if value is None else [value])
            return shared[0]

        self.workers = []
        for number, shard in enumerate(shards):
            caches = describe_caches(
                dict(zip(LAYERS, self.cells[number], strict=True)),
                self.groups,
                backend="MLA",
                layers={name: layer for layer, name in enumerate(LAYERS)},
                total_kv_heads=dict.fromkeys(LAYERS, 1),
                tp_size=len(shards),
                tp_rank=number,
                fingerprint="model",
                shard=shard,
            )
            place = Place("server", number, len(shards), is_prefill, not is_prefill, share)
            ranks = open_ranks(options, place, caches.layout)
            ignored: Any = lambda *_: None  # noqa: E731 - two callbacks
            worker = ConnectorWorker(
                caches, ranks, layerwise=False, patience_s=0.001, on_end=ignored, on_blocks=ignored
            )
            stack.callback(worker.close)
            self.workers.append(worker)
        self.scheduler = ConnectorScheduler(self.groups, is_prefill=is_prefill, is_decode=not is_prefill)
        self.scheduler.held.pool = Pool()
        self.scheduler.answers.ticket = self.workers[0]._ranks.ticket or {}
        self._told = {"sent": [set[str]() for _ in shards], "received": [set[str]() for _ in shards]}
        self.failed: set[str] = set()

    @property
    def sent(self) -> set[str]:
        return set.intersection(*self._told["sent"])

    @property
    def received(self) -> set[str]:
        return set.intersection(*self._told["received"])

    def step(
        self,
        computed: Mapping[str, tuple[int, int, Sequence[Sequence[int]]]] | None = None,
        finished: Sequence[str] = (),
    ) -> None:
        orders = self.scheduler.step(scheduled(dict(computed or {})))
        for number, worker in enumerate(self.workers):
            worker.preempt(orders)
            worker.begin(orders)
            for start, count, tables in (computed or {}).values():
                for token in range(start, start + count):
                    for kind, table in zip(self.groups, tables, strict=True):
                        self.write(number, kind, table, token)
            worker.receive(orders)
            worker.saved(orders)
            results = worker.take_results(finished)
            self._told["sent"][number] |= results.sent
            self._told["received"][number] |= results.received
            self.failed |= results.failed
            report = worker.take_report()
            if report is not None:
                self.scheduler.take_report(report)

    def until(self, kind: str, request_id: str) -> None:
        for _ in range(10_000):
            if request_id in getattr(self, kind):
                return
            self.step()
        raise AssertionError("it never happened")

    def write(self, number: int, kind: Group, table: Sequence[int], token: int) -> None:
        where = self.where(number, kind, table, token)
        if where is not None:
            for layer in range(len(LAYERS)):
                if LAYERS[layer] in kind.layers:
                    self.cells[number, layer, where[0], 0, where[1]] = token + 1

    def where(self, number: int, kind: Group, table: Sequence[int], token: int) -> tuple[int, int] | None:
        """Return block and offset of a token on a worker, as vLLM's kernel for slot mappings computes them."""
        shard = self.shards[number] if kind.num_shards > 1 else TokenShard()
        block, offset = divmod(token, BLOCK * shard.size)
        if offset // shard.interleave % shard.size != shard.rank:
            return None
        cycle = shard.size * shard.interleave
        return table[block], offset // cycle * shard.interleave + offset % shard.interleave


def tables(server: Server, first: int, seed: int) -> list[list[int]]:
    """Return block tables of a request; vLLM has freed blocks that a window has left."""
    counts = [-(-PROMPT // (BLOCK * kind.num_shards)) for kind in server.groups]
    blocks = np.random.default_rng(seed).permutation(BLOCKS - 1)[: sum(counts)] + 1
    main, window = blocks[: counts[0]].tolist(), blocks[counts[0] :].tolist()
    left = max(first - WINDOW, 0) // BLOCK
    return [main, [0] * left + window[left:]]


@contextmanager
def servers(source: Sequence[TokenShard], target: Sequence[TokenShard]) -> Iterator[tuple[Server, Server]]:
    with ExitStack() as stack:
        yield Server(stack, source, is_prefill=True), Server(stack, target, is_prefill=False)


def shards(size: int, interleave: int = 1, replicas: int = 1) -> list[TokenShard]:
    return [TokenShard(size, rank, interleave) for _ in range(replicas) for rank in range(size)]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (shards(2), shards(1)),
        (shards(1), shards(2)),
        (shards(1), shards(2, 4)),
        (shards(2, 4), shards(2, 4)),
        (shards(2, 2, replicas=2), shards(1)),
        (shards(4), shards(2, 4)),
        (shards(1, replicas=2), shards(2)),
    ],
    ids=["2-1", "1-2", "1-2x4", "2x4-2x4", "TP4 of 2x2-1", "4-2x4", "TP2-2"],
)
@pytest.mark.parametrize("has_prefix", [False, True])
def test_decode_has_each_token_where_it_looks_for_it(
    source: Sequence[TokenShard], target: Sequence[TokenShard], has_prefix: bool
) -> None:
    with servers(source, target) as (prefill, decode):
        request, blocks = asked("p", {"do_remote_decode": True}, PROMPT), tables(prefill, 0, seed=1)
        prefill.scheduler.add(request)
        for start, stop in ((0, 13), (13, 32), (32, PROMPT)):
            prefill.step({"p": (start, stop - start, blocks)})
        _, params = prefill.scheduler.finished(request, (), is_complete=True)
        prefill.step(finished=["p"])
        num_local = BLOCK * target[0].size if has_prefix else 0
        received = asked("d", params, PROMPT)
        decode.scheduler.add(received)
        decode.step()
        num_elsewhere = decode.scheduler.num_elsewhere(received, num_local)
        assert num_elsewhere == PROMPT - 1 - num_local
        granted = tables(decode, PROMPT, seed=2)
        decode.scheduler.allocated(received, granted, num_elsewhere)
        decode.until("received", "d")
        prefill.until("sent", "p")
        assert not decode.failed
        expected = np.zeros_like(decode.cells)
        decode.cells, written = expected, decode.cells
        for number in range(len(target)):
            for kind, table in zip(decode.groups, granted, strict=True):
                for token in range(max(num_local, kind.first_seen(PROMPT - 1)), PROMPT - 1):
                    decode.write(number, kind, table, token)
        np.testing.assert_array_equal(written, expected)

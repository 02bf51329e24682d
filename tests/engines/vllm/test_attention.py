"""Blocks that vLLM's own kernels write and read, with a transfer by kvflow in between."""

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from torch.nn import functional
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

import kvflow
import kvflow.blocking
from kvflow.engines.vllm.groups import Group
from kvflow.engines.vllm.layout import Caches, describe_caches
from kvflow.engines.vllm.metadata import GroupBlocks

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(60)]

HEADS, SIZE, BLOCK, BLOCKS = 4, 64, 32, 8
TOKENS = 70
"""Two whole blocks, and a part of a third."""

NAME = "layer"
ISA = _get_attn_isa(torch.float32, BLOCK, SIZE, "auto")


class Worker:
    """The cache of one layer on one of the workers that share its heads."""

    def __init__(self, tp_size: int, tp_rank: int, backend: str) -> None:
        self.heads = slice(HEADS // tp_size * tp_rank, HEADS // tp_size * (tp_rank + 1))
        self.cache = torch.zeros(BLOCKS, HEADS // tp_size, BLOCK, 2 * SIZE)
        self.caches: Caches = describe_caches(
            {NAME: self.cache},
            [Group("kv", (NAME,), BLOCK, {NAME: HEADS // tp_size})],
            backend=backend,
            layers={NAME: 0},
            total_kv_heads={NAME: HEADS},
            tp_size=tp_size,
            tp_rank=tp_rank,
            fingerprint="model",
        )

    @property
    def halves(self) -> Sequence[torch.Tensor]:
        """Return K and V, as vLLM's backend splits them."""
        return self.cache.view(BLOCKS, -1, 2 * BLOCK, SIZE).chunk(2, dim=2)

    def write(self, keys: torch.Tensor, values: torch.Tensor, blocks: Sequence[int]) -> None:
        """Write tokens as a forward pass of vLLM does."""
        slots = torch.tensor([blocks[token // BLOCK] * BLOCK + token % BLOCK for token in range(len(keys))])
        own = [tensor[:, self.heads].contiguous() for tensor in (keys, values)]
        ops.cpu_attn_reshape_and_cache(*own, *self.halves, slots, ISA)

    def attend(self, query: torch.Tensor, blocks: Sequence[int], num_tokens: int) -> torch.Tensor:
        """Return the attention output of a query over blocks."""
        lengths, start = torch.tensor([num_tokens], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
        plan = ops.cpu_attn_get_scheduler_metadata(
            1, HEADS, HEADS, SIZE, lengths, torch.float32, start, True, -1, ISA, False
        )
        output, table = torch.empty_like(query), torch.tensor([blocks], dtype=torch.int32)
        arguments: tuple[Any, ...] = (start, lengths, SIZE**-0.5, True, None, -1, table, 0.0, plan, None)
        ops.cpu_attention_with_kv_cache(query, *self.halves, output, *arguments)
        return output


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("backend", ["CPU_ATTN", "FLASH_ATTN"])
def test_attention_sees_what_was_moved(backend: str, tp_size: int) -> None:
    """Declared by its shape alone, as for other backends, a partial block of the CPU backend arrives wrong."""
    generator = torch.Generator().manual_seed(3)
    keys, values = (torch.randn(TOKENS, HEADS, SIZE, generator=generator) for _ in range(2))
    query = torch.randn(1, HEADS, SIZE, generator=generator)
    source, target = [5, 2, 7], [1, 6, 3]
    workers = [Worker(tp_size, tp_rank, backend) for tp_rank in range(tp_size)]
    decode = Worker(1, 0, backend)
    for worker in workers:
        worker.write(keys, values, source)
    move(workers, decode, source, target)
    found = decode.attend(query, target, TOKENS)
    by_head = [tensor.transpose(0, 1) for tensor in (query, keys, values)]
    expected = functional.scaled_dot_product_attention(by_head[0], by_head[1], by_head[2])
    assert torch.allclose(found, expected.transpose(0, 1), atol=1e-5) is (backend == "CPU_ATTN")


def move(workers: Sequence[Worker], decode: Worker, source: Sequence[int], target: Sequence[int]) -> None:
    """Move tokens in two chunks; the first ends within a block."""
    ranks: list[kvflow.blocking.PrefillRank] = []
    for number, worker in enumerate(workers):
        config = kvflow.PrefillConfig(
            instance="prefill",
            engine_rank=number,
            num_ranks=len(workers),
            backend="memory",
            registry=ranks[0].endpoint if ranks else None,
        )
        ranks.append(kvflow.blocking.PrefillRank(config, worker.caches.layout).open())
    receiving = kvflow.blocking.DecodeRank(
        kvflow.DecodeConfig(instance="decode", backend="memory"), decode.caches.layout
    ).open()
    try:
        receiver = receiving.announce(prefill=ranks[0].ticket("room"))
        receiver.grant(tokens=(0, TOKENS), pages=decode.caches.pages([GroupBlocks(0, target)], TOKENS))
        for rank, worker in zip(ranks, workers, strict=True):
            sender = rank.send("room")
            sender.chunk((0, 40), worker.caches.pages([GroupBlocks(0, source[:2])], 40))
            sender.finish((40, TOKENS), worker.caches.pages([GroupBlocks(40, source[1:])], TOKENS))
        assert receiver.wait(20.0) is kvflow.Outcome.SUCCESS
    finally:
        receiving.close()
        for rank in reversed(ranks):
            rank.close()

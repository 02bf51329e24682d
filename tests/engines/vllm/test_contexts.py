"""Decode context parallelism by vLLM's own code: its block tables, and the tokens that it lets a worker hold.

vLLM's CPU backends refuse to run with it, so there is no server.
"""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec, MLAAttentionSpec
from vllm.v1.request import Request
from vllm.v1.worker import cp_utils

from kvflow.engines.vllm import connector
from kvflow.engines.vllm.groups import describe_groups
from kvflow.geometry import TokenShard, shard_pages

pytestmark = [pytest.mark.vllm]

BLOCK = 4


def group(**values: object) -> KVCacheGroupSpec:
    spec = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32, **values)
    return KVCacheGroupSpec(["model.layers.0"], spec)


@pytest.mark.parametrize("dcp_size", [1, 2, 4])
@pytest.mark.parametrize("num_tokens", [1, 4, 5, 8, 9, 31, 32, 33])
def test_blocks_of_a_worker_hold_as_many_tokens_as_vllm_says(dcp_size: int, num_tokens: int) -> None:
    """The table is that of vLLM's manager, and each of its entries is for a block on every worker."""
    config = KVCacheConfig(num_blocks=40, kv_cache_tensors=[], kv_cache_groups=[group()])
    sizes = {"scheduler_block_size": BLOCK * dcp_size, "hash_block_size": BLOCK * dcp_size}
    manager = KVCacheManager(config, 256, enable_caching=False, dcp_world_size=dcp_size, **sizes)
    request = Request("r", list(range(num_tokens)), SamplingParams(max_tokens=1), None)
    blocks = manager.allocate_slots(request, num_tokens)
    assert blocks is not None
    (table,) = blocks.get_block_ids()
    (described,) = describe_groups([group()], dcp_size=dcp_size)
    given = described.blocks_of(table, 0, num_tokens)
    assert given is not None
    assert list(given.blocks) == table
    for interleave in (1, 2, BLOCK):
        counts = get_dcp_local_seq_lens(torch.tensor([num_tokens]), dcp_size, None, interleave)[0].tolist()
        for rank, count in enumerate(counts):
            pages = shard_pages((0, num_tokens), table, TokenShard(dcp_size, rank, interleave), BLOCK).pages
            assert list(pages) == table[: -(-count // BLOCK)]


def test_only_groups_that_vllm_shards_have_shards() -> None:
    """Recurrent states and the cache of a draft model may be whole on each worker."""
    groups = describe_groups([group(), group(dcp_sharded=False)], dcp_size=2)
    assert [one.num_shards for one in groups] == [2, 1]
    sharded = {kind: kind.__dataclass_fields__["dcp_sharded"].default for kind in (MLAAttentionSpec, MambaSpec)}
    assert sharded == {MLAAttentionSpec: True, MambaSpec: False}


@pytest.mark.parametrize(("dcp_size", "expected"), [(1, TokenShard()), (4, TokenShard(4, 3, 16))])
def test_worker_has_the_shard_of_its_group(
    dcp_size: int, expected: TokenShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connector, "get_dcp_group", lambda: SimpleNamespace(world_size=4, rank_in_group=3))
    parallel = SimpleNamespace(decode_context_parallel_size=dcp_size, cp_kv_cache_interleave_size=16)
    assert connector._token_shard(parallel) == expected


def test_attention_on_cpus_refuses_to_run_with_it() -> None:
    """If this fails, a server of two workers can be tested."""
    layer = SimpleNamespace(
        impl=SimpleNamespace(need_to_return_lse_for_decode=CPUAttentionBackendImpl.can_return_lse_for_decode)
    )
    parallel = SimpleNamespace(
        prefill_context_parallel_size=1, decode_context_parallel_size=2, cp_kv_cache_interleave_size=1
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cp_utils, "get_layers_from_vllm_config", lambda *_: {"layer": layer})
        with pytest.raises(AssertionError, match="requires attention implementations to return the softmax LSE"):
            cp_utils.check_attention_cp_compatibility(
                SimpleNamespace(parallel_config=parallel, speculative_config=None)
            )

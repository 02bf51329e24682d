"""Speculative decoding: layers of draft models move like others, and prefill leaves out what decode must compute."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvflow.engines.vllm.groups import describe_groups
from kvflow.engines.vllm.layout import describe_caches
from kvflow.engines.vllm.scheduler import ConnectorScheduler
from tests.engines.test_vllm_adapter import BLOCK, BLOCKS, DECODE, PREFILL, PROMPT, Pool, asked, group, scheduled

LAYERS = {"model.layers.0.attn": 0, "model.layers.1.attn": 1, "draft_model.model.layers.0.attn": 2}
DRAFT = "draft_model.model.layers.0.attn"


def uniform(heads: Mapping[str, int]) -> Any:
    """Make the group that vLLM forms of layers with unequal heads."""
    specs = {name: group(num_kv_heads=count).kv_cache_spec for name, count in heads.items()}
    spec = type("UniformTypeKVCacheSpecs", (), {"kv_cache_specs": specs, "block_size": BLOCK})()
    return SimpleNamespace(kv_cache_spec=spec, layer_names=list(LAYERS))


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_layers_of_a_draft_model_have_their_own_heads(tp_rank: int) -> None:
    """Two workers share the four heads of the model and the two of its draft model, whose content is smaller, too."""
    caches = {name: np.zeros((BLOCKS, 2, BLOCK, 16), np.uint8) for name in LAYERS}
    caches[DRAFT] = np.zeros((BLOCKS, 1, BLOCK, 8), np.uint8)
    found = describe_caches(
        caches,
        describe_groups([uniform({**dict.fromkeys(LAYERS, 2), DRAFT: 1})]),
        backend="FLASH_ATTN",
        layers=LAYERS,
        total_kv_heads={**dict.fromkeys(LAYERS, 4), DRAFT: 2},
        tp_size=2,
        tp_rank=tp_rank,
        fingerprint="model",
    )
    (component,) = found.layout.components
    heads = {region.layer: (region.heads, region.head_bytes) for region in component.regions}
    whole, half = ((0, 2), (0, 1)) if tp_rank == 0 else ((2, 4), (1, 2))
    assert heads == {0: (whole, 16), 1: (whole, 16), 2: (half, 8)}
    assert list(found.layers.values()) == [0, 1, 2]


@pytest.mark.parametrize(("num_tokens", "num_computed"), [(1, 1), (3, 3), (4, 1), (PROMPT, PROMPT - 3)])
def test_tokens_that_only_decode_may_compute(num_tokens: int, num_computed: int) -> None:
    """With four MTP modules, prefill would fill the caches of the last three from drafts that nothing verifies."""
    groups = describe_groups([group()])
    prefill = ConnectorScheduler(groups, is_prefill=True, is_decode=False, num_left_out=3)
    prefill.held.pool = Pool()
    prefill.answers.ticket = {"address": "tcp://127.0.0.1:1", "instance": "server", "fingerprint": "", "room": "any"}
    request = asked("p", {"do_remote_decode": True}, num_tokens)
    request._all_token_ids, request.num_prompt_tokens = list(range(num_tokens)), num_tokens
    prefill.add(request)
    assert request.num_prompt_tokens == len(request.prompt_token_ids) == len(request._all_token_ids) == num_computed
    (chunk,) = prefill.step(scheduled({"p": (0, num_computed, [PREFILL])})).chunks.values()
    assert (chunk.start, chunk.stop, chunk.is_last) == (0, num_computed, True)

    decode = ConnectorScheduler(groups, is_prefill=False, is_decode=True, num_left_out=3)
    request = asked(
        "d", {"do_remote_prefill": True, "kvflow_ticket": {}, "kvflow_prompt": chunk.metadata.decode()}, num_tokens
    )
    decode.add(request)
    num_elsewhere = decode.num_elsewhere(request, 0)
    assert num_elsewhere == (num_computed if num_tokens > 3 else 0)
    decode.allocated(request, [DECODE], num_elsewhere)
    orders = decode.step(scheduled({}))
    assert ("d" in orders.declined) is (num_tokens <= 3)
    assert [(one.start, one.stop) for one in orders.granted.values()] == [(0, num_computed)] * (num_tokens > 3)

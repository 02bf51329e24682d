"""Small models whose layers have several kinds of cache."""

from pathlib import Path
from typing import Any, Final

import torch
from transformers import (
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from benchmarks.vllm_handover.client import prompt_of
from kvflow.cli.smollm2 import prepare_smollm2

__all__ = ["WINDOW", "make_gated_delta_model", "make_mamba_model", "make_windowed_model", "prompt_of_tokens"]

WINDOW: Final = 100


def make_windowed_model(place: Path, tokenizer: Path) -> Path:
    """Make a model in which two of three layers have a sliding window, so vLLM forms three groups of caches.

    Args:
        place: Directory of the model.
        tokenizer: Directory of the tokenizer to use.
    """
    return _make(
        place,
        tokenizer,
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        initializer_range=0.3,  # so that the visible tokens decide the next one
        tie_word_embeddings=False,
        pad_token_id=0,
    )


def make_mamba_model(place: Path, tokenizer: Path) -> Path:
    """Make a model that alternates Mamba-2 and attention; arguments as above."""
    return _make(
        place,
        tokenizer,
        GraniteMoeHybridForCausalLM,
        GraniteMoeHybridConfig,
        hidden_size=128,
        intermediate_size=128,
        shared_intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["mamba", "attention"] * 2,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_n_groups=1,
        mamba_expand=2,
        num_local_experts=0,
        num_experts_per_tok=0,
        initializer_range=0.3,
        pad_token_id=0,
    )


def make_gated_delta_model(place: Path, tokenizer: Path) -> Path:
    """Make a model that alternates gated delta nets and attention, in bf16 as vLLM requires."""
    return _make(
        place,
        tokenizer,
        Qwen3NextForCausalLM,
        Qwen3NextConfig,
        dtype=torch.bfloat16,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=2,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        initializer_range=0.1,
    )


def _make(
    place: Path, tokenizer: Path, model: Any, config: Any, *, dtype: torch.dtype = torch.float32, **sizes: Any
) -> Path:
    """Make a model with random weights, the same each time."""
    torch.manual_seed(0)
    words = AutoTokenizer.from_pretrained(tokenizer)
    described = config(
        vocab_size=len(words),
        max_position_embeddings=2048,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
        **sizes,
    )
    model(described).to(dtype).save_pretrained(place)
    words.save_pretrained(place)
    return place


def prompt_of_tokens(count: int) -> str:
    """Return a prompt of `count` tokens."""
    words = AutoTokenizer.from_pretrained(prepare_smollm2())
    prompts = (prompt_of(seed, count - fewer) for seed in range(50) for fewer in range(count // 10))
    return next(prompt for prompt in prompts if len(words(prompt)["input_ids"]) == count)

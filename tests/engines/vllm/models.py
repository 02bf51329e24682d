"""A small model whose layers have caches of several kinds."""

from pathlib import Path
from typing import Final

import torch
from transformers import AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig

__all__ = ["WINDOW", "make_windowed_model"]

WINDOW: Final = 100


def make_windowed_model(place: Path, tokenizer: Path) -> Path:
    """Make a model with random weights: two layers in three see a window only, so vLLM has three groups of caches.

    Args:
        place: Where to put it.
        tokenizer: Directory of the tokenizer to use.
    """
    torch.manual_seed(0)
    words = AutoTokenizer.from_pretrained(tokenizer)
    config = Gemma3TextConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        max_position_embeddings=2048,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        initializer_range=0.3,  # so that what a token sees decides about the next one
        tie_word_embeddings=False,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
        pad_token_id=0,
    )
    Gemma3ForCausalLM(config).save_pretrained(place)
    words.save_pretrained(place)
    return place

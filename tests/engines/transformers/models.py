"""Tiny models with random weights, and managers over them, the same in every process."""

from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, Qwen3Config
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.models.llama import LlamaForCausalLM
from transformers.models.qwen3 import Qwen3ForCausalLM

__all__ = ["VOCAB_SIZE", "make_manager", "make_model", "prompt"]

VOCAB_SIZE = 512
COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
KINDS = ("full_attention", "sliding_attention", "sliding_attention")


def make_model(name: str) -> Any:
    """Make "full" (Llama), "mixed" (the last two layers have a sliding window) or "window" (all layers have one).

    With " bfloat16" behind it, in that type.
    """
    torch.set_num_threads(1)
    name, _, dtype = name.partition(" ")
    model: Any
    if name == "full":
        model = LlamaForCausalLM(LlamaConfig(**COMMON))
    else:
        kinds = KINDS if name == "mixed" else KINDS[1:] + KINDS[1:2]
        config = {"use_sliding_window": True, "sliding_window": 20, "layer_types": list(kinds)}
        model = Qwen3ForCausalLM(Qwen3Config(**COMMON, **config))
    generator = torch.Generator().manual_seed(20)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.ndim > 1:  # the others are norms
                weights.normal_(0.0, 0.4, generator=generator)
    model.set_attn_implementation("sdpa")
    return model.to(getattr(torch, dtype or "float32")).eval()


def make_manager(
    name: str = "full", *, page_size: int = 16, num_blocks: int = 64, samples: bool = False, **settings: Any
) -> Any:
    """Make a manager that is not running yet, with chunks of 32 tokens."""
    config = ContinuousBatchingConfig(
        page_size=page_size,
        num_blocks=num_blocks,
        max_batch_tokens=32,
        use_cuda_graph=False,
        auto_switch_to_flash=False,
        **settings,
    )
    choice = {"do_sample": True, "temperature": 0.7} if samples else {"do_sample": False}
    generation = GenerationConfig(max_new_tokens=24, eos_token_id=None, **choice)
    return ContinuousBatchingManager(make_model(name), generation, config)


def prompt(seed: int, num_tokens: int) -> list[int]:
    """Return random tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(0, VOCAB_SIZE, (num_tokens,), generator=generator).tolist()
    return tokens

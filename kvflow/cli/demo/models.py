"""The demo's language models: a real one from a Python package, and a tiny random one without dependencies."""

import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoTokenizer, DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from kvflow.cli.demo.options import KV_HEADS
from kvflow.cli.smollm2 import prepare_smollm2

__all__ = ["LanguageModel", "load_model"]

TINY_SPREAD = 0.4
"""Standard deviation of the random weights: wide enough that the output depends on every part of the prompt."""
TINY_CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=96,
    intermediate_size=192,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=KV_HEADS,
    head_dim=16,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=None,
)

CACHE: Final = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
"""Name of the argument that holds the cache: it changed in transformers 5.24."""


class LanguageModel:
    """A causal language model with grouped-query attention, on the CPU in float32.

    Attributes:
        name: Part of the layout's fingerprint.
        config: Sizes of the model.
    """

    def __init__(self, name: str, network: LlamaForCausalLM, tokenizer: Any = None) -> None:
        self.name = name
        self.config: LlamaConfig = network.config
        self._network = network.eval()
        self._tokenizer = tokenizer
        self._end_id: int | None = tokenizer and tokenizer.eos_token_id

    def encode(self, prompt: str) -> list[int]:
        """Return the token ids of a prompt, chat template included; without a tokenizer, each byte is a token."""
        if self._tokenizer is None:
            return list(prompt.encode())
        messages = [{"role": "user", "content": prompt}]
        text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        if self._tokenizer is None:
            return "".join(chr(token) if 32 <= token < 127 else "\N{MIDDLE DOT}" for token in ids)
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def new_cache(self) -> DynamicCache:
        """Create an empty KV cache."""
        return DynamicCache(config=self.config)

    @torch.inference_mode()
    def step(self, ids: Sequence[int], cache: DynamicCache) -> int:
        """Append tokens to the cache, and return the most likely next one."""
        output = self._network(torch.tensor([ids]), use_cache=True, logits_to_keep=1, **{CACHE: cache})
        return int(output.logits[0, -1].argmax())

    def ends_with(self, tokens: Sequence[int]) -> bool:
        """Return whether the last token ends the text."""
        return tokens[-1] == self._end_id

    def generate(self, first: int, cache: DynamicCache, num_tokens: int) -> Iterator[int]:
        """Yield `first`, which follows the cache, and the most likely tokens after it, at most `num_tokens` in all."""
        token = first
        for position in range(num_tokens):
            if position:
                token = self.step([token], cache)
            yield token
            if token == self._end_id:
                return


def load_model(name: str) -> LanguageModel:
    """Load "smollm2", "tiny", or a Llama model from a directory. Raises the error of `prepare_smollm2`."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    # On a busy machine with two cores, more threads wait for each other, and cost more than they gain.
    torch.set_num_threads(1)
    if name == "tiny":
        return LanguageModel(name, _tiny_network())
    directory = prepare_smollm2() if name == "smollm2" else Path(name)
    network = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
    return LanguageModel(name, network, AutoTokenizer.from_pretrained(directory, local_files_only=True))


def _tiny_network() -> LlamaForCausalLM:
    """Return a network with random weights that are the same in every process and thread."""
    network = LlamaForCausalLM(TINY_CONFIG)
    generator = torch.Generator().manual_seed(20)
    with torch.no_grad():
        for weights in network.parameters():
            if weights.ndim > 1:  # the others are norms, which stay at one
                weights.normal_(0.0, TINY_SPREAD, generator=generator)
    return network

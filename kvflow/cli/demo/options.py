"""Options of the demo, in a form that can be sent to the worker processes."""

import json
from pathlib import Path
from typing import Final, Literal

import msgspec

from kvflow.errors import ConfigError

__all__ = ["DEFAULT_PROMPT", "KV_HEADS", "DemoOptions", "EngineName", "SideName", "check_model", "check_tp"]

SideName = Literal["prefill", "decode"]
EngineName = Literal["none", "transformers"]

DEFAULT_PROMPT = """\
Large language models answer in two phases. In the first, called prefill, the whole prompt is read at once and a key \
and a value vector is computed for every token in every layer; together these are called the KV cache. In the second, \
called decode, one token after another is produced, and each of them looks at the whole cache. Prefill needs a lot of \
arithmetic and decode needs a lot of memory bandwidth, so large deployments run the two on different machines. The \
cache then has to travel from one machine to the other, page by page, while the rest of the prompt is still being \
read, and nothing may be lost or mixed up on the way. If a single page arrived in the wrong place, the answer would \
be nonsense.

Explain in two sentences what the KV cache is and why it has to be moved."""


KV_HEADS: Final = {"smollm2": 3, "tiny": 3}
"""KV heads of the models that are known by name."""


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the demo.

    Attributes:
        side: Side of a worker.
        engine: "none" (pools as an engine would keep them), or the engine whose adapter is shown.
        model: "smollm2", "tiny", or the directory of a Llama model.
        prefill_tp: Prefill ranks, among which the KV heads are split or replicated.
        decode_tp: Decode ranks, likewise.
        backend: "memory" (both sides in one process), or any other transport (each side in its own process).
        page_size: Tokens of a page.
        chunk_tokens: Tokens of a prefill chunk.
        prompt: Prompt of the request.
        tokens: Maximum number of tokens to generate.
        seed: Seed of the page tables, which are shuffled on both sides.
        log: Format of kvflow's log on standard error: "none", "console" or "json".
    """

    side: SideName = "prefill"
    engine: EngineName = "none"
    model: str = "smollm2"
    prefill_tp: int = 3
    decode_tp: int = 1
    backend: str = "nixl"
    page_size: int = 16
    chunk_tokens: int = 64
    prompt: str = DEFAULT_PROMPT
    tokens: int = 48
    seed: int = 0
    log: Literal["none", "console", "json"] = "none"

    def page_size_of(self, side: SideName) -> int:
        """Return the page size of a side. That of prefill is twice that of decode, to show that they may differ."""
        return self.page_size * (2 if side == "prefill" else 1)


def check_model(model: str) -> int:
    """Check that a model exists, without loading it.

    Args:
        model: As in `DemoOptions`.

    Returns:
        Number of its KV heads.

    Raises:
        ConfigError: It does not exist, or its configuration lacks the number of heads.
    """
    if model in KV_HEADS:
        return KV_HEADS[model]
    path = Path(model) / "config.json"
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        hint = "no such model; pass smollm2, tiny, or a directory with config.json"
        raise ConfigError(hint, model=model) from error
    except ValueError as error:
        raise ConfigError("config.json cannot be read", path=str(path), detail=str(error)) from error
    fields = ("num_key_value_heads", "num_attention_heads")
    heads = next((config[field] for field in fields if field in config), None) if isinstance(config, dict) else None
    if not isinstance(heads, int) or heads < 1:
        raise ConfigError(
            "config.json does not contain the number of KV heads", path=str(path), field="num_key_value_heads"
        )
    return heads


def check_tp(option: str, num_ranks: int, kv_heads: int) -> None:
    """Check that the KV heads can be distributed evenly over the ranks of one side.

    Raises:
        ConfigError: They cannot; the error lists the possible numbers of ranks.
    """
    if kv_heads % num_ranks and num_ranks % kv_heads:
        divisors = [str(count) for count in range(1, kv_heads + 1) if kv_heads % count == 0]
        raise ConfigError(
            "KV heads cannot be split evenly among the ranks",
            option=option,
            value=num_ranks,
            kv_heads=kv_heads,
            possible=f"{', '.join(divisors)} or a multiple of {kv_heads}",
        )

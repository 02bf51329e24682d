"""What a user can choose, in a form that reaches the worker processes."""

from typing import Literal

import msgspec

__all__ = ["DEFAULT_PROMPT", "DemoOptions"]

DEFAULT_PROMPT = """\
Large language models answer in two phases. In the first, called prefill, the whole prompt is read at once and a key \
and a value vector is computed for every token in every layer; together these are called the KV cache. In the second, \
called decode, one token after another is produced, and each of them looks at the whole cache. Prefill needs a lot of \
arithmetic and decode needs a lot of memory bandwidth, so large deployments run the two on different machines. The \
cache then has to travel from one machine to the other, page by page, while the rest of the prompt is still being \
read, and nothing may be lost or mixed up on the way. If a single page arrived in the wrong place, the answer would \
be nonsense.

Explain in two sentences what the KV cache is and why it has to be moved."""


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the demo.

    Attributes:
        model: "smollm2", "tiny", or the directory of a Llama model.
        prefill_tp: Prefill ranks, among which the KV heads are split or replicated.
        decode_tp: Decode ranks, likewise.
        backend: "memory" (both sides in one process), or any other transport (each in its own).
        page_size: Tokens of a page.
        chunk_tokens: Tokens of a prefill chunk.
        prompt: What the model is asked.
        tokens: Tokens to generate at most.
        seed: Of the page tables, which are shuffled on both sides.
        log: How to print kvflow's log to standard error: "none", "console" or "json".
    """

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

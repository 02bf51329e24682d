"""Options of the demo, in a form that can be sent to other processes."""

from typing import Final, Literal

import msgspec

__all__ = ["KV_HEADS", "MODELS", "DemoOptions", "SideName"]

SideName = Literal["prefill", "decode"]

DEFAULT_PROMPT: Final = """\
Large language models answer in two phases. In the first, called prefill, the whole prompt is read at once and a key \
and a value vector is computed for every token in every layer; together these are called the KV cache. In the second, \
called decode, one token after another is produced, and each of them looks at the whole cache. Prefill needs a lot of \
arithmetic and decode needs a lot of memory bandwidth, so large deployments run the two on different machines. The \
cache then has to travel from one machine to the other, page by page, while the rest of the prompt is still being \
read, and nothing may be lost or mixed up on the way. If a single page arrived in the wrong place, the answer would \
be nonsense.

Explain in two sentences what the KV cache is and why it has to be moved."""

MODELS: Final = ("smollm2", "tiny")
KV_HEADS: Final = 3
"""KV heads of each of these models."""


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the demo: options of `kvflow demo`, whose help explains them, and the endpoint of its registry."""

    model: str = "smollm2"
    prefill_tp: int = 3
    decode_tp: int = 1
    backend: str = "nixl"
    page_size: int = 16
    chunk: int = 64
    prompt: str = DEFAULT_PROMPT
    tokens: int = 48
    seed: int = 0
    log: Literal["none", "console", "json"] = "none"
    json: bool = False
    registry: str = ""

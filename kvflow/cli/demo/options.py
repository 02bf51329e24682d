"""Options of the demo, in a form that can be sent to other processes."""

from typing import Final, Literal

import msgspec

__all__ = ["KV_HEADS", "MODELS", "DemoOptions", "SideName"]

SideName = Literal["prefill", "decode", "second"]
"""`second` is another decode server, to which the request moves."""

DEFAULT_PROMPT: Final = """\
The seasons are spring, summer, autumn and winter.
The planets are Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus and Neptune.
The days of the week are Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday.
The colours of the rainbow are red, orange, yellow, green, blue, indigo and violet.
The continents are Africa, Antarctica, Asia, Australia, Europe, North America and South America.
The oceans are the Pacific, the Atlantic, the Indian, the Southern and the Arctic Ocean.
The months are January, February, March, April, May, June, July, August, September, October, November and December.

Name the planets in order, from Mercury to Neptune."""
"""The answer is in the prompt, so anybody sees whether the cache has arrived, and even a small model gets it right."""

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
    stages: bool = False
    migrate: bool = False
    registry: str = ""

"""Pairs of instances with chosen numbers of context-parallel ranks, for tests over every transport."""

import itertools
from dataclasses import replace
from typing import Final

from tests.support.worlds import ComponentSpec, Split, TensorSpec, World, build_ranks

__all__ = ["PAIRS", "context_world"]

NUM_TOKENS, ROWS = 75, 3

SPECS: Final = {
    "gqa": (
        ComponentSpec("kv", "paged", (TensorSpec("k", 2, 6), TensorSpec("v", 2, 6)), (0, 1), 0, NUM_TOKENS),
        ComponentSpec("swa", "paged", (TensorSpec("k", 2, 2),), (0,), 0, NUM_TOKENS),
        ComponentSpec("mamba", "slot", (TensorSpec("conv", 4, 2), TensorSpec("ssm", 4, 5, ROWS)), (1,), 0, ROWS),
    ),
    "mla": (
        ComponentSpec("kv", "paged", (TensorSpec("latent", 1, 9), TensorSpec("rope", 1, 2)), (0, 1), 0, NUM_TOKENS),
        ComponentSpec("index", "paged", (TensorSpec("index_k", 1, 4), TensorSpec("s", 1, 1, 4)), (0,), 0, NUM_TOKENS),
    ),
}
"""Two models; only their main components are sharded. Windows, an index and recurrent states are whole on each rank."""

WANTED: Final = {"kv": (5, NUM_TOKENS), "swa": (59, NUM_TOKENS), "index": (0, NUM_TOKENS), "mamba": (0, ROWS)}


def split(tp: int, context: int, interleave: int, page_size: int = 16, pp: int = 1) -> Split:
    return Split(tp, pp, context, interleave, page_size, frozenset({"kv"}))


PAIRS: Final = [
    *((split(1, 2, step), split(1, 1, 1)) for step in (1, 16)),
    *((split(1, 1, 1), split(1, 2, step)) for step in (1, 4, 16)),
    *((split(1, 2, step), split(1, 4, step)) for step in (1, 16)),
    (split(1, 4, 16), split(1, 2, 1)),
    (split(1, 3, 1), split(1, 2, 4)),
    (split(1, 2, 16), split(1, 2, 16)),
    (split(1, 2, 1), split(1, 2, 16)),
    (split(2, 2, 16), split(1, 1, 1)),
    (split(1, 1, 1), split(2, 2, 16)),
    (split(2, 2, 1), split(4, 2, 4)),
    (split(1, 2, 16, page_size=16), split(1, 2, 16, page_size=32)),
    (split(1, 2, 4, pp=2), split(1, 1, 1, page_size=4)),
]
"""How prefill and decode split the model."""


def context_world(model: str, prefill: Split, decode: Split, *, declared: int | None = None) -> World:
    """Build the ranks of both sides, and a request of 75 tokens, of which decode has the first five already.

    If `declared` is given, prefill declares that interleave instead of the one by which it has computed.
    """
    specs = SPECS[model]
    names = [spec.name for spec in specs]
    world = World(
        build_ranks(specs, prefill, itertools.count(1), is_decode=False),
        build_ranks(specs, decode, itertools.count(101), is_decode=True),
        wanted={name: WANTED[name] for name in names},
        cuts={name: [16, 41] if name == "kv" else [] for name in names},
        num_tokens={spec.name: spec.num_tokens for spec in specs},
        head_bytes={(spec.name, tensor.name): tensor.head_bytes for spec in specs for tensor in spec.tensors},
    )
    world.compute()
    if declared is not None:
        others = build_ranks(specs, replace(prefill, interleave=declared), itertools.count(1), is_decode=False)
        for number, rank in world.prefill.items():
            rank.layout = others[number].layout
    return world

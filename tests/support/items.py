"""Ranks over flat lists of buffers, as engines describe memory to their transports, backed by real bytes."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kvflow.geometry import BufferLists, Component, layout_from_pointers
from tests.support.links import links, send
from tests.support.worlds import Rank, World

__all__ = ["FILL", "Bytes", "ItemMemory", "move"]

Bytes = NDArray[np.uint8]

FILL = 0xEE


class ItemMemory:
    """One rank's buffers, with gaps between them.

    Args:
        pools: uint8[items, item bytes] for each buffer, copied; None for an entry that the rank does not hold.
        base: Address of the first byte in the lists; the real one by default.

    Attributes:
        lists: Buffers in the engine's format.
        pools: Views of the copies.
    """

    def __init__(self, pools: Sequence[Bytes | None], *, base: int | None = None) -> None:
        sizes = [0 if pool is None else pool.size for pool in pools]
        starts = np.cumsum([3, *(size + 5 for size in sizes)]).tolist()
        self.memory = np.full(starts[-1], FILL, np.uint8)
        self.base = self.memory.ctypes.data if base is None else base
        self.pools: list[Bytes | None] = []
        for pool, start in zip(pools, starts, strict=False):
            self.pools.append(None if pool is None else self.memory[start : start + pool.size].reshape(pool.shape))
            if pool is not None:
                self.memory[start : start + pool.size] = pool.ravel()
        held = [pool is not None for pool in pools]
        self.lists = BufferLists(
            [self.base + start if here else 0 for start, here in zip(starts, held, strict=False)],
            sizes,
            [0 if pool is None else pool.shape[1] for pool in pools],
        )

    def rank(self, components: Sequence[Component], tables: Mapping[str, list[int]]) -> Rank:
        """Return a rank with these components over this memory; `tables` hold the request's pages, from token 0."""
        return Rank(
            self.memory, self.base, layout_from_pointers(components, "model", buffers=[self.lists]), dict(tables)
        )


def move(
    prefill: Sequence[Rank],
    decode: Sequence[Rank],
    wanted: Mapping[str, tuple[int, int]],
    cuts: Mapping[str, list[int]] | None = None,
) -> None:
    """Send the wanted tokens.

    Args:
        prefill: Ranks of the prefill instance.
        decode: Ranks of the decode instance.
        wanted: Tokens of each component that decode wants; rows for a slot.
        cuts: Tokens of each component at which prefill starts a new chunk.
    """
    world = World(
        dict(enumerate(prefill)),
        dict(enumerate(decode)),
        wanted=dict(wanted),
        cuts={name: list((cuts or {}).get(name, [])) for name in wanted},
        num_tokens={},
        head_bytes={},
    )
    for _, bound, source, target in links(world):
        send(world, bound, source, target)

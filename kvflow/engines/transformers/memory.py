"""The cache of a manager as a layout, and its block tables as page tables. Pure.

The cache is one flat tensor. A block holds, for each layer of its kind of attention, the keys of a page of tokens,
followed by their values. Each kind of attention is a component:

- "kv": full attention. A page is a block.
- "window": sliding attention. A request's blocks form a ring, with the token at position `p` in place `p mod window`. A
  page is one token, so rings match whatever the page sizes of the two sides.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvflow import KVLayout, LayoutError, TokenPages
from kvflow.geometry import BufferLists, Component, Location, Region, layout_from_pointers

__all__ = ["BlockTables", "CacheMap"]

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
COMPONENTS: Final = {FULL: "kv", SLIDING: "window"}
"""Component of each kind of attention."""

BlockTables = Mapping[str, Sequence[int]]
"""Blocks of a request for each kind of attention, in token order."""

Tables = dict[str, Sequence[int] | TokenPages | None]


class CacheMap:
    """The layout of a `PagedAttentionCache`, and its page tables; LayoutError if kvflow does not move its attention."""

    def __init__(self, cache: Any, fingerprint: str) -> None:
        unknown = sorted(set(cache.cache_allocators) - set(COMPONENTS))
        if unknown:
            raise LayoutError("kvflow does not move this cache", found=unknown, expected=sorted(COMPONENTS))
        self._allocators = dict(cache.cache_allocators)
        tensor = cache.cache_tensor
        address, length = tensor.data_ptr(), tensor.numel()
        device = tensor.device
        location = Location("DRAM", 0) if device.type == "cpu" else Location("VRAM", device.index or 0)
        self.layout: KVLayout = layout_from_pointers(
            [_component(name, one, address, length) for name, one in self._allocators.items()],
            fingerprint,
            buffers=[BufferLists([address], [length], [length])],
            memory_kind=location.memory_kind,
            device_id=location.device_id,
        )
        self.layout.keep([tensor])

    def whole(self, num_tokens: int) -> int:
        """Round a number of tokens down to complete blocks; return 0 if nothing can be sent before the end."""
        if FULL not in self._allocators:
            return 0
        size = self._allocators[FULL].tokens_per_page
        return int(num_tokens // size * size)

    def chunk(self, blocks: BlockTables, start: int, stop: int) -> Tables:
        """Return the page tables of a chunk that is not the last; windows are only sent at the end."""
        if FULL not in blocks:
            return {}
        size = self._allocators[FULL].tokens_per_page
        return {COMPONENTS[FULL]: blocks[FULL][start // size : -(-stop // size)]}

    def last(self, blocks: BlockTables, start: int, num_tokens: int) -> Tables:
        """Return the page tables of the last chunk: the tokens from `start` on, and what the window contains."""
        tables = self.chunk(blocks, start, num_tokens)
        if SLIDING in blocks:
            ring = self._allocators[SLIDING]
            first = num_tokens - min(num_tokens, ring.sliding_window)
            places = [position % ring.sliding_window for position in range(first, num_tokens)]
            size, rows = ring.tokens_per_page, ring.block_physical_stride
            pages = [blocks[SLIDING][place // size] * rows + place % size for place in places]
            tables[COMPONENTS[SLIDING]] = TokenPages((first, num_tokens), pages)
        return tables


def _component(kind: str, allocator: Any, address: int, length: int) -> Component:
    """Describe the blocks of one kind of attention, over the whole cache, because any part may be allocated to it."""
    size, heads = allocator.tokens_per_page, allocator.num_key_value_heads
    head_bytes = allocator.head_dim * allocator.cache_dtype.itemsize
    token_bytes = heads * head_bytes
    slots, slot_bytes, page_tokens = length // allocator.bytes_per_block, allocator.bytes_per_block, size
    if kind == SLIDING:  # the rows of the last block end with its first page
        slots, slot_bytes, page_tokens = (slots - 1) * allocator.block_physical_stride + size, token_bytes, 1
    regions = [
        Region(
            tensor=tensor,
            layer=layer,
            address=address + (2 * place + is_value) * size * token_bytes,
            slots=slots,
            slot_stride=slot_bytes,
            tokens_per_slot=page_tokens,
            token_stride=token_bytes,
            heads=(0, heads),
            head_stride=head_bytes,
            head_bytes=head_bytes,
            dtype=str(allocator.cache_dtype).removeprefix("torch."),
        )
        for is_value, tensor in enumerate(("k", "v"))
        for place, layer in enumerate(allocator.layer_indices)
    ]
    return Component(COMPONENTS[kind], tuple(regions))

"""SGLang's lists of buffers as regions. Pure."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvflow import LayoutError, head_range
from kvflow.geometry import BufferLists, OpaqueItem, PagePart, PageRows, Region, TokenShard, regions_from_pointers

__all__ = ["ListedBuffer", "Parts", "Shard", "buffers_in", "keys_and_values", "regions_of"]

Parts = Sequence[PagePart | PageRows] | OpaqueItem
"""Content of an item of a buffer."""


class Shard(NamedTuple):
    """The part of the model that a rank holds.

    Attributes:
        kv_heads: KV heads of the whole model; 1 with MLA.
        tp_size: Ranks that share its heads.
        tp_rank: Number of this rank among them.
        pp_size: Pipeline stages.
        pp_rank: Stage of this rank.
        is_mla: Each rank holds the latents of all heads.
        has_unknown_order: The order of heads within a page of the main pool is unknown.
        tokens: Tokens of the main pool that this rank holds (decode context parallelism).
    """

    kv_heads: int
    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0
    is_mla: bool = False
    has_unknown_order: bool = False
    tokens: TokenShard = TokenShard()

    @property
    def heads(self) -> tuple[int, int]:
        """KV heads that this rank holds; LayoutError if they cannot be distributed over the ranks."""
        return head_range(self.kv_heads, self.tp_size, self.tp_rank)

    def opaque(self, tensor: str) -> OpaqueItem:
        """Describe an item of unknown content, which moves only between ranks of equal TP size."""
        return OpaqueItem(f"{tensor} of {self.tp_size} ranks", self.tp_rank)


class ListedBuffer(NamedTuple):
    """One entry of SGLang's lists: address, length, bytes of an item, and layer of the model."""

    address: int
    length: int
    item: int
    layer: int


def buffers_in(
    addresses: Sequence[int], lengths: Sequence[int], items: Sequence[int], layers: Sequence[int]
) -> list[ListedBuffer]:
    """Combine SGLang's lists; raise LayoutError if they differ in length."""
    counts = {len(addresses), len(lengths), len(items), len(layers)}
    if len(counts) != 1:
        raise LayoutError("lists of buffers differ in length", found=sorted(counts))
    return [ListedBuffer(*entry) for entry in zip(addresses, lengths, items, layers, strict=True)]


def regions_of(
    buffers: Iterable[ListedBuffer],
    parts: OpaqueItem | Callable[[ListedBuffer], Parts],
    *,
    page_size: int,
    optional: bool = False,
) -> tuple[Region, ...]:
    """Describe buffers whose items may differ between layers; omitted ones (of length 0) get no region."""
    regions: list[Region] = []
    for one in buffers:
        if one.length:
            lists = BufferLists([one.address], [one.length], [one.item])
            item = parts if isinstance(parts, OpaqueItem) else parts(one)
            regions += regions_from_pointers(lists, [item], page_size=page_size, layers=[one.layer], optional=optional)
    return tuple(regions)


def keys_and_values(  # noqa: PLR0913 - most by keyword
    buffers: Sequence[ListedBuffer],
    shard: Shard,
    *,
    page_size: int,
    dtype: str,
    order: str = "NHD",
    are_heads_known: bool = True,
    is_opaque: bool = False,
    optional: bool = False,
) -> tuple[Region, ...]:
    """Describe `[K of each layer, V of each layer]`.

    Args:
        buffers: The list.
        shard: The part of the model that this rank holds.
        page_size: Tokens of an item.
        dtype: Name of the element type.
        order: "NHD" or "HND".
        are_heads_known: They have as many heads as the model. A draft model or a sliding window may have another
            number, which SGLang does not provide. Splitting them into as many parts as the model has heads is still
            correct for every rank, as long as no head is on two ranks. If one is, they move only between ranks of equal
            TP size.
        is_opaque: They move only between ranks of equal TP size in any case.
        optional: Decode can do without them.

    Raises:
        LayoutError: The numbers of K and V buffers differ, or an item does not hold whole heads.
    """
    if len(buffers) % 2:
        raise LayoutError("list must have as many buffers of K as of V", found=len(buffers))
    half = len(buffers) // 2
    heads = shard.heads
    is_opaque = is_opaque or (not are_heads_known and shard.tp_size > shard.kv_heads)
    regions: tuple[Region, ...] = ()
    for tensor, part in (("k", buffers[:half]), ("v", buffers[half:])):

        def cells(one: ListedBuffer, tensor: str = tensor) -> Parts:
            if is_opaque:
                return shard.opaque(tensor)
            head_bytes = one.item // (page_size * (heads[1] - heads[0]))
            return [PagePart(tensor, head_bytes, dtype, heads, order)]

        regions += regions_of(part, cells, page_size=page_size, optional=optional)
    return regions

"""Layouts from flat pointer lists, as engines keep them for their transports. No tensors are needed.

An engine has three lists of equal length: `kv_data_ptrs` (start of each buffer), `kv_data_lens` (its bytes) and
`kv_item_lens` (the bytes of one page in it). Buffers come in *groups*, one after another, each with one buffer per
layer: `[k of layer 0, k of layer 1, ..., v of layer 0, ...]`. Draft layers come after all groups. Pointers say nothing
about strides, so buffers must be packed: page after page, and each page as its `PagePart`s say.

A rank that does not hold a layer may keep its place in the lists: an entry of length 0 is *elided*. It becomes no
region and is not registered, and the entries after it keep their layers.
"""

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from numpy.typing import NDArray

from kvflow.errors import LayoutError
from kvflow.geometry.layout import Component, KVLayout, Region
from kvflow.geometry.memory import ADDRESS_LIMIT, Location, MemoryKind, MemoryRange, merge_ranges
from kvflow.geometry.parts import ItemParts, OpaqueItem, PagePart, PageRows

__all__ = ["BufferLists", "buffers_of", "layout_from_pointers", "regions_from_pointers"]

Numbers = Sequence[int] | NDArray[Any]


class BufferLists(msgspec.Struct, frozen=True):
    """Three flat lists; entry `i` of each describes buffer `i`.

    Attributes:
        data_ptrs: Address of each buffer's first byte, uint64: bit 63 may be set, negative numbers are refused.
        data_lens: Bytes of each buffer; 0 for an elided entry, whose address and item length are ignored.
        item_lens: Bytes of one item of each buffer; an item is a page unless stated otherwise.
        location: Location of the buffers; None for the default of `layout_from_pointers`.

    Raises:
        LayoutError: Lists differ in length, or a number is not an unsigned 64-bit integer, or is 0 in an entry that is
            not elided.
    """

    data_ptrs: Sequence[int]
    data_lens: Sequence[int]
    item_lens: Sequence[int]
    location: Location | None = None

    def __post_init__(self) -> None:
        for field in ("data_ptrs", "data_lens", "item_lens"):
            msgspec.structs.force_setattr(self, field, _whole_numbers(field, getattr(self, field)))
        counts = (len(self.data_ptrs), len(self.data_lens), len(self.item_lens))
        if len(set(counts)) != 1:
            raise LayoutError(
                "pointer lists differ in length", data_ptrs=counts[0], data_lens=counts[1], item_lens=counts[2]
            )
        entries = zip(self.data_ptrs, self.data_lens, self.item_lens, strict=True)
        for index, (address, length, item) in enumerate(entries):
            if length and not (address and item):
                raise LayoutError(
                    "address and item length may be 0 only in an elided entry, whose length is 0",
                    field="item_lens" if address else "data_ptrs",
                    index=index,
                    expected="> 0",
                    found=0,
                )
            if address + length > ADDRESS_LIMIT:
                raise LayoutError(
                    "buffer exceeds the 64-bit address space",
                    field="data_lens",
                    index=index,
                    address=address,
                    length=length,
                )

    def __len__(self) -> int:
        return len(self.data_ptrs)

    def split(self, count: int) -> tuple["BufferLists", "BufferLists"]:
        """Split the first `count` buffers (the model's groups) from draft layers; LayoutError if there are fewer."""
        if not 0 <= count <= len(self):
            raise LayoutError("pointer lists are too short", field="data_ptrs", expected=count, found=len(self))
        return self._part(slice(count)), self._part(slice(count, None))

    def _part(self, chosen: slice) -> "BufferLists":
        return BufferLists(self.data_ptrs[chosen], self.data_lens[chosen], self.item_lens[chosen], self.location)

    @property
    def ranges(self) -> list[MemoryRange]:
        """The buffers that are not elided as memory ranges."""
        pairs = zip(self.data_ptrs, self.data_lens, strict=True)
        return [MemoryRange(address, length, self.location) for address, length in pairs if length]


def buffers_of(component: Component, tensors: Sequence[str]) -> BufferLists:
    """Return a component's buffers as the lists that engines pass around, for example of its index keys.

    Args:
        component: Its regions must be packed: page after page, without gaps or other tensors between.
        tensors: Names, in the order of the groups; within a group, layers are in the component's order.

    Returns:
        For each tensor and layer: pointer, total bytes, bytes of one page.

    Raises:
        LayoutError: The component has no such tensor, or one of its buffers is not packed.

    Source: `get_state_buf_infos` of SGLang's pools (SGLang #23893).
    """
    chosen = [region for tensor in tensors for region in component.regions if region.tensor == tensor]
    missing = sorted(set(tensors) - {region.tensor for region in chosen})
    if missing:
        raise LayoutError("component has no such tensor", component=component.name, tensors=missing)
    for region in chosen:
        page_bytes = region.cells_per_slot * region.num_heads * region.head_bytes
        if region.slot_stride != page_bytes:
            raise LayoutError(
                "buffer is not packed: its pages are not contiguous",
                tensor=region.tensor,
                layer=region.layer,
                field="slot_stride",
                expected=page_bytes,
                found=region.slot_stride,
            )
    return BufferLists(
        [region.address for region in chosen],
        [region.slots * region.slot_stride for region in chosen],
        [region.slot_stride for region in chosen],
    )


def regions_from_pointers(
    buffers: BufferLists,
    groups: Sequence[ItemParts],
    *,
    page_size: int,
    layers: Sequence[int],
    item_tokens: int | None = None,
    optional: bool = False,
) -> tuple[Region, ...]:
    """Describe buffers that come in groups, one buffer for each layer.

    Args:
        buffers: `[group 0 layer 0, group 0 layer 1, ..., group 1 layer 0, ...]`, nothing after it; see
            `BufferLists.split` for draft layers.
        groups: Parts of an item of each group, in memory order: `[[k], [v]]` for separate K and V buffers, `[[k, v]]`
            where they are interleaved page by page, `[[PageRows((k, v))]]` where they are interleaved token by token,
            and `[OpaqueItem("index")]` where the content is unknown.
        page_size: Tokens of a page; 1 for buffers with one item for each request.
        layers: Global number of each layer in a group.
        item_tokens: Tokens of one item, by default a page: 1 for Ascend FIA buffers, which state the bytes of a token;
            n for an item that is a ring of n tokens with pages of one token (see `ring_pages`).
        optional: Whether decode can run without these layers (draft layers).

    Returns:
        One region for each buffer and part, in the order of the buffers; none for elided entries. A pool has
        `data_len // page bytes` slots.

    Raises:
        LayoutError: The number of buffers is not groups times layers, an item does not hold its parts, or a buffer is
            not a whole number of pages. The error names tensor, layer, field and both values.

    Source: buffer groups of SGLang #23893, items of Ascend FIA buffers of SGLang #15852.
    """
    layers = [operator.index(layer) for layer in layers]  # numpy integers cannot be encoded
    if not groups or not layers or not all(groups) or len(buffers) != len(groups) * len(layers):
        raise LayoutError(
            "pointer lists must have one entry for each group and layer",
            field="data_ptrs",
            expected=(len(groups), len(layers)),
            found=len(buffers),
        )
    regions: list[Region] = []
    for index in range(len(buffers)):
        group, layer = groups[index // len(layers)], layers[index % len(layers)]
        item, length = buffers.item_lens[index], buffers.data_lens[index]
        if not length:
            continue
        placed = list(_place([group.part(item, page_size)] if isinstance(group, OpaqueItem) else group, page_size))
        page_bytes = sum(part.num_bytes(page_size) for part, _, _ in placed)
        where = {"tensor": placed[0].part.tensor, "layer": layer}
        _check_buffer(item, length, page_bytes, page_size, item_tokens or page_size, where)
        memory = MemoryRange(buffers.data_ptrs[index], length)
        regions += [_region(one, layer, memory, page_bytes, page_size, optional=optional) for one in placed]
    return tuple(regions)


def _region(
    placed: "_Placed", layer: int, memory: MemoryRange, page_bytes: int, page_size: int, *, optional: bool
) -> Region:
    part, offset, token_stride = placed
    return Region(
        tensor=part.tensor,
        layer=layer,
        address=memory.address + offset,
        slots=memory.length // page_bytes,
        slot_stride=page_bytes,
        tokens_per_slot=page_size,
        token_stride=token_stride,
        heads=part.heads,
        head_stride=part.head_bytes * (1 if part.order == "NHD" else page_size // part.tokens_per_cell),
        head_bytes=part.head_bytes,
        dtype=part.dtype,
        optional=optional,
        tokens_per_cell=part.tokens_per_cell,
    )


def layout_from_pointers(
    components: Sequence[Component],
    fingerprint: str,
    *,
    buffers: Iterable[BufferLists],
    memory_kind: MemoryKind = "DRAM",
    device_id: int = 0,
) -> KVLayout:
    """Build a layout from components, and register the buffers that hold them.

    Args:
        components: All pools of the rank, each with its own page table.
        fingerprint: Identifies the content (model and revision).
        buffers: Every list that the components were made from. Each buffer is one registration; buffers that overlap
            are registered together.
        memory_kind: "DRAM" or "VRAM", for lists without a location.
        device_id: Device ordinal for the same lists; 0 for host memory.

    Returns:
        A layout that cannot keep its memory alive: kvflow does not know who owns it. Keep it allocated until every rank
        that uses the layout is closed, or peers write into what the allocator puts there next; or pass its owners to
        `KVLayout.keep`.

    Raises:
        LayoutError: A region lies outside the buffers, or a component spans several locations.
    """
    allocations = merge_ranges(item for lists in buffers for item in lists.ranges)
    return KVLayout(tuple(components), fingerprint, allocations, memory_kind, device_id)


def _whole_numbers(field: str, values: Numbers) -> tuple[int, ...]:
    """Convert to Python integers, which do not overflow. Floats may have lost bits and are refused."""
    numbers = []
    for index, value in enumerate(values):
        try:
            number = operator.index(value)
        except TypeError:
            raise LayoutError(
                "pointer lists must contain integers", field=field, index=index, expected="integer", found=value
            ) from None
        if not 0 <= number < ADDRESS_LIMIT:
            raise LayoutError(
                "number must be an unsigned 64-bit integer",
                field=field,
                index=index,
                expected=">= 0",
                found=number,
            )
        numbers.append(number)
    return tuple(numbers)


class _Placed(NamedTuple):
    """A part of an item: where it begins there, and how far apart its cells lie along the tokens, in bytes."""

    part: PagePart
    offset: int
    token_stride: int


def _place(parts: Sequence[PagePart | PageRows], page_size: int) -> Iterator[_Placed]:
    """Lay the parts of an item out one after another, and those of a row side by side."""
    offset = 0
    for part in parts:
        if isinstance(part, PageRows):
            row_bytes = sum(inner.row_bytes for inner in part.parts)
            starts = itertools.accumulate((inner.row_bytes for inner in part.parts), initial=offset)
            yield from (_Placed(inner, start, row_bytes) for inner, start in zip(part.parts, starts, strict=False))
        else:
            yield _Placed(part, offset, part.row_bytes if part.order == "NHD" else part.head_bytes)
        offset += part.num_bytes(page_size)


def _check_buffer(
    item: int, length: int, page_bytes: int, page_size: int, item_tokens: int, where: dict[str, Any]
) -> None:
    """Check a buffer against what is declared about it."""
    if item_tokens < 1 or (page_size % item_tokens and item_tokens % page_size):
        raise LayoutError(
            "`item_tokens` must be a divisor or a multiple of the page size",
            **where,
            field="item_tokens",
            expected=page_size,
            found=item_tokens,
        )
    if item * page_size != page_bytes * item_tokens:
        message = "item does not have the size of the parts of a page"
        if item_tokens == page_size and item * page_size == page_bytes:
            message = "item has the size of a token, not of a page; set item_tokens=1 if it is one (Ascend FIA)"
        raise LayoutError(
            message, **where, field="item_lens", expected=page_bytes * item_tokens // page_size, found=item
        )
    whole = max(item, page_bytes)
    if length % whole:
        things = "pages" if whole == page_bytes else "items"
        raise LayoutError(
            f"buffer does not hold a whole number of {things}", **where, field="data_lens", expected=whole, found=length
        )

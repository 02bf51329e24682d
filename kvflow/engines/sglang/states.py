"""SGLang's `state_types` as components: sliding windows, the index of DSA, recurrent states, opaque items. Pure."""

import functools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from numpy.typing import NDArray

from kvflow import LayoutError, PlanError, TokenPages
from kvflow.engines.sglang.buffers import ListedBuffer, Parts, Shard, buffers_in, keys_and_values, regions_of
from kvflow.geometry import Component, OpaqueItem, PagePart, PageRows, Region

__all__ = ["REFUSED", "ROWS", "State", "StateBuffers", "describe_state"]

REFUSED: Final = {
    "swa_ring": "only DeepSeek V4 has it, whose pools mix items of several layouts in one list",
    "c128_state": "only DeepSeek V4 has it, whose pools mix items of several layouts in one list",
    "request_row": "only the draft model of DeepSeek V4 has it, whose pools are not moved",
}
"""Kinds of state that SGLang 0.5.23 has and kvflow does not move, with the reason."""

ROWS: Final = {"dsa_tail": 6, "qsa_pending": 1}
"""Kinds with one row per request, and how many indices SGLang gives for it; the first is the row. The others of
`dsa_tail` name the live part of its ring; the whole ring is moved, so both sides need rings of the same size."""

PAGED: Final = frozenset(
    {"block_scale", "block_scale_swa", "qsa_compressed", "minimax_index_k", "minimax_dense_kv"},
)
"""Kinds with one item per page, of unknown content."""

LIKE_MAIN: Final = frozenset({"dsa_tail", "block_scale"})
"""Kinds with a list of items of each layer of the main pool, one list after the other, without layer numbers."""

ORDERS: Final = {"nhd": "NHD", "hnd": "HND"}


class StateBuffers(NamedTuple):
    """SGLang's lists for one state.

    Attributes:
        kind: Its entry of `state_types`.
        buffers: Its buffers; without layers, they are numbered by their position in the list.
        has_layers: Their layers are those of the model.
        dims: For a recurrent state: cells along the sharded axis; 0 if there is none, None if SGLang does not provide
            it.
        groups: For a recurrent state: full sizes of the blocks of that axis that are sharded separately.
        rows: For a recurrent state: rows outside that axis.
    """

    kind: str
    buffers: list[ListedBuffer]
    has_layers: bool
    dims: Sequence[int | None]
    groups: Sequence[Sequence[int] | None]
    rows: Sequence[int]

    @classmethod
    def read(cls, args: Any, index: int) -> "StateBuffers":
        """Extract state `index` from `KVArgs`; raise LayoutError if its lists differ in length."""
        kind = args.state_types[index]
        addresses = args.state_data_ptrs[index]
        layers = list(_nth(args, "state_layer_ids", index))
        count = len(addresses)
        buffers = buffers_in(
            addresses, args.state_data_lens[index], args.state_item_lens[index], layers or list(range(count))
        )
        return cls(
            getattr(kind, "value", kind),
            buffers,
            bool(layers),
            _nth(args, "state_dim_per_tensor", index) or [None] * count,
            _nth(args, "state_conv_shard_groups", index) or [None] * count,
            _nth(args, "state_slice_outer_counts", index) or [1] * count,
        )


def _nth(args: Any, field: str, index: int) -> Sequence[Any]:
    lists = getattr(args, field, None) or []
    return lists[index] if index < len(lists) and lists[index] else []


class State(NamedTuple):
    """Description of one state.

    Attributes:
        components: Its components in the layout; all have the same page table.
        num_indices: Number of SGLang's indices if a request has one slot of it, of which the first is the slot; 0 if it
            has pages up to its last token.
    """

    components: tuple[Component, ...]
    num_indices: int = 0

    def pages(
        self, tokens: tuple[int, int], indices: NDArray[Any] | None, page_size: int
    ) -> dict[str, TokenPages | None]:
        """Return the page tables of a request.

        Args:
            tokens: First token of which pages are needed, and one past the last token of the request's last page.
            indices: SGLang's indices: those of one slot, or as many pages as the state has for this request.
            page_size: Tokens of a page.

        Raises:
            PlanError: A request has more than one slot.
        """
        names = [component.name for component in self.components]
        if not names or indices is None or not indices.size:
            return dict.fromkeys(names)
        if self.num_indices:
            if indices.size != self.num_indices:
                raise PlanError(
                    "a request has one slot of this state",
                    component=names[0],
                    expected=self.num_indices,
                    found=indices.size,
                )
            rows = self.components[0].tokens_per_slot
            return dict.fromkeys(names, TokenPages((0, rows), indices[:1]))
        needed, end = tokens
        start = max(needed, end - indices.size * page_size)
        pages = indices[indices.size - (end - start) // page_size :]
        return dict.fromkeys(names, TokenPages((start, end), pages) if start < end else None)


def describe_state(name: str, args: Any, index: int, shard: Shard, layers: Sequence[int]) -> State:
    """Describe the state at a position of the lists in SGLang's `KVArgs`; `layers` are those of the main pool.

    Raises:
        LayoutError: Its kind is not moved, with the reason, or its buffers do not fit.
    """
    state = StateBuffers.read(args, index)
    match state.kind:
        case "mamba":
            return State((_recurrent(name, state, shard),), num_indices=1)
        case "dsa" if shard.is_mla:
            return State(_index(name, state, layers, args.page_size))
        case "swa":
            return State((_window(name, state, args, shard),))
        case kind if kind in ROWS:
            return State(_items(name, state, shard, layers, page_size=1), ROWS[kind])
        case kind if kind in PAGED:
            return State(_items(name, state, shard, layers, page_size=args.page_size))
        case _:
            reason = REFUSED.get(state.kind, "kvflow does not know it")
            raise LayoutError("kvflow does not move this state of SGLang", state=state.kind, reason=reason)


def _items(
    name: str, state: StateBuffers, shard: Shard, layers: Sequence[int], page_size: int
) -> tuple[Component, ...]:
    """Describe items of unknown content, which move as a whole; latents aside, between ranks of equal TP size.

    A pipeline stage may have none.
    """
    buffers = state.buffers
    if state.kind in LIKE_MAIN:
        buffers = [one._replace(layer=layers[place % len(layers)]) for place, one in enumerate(buffers)]
    elif shard.pp_size > 1 and not state.has_layers:
        raise LayoutError("this state has no layer numbers, which pipeline stages need", state=state.kind)
    seen = Counter[int]()
    regions: tuple[Region, ...] = ()
    for one in buffers:
        tensor = f"item{seen[one.layer]}"
        seen[one.layer] += 1
        item = OpaqueItem(tensor) if shard.is_mla else shard.opaque(tensor)
        regions += regions_of([one], item, page_size=page_size)
    return (Component(name, regions, kind="slot" if state.kind in ROWS else "paged"),) if regions else ()


def _window(name: str, state: StateBuffers, args: Any, shard: Shard) -> Component:
    """Describe K and V of a sliding window, which has its own pages."""
    layout = getattr(args, "swa_kv_cache_layout", None)
    if shard.is_mla or layout not in ORDERS:
        raise LayoutError(
            "kvflow does not move this sliding window",
            state="swa",
            layout=layout,
            known=sorted(ORDERS),
            mla=shard.is_mla,
        )
    if shard.pp_size > 1:
        raise LayoutError("a sliding window has no layer numbers, which pipeline stages need", state="swa")
    half = len(state.buffers) // 2  # K of each layer, then V
    buffers = [one._replace(layer=place % half) for place, one in enumerate(state.buffers)]
    regions = keys_and_values(
        buffers,
        shard,
        page_size=args.page_size,
        dtype=args.kv_cache_dtype_str,
        order=ORDERS[layout],
        are_heads_known=False,
    )
    return Component(name, regions)


def _index(name: str, state: StateBuffers, layers: Sequence[int], page_size: int) -> tuple[Component, ...]:
    """Describe index keys with their scales, replicated on every rank: one item per page, draft layers last."""
    count = len(layers)
    if len(state.buffers) < count:
        raise LayoutError(
            "there must be an index for each layer", state="dsa", expected=count, found=len(state.buffers)
        )
    own = [one._replace(layer=layer) for one, layer in zip(state.buffers, layers, strict=False)]
    draft = [one._replace(layer=place) for place, one in enumerate(state.buffers[count:])]
    components = []
    for suffix, buffers, optional in (("", own, False), ("_draft", draft, True)):
        regions = regions_of(buffers, OpaqueItem("index_k"), page_size=page_size, optional=optional)
        if regions:
            components.append(Component(f"{name}{suffix}", regions))
    return tuple(components)


def _recurrent(name: str, state: StateBuffers, shard: Shard) -> Component:
    """Describe convolution and recurrent states, one slot for each request.

    The rows of a slot are its "tokens"; a state without rows has one cell, which belongs to all of them. A convolution
    state has blocks (such as q, k and v), each sharded separately. Where SGLang names none, their number is unknown,
    and the state moves only between ranks of equal TP size.
    """
    if shard.pp_size > 1 and not state.has_layers:
        raise LayoutError("this state has no layer numbers, which pipeline stages need", state="mamba")
    rows = math.lcm(*state.rows)
    seen = Counter[int]()
    regions: tuple[Region, ...] = ()
    for place, one in enumerate(state.buffers):
        tensor = f"state{seen[one.layer]}"
        seen[one.layer] += 1
        regions += regions_of([one], functools.partial(_cut, state, place, shard, tensor), page_size=rows)
    return Component(name, regions, kind="slot")


def _cut(state: StateBuffers, place: int, shard: Shard, tensor: str, one: ListedBuffer) -> Parts:
    """Return the content of an item of one buffer of a recurrent state."""
    dim, groups, rows = state.dims[place], state.groups[place], state.rows[place]
    if dim is None:
        return shard.opaque(tensor)
    if dim == 0:
        return OpaqueItem(tensor)
    tp_size, tp_rank = shard.tp_size, shard.tp_rank
    unit, shared_by = one.item // (dim * rows), math.lcm(*state.rows) // rows
    if groups and sum(groups) == dim * tp_size and not any(full % tp_size for full in groups):
        blocks = []
        for number, full in enumerate(groups):
            heads = (tp_rank * full // tp_size, (tp_rank + 1) * full // tp_size)
            blocks.append(PagePart(f"{tensor}.{number}", unit, "uint8", heads, tokens_per_cell=shared_by))
        return [PageRows(tuple(blocks))]
    is_one_block = any(state.groups) and groups is None
    if not is_one_block:
        tensor = f"{tensor} of {tp_size} ranks"
    return [PagePart(tensor, unit, "uint8", (tp_rank * dim, (tp_rank + 1) * dim), tokens_per_cell=shared_by)]

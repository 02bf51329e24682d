"""SGLang's `KVArgs` as a layout, and its index lists as page tables. Pure.

Each component of the layout is one of SGLang's lists of buffers:

- "kv": K and V of each layer, or the latents of MLA;
- "draft": the same for the layers of a draft model, which is optional for decode;
- one for each state, named after its kind; see `kvflow.engines.sglang.states`.

All of them move in whole pages, as in SGLang, so page sizes must be equal on both sides. With decode context
parallelism, a rank holds every n-th token of "kv", and an entry of SGLang's index lists is for a page on each of n
ranks. The draft model and the states are whole on each rank.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvflow import KVLayout, LayoutError, PlanError, TokenPages
from kvflow.engines.sglang.buffers import ListedBuffer, Parts, Shard, buffers_in, keys_and_values, regions_of
from kvflow.engines.sglang.states import State, describe_state
from kvflow.geometry import BufferLists, Component, Location, PagePart, Region, layout_from_pointers, shard_pages

__all__ = ["PoolMap", "describe_pools"]

HOST_FIELDS: Final = tuple(
    f"host_{pool}_{field}" for pool in ("kv", "state") for field in ("data_ptrs", "data_lens", "item_lens")
)

Tables = dict[str, NDArray[Any] | TokenPages | None]


class PoolMap:
    """The layout of one rank, and the components that SGLang's index lists refer to.

    Args:
        layout: Layout of all pools.
        paged: Components whose pages are in SGLang's `kv_indices`.
        states: States, in the order of `state_types`.
        page_size: Tokens of a page.

    Attributes:
        index_tokens: Tokens of an entry of `kv_indices`.
    """

    def __init__(self, layout: KVLayout, paged: Sequence[str], states: Sequence[State], page_size: int) -> None:
        self.layout = layout
        self._shard = layout.component("kv").shard
        self.index_tokens = page_size * self._shard.size
        self._page_size = page_size
        self._paged = paged
        self._states = states

    def tokens(self, prefix: int, first: int, count: int, num_tokens: int | None) -> tuple[int, int]:
        """Return the token range of `count` entries of `kv_indices`, up to the end of a page.

        Args:
            prefix: Tokens before the first entry of the request.
            first: Number of entries before these.
            count: Number of entries.
            num_tokens: Tokens that they hold, without which the last page is known only if an entry is a page.

        Raises:
            PlanError: The number of tokens is needed, and unknown.
        """
        start = prefix + first * self.index_tokens
        if self._shard.size == 1:
            return start, start + count * self._page_size
        if num_tokens is None:
            raise PlanError("number of tokens is unknown, which context parallelism needs", entries=count)
        return start, start + -(-num_tokens // self._page_size) * self._page_size

    def pages(self, tokens: tuple[int, int], kv_indices: NDArray[Any]) -> Tables:
        """Return the page tables of a chunk; raise PlanError if they do not fit its tokens."""
        tables: Tables = dict.fromkeys(self._paged, kv_indices)
        if self._shard.size > 1:
            tables["kv"] = shard_pages(tokens, kv_indices, self._shard, self._page_size)
        return tables

    def state_pages(self, tokens: tuple[int, int], state_indices: Sequence[Any] | None) -> Tables:
        """Return the page tables of a request's states; None where it has none.

        Args:
            tokens: See `State.pages`.
            state_indices: Index lists in the order of `state_types`, or None.

        Raises:
            PlanError: There is not exactly one list of indices for each state.
        """
        given = [None] * len(self._states) if state_indices is None else list(state_indices)
        if len(given) != len(self._states):
            raise PlanError("there must be indices for each state", expected=len(self._states), found=len(given))
        tables: Tables = {}
        for state, indices in zip(self._states, given, strict=True):
            flat = None if indices is None else np.asarray(indices).reshape(-1)
            tables |= state.pages(tokens, flat, self._page_size)
        return tables


def describe_pools(args: Any, shard: Shard, *, fingerprint: str, location: Location) -> PoolMap:
    """Describe the pools of a rank that are in SGLang's `KVArgs`.

    Raises:
        LayoutError: They hold what kvflow does not move, with the reason, or their sizes are inconsistent.
    """
    _refuse_unknown(args, shard)
    main, draft = _main_buffers(args, shard)
    components = [Component("kv", _cells(main, args, shard), shard=shard.tokens)]
    if draft:
        components.append(Component("draft", _cells(draft, args, shard, main=main)))
    paged = [component.name for component in components]
    groups = 1 if shard.is_mla else 2
    layers = [one.layer for one in main[: len(main) // groups]]
    names = _state_names(args.state_types)
    states = [describe_state(name, args, index, shard, layers) for index, name in enumerate(names)]
    components += [component for state in states for component in state.components]
    layout = layout_from_pointers(
        components,
        fingerprint,
        buffers=_registered(args),
        memory_kind=location.memory_kind,
        device_id=location.device_id,
    )
    return PoolMap(layout, paged, states, args.page_size)


def _refuse_unknown(args: Any, shard: Shard) -> None:
    if shard.tokens.size > 1 and not shard.is_mla:
        raise LayoutError("kvflow does not move these pools of SGLang", reason="only latents are shared by tokens")
    if getattr(args, "mla_compression_ratios", None):
        raise LayoutError("kvflow does not move these pools of SGLang", reason="DeepSeek V4 has not been tried")
    if getattr(args, "kv_buf_groups", None):
        raise LayoutError("kvflow does not move these pools of SGLang", reason="NPUs have not been tried")
    if "fp4" in args.kv_cache_dtype_str:
        raise LayoutError("kvflow does not move these pools of SGLang", reason="KVArgs lacks the block scales of FP4")
    given = [name for name in HOST_FIELDS if getattr(args, name, None)]
    if given:
        raise LayoutError("kvflow does not receive into host memory", found=given)
    held = getattr(args, "kv_head_num", None)
    expected = shard.heads[1] - shard.heads[0]
    if not shard.is_mla and held and held != expected:
        raise LayoutError("rank holds other heads than the model says", expected=expected, found=held)


def _main_buffers(args: Any, shard: Shard) -> tuple[list[ListedBuffer], list[ListedBuffer]]:
    """Assign each buffer its layer, and split off the draft model's buffers, which only the last stage has computed."""
    groups = 1 if shard.is_mla else 2
    total, num_draft = len(args.kv_data_ptrs), args.num_draft_entries
    if total <= num_draft or (total - num_draft) % groups or num_draft % groups:
        raise LayoutError("list of buffers fits no arrangement", found=total, draft=num_draft, groups=groups)
    layers = list(getattr(args, "kv_layer_ids", None) or ())
    if not layers:
        first, own = getattr(args, "prefill_start_layer", None) or 0, (total - num_draft) // groups
        layers = [first + place % own for place in range(total - num_draft)]
        layers += [place % (num_draft // groups) for place in range(num_draft)]
    buffers = buffers_in(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens, layers)
    is_last = shard.pp_rank == shard.pp_size - 1
    return buffers[: total - num_draft], buffers[total - num_draft :] if is_last else []


def _cells(
    buffers: Sequence[ListedBuffer], args: Any, shard: Shard, main: Sequence[ListedBuffer] | None = None
) -> tuple[Region, ...]:
    """Describe the main pool, or that of a draft model beside the pool `main`."""
    is_draft = main is not None
    if not shard.is_mla:
        return keys_and_values(
            buffers,
            shard,
            page_size=args.page_size,
            dtype=args.kv_cache_dtype_str,
            are_heads_known=not is_draft,
            is_opaque=shard.has_unknown_order,
            optional=is_draft,
        )
    page_size = args.page_size * (shard.tokens.size if is_draft else 1)  # a draft model has all tokens of an entry

    def latents(one: ListedBuffer) -> Parts:
        return [PagePart("latent", one.item // page_size, "uint8")]

    # A draft model may have ordinary attention beside latents: its heads are sharded, and their number is unknown.
    known = {one.item // args.page_size for one in main or ()}
    has_latents = not is_draft or {one.item // page_size for one in buffers} <= known
    return regions_of(
        buffers, latents if has_latents else shard.opaque("draft"), page_size=page_size, optional=is_draft
    )


def _state_names(kinds: Sequence[Any]) -> list[str]:
    """Name states after their kinds, with a number from the second of a kind on."""
    names: list[str] = []
    for kind in kinds:
        text = getattr(kind, "value", kind)
        count = sum(name.split("#")[0] == text for name in names)
        names.append(f"{text}#{count}" if count else text)
    return names


def _registered(args: Any) -> list[BufferLists]:
    """List every buffer."""
    lists = [BufferLists(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens)]
    states = zip(args.state_data_ptrs, args.state_data_lens, args.state_item_lens, strict=True)
    return lists + [BufferLists(*entry) for entry in states]

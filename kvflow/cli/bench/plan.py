"""What planning costs: descriptors from page tables, and routes at the handshake."""

import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import product

import msgspec
import numpy as np

from kvflow.geometry import (
    BoundRoute,
    Component,
    Descriptors,
    KVLayout,
    Part,
    Region,
    Share,
    bind_route,
    check_part,
    compile_routes,
    head_range,
    plan,
)

__all__ = ["HandshakeRow", "PlanRow", "measure_handshake", "measure_plans"]

LAYERS = (32, 64, 80)
TOKENS = (1_024, 8_192, 32_768, 131_072)
PAGE_SIZES = (1, 16, 64)
TABLES = ("contiguous", "half", "random")
SPLITS = {"equal": (8, 4, 4), "4 to 2": (8, 4, 2), "2 to 4": (8, 2, 4), "mla": (1, 4, 4)}
"""Total KV heads, prefill and decode ranks."""

HEAD_DIM = 128
LATENT_DIM = 576
ELEMENT_BYTES = 2
MAX_ROWS = 4_000_000
"""Larger plans are left out: nobody posts them in one piece."""

REPEATS = 7


class PlanRow(msgspec.Struct, kw_only=True):
    """One plan.

    Attributes:
        split: "equal", "4 to 2", "2 to 4" (tensor-parallel sizes, 8 KV heads) or "mla".
        table: "contiguous", "half" (every other run of two pages is broken) or "random" page tables on both sides.
        descriptors: Rows of the plan.
        plan_ms: Median time of one plan.
        ns_per_descriptor: The same for one row.
        memory_ratio: Most memory in use while planning, as a multiple of the output.
    """

    case: str = "plan"
    split: str
    layers: int
    tokens: int
    page_size: int
    table: str
    descriptors: int
    plan_ms: float
    ns_per_descriptor: float
    memory_ratio: float


class HandshakeRow(msgspec.Struct, kw_only=True):
    """Compiling and binding the routes of one decode rank.

    Attributes:
        routes_ms: Median time to compile the routes from every prefill rank.
        bind_ms: Median time to bind all of them.
    """

    case: str = "handshake"
    prefill_ranks: int
    decode_ranks: int
    layers: int
    routes_ms: float
    bind_ms: float


def measure_plans(layers: tuple[int, ...] = LAYERS, tokens: tuple[int, ...] = TOKENS) -> Iterator[PlanRow]:
    """Plan a whole request in every combination, smallest first."""
    for split, num_layers, num_tokens, page_size, table in product(SPLITS, layers, tokens, PAGE_SIZES, TABLES):
        route, src, dst = _route(split, num_layers, num_tokens, page_size)
        if route.max_rows("kv", num_tokens) > MAX_ROWS and table != "contiguous":
            continue
        share = _share(src, dst, num_tokens, table)
        descriptors = plan(route, {"kv": share})
        if len(descriptors.src) > MAX_ROWS:
            continue
        seconds = _median(lambda route=route, share=share: plan(route, {"kv": share}))  # type: ignore[misc]
        yield PlanRow(
            split=split,
            layers=num_layers,
            tokens=num_tokens,
            page_size=page_size,
            table=table,
            descriptors=len(descriptors.src),
            plan_ms=round(seconds * 1e3, 4),
            ns_per_descriptor=round(seconds * 1e9 / len(descriptors.src), 1),
            memory_ratio=round(_peak_bytes(route, share) / _num_bytes(descriptors), 2),
        )


def measure_handshake(prefill_ranks: int = 8, decode_ranks: int = 8, layers: int = 80) -> HandshakeRow:
    """Compile what one decode rank needs from every prefill rank."""
    prefill = {rank: _layout(8, prefill_ranks, rank, layers, 1_024, 16) for rank in range(prefill_ranks)}
    decode = _layout(8, decode_ranks, decode_ranks // 2, layers, 1_024, 16)
    rank = decode_ranks // 2
    routes = compile_routes(prefill, decode, decode_rank=rank)
    compile_s = _median(lambda: compile_routes(prefill, decode, decode_rank=rank))
    bind_s = _median(lambda: [bind_route(route, prefill[route.engine_rank], decode) for route in routes])
    return HandshakeRow(
        prefill_ranks=prefill_ranks,
        decode_ranks=decode_ranks,
        layers=layers,
        routes_ms=round(compile_s * 1e3, 3),
        bind_ms=round(bind_s * 1e3, 3),
    )


def _route(split: str, layers: int, num_tokens: int, page_size: int) -> tuple[BoundRoute, Component, Component]:
    """The route from the first prefill rank that owes something to the first decode rank."""
    total, prefill_tp, decode_tp = SPLITS[split]
    pages = 2 * num_tokens // page_size
    prefill = {rank: _layout(total, prefill_tp, rank, layers, pages, page_size) for rank in range(prefill_tp)}
    decode = _layout(total, decode_tp, 0, layers, pages, page_size)
    route = next(route for route in compile_routes(prefill, decode, decode_rank=0) if route.pieces)
    source = prefill[route.engine_rank]
    return bind_route(route, source, decode), source.components[0], decode.components[0]


def _layout(total: int, tp_size: int, tp_rank: int, layers: int, pages: int, page_size: int) -> KVLayout:
    """Token-major pages; K and V of each layer in allocations of their own, or one latent."""
    heads = head_range(total, tp_size, tp_rank)
    head_bytes = (LATENT_DIM if total == 1 else HEAD_DIM) * ELEMENT_BYTES
    token_stride = head_bytes * (heads[1] - heads[0])
    size = pages * page_size * token_stride
    names = ("latent",) if total == 1 else ("k", "v")
    regions = tuple(
        Region(
            tensor=name,
            layer=layer,
            address=2**40 + (layer * len(names) + index) * (size + 4_096),
            slots=pages,
            slot_stride=page_size * token_stride,
            tokens_per_slot=page_size,
            token_stride=token_stride,
            heads=heads,
            head_stride=head_bytes,
            head_bytes=head_bytes,
            dtype="bfloat16",
        )
        for layer in range(layers)
        for index, name in enumerate(names)
    )
    return KVLayout((Component("kv", regions),), "bench")


def _share(src: Component, dst: Component, num_tokens: int, table: str) -> Share:
    count = num_tokens // src.tokens_per_slot
    rng = np.random.default_rng(0)
    tokens = (0, num_tokens)
    return Share(
        tokens,
        check_part(src, Part(tokens, _pages(table, count, src.slots, rng))),
        check_part(dst, Part(tokens, _pages(table, count, dst.slots, rng))),
    )


def _pages(
    table: str, count: int, slots: int, rng: np.random.Generator
) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    if table == "contiguous":
        return np.arange(count)
    if table == "random":
        return rng.permutation(slots)[:count]
    return np.arange(count) + np.arange(count) // 2  # pairs of neighbours, with a gap after each


def _median(act: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        act()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _peak_bytes(route: BoundRoute, share: Share) -> int:
    tracemalloc.start()
    try:
        plan(route, {"kv": share})
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _num_bytes(descriptors: Descriptors) -> int:
    return descriptors.src.nbytes + descriptors.dst.nbytes

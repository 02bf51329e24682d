"""Cost of planning: descriptors from page tables, and routes at the handshake."""

import argparse
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import numpy as np

from benchmarks.options import counts
from benchmarks.rows import Measured, Row, compare, print_rows
from kvflow.geometry import (
    BoundRoute,
    Component,
    ComponentSlice,
    Descriptors,
    KVLayout,
    Region,
    TokenPages,
    bind_route,
    build_page_table,
    compile_routes,
    head_range,
    plan,
)

__all__ = ["add_arguments", "measure_handshake", "measure_plans", "prepare"]

PAGE_SIZES = (1, 16, 64)
TABLES = ("contiguous", "half", "random")
SPLITS = {"equal": (8, 4, 4), "4 to 2": (8, 4, 2), "2 to 4": (8, 2, 4), "mla": (1, 4, 4)}
"""Total KV heads, prefill and decode ranks."""

HEAD_DIM = 128
LATENT_DIM = 576
ELEMENT_BYTES = 2
MAX_DESCRIPTORS = 4_000_000
"""Largest measured plan: no larger one is posted in one piece."""

REPEATS = 7


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--layers", type=counts, default="32,64,80", metavar="N,...", help="of the model")
    parser.add_argument("--tokens", type=counts, default="1024,8192,32768,131072", metavar="N,...", help="of a request")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return a function that measures and prints."""

    async def measure(on_row: Callable[[Row], None]) -> list[Row]:
        rows = []
        for row in (*measure_handshake(), *measure_plans(arguments.layers, arguments.tokens)):
            rows.append(row)
            on_row(row)
        return rows

    return lambda: print_rows(measure, is_json=arguments.json)


def measure_plans(layers: tuple[int, ...], tokens: tuple[int, ...]) -> Iterator[Row]:
    """Plan a whole request in every combination, smallest first.

    Splits are tensor-parallel sizes with 8 KV heads, or "mla"; tables are "contiguous", "half" (runs of two pages) or
    "random" on both sides. `memory_ratio` is the peak memory while planning, as a multiple of the output.
    """
    for split, num_layers, num_tokens, page_size, table in product(SPLITS, layers, tokens, PAGE_SIZES, TABLES):
        route, src, dst = _route(split, num_layers, num_tokens, page_size)
        if (
            sum(group.max_descriptors(num_tokens) for group in route.copy_groups) > MAX_DESCRIPTORS
            and table != "contiguous"
        ):
            continue
        share = _share(src, dst, num_tokens, table)
        descriptors = plan(route, {"kv": share})
        if len(descriptors.src) > MAX_DESCRIPTORS:
            continue
        times = _times(partial(plan, route, {"kv": share}))
        facts: dict[str, float | str] = {
            "descriptors": len(descriptors.src),
            "ns_per_descriptor": round(statistics.median(times) * 1e6 / len(descriptors.src), 1),
            "memory_ratio": round(_peak_bytes(route, share) / _num_bytes(descriptors), 2),
        }
        case = f"{split}, {num_layers} layers, {num_tokens} tokens, pages of {page_size}, {table}"
        yield compare(_measured("plans", case, "time of a plan"), times, facts=facts)


def measure_handshake() -> Iterator[Row]:
    """Compile and bind the routes from all prefill ranks to one decode rank."""
    num_ranks, layers, rank = 8, 80, 4
    prefill = {rank: _layout(8, num_ranks, rank, layers, 1_024, 16) for rank in range(num_ranks)}
    decode = prefill[rank]
    routes = compile_routes(prefill, decode, decode_rank=rank)
    acts = {
        "compile routes": lambda: compile_routes(prefill, decode, decode_rank=rank),
        "bind routes": lambda: [bind_route(route, prefill[route.engine_rank], decode) for route in routes],
    }
    case = f"{num_ranks} x {num_ranks} ranks of {layers} layers"
    for quantity, act in acts.items():
        yield compare(_measured("handshake of a decode rank", case, quantity), _times(act))


def _measured(group: str, case: str, quantity: str) -> Measured:
    return Measured(bench="plan", group=group, case=case, quantity=quantity, unit="ms", better="lower")


def _route(split: str, layers: int, num_tokens: int, page_size: int) -> tuple[BoundRoute, Component, Component]:
    """Return the route to the first decode rank from the first prefill rank that sends it anything."""
    total, prefill_tp, decode_tp = SPLITS[split]
    pages = 2 * num_tokens // page_size
    prefill = {rank: _layout(total, prefill_tp, rank, layers, pages, page_size) for rank in range(prefill_tp)}
    decode = _layout(total, decode_tp, 0, layers, pages, page_size)
    route = next(route for route in compile_routes(prefill, decode, decode_rank=0) if route.slices)
    source = prefill[route.engine_rank]
    return bind_route(route, source, decode), source.components[0], decode.components[0]


def _layout(total: int, tp_size: int, tp_rank: int, layers: int, pages: int, page_size: int) -> KVLayout:
    """Return a layout of token-major pages, with K and V of each layer in their own allocations, or one latent."""
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


def _share(src: Component, dst: Component, num_tokens: int, table: str) -> ComponentSlice:
    count = num_tokens // src.tokens_per_slot
    rng = np.random.default_rng(0)
    tokens = (0, num_tokens)
    return ComponentSlice(
        tokens,
        build_page_table(src, TokenPages(tokens, _pages(table, count, src.slots, rng))),
        build_page_table(dst, TokenPages(tokens, _pages(table, count, dst.slots, rng))),
    )


def _pages(
    table: str, count: int, slots: int, rng: np.random.Generator
) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    if table == "contiguous":
        return np.arange(count)
    if table == "random":
        return rng.permutation(slots)[:count]
    return np.arange(count) + np.arange(count) // 2  # pairs of neighbours, with a gap after each


def _times(act: Callable[[], object]) -> list[float]:
    """Return the milliseconds of each repetition."""
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        act()
        times.append((time.perf_counter() - began) * 1e3)
    return times


def _peak_bytes(route: BoundRoute, share: ComponentSlice) -> int:
    tracemalloc.start()
    try:
        plan(route, {"kv": share})
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _num_bytes(descriptors: Descriptors) -> int:
    return descriptors.src.nbytes + descriptors.dst.nbytes

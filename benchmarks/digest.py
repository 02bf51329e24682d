"""Cost of digests in transfers of one chunk, with pages in random order, between two ranks of one process."""

import argparse
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Final

import anyio
import numpy as np

from benchmarks.options import counts
from benchmarks.pools import PagePool, PoolShape
from benchmarks.rooms import Pair, deploy
from benchmarks.rows import Measured, Row, compare, print_rows
from kvflow.cli.options import add_backend_option, check_backend, check_positive

__all__ = ["add_arguments", "measure_digests", "prepare"]

LAYERS, HEADS, HEAD_BYTES = 8, 8, 256
WARM_UP: Final = 2
"""Unmeasured transfers, which do the handshake and touch every page."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_backend_option(parser)
    parser.add_argument("--megabytes", type=int, default=64, metavar="N", help="of a transfer")
    parser.add_argument("--rounds", type=int, default=21, metavar="N", help="with and without digests")
    parser.add_argument("--page-sizes", type=counts, default="1,16,64", metavar="N,...", help="tokens of a page")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return a function that measures and prints.

    Raises:
        ConfigError: An option is unusable.
    """
    check_positive(arguments, "megabytes", "rounds")
    backend = check_backend(arguments.backend)
    measure = partial(measure_digests, backend, arguments.page_sizes, arguments.megabytes, arguments.rounds)
    return lambda: print_rows(measure, is_json=arguments.json)


async def measure_digests(
    backend: str, page_sizes: tuple[int, ...], megabytes: int, rounds: int, on_row: Callable[[Row], None]
) -> list[Row]:
    """Transfer the same pages repeatedly, with and without digests in turn.

    Args:
        backend: Transport of both ranks.
        page_sizes: Tokens of a page; each is measured token-major and head-major.
        megabytes: Size of a transfer, in units of 2**20 bytes.
        rounds: Transfers with digests, and as many without.
        on_row: Called with each row.

    Returns:
        Times from offering the pages to the end of `done()`; `bare` is without digests.
    """
    rows = []
    for page_size, is_head_major in product(page_sizes, (False, True)):
        shape = PoolShape(
            layers=LAYERS, heads=(0, HEADS), head_bytes=HEAD_BYTES, page_size=page_size, is_head_major=is_head_major
        )
        num_pages = max(1, megabytes * 2**20 // (shape.page_bytes * shape.num_tensors))
        plain, digested = await _measure(backend, shape, num_pages, rounds)
        measured = Measured(
            bench="digest",
            group=f"{megabytes} MiB over {backend}",
            case=f"pages of {page_size}, {'head' if is_head_major else 'token'}-major",
            quantity="time with digests, bare is without",
            unit="ms",
            better="lower",
        )
        rows.append(compare(measured, digested, plain))
        on_row(rows[-1])
    return rows


async def _measure(backend: str, shape: PoolShape, num_pages: int, rounds: int) -> tuple[list[float], list[float]]:
    """Return the milliseconds of each transfer without and with digests."""
    source, target = (PagePool(shape, num_pages) for _ in range(2))
    source.fill()
    times: tuple[list[float], list[float]] = ([], [])
    async with deploy(pools=(source, target), backend=backend) as (pair,):
        for room in range(WARM_UP + 2 * rounds):
            has_digest = bool(room % 2)
            taken = await _transfer(pair, room, num_pages, (0, num_pages * shape.page_size), digest=has_digest)
            if room >= WARM_UP:
                times[has_digest].append(taken * 1e3)
    return times


async def _transfer(pair: Pair, room: int, num_pages: int, tokens: tuple[int, int], *, digest: bool) -> float:
    """Run one transfer; return the seconds from the offer to the end of `done()`, with both sides already open."""
    rng, name = np.random.default_rng(room), pair.prefill.config.instance
    source, target = {"kv": rng.permutation(num_pages)}, {"kv": rng.permutation(num_pages)}
    async with (
        pair.prefill.send(room) as sender,
        pair.decode.receive(room, prefill=name, tokens=tokens, pages=target, digest=digest) as receiver,
    ):
        began = anyio.current_time()
        await sender.finish(tokens, source)
        await receiver.done()
        return anyio.current_time() - began

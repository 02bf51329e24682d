"""Cost of keys: the control channel with and without CURVE, in turns in one process."""

import argparse
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, Literal, NamedTuple

import kvflow
from benchmarks.rooms import PATIENT, Pair, Rooms, deploy, make_pool
from benchmarks.rows import Measured, Row, compare, print_rows, there_and_back
from kvflow.cli.options import add_backend_option, check_backend, check_positive
from kvflow.keys import add_peer, add_registry, make_keys

__all__ = ["add_arguments", "make_trusts", "measure_keys", "prepare"]

IN_FLIGHT: Final = 16

Way = Literal["with keys", "plain"]
WAYS: Final[tuple[Way, Way]] = ("with keys", "plain")


class _Round(NamedTuple):
    """Results of one round.

    Attributes:
        alone_s: Time of a request, one at a time.
        cpu_s: CPU time of both ranks for a request, 16 in flight.
        rate: Requests a second, 16 in flight.
        connect_s: Time of the first request of a new decode rank.
    """

    alone_s: float
    cpu_s: float
    rate: float
    connect_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_backend_option(parser)
    parser.add_argument("--rounds", type=int, default=11, metavar="N", help="rounds of each way")
    parser.add_argument("--requests", type=int, default=200, metavar="N", help="requests in a round")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return a function that measures and prints.

    Raises:
        ConfigError: An option is unusable.
    """
    check_positive(arguments, "rounds", "requests")
    backend = check_backend(arguments.backend)
    measure = partial(measure_keys, backend, arguments.rounds, arguments.requests)
    return lambda: print_rows(measure, is_json=arguments.json)


async def measure_keys(backend: str, rounds: int, requests: int, on_row: Callable[[Row], None]) -> list[Row]:
    """Transfer small requests between two ranks of this process, with keys and without.

    Args:
        backend: Transport of every rank.
        rounds: Rounds of each way.
        requests: Requests in each round, one at a time and 16 in flight.
        on_row: Called with each row.

    Returns:
        Rows that compare the ranks with keys to those without.
    """
    played: dict[Way, list[_Round]] = {way: [] for way in WAYS}
    async with AsyncExitStack() as stack:
        sides = {way: await stack.enter_async_context(_open(backend, way)) for way in WAYS}
        for way in there_and_back(WAYS, rounds):
            played[way].append(await _play(*sides[way], requests))
    kinds: list[tuple[str, str, str, Literal["higher", "lower"], Callable[[_Round], float]]] = [
        ("one at a time", "time of a request", "us", "lower", lambda one: one.alone_s * 1e6),
        (f"{IN_FLIGHT} in flight", "requests", "1/s", "higher", lambda one: one.rate),
        (f"{IN_FLIGHT} in flight", "CPU of both ranks", "us per request", "lower", lambda one: one.cpu_s * 1e6),
        ("new decode rank", "time of the first request", "ms", "lower", lambda one: one.connect_s * 1e3),
    ]
    rows = []
    for case, quantity, unit, better, value in kinds:
        group = f"with keys, held against without, over {backend}"
        measured = Measured(bench="keys", group=group, case=case, quantity=quantity, unit=unit, better=better)
        with_keys, plain = ([value(one) for one in played[way]] for way in WAYS)
        rows.append(compare(measured, with_keys, plain, facts={"requests": requests}))
        on_row(rows[-1])
    return rows


@asynccontextmanager
async def _open(backend: str, way: Way) -> AsyncIterator[tuple[Pair, Rooms]]:
    with TemporaryDirectory() as place:
        trusts = make_trusts(Path(place), "prefill-0", "decode-0") if way == "with keys" else {}
    async with deploy(backend=backend, trusts=trusts) as pairs:
        rooms = Rooms(pairs)
        await rooms.fill(IN_FLIGHT)
        await rooms.finish_all()
        yield pairs[0], rooms


def make_trusts(place: Path, *instances: str) -> dict[str, kvflow.Trust]:
    """Create keys for a registry and instances, each in a directory of its name, with the others as known peers."""
    directories = {name: place / name for name in ("registry", *instances)}
    keys = {name: make_keys(path) for name, path in directories.items()}
    for path in directories.values():
        for name in instances:
            add_peer(path, keys[name], f"{name}*")
        add_registry(path, keys["registry"])
    return {name: kvflow.load_trust(path) for name, path in directories.items()}


async def _play(pair: Pair, rooms: Rooms, requests: int) -> _Round:
    began = time.monotonic()
    for _ in range(requests):
        await rooms.open(1)
        await rooms.finish_all()
    alone_s = (time.monotonic() - began) / requests
    await rooms.fill(IN_FLIGHT)
    began, cpu_began = time.monotonic(), time.process_time()
    await rooms.turn_over(requests)
    elapsed_s, cpu_s = time.monotonic() - began, time.process_time() - cpu_began
    await rooms.finish_all()
    return _Round(alone_s, cpu_s / requests, requests / elapsed_s, await _connect(pair))


async def _connect(pair: Pair) -> float:
    """Open another decode rank, and time its first request."""
    config, pool = pair.decode.config, make_pool()
    other = kvflow.DecodeConfig(
        instance=f"{config.instance}-b",
        registry=config.registry,
        backend=config.backend,
        timeouts=PATIENT,
        trust=config.trust,
    )
    async with kvflow.DecodeRank(other, pool.layout) as rank:
        rooms = Rooms([Pair(pair.prefill, rank)])
        began = time.monotonic()
        await rooms.open(1)
        await rooms.finish_all()
        return time.monotonic() - began

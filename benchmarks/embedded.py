"""Handovers as engines have them: blocking ranks, other work in both processes, and a pause before the last chunk.

On each side a scheduler thread looks every 0.2 ms what has changed, while another thread holds the interpreter as an
engine would. Requests go one at a time, with their last chunk some time after the grant, and then 16 at once, to see
what the calls cost the scheduler.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec

from kvflow.cli.bench.loads import SHAPES
from kvflow.cli.bench.rows import Measured, Row, Tail, compare, percentile, print_rows
from kvflow.cli.bench.sides import SideOptions, open_sides
from kvflow.cli.options import add_backend_option, cases_of, check_backend, check_positive, names
from kvflow.cli.processes import ChildProcess

__all__ = ["ENGINES", "EmbeddedOptions", "Load", "add_arguments", "measure_embedded", "prepare"]

ENGINES: Final = {
    "sleeps": "the other thread sleeps",
    "steps": "the other thread runs steps of 5 ms, 2 ms of them Python and 3 ms numpy",
    "python": "the other thread runs Python all the time",
}

LANES: Final = 16
WARM_UP: Final = 8


class EmbeddedOptions(SideOptions, frozen=True, kw_only=True):
    """One process.

    Attributes:
        shape: Of `SHAPES`.
        tokens: Of each request, whole pages.
    """

    shape: str = "llama3-8b"
    tokens: int = 16


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Some requests.

    Attributes:
        engine: Of `ENGINES`.
        first_room: Room of the first one; the others follow.
        count: How many.
        lanes: Under way at once.
        gap_s: From starting to send one to its last chunk.
    """

    engine: str
    first_room: int
    count: int
    lanes: int = 1
    gap_s: float = 0.0

    @property
    def rooms(self) -> range:
        """Rooms of the requests, in order."""
        return range(self.first_room, self.first_room + self.count)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--engines", type=names, default="all", metavar="NAME,...", help=f"of {', '.join(ENGINES)}")
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b", help="of the cache")
    parser.add_argument("--tokens", type=int, default=16, metavar="N", help="of a request")
    parser.add_argument("--gap", type=float, default=0.03, metavar="S", help="from the grant to the last chunk")
    parser.add_argument("--requests", type=int, default=70, metavar="N", help="of a round")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of each engine")
    add_backend_option(parser)


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Give what measures and prints.

    Raises:
        ConfigError: An option is unusable.
    """
    engines = cases_of(arguments.engines, ENGINES)
    check_positive(arguments, "tokens", "gap", "requests", "rounds")
    backend = check_backend(arguments.backend, between_processes=True)
    options = EmbeddedOptions(backend=backend, shape=arguments.shape, tokens=arguments.tokens)
    count, rounds, gap_s = arguments.requests, arguments.rounds, arguments.gap
    return lambda: print_rows(
        lambda report: measure_embedded(options, engines, count, rounds, gap_s, report), is_json=arguments.json
    )


async def measure_embedded(
    options: EmbeddedOptions,
    engines: Sequence[str],
    count: int,
    rounds: int,
    gap_s: float,
    on_row: Callable[[Row], None],
) -> list[Row]:
    """Measure each engine with the same two processes.

    Args:
        options: Of both processes.
        engines: Of `ENGINES`.
        count: Requests of a round.
        rounds: Of each engine.
        gap_s: From starting to send a request to its last chunk, when they go one at a time.
        on_row: Told of each row when it is there.

    Raises:
        ChildFailed: A process hangs, or ended with an error or with something on its standard error.
    """
    rows: list[Row] = []
    async with open_sides(options, "benchmarks.embedded_worker") as (prefill, decode):
        for side in (prefill, decode):
            await side.expect("ready")
        room = 0
        for engine in engines:
            played: tuple[list[Played], list[Played]] = ([], [])  # one at a time, and many at once
            for number in range(rounds + 1):
                for lanes, gap, into in ((1, gap_s, played[0]), (LANES, 0.0, played[1])):
                    load = Load(
                        engine=engine, first_room=room, count=count if number else WARM_UP, lanes=lanes, gap_s=gap
                    )
                    room += load.count
                    sides = await _play(prefill, decode, load)
                    if number:
                        into.append(sides)
            for row in (*_handover_rows(options, engine, gap_s, played[0]), *_call_rows(options, engine, played[1])):
                rows.append(row)
                on_row(row)
    return rows


Played = tuple[dict[str, Any], dict[str, Any]]
"""What the sides report of a load: `ended_ns`, and `calls_us` by name; prefill also `began_ns` and `freed_ns`."""


async def _play(prefill: ChildProcess, decode: ChildProcess, load: Load) -> Played:
    for side in (decode, prefill):
        await side.tell("play", load=msgspec.to_builtins(load))
    return await prefill.expect("played", load.first_room), await decode.expect("played", load.first_room)


def _handover_rows(options: EmbeddedOptions, engine: str, gap_s: float, played: list[Played]) -> Iterator[Row]:
    case = f"{ENGINES[engine]}, last chunk {gap_s * 1e3:g} ms after the grant"
    seen = [_times(sent["began_ns"], got["ended_ns"]) for sent, got in played]
    yield _row(options, case, "from finish() to the decode engine's thread seeing it", "ms", seen)
    free = [_times(sent["began_ns"], sent["freed_ns"]) for sent, _ in played]
    yield _row(options, case, "from finish() to the prefill engine's thread seeing its pages free", "ms", free)


def _times(began_ns: list[int], ended_ns: list[int]) -> list[float]:
    return [(stop - start) / 1e6 for start, stop in zip(began_ns, ended_ns, strict=True)]


def _call_rows(options: EmbeddedOptions, engine: str, played: list[Played]) -> Iterator[Row]:
    for side, calls in ((0, ("send", "finish", "completed")), (1, ("receive", "completed"))):
        for call in calls:
            quantity = f"{call}() on {'decode' if side else 'prefill'}, {LANES} in flight"
            yield _row(options, ENGINES[engine], quantity, "us", [one[side]["calls_us"][call] for one in played])


def _row(options: EmbeddedOptions, case: str, quantity: str, unit: str, rounds: list[list[float]]) -> Row:
    measured = Measured(
        bench="embedded",
        group=f"{options.shape} over {options.backend}, requests of {options.tokens} tokens",
        case=case,
        quantity=quantity,
        unit=unit,
        better="lower",
    )
    values = [value for values in rounds for value in values]
    tail = Tail(kvflow_p50=percentile(values, 0.5), kvflow_p99=percentile(values, 0.99))
    return compare(measured, [statistics.median(values) for values in rounds], tail=tail)

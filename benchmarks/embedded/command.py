"""Options, order of the runs, and rows."""

import argparse
import signal
import socket
import statistics
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, Final

import msgspec

from benchmarks.embedded.loads import ENGINES, LANES, EmbeddedOptions, Load, Way
from benchmarks.embedded.timeline import STEPS, steps_of
from benchmarks.options import cases_of, names
from benchmarks.pair.loads import SHAPES
from benchmarks.processes import ChildProcess
from benchmarks.rows import Measured, Row, Tail, compare, percentile, print_rows, there_and_back
from benchmarks.sides import WrongBytes, open_sides
from kvflow import ConfigError
from kvflow.cli.options import add_backend_option, check_backend, check_installed, check_positive

__all__ = ["Player", "add_arguments", "check_sglang", "open_player", "prepare", "times"]

WARM_UP: Final = 8
ANSWER_S: Final = 180.0
MODULE: Final = "benchmarks.embedded.worker"

BARE_BACKENDS: Final = ("nixl", "mooncake")

Sides = tuple[ChildProcess, ChildProcess]
Played = tuple[dict[str, Any], dict[str, Any]]
"""Reports of prefill and decode for a load: times of events in `..._ns`, of calls in `calls_us` by name."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--engines", type=names, default="all", metavar="NAME,...", help=f"of {', '.join(ENGINES)}")
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b", help="of the cache")
    parser.add_argument("--tokens", type=int, default=16, metavar="N", help="of a request")
    parser.add_argument("--gap", type=float, default=0.03, metavar="S", help="from the grant to the last chunk")
    parser.add_argument("--requests", type=int, default=70, metavar="N", help="of a round")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of each engine")
    parser.add_argument("--sglang", action="store_true", help="compare with SGLang's own ends; it has to be installed")
    parser.add_argument("--alone", action="store_true", help="leave out what kvflow is compared with")
    parser.add_argument("--timeline", action="store_true", help="time the steps of a handover of kvflow instead")
    add_backend_option(parser)


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return a function that measures and prints.

    Raises:
        ConfigError: An option is unusable.
    """
    engines = cases_of(arguments.engines, ENGINES)
    check_positive(arguments, "tokens", "gap", "requests", "rounds")
    backend = check_backend(arguments.backend, between_processes=True)
    common = EmbeddedOptions(
        backend=backend,
        shape=arguments.shape,
        tokens=arguments.tokens,
        is_traced=arguments.timeline,
    )
    ways: list[Way] = ["kvflow"]
    if not arguments.alone and not arguments.timeline:
        ways += ["bare"] if backend in BARE_BACKENDS else []
        ways += ["sglang"] if arguments.sglang else []
    if "sglang" in ways:
        check_sglang(backend)
    plan = Plan(common, ways, engines, arguments.requests, arguments.rounds, arguments.gap)
    return lambda: print_rows(plan.measure, is_json=arguments.json)


def check_sglang(backend: str = "nixl") -> None:
    """Check that a comparison with SGLang is possible.

    Raises:
        ConfigError: SGLang is not installed, or kvflow would use another transport.
    """
    check_installed("sglang")
    if backend != "nixl":
        raise ConfigError("SGLang is compared over NIXL only", option="--sglang", backend=backend)


class Plan(msgspec.Struct, frozen=True):
    """What to measure.

    Attributes:
        options: Options of all processes.
        ways: Implementations that move the bytes, in turn.
        engines: Names of `ENGINES`.
        count: Requests in a round.
        rounds: Rounds of each engine and way.
        gap_s: Time from the grant to the last chunk, when requests go one at a time.
    """

    options: EmbeddedOptions
    ways: Sequence[Way]
    engines: Sequence[str]
    count: int
    rounds: int
    gap_s: float

    async def measure(self, on_row: Callable[[Row], None]) -> list[Row]:
        """Measure each engine with the same processes; errors as in `open_sides`."""
        rows: list[Row] = []
        async with AsyncExitStack() as stack:
            players = {way: await stack.enter_async_context(open_player(self.options, way)) for way in self.ways}
            for engine in self.engines:
                for row in await self._rows(engine, players):
                    rows.append(row)
                    on_row(row)
            for player in players.values():
                await player.check()
        return rows

    async def _rows(self, engine: str, players: "dict[Way, Player]") -> list[Row]:
        singles: dict[Way, list[Played]] = {way: [] for way in self.ways}
        crowds: dict[Way, list[Played]] = {way: [] for way in self.ways}
        single = Load(engine=engine, count=self.count, gap_s=self.gap_s)
        for way in self.ways:
            await players[way].play(msgspec.structs.replace(single, count=WARM_UP))
        for way in there_and_back(self.ways, self.rounds):
            singles[way].append(await players[way].play(single))
            if way != "bare" and not self.options.is_traced:
                crowds[way].append(await players[way].play(Load(engine=engine, count=self.count, lanes=LANES)))
        if self.options.is_traced:
            return list(_step_rows(self, engine, singles["kvflow"]))
        return [*_handover_rows(self, engine, singles), *_call_rows(self, engine, crowds)]

    def measured(self, case: str, quantity: str, unit: str) -> Measured:
        """Return the labels of a quantity."""
        options = self.options
        return Measured(
            bench="embedded",
            group=f"{options.shape} over {options.backend}, requests of {options.tokens} tokens",
            case=case,
            quantity=quantity,
            unit=unit,
            better="lower",
        )

    def cold(self, engine: str) -> str:
        """Return the name of the case in which requests go one at a time."""
        return f"{ENGINES[engine]}, last chunk {self.gap_s * 1e3:g} ms after the grant"


class Player:
    """Both processes of a way. Those of SGLang busy-wait, and are stopped while others play."""

    def __init__(self, way: Way, sides: Sides) -> None:
        self._way = way
        self._sides = sides
        self._next_room = 1
        self._unchecked: Load | None = None

    async def play(self, load: Load) -> Played:
        """Play the requests of a load in rooms of their own."""
        prefill, decode = self._sides
        load = msgspec.structs.replace(load, first_room=self._next_room)
        self._next_room += load.count
        first = load.first_room if self._unchecked is None else self._unchecked.first_room
        self._unchecked = msgspec.structs.replace(load, first_room=first, count=self._next_room - first)
        with self.awake():
            for side in (decode, prefill):
                await side.tell("play", load=msgspec.to_builtins(load))
            return await prefill.expect("played", load.first_room), await decode.expect("played", load.first_room)

    async def check(self) -> None:
        """Check the bytes of all loads since the last check, which have to use the same pages, and wipe decode's pool.

        Raises:
            WrongBytes: Decode's pool does not have what prefill's has, or has something else.
        """
        load, self._unchecked = self._unchecked, None
        with self.awake():
            await self._sides[1].tell("check", load=msgspec.to_builtins(load))
            found = await self._sides[1].expect("checked")
        if not found["is_right"]:
            raise WrongBytes("the bytes that were received differ from those sent", way=self._way)

    async def rest(self, seconds: float) -> tuple[dict[str, Any], dict[str, Any]]:
        """Leave both processes idle for some time; return the resources that prefill and decode used."""
        prefill, decode = self._sides
        with self.awake():
            for side in (decode, prefill):
                await side.tell("rest", seconds=seconds)
            return await prefill.expect("rested"), await decode.expect("rested")

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let the processes run within the block."""
        self.signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.signal(signal.SIGSTOP)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to processes that busy-wait."""
        if self._way == "sglang":
            for side in self._sides:
                side.send_signal(number)


@asynccontextmanager
async def open_player(options: EmbeddedOptions, way: Way) -> AsyncIterator[Player]:
    """Start both processes of a way, and stop them at the end of the block."""
    options = msgspec.structs.replace(options, way=way, port=_free_port())
    async with open_sides(options, MODULE, ANSWER_S) as sides:
        if way != "kvflow":
            bound = [await side.expect("bound") for side in sides]
            for side, peer in zip(sides, reversed(bound), strict=True):
                await side.tell("meet", address=peer["address"])
        for side in sides:
            await side.expect("ready")
        player = Player(way, sides)
        player.signal(signal.SIGSTOP)
        try:
            yield player
        finally:
            player.signal(signal.SIGCONT)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _handover_rows(plan: Plan, engine: str, played: dict[Way, list[Played]]) -> Iterator[Row]:
    seen = {way: [times(sent["began_ns"], got["ended_ns"]) for sent, got in rounds] for way, rounds in played.items()}
    yield _row(plan.measured(plan.cold(engine), "from finish() to the decode engine's thread seeing it", "ms"), seen)
    free = {way: [times(sent["began_ns"], sent["freed_ns"]) for sent, _ in rounds] for way, rounds in played.items()}
    quantity = "from finish() to the prefill engine's thread seeing its pages free"
    yield _row(plan.measured(plan.cold(engine), quantity, "ms"), free)


def times(began_ns: list[int], ended_ns: list[int]) -> list[float]:
    """Return the milliseconds from one event to another for each request."""
    return [(stop - start) / 1e6 for start, stop in zip(began_ns, ended_ns, strict=True)]


def _call_rows(plan: Plan, engine: str, played: dict[Way, list[Played]]) -> Iterator[Row]:
    for side, calls in ((0, ("send", "chunk", "finish", "completed")), (1, ("receive", "completed"))):
        for call in calls:
            quantity = f"{call}() on {'decode' if side else 'prefill'}, {LANES} in flight"
            took = {
                way: [one[side]["calls_us"][call] for one in rounds]
                for way, rounds in played.items()
                if rounds and (way == "kvflow" or call != "chunk")  # for the others, `finish` sends everything
            }
            yield _row(plan.measured(ENGINES[engine], quantity, "us"), took)


def _step_rows(plan: Plan, engine: str, rounds: list[Played]) -> Iterator[Row]:
    found = [
        steps_of(sent["began_ns"], got["ended_ns"], sent["freed_ns"], [*sent["marks"], *got["marks"]])
        for sent, got in rounds
    ]
    for step in STEPS:
        took = [times[step.name] for times in found if times[step.name]]
        if took:
            yield _row(
                plan.measured(step.name, f"since finish() was called; {plan.cold(engine)}", "ms"), {"kvflow": took}
            )


def _row(measured: Measured, values: dict[Way, list[list[float]]]) -> Row:
    """Make a row from the values of each round: medians by round, and percentiles over all rounds."""
    medians = {way: [statistics.median(one) for one in rounds] for way, rounds in values.items()}
    together = {way: [value for one in rounds for value in one] for way, rounds in values.items()}
    others = {}
    if "sglang" in values:
        others = {"SGLang": medians["sglang"], "SGLang p99": [percentile(together["sglang"], 0.99)]}
    tail = Tail(
        kvflow_p50=percentile(together["kvflow"], 0.5),
        kvflow_p99=percentile(together["kvflow"], 0.99),
        bare_p50=percentile(together["bare"], 0.5) if "bare" in values else None,
        bare_p99=percentile(together["bare"], 0.99) if "bare" in values else None,
    )
    return compare(measured, medians["kvflow"], medians.get("bare", ()), others=others, tail=tail)

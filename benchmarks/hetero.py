"""Transfers between two processes with different cache layouts: direct, packed, and as kvflow chooses."""

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Final, Literal, NamedTuple

import msgspec
from msgspec import structs, to_builtins

from benchmarks.options import cases_of, names
from benchmarks.pools import PoolShape
from benchmarks.processes import ChildProcess
from benchmarks.rows import Measured, Row, compare, print_rows, there_and_back
from benchmarks.sides import PREFILL, SideOptions, WrongBytes, open_sides
from kvflow import ConfigError, head_range
from kvflow.cli.options import add_backend_option, check_backend, check_positive
from kvflow.config import Packing

__all__ = ["CASES", "TABLES", "WAYS", "HeteroOptions", "Load", "add_arguments", "measure_hetero", "prepare"]

MODULE: Final = "benchmarks.hetero_worker"

WAYS: Final[tuple[Packing, ...]] = ("never", "always", "auto")

TABLES: Final = 4
"""Number of page tables, each with its own pages in random order over the pool."""

HEADS: Final = 8
HEAD_BYTES: Final = 256

Axes = Literal["NHD", "HND"]


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """Cache layout of one instance.

    Attributes:
        ranks: Tensor-parallel size; all ranks hold the same number of heads.
        axes: "NHD" for token-major pages, "HND" for head-major ones.
    """

    ranks: int = 1
    page_size: int = 16
    axes: Axes = "NHD"

    def __str__(self) -> str:
        return f"TP {self.ranks}, page {self.page_size} {self.axes}"


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """Cache layouts of both sides."""

    prefill: Side = Side()
    decode: Side = Side()


CASES: Final = {
    "tp4-tp2": Case(prefill=Side(ranks=4), decode=Side(ranks=2)),
    "tp2-tp4": Case(prefill=Side(ranks=2), decode=Side(ranks=4)),
    "tp1-tp4": Case(decode=Side(ranks=4)),
    "page16-page64": Case(decode=Side(page_size=64)),
    "hnd-nhd": Case(prefill=Side(axes="HND")),
}


class HeteroOptions(SideOptions, frozen=True, kw_only=True):
    """Options of one process.

    Attributes:
        case: Name in `CASES`.
        layers: Layers of the model, which is otherwise Llama 3 8B in bfloat16.
        tokens: Tokens of each request; whole pages on both sides.
    """

    case: str = "tp4-tp2"
    layers: int = 32
    tokens: int = 512

    @property
    def own(self) -> Side:
        """Cache layout of this side."""
        case = CASES[self.case]
        return case.prefill if self.side == PREFILL else case.decode

    @property
    def others(self) -> int:
        """Number of ranks of the other side."""
        case = CASES[self.case]
        return (case.decode if self.side == PREFILL else case.prefill).ranks

    def shape(self, engine_rank: int) -> PoolShape:
        """Return the pool shape of a rank of this side."""
        return PoolShape(
            layers=self.layers,
            heads=head_range(HEADS, self.own.ranks, engine_rank),
            head_bytes=HEAD_BYTES,
            page_size=self.own.page_size,
            is_head_major=self.own.axes == "HND",
        )


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive requests.

    Attributes:
        packing: Packing of the prefill instance that sends them.
        first_room: Room of the first request; the others follow.
        count: Number of requests; each uses the next page table.
    """

    packing: Packing
    first_room: int
    count: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--cases", type=names, default="all", metavar="NAME,...", help=f"of {', '.join(CASES)}")
    parser.add_argument("--tokens", type=int, default=512, metavar="N", help="of a request")
    parser.add_argument("--layers", type=int, default=32, metavar="N", help="of the model")
    parser.add_argument("--rounds", type=int, default=11, metavar="N", help="of each way")
    add_backend_option(parser)


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return a function that measures and prints.

    Raises:
        ConfigError: An option is unusable.
    """
    cases = cases_of(arguments.cases, CASES)
    check_positive(arguments, "tokens", "layers", "rounds")
    page_size = max(side.page_size for case in CASES.values() for side in (case.prefill, case.decode))
    if arguments.tokens % page_size:
        raise ConfigError("tokens must fill whole pages", tokens=arguments.tokens, page_size=page_size)
    backend = check_backend(arguments.backend, between_processes=True)
    options = HeteroOptions(backend=backend, tokens=arguments.tokens, layers=arguments.layers)
    return lambda: print_rows(
        lambda report: measure_hetero(options, cases, arguments.rounds, report), is_json=arguments.json
    )


class Round(NamedTuple):
    """Result of one round.

    Attributes:
        time_ms: Median over its requests of the time from the offer on all prefill ranks to `done` on all decode ranks.
        packed: Share of the writes that were packed.
    """

    time_ms: float
    packed: float


class Sides:
    """Handles of both processes."""

    def __init__(self, case: str, prefill: ChildProcess, decode: ChildProcess) -> None:
        self._case = case
        self._prefill = prefill
        self._decode = decode
        self._next_room = 0

    async def play(self, packing: Packing) -> Round:
        """Transfer each request once.

        Raises:
            ChildFailed: A side did not finish.
        """
        load = Load(packing=packing, first_room=self._next_room, count=TABLES)
        self._next_room += TABLES
        for worker in (self._decode, self._prefill):
            await worker.tell("play", load=to_builtins(load))
        began = await self._prefill.expect("played", load.first_room)
        ended = await self._decode.expect("played", load.first_room)
        took = [(stop - start) / 1e6 for start, stop in zip(began["times_ns"], ended["times_ns"], strict=True)]
        return Round(statistics.median(took), began["packed"] / (began["packed"] + began["direct"]))

    async def check(self, packing: Packing) -> None:
        """Transfer each request once to wiped pages, and check every byte.

        Raises:
            WrongBytes: A byte is wrong.
        """
        await self._decode.tell("wipe")
        await self._decode.expect("wiped")
        await self.play(packing)
        await self._decode.tell("check")
        if not (await self._decode.expect("checked"))["is_right"]:
            raise WrongBytes("wrong bytes have arrived", packing=packing, case=self._case)


async def measure_hetero(
    options: HeteroOptions, cases: Sequence[str], rounds: int, report: Callable[[Row], None]
) -> list[Row]:
    """Measure each case in processes of its own.

    Args:
        options: Options of both processes; the case is filled in.
        cases: Names of `CASES`.
        rounds: Rounds of each way; the ways take turns.
        report: Called with each row.

    Raises:
        ChildFailed: A process hangs, or exited with an error or output on its standard error.
        WrongBytes: A byte is wrong.
    """
    rows: list[Row] = []
    for case in cases:
        async with open_sides(structs.replace(options, case=case), MODULE) as workers:
            for worker in workers:
                await worker.expect("ready")
            sides = Sides(case, *workers)
            for way in WAYS:
                await sides.check(way)
            played: dict[Packing, list[Round]] = {way: [] for way in WAYS}
            for way in there_and_back(WAYS, rounds):
                played[way].append(await sides.play(way))
        for row in _rows(options, case, played):
            report(row)
            rows.append(row)
    return rows


def _rows(options: HeteroOptions, case: str, played: dict[Packing, list[Round]]) -> list[Row]:
    """Compare packed with direct writes, and kvflow's choice with the better of both. All ratios are of times."""
    megabytes = 2 * options.layers * HEADS * HEAD_BYTES * options.tokens / 2**20
    name = f"{CASES[case].prefill} -> {CASES[case].decode}"
    measured = Measured(
        bench="hetero",
        group=f"{options.tokens} tokens, {megabytes:.0f} MiB over {options.backend}",
        case=name,
        quantity="time",
        unit="ms",
        better="lower",
    )
    direct, packed, auto = ([one.time_ms for one in played[way]] for way in WAYS)
    best = min(direct, packed, key=statistics.median)
    facts: dict[str, float | str] = {f"packed {way}": _choice(played[way]) for way in ("never", "always")}
    packed_row = compare(
        structs.replace(measured, quantity="time packed, bare is direct"),
        packed,
        direct,
        facts={**facts, "packed is quicker": round(statistics.median(direct) / statistics.median(packed), 2)},
    )
    auto_row = compare(
        structs.replace(measured, quantity="time as chosen, bare is the better of both"),
        auto,
        best,
        facts={"auto chose": _choice(played["auto"]), "better": "packed" if best is packed else "direct"},
    )
    return [packed_row, auto_row]


def _choice(rounds: Sequence[Round]) -> str:
    """Describe whether writes were packed."""
    share = statistics.median(one.packed for one in rounds)
    return {0.0: "direct", 1.0: "packed"}.get(share, f"{share:.0%} of the writes packed")

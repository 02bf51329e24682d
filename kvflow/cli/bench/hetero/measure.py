"""All of `kvflow bench hetero`."""

import statistics
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from msgspec import structs, to_builtins

from kvflow.cli.bench.hetero.options import CASES, WAYS, HeteroOptions, Load
from kvflow.cli.bench.rows import Measured, Row, compare, there_and_back
from kvflow.cli.bench.workers.process import WorkerProcess
from kvflow.cli.bench.workers.sides import WrongBytes, open_sides
from kvflow.config import Packing

__all__ = ["measure_hetero"]

MODULE: Final = "kvflow.cli.bench.hetero.worker"


class Round(NamedTuple):
    """What one round gave.

    Attributes:
        time_ms: Median of its requests, from offering one on all prefill ranks to having it on all decode ranks.
        packed: Share of the writes that were packed.
    """

    time_ms: float
    packed: float


class Sides:
    """Both processes."""

    def __init__(self, prefill: WorkerProcess[HeteroOptions], decode: WorkerProcess[HeteroOptions]) -> None:
        self._prefill = prefill
        self._decode = decode
        self._count = decode.options.tables
        self._next_room = 0

    async def play(self, packing: Packing) -> Round:
        """Move each request once.

        Raises:
            WorkerFailed: A side did not come to its end.
        """
        load = Load(packing=packing, first_room=self._next_room, count=self._count)
        self._next_room += self._count
        for worker in (self._decode, self._prefill):
            await worker.tell("play", load=to_builtins(load))
        began = await self._prefill.expect("played", load.first_room)
        ended = await self._decode.expect("played", load.first_room)
        took = [(stop - start) / 1e6 for start, stop in zip(began["times_ns"], ended["times_ns"], strict=True)]
        return Round(statistics.median(took), began["packed"] / (began["packed"] + began["direct"]))

    async def check(self, packing: Packing) -> None:
        """Move each request once over wiped pages, and look at every byte.

        Raises:
            WrongBytes: One of them is wrong.
        """
        await self._decode.tell("wipe")
        await self._decode.expect("wiped")
        await self.play(packing)
        await self._decode.tell("check")
        if not (await self._decode.expect("checked"))["is_right"]:
            raise WrongBytes("wrong bytes have arrived", packing=packing, case=self._decode.options.case)


async def measure_hetero(
    options: HeteroOptions, cases: Sequence[str], rounds: int, report: Callable[[Row], None]
) -> list[Row]:
    """Measure every case with processes of its own.

    Args:
        options: Of both processes, but for the case.
        cases: Of `CASES`.
        rounds: Of each way; all ways take turns.
        report: Told of each row.

    Raises:
        WorkerFailed: A process hangs, or ended with an error or with something on its standard error.
        WrongBytes: Something arrived wrongly.
    """
    rows: list[Row] = []
    for case in cases:
        async with open_sides(structs.replace(options, case=case), MODULE) as workers:
            sides = Sides(*workers)
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
    """Packed against direct, and what kvflow chose against the better of both. All ratios are of times."""
    megabytes = options.request_bytes / 2**20
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
    """How pieces were moved."""
    share = statistics.median(one.packed for one in rounds)
    return {0.0: "direct", 1.0: "packed"}.get(share, f"{share:.0%} of the writes packed")

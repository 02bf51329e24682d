"""Both processes as the one who measures sees them: a round is played on both sides, through kvflow or without it."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from msgspec import structs, to_builtins

from kvflow.cli.bench.pair.options import Load, PairOptions, Way
from kvflow.cli.bench.rows import there_and_back
from kvflow.cli.bench.workers.options import DECODE, PREFILL
from kvflow.cli.bench.workers.process import Report, WorkerProcess
from kvflow.cli.bench.workers.sides import WrongBytes, open_sides

__all__ = ["Pair", "Round", "open_pair", "rounds_in_turn"]

MODULE: Final = "kvflow.cli.bench.pair.worker"

ANSWER_S: Final = 300.0
"""How long a round may take, or filling gigabytes with a pattern on a busy machine."""


@dataclass(frozen=True)
class Round:
    """What one round gave.

    Attributes:
        latencies_s: Of each request that was announced, from offering it to knowing that it has arrived; of copies, how
            long each took.
        elapsed_s: From when both sides had begun to when the last request had arrived.
        cpu_s: Of both processes, all threads.
        thread_cpu_s: Of kvflow's own threads on each side ("prefill loop", "decode owner", ...).
    """

    latencies_s: Sequence[float]
    elapsed_s: float
    cpu_s: float
    thread_cpu_s: dict[str, float]


class Pair:
    """Both processes. They wait for a round to begin without using any CPU."""

    def __init__(self, prefill: WorkerProcess[PairOptions], decode: WorkerProcess[PairOptions]) -> None:
        self._prefill = prefill
        self._decode = decode
        self._next_room = 1

    async def connect(self) -> None:
        """Let the bare endpoints meet."""
        for worker, peer in ((self._prefill, self._decode), (self._decode, self._prefill)):
            await worker.tell("connect", address=peer.endpoint)
            await worker.expect("connected")

    async def play(self, load: Load) -> Round:
        """Play one round.

        Raises:
            WorkerFailed: A side did not come to its end.
        """
        load = structs.replace(load, first_room=self._next_room)
        self._next_room += load.count
        for worker in (self._decode, self._prefill):
            await worker.tell("play", load=to_builtins(load))
        prefill, decode = [await worker.expect("played", load.first_room) for worker in (self._prefill, self._decode)]
        return _round(load, prefill, decode)

    async def check(self, load: Load) -> None:
        """Play a round over wiped pages, and look at every byte of it.

        Raises:
            WrongBytes: One of them is wrong.
        """
        await self.wipe()
        await self.play(load)
        if not await self.has_arrived(load):
            raise WrongBytes("wrong bytes have arrived", **to_builtins(load))

    async def wipe(self) -> None:
        """Make all pages of decode look like nobody had written to them."""
        await self._decode.tell("wipe")
        await self._decode.expect("wiped")

    async def has_arrived(self, load: Load) -> bool:
        """Every byte of the requests of a round is in the pages of decode."""
        await self._decode.tell("check", load=to_builtins(load))
        is_right: bool = (await self._decode.expect("checked"))["is_right"]
        return is_right


def _round(load: Load, prefill: Report, decode: Report) -> Round:
    began, ended = prefill["times_ns"], decode["times_ns"]
    if load.way == "memcpy":
        took = [nanoseconds / 1e9 for nanoseconds in began]
        return Round(took, sum(took), prefill["cpu_s"], {})
    is_timed = load.is_announced
    latencies = [(stop - start) / 1e9 for start, stop in zip(began, ended, strict=True)] if is_timed else []
    elapsed_s = (max(ended) - max(prefill["began_ns"], decode["began_ns"])) / 1e9
    sides = ((PREFILL, prefill), (DECODE, decode))
    threads = {f"{side} {name}": spent for side, report in sides for name, spent in report["thread_s"].items()}
    return Round(latencies, elapsed_s, prefill["cpu_s"] + decode["cpu_s"], threads)


@asynccontextmanager
async def open_pair(options: PairOptions) -> AsyncIterator[Pair]:
    """Start both processes and a registry, and end them on exit; errors as in `open_sides`."""
    async with open_sides(options, MODULE, ANSWER_S) as workers:
        pair = Pair(*workers)
        await pair.connect()
        yield pair


async def rounds_in_turn(pair: Pair, loads: dict[Way, Load], rounds: int) -> dict[Way, list[Round]]:
    """Check the bytes of each way once, then play rounds of all of them in turn.

    Args:
        pair: Who plays.
        loads: By way; equal but for it.
        rounds: Of each way.
    """
    for way, load in loads.items():
        if way != "memcpy":
            await pair.check(structs.replace(load, count=load.tables))
    played: dict[Way, list[Round]] = {way: [] for way in loads}
    for way in there_and_back(list(loads), rounds):
        played[way].append(await pair.play(loads[way]))
    return played

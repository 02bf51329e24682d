"""The pair of processes, as the process that measures sees it."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from msgspec import structs, to_builtins

from benchmarks.pair.loads import SHAPES, WAYS, Load, PairOptions, Way
from benchmarks.processes import ChildProcess, Report
from benchmarks.rows import there_and_back
from benchmarks.sides import DECODE, PREFILL, WrongBytes, make_all_keys, open_sides

__all__ = ["Pair", "Round", "Rounds", "open_pair", "rounds_in_turn"]

MODULE: Final = "benchmarks.pair.worker"

ANSWER_S: Final = 300.0
"""Maximum duration of a round, or of filling gigabytes with a pattern on a busy machine."""


@dataclass(frozen=True)
class Round:
    """Results of one round.

    Attributes:
        latencies_s: For each announced request, the time from offering it to knowing that it has arrived.
        elapsed_s: Time from when both sides had started to when the last request had arrived.
        cpu_s: CPU time of both processes, all threads.
        thread_cpu_s: CPU time of kvflow's own threads on each side ("prefill loop", "decode owner", ...).
    """

    latencies_s: Sequence[float]
    elapsed_s: float
    cpu_s: float
    thread_cpu_s: Mapping[str, float]


Rounds = Mapping[Way, Sequence[Round]]
"""Rounds of each way, in order."""


class Pair:
    """Both processes. While they wait for a round, they use no CPU."""

    def __init__(self, prefill: ChildProcess, decode: ChildProcess) -> None:
        self._prefill = prefill
        self._decode = decode
        self._next_room = 1

    async def connect(self) -> None:
        """Wait until both are ready, and connect the bare endpoints."""
        ready = [await child.expect("ready") for child in (self._prefill, self._decode)]
        for child, peer in ((self._prefill, ready[1]), (self._decode, ready[0])):
            await child.tell("connect", address=peer["address"])
            await child.expect("connected")

    async def play(self, load: Load) -> Round:
        """Play one round.

        Raises:
            ChildFailed: A side did not complete it.
        """
        load = structs.replace(load, first_room=self._next_room)
        self._next_room += load.count
        for child in (self._decode, self._prefill):
            await child.tell("play", load=to_builtins(load))
        prefill, decode = [await child.expect("played", load.first_room) for child in (self._prefill, self._decode)]
        return _round(load, prefill, decode)

    async def check(self, load: Load) -> None:
        """Play a round over wiped pages, and check every byte of it.

        Raises:
            WrongBytes: A byte is wrong.
        """
        await self.wipe()
        await self.play(load)
        if not await self.has_arrived(load):
            raise WrongBytes("wrong bytes have arrived", **to_builtins(load))

    async def wipe(self) -> None:
        """Zero all pages of decode."""
        await self._decode.tell("wipe")
        await self._decode.expect("wiped")

    async def has_arrived(self, load: Load) -> bool:
        """Return whether every byte of a round's requests is in the pages of decode."""
        await self._decode.tell("check", load=to_builtins(load))
        is_right: bool = (await self._decode.expect("checked"))["is_right"]
        return is_right


def _round(load: Load, prefill: Report, decode: Report) -> Round:
    began, ended = prefill["times_ns"], decode["times_ns"]
    latencies = zip(began, ended, strict=True) if load.is_announced else ()
    sides = ((PREFILL, prefill), (DECODE, decode))
    return Round(
        latencies_s=[(stop - start) / 1e9 for start, stop in latencies],
        elapsed_s=(max(ended) - max(prefill["began_ns"], decode["began_ns"])) / 1e9,
        cpu_s=prefill["cpu_s"] + decode["cpu_s"],
        thread_cpu_s={f"{side} {name}": spent for side, report in sides for name, spent in report["thread_s"].items()},
    )


@asynccontextmanager
async def open_pair(
    backend: str, shape: str, *, num_bytes: int, tokens: int, memory: str = "host", has_keys: bool = False
) -> AsyncIterator[Pair]:
    """Start both processes and a registry, and end them on exit; raises the errors of `open_sides`.

    Args:
        backend: "nixl" or "mooncake".
        shape: Name in `SHAPES`.
        num_bytes: Minimum size of each pool.
        tokens: Minimum number of tokens of each pool.
        memory: Where the pools are, a name in `MEMORIES`.
        has_keys: The control channel has keys.
    """
    num_pages = max(num_bytes // SHAPES[shape].token_bytes, tokens) // SHAPES[shape].page_size
    options = PairOptions(backend=backend, shape=shape, num_pages=max(1, num_pages), memory=memory)
    with TemporaryDirectory() as directory:
        if has_keys:
            make_all_keys(Path(directory))
            options = structs.replace(options, keys=directory)
        async with open_sides(options, MODULE, ANSWER_S) as sides:
            pair = Pair(*sides)
            await pair.connect()
            yield pair


async def rounds_in_turn(pair: Pair, load: Load, rounds: int) -> Rounds:
    """Check the bytes of each way once, then play rounds of all ways in turn.

    Args:
        pair: The processes.
        load: The load of each way.
        rounds: Number of rounds of each way.

    Raises:
        ChildFailed: A side did not complete a round.
        WrongBytes: Wrong bytes have arrived.
    """
    for way in WAYS:
        await pair.check(structs.replace(load, way=way, count=load.tables))
    played: dict[Way, list[Round]] = {way: [] for way in WAYS}
    for way in there_and_back(WAYS, rounds):
        played[way].append(await pair.play(structs.replace(load, way=way)))
    return played

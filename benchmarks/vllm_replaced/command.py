"""Options, order of the rounds, and rows."""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio

from benchmarks.options import cases_of, names
from benchmarks.rows import Measured, Row, compare, print_rows
from kvflow.cli.options import check_installed, check_positive
from kvflow.cli.tasks import open_tasks
from kvflow.errors import ConfigError

if TYPE_CHECKING:
    from benchmarks.vllm_replaced.replacing import Dead, Replacing, Served, Survivor
    from benchmarks.vllm_replaced.standing import Standing

__all__ = ["add_arguments", "prepare"]

FIRST_PORT: Final = 8190
PORTS: Final = 4
SIDES: Final = ("prefill", "decode")
WAYS: Final = ("kvflow", "NixlConnector")
LOOK_S: Final = (1.0, 5.0, 30.0)
SPIN_S: Final = 1.5
"""Wait between requests to different pairs: vLLM's workers busy-wait for a second after each."""

QUANTITIES: Final = {
    "descriptors": ("descriptors", "count"),
    "sockets": ("sockets", "count"),
    "half_closed": ("sockets that the far end has closed", "count"),
    "epolls": ("epoll instances", "count"),
    "eventfds": ("eventfds", "count"),
    "shared": ("descriptors of shared memory", "count"),
    "mappings": ("mappings", "count"),
    "shared_mib": ("shared mappings", "MiB"),
    "resident_mib": ("resident memory", "MiB"),
    "threads": ("threads", "count"),
    "agents": ("agents that NIXL knows", "count"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--victim", choices=SIDES, default="prefill", help="the server that is killed")
    parser.add_argument("--ways", type=names, default=",".join(WAYS), metavar="NAME,...", help="connectors to compare")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="deaths, every other one without requests")
    parser.add_argument(
        "--logs", type=Path, metavar="DIRECTORY", help="for logs, traces and rounds; by default a new one"
    )


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return a function that measures and prints.

    Raises:
        ConfigError: An option is unusable, or a package is missing.
    """
    check_positive(arguments, "rounds")
    arguments.ways = cases_of(arguments.ways, WAYS)
    if "kvflow" not in arguments.ways:
        raise ConfigError("kvflow has to be among the ways", option="--ways")
    check_installed("vllm", "aiohttp")
    return lambda: print_rows(partial(_measure, arguments), is_json=arguments.json)


class _Found:
    """What was found of one pair.

    Attributes:
        before: What stands in the survivor before each kill, and at the end.
        dead: What each death has done.
        served: How each replacement has served.
    """

    def __init__(self, way: str, survivor: "Survivor", place: Path) -> None:
        self.survivor = survivor
        self._way = way
        self._file = place / "rounds.jsonl"
        self._write(survivor)
        self.before: list[Standing] = []
        self.dead: list[Dead] = []
        self.served: list[Served] = []

    async def watch(self, replacing: "Replacing") -> None:
        """Note what the death of the victim does."""
        self.dead.append(await replacing.watch(LOOK_S))
        self._write(self.dead[-1])

    async def replace(self, replacing: "Replacing") -> None:
        """Replace the victim, and note how it serves."""
        self.served.append(await replacing.replace())
        self._write(self.served[-1])

    def _write(self, noted: "Dead | Served | Survivor") -> None:
        line = {"way": self._way, "what": type(noted).__name__, **noted._asdict()}
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")


async def _measure(arguments: argparse.Namespace, on_row: Callable[[Row], None]) -> list[Row]:
    from benchmarks.vllm_handover.client import open_client  # noqa: PLC0415 - its dependencies may be missing
    from benchmarks.vllm_handover.servers import running  # noqa: PLC0415 - as above
    from benchmarks.vllm_replaced.replacing import Replacing, expected_texts  # noqa: PLC0415 - as above
    from benchmarks.vllm_replaced.servers import Pair  # noqa: PLC0415 - as above

    place = arguments.logs or Path(tempfile.mkdtemp(prefix="kvflow-replaced-"))
    place.mkdir(parents=True, exist_ok=True)
    pairs = [Pair(way, FIRST_PORT + PORTS * number, place) for number, way in enumerate(arguments.ways)]
    found: dict[str, _Found] = {}
    async with running([server for pair in pairs for server in pair.servers]), open_client() as client:
        expected = await expected_texts(client, pairs[0].prefill)
        each = [Replacing(pair, arguments.victim, client, expected) for pair in pairs]
        for one in each:
            found[one.pair.way] = _Found(one.pair.way, await one.warm_up(), place)
        for number in range(arguments.rounds):
            ordered = each if number % 2 == 0 else each[::-1]
            async with open_tasks() as tasks:
                for one in ordered:
                    found[one.pair.way].before.append(one.look())
                    await one.kill(tasks, is_idle=number % 2 == 1)
                    tasks.start_soon(found[one.pair.way].watch, one)
                    await one.wait_for_ends()
                    await anyio.sleep(SPIN_S)
            for one in ordered:
                await found[one.pair.way].replace(one)
        for one in each:
            found[one.pair.way].before.append(one.look())
    rows = _Rows(arguments.victim, found)
    for row in (*rows.of_requests(), *rows.of_what_stands()):
        on_row(row)
    return [*rows.of_requests(), *rows.of_what_stands()]


class _Rows:
    """Rows of a victim, with NixlConnector as the other side."""

    def __init__(self, victim: str, found: Mapping[str, _Found]) -> None:
        self._victim = victim
        self._found = found

    def of_requests(self) -> list[Row]:
        """Return the rows of what clients see, and of the survivor's blocks."""
        return [
            self._row(
                "first right answer after it is healthy",
                "time",
                "s",
                lambda found: [served.first_s for served in found.served],
                lambda found: {
                    "usual, s": statistics.median(found.survivor.usual_s),
                    "first of fresh servers, s": found.survivor.fresh_s,
                    "second, s": statistics.median(served.second_s for served in found.served),
                    "until healthy, s": statistics.median(served.start_s for served in found.served),
                    "failed before": _counts([{how: 1} for served in found.served for how in served.failed]),
                },
            ),
            self._row(
                "requests in flight",
                "failed",
                "requests",
                lambda found: [float(sum(dead.ended.values()) - dead.ended.get("right", 0)) for dead in _busy(found)],
                lambda found: {
                    "how": _counts([dead.ended for dead in _busy(found)]),
                    "the last has ended after, s": statistics.median(dead.last_s for dead in _busy(found)),
                },
            ),
            self._row(
                "requests in flight",
                "blocks of the survivor are free",
                "s",
                lambda found: [dead.free_s for dead in _busy(found)],
                lambda found: {"not within that time": sum(not dead.is_free for dead in _busy(found))},
            ),
        ]

    def of_what_stands(self) -> list[Row]:
        """Return the rows of what stands in the survivor, beyond what it had before it met the other server."""
        return [row for name in QUANTITIES for row in self._rows_of(name)]

    def _rows_of(self, name: str) -> list[Row]:
        quantity, unit = QUANTITIES[name]
        cases: dict[str, Callable[[_Found], Sequence[Standing]]] = {"with the peer": lambda found: found.before}
        for after_s in LOOK_S:
            cases[f"{after_s:.0f} s after the death"] = partial(_looks, after_s=after_s, of_dead=True)
        for after_s in next(iter(self._found.values())).served[0].looks:
            cases[f"{after_s:.0f} s after the first answer"] = partial(_looks, after_s=after_s, of_dead=False)
        rows = [self._row(case, quantity, unit, partial(_beyond, name, looks)) for case, looks in cases.items()]
        if not any(row.kvflow_low or row.kvflow_high or row.bare or any(row.others.values()) for row in rows):
            return []
        return [*rows, self._row("growth per replacement", quantity, unit, partial(_grown, name))]

    def _row(
        self,
        case: str,
        quantity: str,
        unit: str,
        values: Callable[[_Found], Sequence[float]],
        facts: Callable[[_Found], Mapping[str, float | str]] = lambda _: {},
    ) -> Row:
        measured = Measured(
            bench="vllm_replaced",
            group=f"{self._victim} is killed",
            case=case,
            quantity=quantity,
            unit=unit,
            better="lower",
        )
        of_way = {way: list(values(found)) for way, found in self._found.items()}
        own, bare = of_way["kvflow"], of_way.get("NixlConnector", [])
        told = {
            f"{what}, {way}": _rounded(fact)
            for way, found in self._found.items()
            for what, fact in facts(found).items()
        }
        can_divide = len(own) == len(bare) and all(bare)
        others = {} if can_divide or not bare else {"NixlConnector": bare}
        return compare(measured, own, bare if can_divide else (), others=others, facts=told)


def _busy(found: _Found) -> "list[Dead]":
    return [dead for dead in found.dead if dead.ended]


def _beyond(name: str, looks: "Callable[[_Found], Sequence[Standing]]", found: _Found) -> list[float]:
    return [getattr(look.beyond(found.survivor.alone), name) for look in looks(found)]


def _grown(name: str, found: _Found) -> list[float]:
    """Return the mean growth since the first replacement, or since the start if there is none but that."""
    first, *_ = before = found.before[1:] if len(found.served) > 1 else found.before
    return [getattr(before[-1].beyond(first), name) / (len(before) - 1)]


def _looks(found: _Found, *, after_s: float, of_dead: bool) -> "list[Standing]":
    return [each.looks[after_s] for each in (found.dead if of_dead else found.served)]


def _counts(counted: Sequence[Mapping[str, int]]) -> str:
    each: dict[str, int] = {}
    for counts in counted:
        for how, count in counts.items():
            each[how] = each.get(how, 0) + count
    return ", ".join(f"{count} x {how}" for how, count in each.items())


def _rounded(fact: float | str) -> float | str:
    return fact if isinstance(fact, str) else round(fact, 3)

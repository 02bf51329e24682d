"""Throughput of a prefill rank while its control port is under attack.

Requests go between two ranks of this process, with keys. A second process attacks the prefill rank, or an idle listener
in a third process. The machine is equally busy in both cases; their ratio is the cost of the attack.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, Literal

import msgspec

import kvflow
from benchmarks.keys import make_trusts
from benchmarks.processes import ChildProcess
from benchmarks.rooms import Rooms, deploy
from benchmarks.rows import Measured, Row, compare, print_rows, there_and_back
from kvflow.cli.options import add_backend_option, check_backend, check_positive
from kvflow.cli.tasks import open_tasks

__all__ = ["AttackerOptions", "add_arguments", "measure_attacks", "prepare"]

IN_FLIGHT: Final = 16
WORKER: Final = "benchmarks.attack_worker"
INSTANCES: Final = ("prefill-0", "decode-0", "other")
KINDS: Final = ("silence", "noise", "no key", "wrong key", "insider, malformed", "insider, grants")

Way = Literal["attacked", "another is attacked", "nobody is attacked"]
WAYS: Final[tuple[Way, Way, Way]] = ("attacked", "another is attacked", "nobody is attacked")


class AttackerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the attacker, or of the process that it attacks for comparison.

    Attributes:
        keys: Directory of its keys.
        instance: Instance that owns them.
        backend: Transport of the prefill rank to attack; empty for the attacker.
    """

    keys: str
    instance: str
    backend: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_backend_option(parser)
    parser.add_argument("--kinds", default=",".join(KINDS).replace(", ", "-"), metavar="KIND,...", help="attacks")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds of each attack, each way")
    parser.add_argument("--requests", type=int, default=800, metavar="N", help="requests in a round")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return a function that measures and prints.

    Raises:
        ConfigError: An option is unusable.
    """
    check_positive(arguments, "rounds", "requests")
    backend = check_backend(arguments.backend)
    kinds = [kind.replace("-", ", ") for kind in arguments.kinds.split(",")]
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise kvflow.ConfigError("no such attack", kinds=unknown, known=KINDS)
    measure = partial(measure_attacks, backend, kinds, arguments.rounds, arguments.requests)
    return lambda: print_rows(measure, is_json=arguments.json)


async def measure_attacks(
    backend: str, kinds: list[str], rounds: int, requests: int, on_row: Callable[[Row], None]
) -> list[Row]:
    """Transfer small requests between two ranks of this process, 16 in flight, during attacks.

    Args:
        backend: Transport of both ranks.
        kinds: Attacks to measure.
        rounds: Rounds of each attack and way.
        requests: Requests in each round.
        on_row: Called with each row.

    Returns:
        A row for each attack: requests a second under it, relative to those while another process is attacked.
    """
    rows = []
    with TemporaryDirectory() as place:
        trusts = make_trusts(Path(place), *INSTANCES)
        options = {
            name: AttackerOptions(keys=str(Path(place) / name), instance=name, backend=used)
            for name, used in (("other", ""), ("prefill-0", backend))
        }
        async with (
            deploy(backend=backend, trusts=trusts) as pairs,
            open_tasks() as tasks,
            ChildProcess("attacker", WORKER, options["other"], tasks) as attacker,
            ChildProcess("other prefill rank", WORKER, options["prefill-0"], tasks, shows_errors=True) as another,
        ):
            prefill = pairs[0].prefill
            endpoints = {WAYS[0]: prefill.endpoint, WAYS[1]: (await another.expect("listening"))["endpoint"]}
            rooms = Rooms(pairs)
            for kind in kinds:
                rates: dict[Way, list[float]] = {way: [] for way in WAYS}
                before = dict(prefill.statistics().anomalies)
                for way in there_and_back(WAYS, rounds):
                    if way in endpoints:
                        server = trusts["prefill-0"].public
                        await attacker.tell("attack", kind=kind, endpoint=endpoints[way], server=server)
                        await attacker.expect("attacking")
                    rates[way].append(await _play(rooms, requests))
                    if way in endpoints:
                        await attacker.tell("stop")
                        await attacker.expect("stopped")
                counted = {
                    reason: count - before.get(reason, 0)
                    for reason, count in prefill.statistics().anomalies.items()
                    if count > before.get(reason, 0)
                }
                rows.append(_row(backend, kind, rates, requests, counted))
                on_row(rows[-1])
    return rows


def _row(backend: str, kind: str, rates: dict[Way, list[float]], requests: int, counted: dict[str, int]) -> Row:
    measured = Measured(
        bench="attack",
        group=f"prefill is attacked, held against another process that is attacked, over {backend}",
        case=kind,
        quantity=f"requests, {IN_FLIGHT} in flight",
        unit="1/s",
        better="higher",
    )
    attacked, another, nobody = (rates[way] for way in WAYS)
    return compare(measured, attacked, another, others={WAYS[2]: nobody}, facts={"requests": requests, **counted})


async def _play(rooms: Rooms, requests: int) -> float:
    await rooms.fill(IN_FLIGHT)
    began = time.monotonic()
    await rooms.turn_over(requests)
    elapsed_s = time.monotonic() - began
    await rooms.finish_all()
    return requests / elapsed_s

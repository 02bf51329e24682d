"""Run fleets of several sizes in virtual time, whose processes are replaced all the time, and check every guarantee."""

import argparse
import re
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvflow.cli.options import check_positive
from kvflow.errors import ConfigError
from simulation.fleet import FleetRow, run_fleet

__all__ = ["add_arguments", "prepare"]

EXIT_VIOLATION = 1
SIZE = re.compile(r"([1-9][0-9]*)x([1-9][0-9]*)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    sizes = "1x2,1x20,1x200,200x1,20x20"
    parser.add_argument("--sizes", default=sizes, metavar="PxD,...", help="prefill and decode ranks of each fleet")
    parser.add_argument("--seed", type=int, default=1, help="determines everything that is drawn")
    parser.add_argument("--rate", type=float, default=20.0, metavar="N", help="requests a second")
    picture = "draw those with one rank of a role into this file (needs matplotlib)"
    parser.add_argument("--picture", type=Path, metavar="FILE", help=picture)
    parser.add_argument("--json", action="store_true", help="print a JSON object for each fleet and nothing else")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return a function that runs the fleets and prints a line for each; its exit code is 1 for a violation.

    Raises:
        ConfigError: An option is invalid.
    """
    check_positive(arguments, "rate")
    found = [SIZE.fullmatch(size) for size in arguments.sizes.split(",")]
    sizes = [(int(size[1]), int(size[2])) for size in found if size is not None]
    if len(sizes) != len(found):
        raise ConfigError("option must be a list such as 1x20,200x1", option="--sizes", value=arguments.sizes)

    def run() -> int:
        rows = _run_fleets(sizes, arguments.seed, arguments.rate, is_json=arguments.json)
        if arguments.picture is not None:
            from simulation.fleet_picture import draw_fleets  # noqa: PLC0415 - needs matplotlib

            draw_fleets([row for row in rows if 1 in (row.num_prefill, row.num_decode)], arguments.picture)
        return EXIT_VIOLATION if any(row.violation for row in rows) else 0

    return run


def _run_fleets(sizes: list[tuple[int, int]], seed: int, rate: float, *, is_json: bool) -> list[FleetRow]:
    if not is_json:
        print("fleet    requests succeeded replaced connections  idle messages/s  messages/request")
    rows = []
    for num_prefill, num_decode in sizes:
        row = run_fleet(seed, num_prefill, num_decode, requests_per_s=rate)
        rows.append(row)
        size = f"{num_prefill}x{num_decode}"
        counts = f"{row.requests:8} {row.successes:9} {row.replaced:8} {row.connections:11}"
        line = f"{size:8} {counts} {row.idle_messages:16.1f} {row.messages_per_request:17.1f}  {row.violation or ''}"
        print(msgspec.json.encode(row).decode() if is_json else line.rstrip(), flush=True)
    return rows

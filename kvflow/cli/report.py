"""Write an archive to attach to an issue: what doctor finds, what running ranks say, incidents, logs; no secrets."""

import argparse
from collections.abc import Callable
from pathlib import Path

from kvflow.cli import doctor
from kvflow.errors import ConfigError

__all__ = ["add_arguments", "prepare"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--output", type=Path, default=Path("kvflow-report.tar.gz"), metavar="FILE", help="the archive")
    parser.add_argument(
        "--log", type=Path, action="append", default=[], metavar="FILE", help="log to include; repeatable"
    )
    parser.add_argument(
        "--incidents", type=Path, metavar="DIRECTORY", help="of files about incidents, if not the default"
    )
    doctor.add_host_options(parser)


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return a function that writes the archive."""
    return lambda: _write(arguments)


def _write(arguments: argparse.Namespace) -> int:
    from kvflow.doctor.report import write_report  # noqa: PLC0415 - `kvflow --help` loads little

    options = doctor.host_options(arguments)
    try:
        names = write_report(arguments.output, options, arguments.log, arguments.incidents)
    except OSError as error:
        raise ConfigError("report cannot be written", path=error.filename, detail=error.strerror) from error
    print(
        "\n".join(
            [*names, f"{arguments.output} is complete. It names hosts and rooms; look through it before you send it."]
        )
    )
    return 0

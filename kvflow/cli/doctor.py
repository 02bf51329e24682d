"""Find out why transfers fail, or are slower than they could be."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvflow.cli.options import add_backend_option, check_positive, read_json

if TYPE_CHECKING:
    from kvflow.doctor.findings import DoctorOptions, Finding

__all__ = ["add_arguments", "prepare"]

EXIT_FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_backend_option(parser)
    parser.add_argument(
        "--backend-options", type=read_json, default={}, metavar="JSON", help="options of the transport"
    )
    parser.add_argument("--keys", metavar="DIRECTORY", help="key directory, see `kvflow keys`")
    parser.add_argument("--socket", type=Path, metavar="PATH", help="a socket, or a directory of sockets, of ranks")
    parser.add_argument("--timeout", type=float, default=3.0, metavar="SECONDS", help="time to wait for an answer")
    parser.add_argument("--no-probe", action="store_true", help="make no probe transfer, which takes some seconds")
    parser.add_argument("--json", action="store_true", help="print the findings as a JSON array")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return a function that prints findings; its exit code is 1 if one of them has failed."""
    return lambda: _examine(arguments)


def _examine(arguments: argparse.Namespace) -> int:
    from kvflow.doctor.checks import examine_host  # noqa: PLC0415 - `kvflow --help` loads little

    return _show(examine_host(_options(arguments)), arguments)


def _options(arguments: argparse.Namespace) -> "DoctorOptions":
    from kvflow.doctor.findings import DoctorOptions  # noqa: PLC0415 - as above

    check_positive(arguments, "timeout")
    return DoctorOptions(
        backend=arguments.backend,
        backend_options=arguments.backend_options,
        keys=arguments.keys,
        socket=arguments.socket,
        timeout_s=arguments.timeout,
        probe_s=0.0 if arguments.no_probe else DoctorOptions.probe_s,
    )


def _show(findings: "Sequence[Finding]", arguments: argparse.Namespace) -> int:
    import msgspec  # noqa: PLC0415 - as above

    if arguments.json:
        print(msgspec.json.encode(findings).decode())
    else:
        print("\n".join(finding.text for finding in findings))
    return EXIT_FAILED if any(finding.status == "fail" for finding in findings) else 0

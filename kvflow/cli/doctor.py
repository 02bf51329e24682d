"""Find out why transfers fail, or are slower than they could be."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvflow.cli.options import add_backend_option, check_positive, read_json

if TYPE_CHECKING:
    from kvflow.doctor.findings import DoctorOptions, Finding

__all__ = ["add_arguments", "add_host_options", "host_options", "prepare"]

EXIT_FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    target = "address (tcp://HOST:PORT) or ticket (JSON) of prefill, to look at it from here; by default, this host"
    parser.add_argument("target", nargs="?", metavar="ADDRESS|TICKET", help=target)
    listen = "serve probe transfers at this address until interrupted, for `kvflow doctor ADDRESS` on another host"
    parser.add_argument("--listen", metavar="ADDRESS", help=listen)
    parser.add_argument("--advertise", metavar="HOST", help="with --listen: host that others use, if not the one bound")
    parser.add_argument("--fingerprint", metavar="TEXT", help="fingerprint of the layout on this side, to compare")
    trust = add_host_options(parser)
    instance = "with --keys: the instance that the key belongs to, for which the other side lists it"
    parser.add_argument("--instance", default="kvflow-doctor", metavar="NAME", help=instance)
    trust.add_argument("--plain", action="store_true", help="with --listen: serve other hosts without keys")
    parser.add_argument("--json", action="store_true", help="print the findings as a JSON array")


def add_host_options(parser: argparse.ArgumentParser) -> Any:
    """Add the options of the checks of this host; return the group of options that `--keys` excludes."""
    add_backend_option(parser)
    options = "options of the transport"
    parser.add_argument("--backend-options", type=read_json, default={}, metavar="JSON", help=options)
    trust = parser.add_mutually_exclusive_group()
    trust.add_argument("--keys", metavar="DIRECTORY", help="key directory, see `kvflow keys`")
    parser.add_argument("--socket", type=Path, metavar="PATH", help="a socket, or a directory of sockets, of ranks")
    parser.add_argument("--timeout", type=float, default=3.0, metavar="SECONDS", help="time to wait for an answer")
    parser.add_argument("--no-probe", action="store_true", help="make no probe transfer, which takes some seconds")
    return trust


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return a function that prints findings; its exit code is 1 if one of them has failed."""
    return _listen(arguments) if arguments.listen else lambda: _examine(arguments)


def _listen(arguments: argparse.Namespace) -> Callable[[], int]:
    from kvflow import Trust, load_trust  # noqa: PLC0415 - `kvflow --help` loads little
    from kvflow.cli.tasks import serving  # noqa: PLC0415 - as above
    from kvflow.doctor.probe import ProbeOrder, serve_logged_probe  # noqa: PLC0415 - as above

    order = ProbeOrder(
        instance=arguments.instance, backend=arguments.backend, backend_options=arguments.backend_options
    )
    trust = Trust.none() if arguments.plain else load_trust(arguments.keys) if arguments.keys else None
    return serving("kvflow doctor", serve_logged_probe(order, arguments.listen, arguments.advertise, trust=trust))


def _examine(arguments: argparse.Namespace) -> int:
    from kvflow.doctor.checks import examine_host  # noqa: PLC0415 - as above

    if arguments.target is None:
        return _show(examine_host(host_options(arguments)), arguments)
    import anyio  # noqa: PLC0415 - as above

    from kvflow import Trust, load_trust  # noqa: PLC0415 - as above
    from kvflow.doctor.peer import Visit, examine_peer, read_target  # noqa: PLC0415 - as above

    address, ticket = read_target(arguments.target)
    trust = load_trust(arguments.keys) if arguments.keys else Trust.none()
    options = replace(host_options(arguments), trust=trust, instance=arguments.instance)
    visit = Visit(options, address, ticket, arguments.fingerprint)
    return _show(anyio.run(examine_peer, visit), arguments)


def host_options(arguments: argparse.Namespace) -> "DoctorOptions":
    """Return what the checks of this host look at."""
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

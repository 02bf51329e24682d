"""The `kvflow` command."""

import argparse
import sys
from collections.abc import Sequence

from kvflow import __version__
from kvflow.cli import registry, simulate
from kvflow.cli.bench import command as bench
from kvflow.cli.demo import command as demo
from kvflow.errors import KvflowError

__all__ = ["main"]

EXIT_UNUSABLE = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit code: what the command says, or 2 if it could not do its work.
    """
    parser = argparse.ArgumentParser(prog="kvflow", description="Moves KV caches from prefill to decode servers.")
    parser.add_argument("--version", action="version", version=f"kvflow {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in (("demo", demo), ("bench", bench), ("registry", registry), ("simulate", simulate)):
        command = commands.add_parser(
            name,
            help=module.__doc__,
            description=module.__doc__,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    arguments = parser.parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except KeyboardInterrupt:
        print(f"kvflow {arguments.command}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except KvflowError as error:
        print(f"kvflow {arguments.command}: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    return code

"""`python -m simulation run | fleet | explore`: the real ranks in virtual time, and the cores in every interleaving."""

import sys
from collections.abc import Sequence
from typing import Final

from kvflow.cli.main import run_program

__all__ = ["main"]

COMMANDS: Final = {
    "run": "simulation.command",
    "fleet": "simulation.fleet_command",
    "explore": "simulation.explore.command",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, and return the exit code; it is 1 for a violation."""
    return run_program("python -m simulation", "Checks the guarantees of kvflow.", COMMANDS, argv)


if __name__ == "__main__":
    sys.exit(main())

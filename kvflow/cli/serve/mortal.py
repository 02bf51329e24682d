"""Run a command that does not outlive the thread that started it: `python -m kvflow.cli.serve.mortal PROGRAM ...`."""

import ctypes
import os
import signal
import sys
from typing import Final

__all__ = ["main"]

PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    """Become the command."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 - that is what this is for


if __name__ == "__main__":
    main()

"""Run a command that does not outlive the thread that started it.

`python -m kvflow.cli.serve.mortal PARENT PROGRAM ...`, where PARENT is the process ID of whoever starts it.
"""

import ctypes
import os
import signal
import sys
from typing import Final

__all__ = ["main"]

PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    """Become the command, unless the parent has ended before this process could ask to end with it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == int(sys.argv[1]):
        os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 - that is what this is for


if __name__ == "__main__":
    main()

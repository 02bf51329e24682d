"""Runs a command that does not outlive the thread that started it.

`python -m kvflow.cli.mortal PARENT PROGRAM ...`, where PARENT is the process ID of the parent.
"""

import ctypes
import os
import signal
import sys
from typing import Final

__all__ = ["end_with_parent", "main"]

PR_SET_PDEATHSIG: Final = 1


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends.

    A parent that has ended already is missed.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main() -> None:
    """Replace this process by the command, unless the parent ended before `end_with_parent` took effect."""
    end_with_parent()
    if os.getppid() == int(sys.argv[1]):
        os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 - the purpose of this module


if __name__ == "__main__":
    main()

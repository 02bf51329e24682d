"""Runs a command that ends with the thread that started it, together with every process that the command starts.

Usage: `python -m kvflow.cli.mortal PARENT PROGRAM ...`, in a new process group. PARENT is the process ID of the parent.
The kernel ends children with their parent, but not grandchildren: the workers of vLLM outlive a server that is killed.
"""

import ctypes
import os
import signal
import subprocess
import sys
from typing import Final

__all__ = ["end_with_parent", "main"]

PR_SET_PDEATHSIG: Final = 1
PARENT_HAS_ENDED: Final = signal.SIGHUP


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel signal this process when the thread that started it ends. A parent already gone is missed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def main() -> int:
    """Run the command, forward SIGTERM to it, and return its exit status. Kill the group if the parent ends."""
    signal.signal(PARENT_HAS_ENDED, lambda *_: os.killpg(0, signal.SIGKILL))
    end_with_parent(PARENT_HAS_ENDED)
    if os.getppid() != int(sys.argv[1]):
        return 1
    command = subprocess.Popen(sys.argv[2:])  # noqa: S603 - that is what this is for
    signal.signal(signal.SIGTERM, lambda *_: command.terminate())
    status = command.wait()
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(main())

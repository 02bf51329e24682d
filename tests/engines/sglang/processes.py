"""The two processes of a deployment, and the commands that they receive."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from tests.support.stopping import is_stopped

__all__ = ["Deployment", "Process", "deployment", "free_port"]

ROOT: Final = Path(__file__).parents[3]


def free_port() -> int:
    """Return a free port, of those that the kernel does not choose for others until it is used."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


class Process:
    """A worker process.

    Args:
        mode: "prefill" or "decode".
        settings: Settings of the adapter.
        environment: More environment variables.
    """

    def __init__(self, mode: str, settings: dict[str, Any], environment: dict[str, str]) -> None:
        own = {"PYTHONPATH": str(ROOT), "KVFLOW_SGLANG": json.dumps({"plain": True, **settings}), **environment}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.engines.sglang.worker", mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | own,
        )

    def tell(self, do: str, **arguments: Any) -> Any:
        """Send a command, and return its result."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        self._process.send_signal(number)

    def stop(self) -> None:
        """Suspend the process, and wait until all of its threads have stopped."""
        self.signal(signal.SIGSTOP)
        while not is_stopped(self._process.pid):
            time.sleep(0.001)

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.communicate()


class Deployment:
    """A prefill and a decode process.

    Attributes:
        prefill: The prefill process.
        decode: The decode process.
        port: Port of the bootstrap server, once there are schedulers.
    """

    def __init__(self, prefill: Process, decode: Process) -> None:
        self.prefill, self.decode, self.port = prefill, decode, 0
        self._threads = ThreadPoolExecutor(2)
        self._rooms = iter(range(1, 1_000_000))

    def open(self, name: str, prefill: dict[str, int], decode: dict[str, int]) -> None:
        """Create both sides of a model."""
        port = free_port()
        self.prefill.tell("open", name=name, port=port, **prefill)
        self.decode.tell("open", name=name, port=port, **decode)

    def start(self) -> None:
        """Create both schedulers."""
        self.port = free_port()
        self.prefill.tell("start", port=self.port)
        self.decode.tell("start", port=self.port)

    def replace_prefill(self, settings: dict[str, Any], **environment: str) -> None:
        """Kill the prefill process, and start another one at the same bootstrap port."""
        self.prefill.kill()
        self.prefill = Process("prefill", settings, environment)
        self.prefill.tell("start", port=self.port)

    def room(self) -> int:
        """Return an unused room."""
        return next(self._rooms)

    def both(self, do: str, **arguments: Any) -> tuple[Any, Any]:
        """Send a command to both processes at the same time, and return both results."""
        doing = [self._threads.submit(one.tell, do, **arguments) for one in (self.prefill, self.decode)]
        return doing[0].result(), doing[1].result()


@contextmanager
def deployment(settings: dict[str, Any], **environment: str) -> Iterator[Deployment]:
    """Start both processes, and end them on exit."""
    made = Deployment(*(Process(mode, settings, environment) for mode in ("prefill", "decode")))
    try:
        yield made
    finally:
        made.prefill.kill()
        made.decode.kill()

"""An engine's HTTP server as a child process."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import aiohttp
import anyio
import anyio.to_thread
from typing_extensions import override

from kvflow.errors import KvflowError

__all__ = ["READY_S", "Server", "ServerFailed"]

READY_S: Final = 600.0
"""How long a server may take to become healthy."""

STOP_S: Final = 40.0
POLL_S: Final = 0.5
TAIL_LINES: Final = 20


class ServerFailed(KvflowError):
    """A server has ended, or did not become healthy in time.

    Attributes:
        server: The server.
    """

    def __init__(self, message: str, server: "Server") -> None:
        super().__init__(message, server=server.name, log=str(server.log))
        self.server = server

    @override
    def __str__(self) -> str:
        """Return the message, and the last lines of the server's log."""
        return f"{super().__str__()}\n{self.server.tail()}"


class Server:
    """A server in its own process group, which is killed if this process dies.

    Attributes:
        name: Name in errors.
        url: Base URL; `/health` there shows when it is ready.
        log: File with all of its output; a restart appends.
        pid: ID of its first process.

    Args:
        command: Command line.
        environment: Additional environment variables.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], *, url: str, log: Path
    ) -> None:
        self.name = name
        self.url = url
        self.log = log
        self.pid = 0
        self._command = command
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process. It is not ready yet."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - the command is ours
                [sys.executable, "-m", "kvflow.cli.mortal", str(os.getpid()), *self._command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._environment},
                start_new_session=True,
            )
        self.pid = self._process.pid

    async def wait_until_ready(self, timeout_s: float = READY_S) -> None:
        """Wait until it is healthy; raise ServerFailed if it has ended, or is not healthy in time."""
        deadline = time.monotonic() + timeout_s
        async with aiohttp.ClientSession() as session:
            while not await self._is_healthy(session):
                if self.has_ended():
                    raise ServerFailed("server has ended", self)
                if time.monotonic() > deadline:
                    raise ServerFailed("server was not ready in time", self)
                await anyio.sleep(POLL_S)

    async def _is_healthy(self, session: aiohttp.ClientSession) -> bool:
        with suppress(aiohttp.ClientError, TimeoutError):
            async with session.get(f"{self.url}/health", timeout=aiohttp.ClientTimeout(total=5)) as answer:
                return answer.status == 200
        return False

    async def watch(self) -> None:
        """Wait until it has ended, and raise ServerFailed."""
        if self._process is not None:
            await anyio.to_thread.run_sync(self._process.wait, abandon_on_cancel=True)
        raise ServerFailed("server has ended", self)

    def has_ended(self) -> bool:
        """Return whether its first process has ended, or was never started."""
        return self._process is None or self._process.poll() is not None

    def stop(self, timeout_s: float = STOP_S) -> None:
        """Ask it to end, wait for that, and kill all processes that remain."""
        if self._process is not None and not self.has_ended():
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
        self.kill()

    def kill(self) -> None:
        """Kill all of its processes at once."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()

    def tail(self) -> str:
        """Return the last lines of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:])

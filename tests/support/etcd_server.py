"""A real etcd server in a process of its own."""

import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Final

import anyio
import pytest

from kvflow.addresses import DirectoryURL
from kvflow.directory import open_directory
from kvflow.directory.listings import DirectoryDown
from tests.support.ports import unused_port

__all__ = ["NEEDS_ETCD", "EtcdServer"]

TOOLS: Final = os.pathsep.join([str(Path(__file__).parents[2] / ".cache/etcd/usr/bin"), os.environ.get("PATH", "")])

NEEDS_ETCD: Final = pytest.mark.skipif(
    shutil.which("etcd", path=TOOLS) is None, reason="scripts/unpack-package.sh gets it"
)


class EtcdServer:
    """A server on ports of its own, which may be killed and started again with its data.

    Args:
        folder: For its data.
        options: More options of etcd.
        scheme: "https" if they say so.
        tools: Directories in which it is looked for.
    """

    def __init__(self, folder: Path, *options: str, scheme: str = "http", tools: str = TOOLS) -> None:
        self.port, peers = unused_port(), unused_port()
        url = f"{scheme}://127.0.0.1:{self.port}"
        program = shutil.which("etcd", path=tools)
        assert program is not None
        self._command = [
            *(program, f"--data-dir={folder / 'etcd'}", f"--listen-peer-urls=http://127.0.0.1:{peers}"),
            *(f"--listen-client-urls={url}", f"--advertise-client-urls={url}", "--log-level=error", *options),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The URL of a directory in it."""
        return f"etcd://127.0.0.1:{self.port}/fleet"

    def start(self) -> None:
        """Start it; it may take a second to answer."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def send_signal(self, number: signal.Signals) -> None:
        """Stop or continue it, for example."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it as a power failure does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    async def wait_until_ready(self, url: str = "") -> None:
        """Wait until it answers."""
        directory = open_directory(DirectoryURL.parse("registry", url or self.url))
        while True:
            try:
                async for _ in directory.watch():
                    return
            except DirectoryDown:
                await anyio.sleep(0.05)

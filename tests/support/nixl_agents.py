"""A process with NIXL agents: `python -m tests.support.nixl_agents silent|polled`, with one name a line on stdin.

It answers each name with a line: the address of the memory that peers may write to, and the metadata that a decode rank
sends. It exits at the end of its input. A silent process never lets UCX make progress, and so answers no connection.
"""

import selectors
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from io import FileIO

import anyio
import numpy as np
from anyio.streams.buffered import BufferedByteReceiveStream

from kvflow.backends.metadata import PeerMetadata, RegisteredMemory
from kvflow.backends.nixl.backend import FORMAT
from kvflow.backends.nixl.library import ENGINE_CONFIG, load
from kvflow.geometry.memory import MemoryRange

__all__ = ["ForeignAgent", "foreign_agents"]

NUM_BYTES = 262_144
POLL_S = 1e-3
LONGEST_LINE = 2**20


@dataclass(frozen=True)
class ForeignAgent:
    """An agent in another process.

    Attributes:
        address: Address of its memory.
    """

    name: str
    address: int
    metadata: bytes

    @property
    def blob(self) -> bytes:
        """The part of the metadata for the NIXL library."""
        return PeerMetadata.unpack(self.metadata, backend=FORMAT).agent

    def with_blob(self, blob: bytes) -> bytes:
        """Return its metadata with another blob for the library."""
        return PeerMetadata(FORMAT, blob, PeerMetadata.unpack(self.metadata, backend=FORMAT).memory).pack()

    def alias(self, name: str) -> "ForeignAgent":
        """Return the same agent under another name, as forged metadata could have it."""
        old, new = (len(text).to_bytes(8, "little") + text.encode() + b"|" for text in (self.name, name))
        return ForeignAgent(name, self.address, self.with_blob(self.blob.replace(old, new, 1)))


@asynccontextmanager
async def foreign_agents(names: Sequence[str], *, is_silent: bool = False) -> AsyncIterator[list[ForeignAgent]]:
    """Start a process with agents, which lives as long as the context."""
    command = [sys.executable, "-m", "tests.support.nixl_agents", "silent" if is_silent else "polled"]
    async with await anyio.open_process(command, stderr=None) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        lines = BufferedByteReceiveStream(process.stdout)
        try:
            await process.stdin.send("".join(f"{name}\n" for name in names).encode())
            found = []
            for name in names:
                address, metadata = (await lines.receive_until(b"\n", LONGEST_LINE)).split()
                found.append(ForeignAgent(name, int(address), bytes.fromhex(metadata.decode())))
            yield found
        finally:
            process.kill()
            await process.wait()


def main(mode: str) -> None:
    """Create agents, and let them make progress unless silent."""
    api = load()
    memory = np.zeros(NUM_BYTES, np.uint8)
    address = int(memory.ctypes.data)
    agents = []
    names = FileIO(sys.stdin.fileno())
    selector = selectors.DefaultSelector()
    selector.register(names, selectors.EVENT_READ)
    while True:
        if selector.select(POLL_S):
            name = names.readline().decode().strip()
            if not name:
                return
            agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
            agent.create_backend("UCX", {"engine_config": ENGINE_CONFIG})
            agent.register_memory([(address, NUM_BYTES, 0, "")], "DRAM")
            registered = RegisteredMemory((MemoryRange(address, NUM_BYTES),), "DRAM", 0)
            metadata = PeerMetadata(FORMAT, agent.get_agent_metadata(), registered).pack()
            sys.stdout.write(f"{address} {metadata.hex()}\n")
            sys.stdout.flush()
            agents.append(agent)
        elif mode != "silent":
            for agent in agents:
                agent.get_new_notifs()


if __name__ == "__main__":
    main(sys.argv[1])

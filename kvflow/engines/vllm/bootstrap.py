"""`GET /query`, answered like the bootstrap server of vLLM's MooncakeConnector.

A router asks once for the id of prefill's engine, and passes it to decode with each request. Here, that id is the
address of the first prefill rank, so decode needs no further lookup. The answer is the same for all, and needs no key.
"""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from kvflow import ConfigError
from kvflow.addresses import split_hosts
from kvflow.blocking import LoopThread

__all__ = ["serve_query"]

REQUEST_S: Final = 5.0
"""Time for a whole request and its answer."""

MAX_HEAD_BYTES: Final = 8_192
MAX_CONNECTIONS: Final = 32
"""Connections at a time; further ones are closed at once."""


@contextmanager
def serve_query(host: str, port: int, endpoint: str, loop: LoopThread) -> Iterator[None]:
    """Serve queries for an endpoint on the rank's event loop; raise ConfigError if the address cannot be bound."""
    body = json.dumps({"0": {"engine_id": endpoint, "worker_addr": {"0": {"0": endpoint}}}}).encode()
    open_tasks: set[asyncio.Task[None]] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_S):
                head = await reader.readuntil(b"\r\n\r\n")
                is_query = head.split(b" ", 2)[:2] == [b"GET", b"/query"]
                status, content = (b"200 OK", body) if is_query else (b"404 Not Found", b"")
                writer.write(b"HTTP/1.1 %b\r\nContent-Type: application/json\r\n" % status)
                writer.write(b"Content-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(content), content))
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            writer.transport.abort()  # TimeoutError is an OSError
        finally:
            writer.close()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(open_tasks) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.create_task(answer(reader, writer))
        open_tasks.add(task)
        task.add_done_callback(open_tasks.discard)

    async def start() -> asyncio.Server:
        return await asyncio.start_server(connected, split_hosts(host), port, limit=MAX_HEAD_BYTES)

    async def stop(server: asyncio.Server) -> None:
        server.close()
        for task in list(open_tasks):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    with loop.use() as portal:
        try:
            server = portal.call(start)
        except OSError as error:
            raise ConfigError(
                "address cannot be bound", setting="mooncake_port", value=port, detail=str(error)
            ) from error
        try:
            yield
        finally:
            portal.call(stop, server)

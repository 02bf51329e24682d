"""Real HTTP servers whose port is mistaken for that of a rank."""

import http.server
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import anyio.to_thread
from aiohttp import web

__all__ = ["HTTP_SERVERS"]


@asynccontextmanager
async def answering_bytes() -> AsyncIterator[str]:
    """Serve with aiohttp, which answers bytes that are no request at once."""
    runner = web.AppRunner(web.Application())
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"tcp://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def waiting_for_lines() -> AsyncIterator[str]:
    """Serve with a server that says nothing before the end of a line has come."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Quiet) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{server.server_port}"
        finally:
            await anyio.to_thread.run_sync(server.shutdown)


class _Quiet(http.server.BaseHTTPRequestHandler):
    timeout = 5.0

    def log_message(self, *_: object) -> None:
        """Keep standard error clean."""


HTTP_SERVERS: Final = {"aiohttp": answering_bytes, "http.server": waiting_for_lines}

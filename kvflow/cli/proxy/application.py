"""The proxy itself: each request goes to a prefill server first, then to a decode server.

It speaks to vLLM as vLLM's own router does with `--kv-connector nixl`: prefill is asked for one token with
`do_remote_decode`, and what it answers in `kv_transfer_params` goes to decode as it is.
"""

import itertools
import json
import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp
from aiohttp import web

from kvflow.errors import ConfigError

__all__ = ["PREFILL_PARAMS", "BadAnswer", "Proxy", "serve_proxy"]

PREFILL_PARAMS: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What prefill is asked with, key by key what routers send."""

GENERATING: Final = ("/v1/completions", "/v1/chat/completions")
FORWARDED: Final = ("Authorization", "traceparent", "tracestate")
MAX_BODY_BYTES: Final = 64 * 2**20
CONNECT_S: Final = 5.0


class BadAnswer(Exception):
    """A server cannot be reached or answered with an error.

    Attributes:
        status: What the client gets.
        body: Likewise, as it came if a server sent it.
    """

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status, body)
        self.status = status
        self.body = body


class Proxy:
    """Takes the servers of each kind in turn.

    Args:
        prefill: URLs of the prefill servers, at least one.
        decode: URLs of the decode servers, at least one.
        session: With which they are asked.
    """

    def __init__(self, prefill: Sequence[str], decode: Sequence[str], session: aiohttp.ClientSession) -> None:
        self._servers = [*prefill, *decode]
        self._prefill = itertools.cycle(prefill)
        self._decode = itertools.cycle(decode)
        self._session = session

    def application(self) -> web.Application:
        """Make what an aiohttp server runs."""
        application = web.Application(client_max_size=MAX_BODY_BYTES)
        for path in GENERATING:
            application.router.add_post(path, self.generate)
        application.router.add_get("/v1/models", self.models)
        application.router.add_get("/health", self.health)
        return application

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Answer a request. If the client leaves, the server that is at work is left, too, and stops."""
        headers = {name: request.headers[name] for name in FORWARDED if name in request.headers}
        headers["X-Request-Id"] = request.headers.get("X-Request-Id") or uuid.uuid4().hex
        try:
            body = _object(await request.read())
            params = await self._ask_prefill(next(self._prefill) + request.path, body, headers)
            url = next(self._decode) + request.path
            async with self._reached(url, {**body, "kv_transfer_params": params}, headers) as answer:
                return await _pass_on(request, answer)
        except BadAnswer as error:
            return web.Response(status=error.status, body=error.body, content_type="application/json")

    async def models(self, _request: web.Request) -> web.Response:
        """Say what a decode server says."""
        try:
            async with self._reached(next(self._decode) + "/v1/models") as answer:
                body = await answer.read()
                return web.Response(status=answer.status, body=body, content_type="application/json")
        except BadAnswer as error:
            return web.Response(status=error.status, body=error.body, content_type="application/json")

    async def health(self, _request: web.Request) -> web.Response:
        """Say whether all servers are healthy."""
        try:
            for url in self._servers:
                async with self._reached(f"{url}/health") as answer:
                    if answer.status != 200:
                        raise _bad_gateway(f"{url} is not healthy, status {answer.status}")
        except BadAnswer as error:
            return web.Response(status=503, body=error.body, content_type="application/json")
        return web.Response()

    async def _ask_prefill(self, url: str, body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
        asked = {key: value for key, value in body.items() if key not in ("stream_options", "min_tokens")}
        asked |= {"stream": False, "max_tokens": 1, "kv_transfer_params": PREFILL_PARAMS}
        if "max_completion_tokens" in asked:
            asked["max_completion_tokens"] = 1
        async with self._reached(url, asked, headers) as answer:
            if answer.status != 200:
                raise BadAnswer(answer.status, await answer.read())
            params = _object(await answer.read(), 502).get("kv_transfer_params")
        if not isinstance(params, dict):
            raise _bad_gateway(f"{url} answered without kv_transfer_params: is it a prefill server with a connector?")
        return params

    @asynccontextmanager
    async def _reached(
        self, url: str, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        method = "GET" if body is None else "POST"
        try:
            answer = await self._session.request(method, url, json=body, headers=headers)
        except aiohttp.ClientError as error:
            raise _bad_gateway(f"{url} cannot be reached: {error}") from error
        async with answer:
            yield answer


def _object(text: bytes, status: int = 400) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except ValueError as error:
        raise BadAnswer(status, _error(status, f"body is not JSON: {error}")) from error
    if not isinstance(body, dict):
        raise BadAnswer(status, _error(status, "body is not a JSON object"))
    return body


async def _pass_on(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    response = web.StreamResponse(status=answer.status)
    response.content_type = answer.content_type
    await response.prepare(request)
    try:
        async for piece in answer.content.iter_any():
            await response.write(piece)
    except aiohttp.ClientError as error:  # the status has been sent, so the text has to say it
        lost = _bad_gateway(f"{answer.url} ended in the middle of its answer: {error}")
        await response.write(b"data: " + lost.body + b"\n\n")
    await response.write_eof()
    return response


def _bad_gateway(message: str) -> BadAnswer:
    print(f"kvflow proxy: {message}", file=sys.stderr, flush=True)
    return BadAnswer(502, _error(502, message))


def _error(status: int, message: str) -> bytes:
    return json.dumps({"error": {"message": message, "type": "proxy_error", "code": status}}).encode()


@asynccontextmanager
async def serve_proxy(prefill: Sequence[str], decode: Sequence[str], host: str, port: int) -> AsyncIterator[str]:
    """Serve until the block is left.

    Args:
        prefill: URLs of the prefill servers.
        decode: URLs of the decode servers.
        host: Where to listen.
        port: Likewise; 0 takes one that is free.

    Yields:
        The proxy's URL.

    Raises:
        ConfigError: It cannot listen there.
    """
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        runner = web.AppRunner(
            Proxy(prefill, decode, session).application(), handler_cancellation=True, access_log=None
        )
        await runner.setup()
        try:
            try:
                await web.TCPSite(runner, host, port).start()
            except OSError as error:
                raise ConfigError("address cannot be bound", host=host, port=port, detail=error.strerror) from error
            yield f"http://{host}:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

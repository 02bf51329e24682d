"""The proxy: sends each request to a prefill server and to a decode server.

It speaks to vLLM like vLLM's own router does with `--kv-connector nixl`: it asks prefill for one token with
`do_remote_decode`, and passes the `kv_transfer_params` of the answer to decode unchanged.

A concurrent proxy asks both servers at the same time, so that pages move while prefill computes. For this, decode needs
the address of prefill's rank, which the proxy takes from the last answer of the prefill server.
"""

import itertools
import json
import sys
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, Final, NamedTuple

import aiohttp
from aiohttp import web

from kvflow.cli.processes import open_tasks
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
"""Parameters of requests to prefill, with the same keys as routers send."""

GENERATING: Final = ("/v1/completions", "/v1/chat/completions")
FORWARDED: Final = ("Authorization", "traceparent", "tracestate")
MAX_BODY_BYTES: Final = 64 * 2**20
CONNECT_S: Final = 5.0


class BadAnswer(Exception):
    """A server cannot be reached or answered with an error.

    Attributes:
        status: Status for the client.
        body: Body for the client; unchanged if a server sent it.
    """

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status, body)
        self.status = status
        self.body = body


class DecodeFailed(BadAnswer):
    """A decode server that was asked at the same time as prefill answered with an error."""


class Asked(NamedTuple):
    """A request of a client.

    Attributes:
        prefill: URL of the request to a prefill server.
        decode: URL of the request to a decode server.
        body: Body of the request.
        headers: Headers to forward.
    """

    prefill: str
    decode: str
    body: dict[str, Any]
    headers: dict[str, str]


class Proxy:
    """Uses the servers of each kind in turn.

    Args:
        prefill: URLs of the prefill servers, at least one.
        decode: URLs of the decode servers, at least one.
        session: HTTP session for requests to servers.
        is_concurrent: Ask both servers at the same time.
    """

    def __init__(
        self, prefill: Sequence[str], decode: Sequence[str], session: aiohttp.ClientSession, *, is_concurrent: bool
    ) -> None:
        self._servers = [*prefill, *decode]
        self._is_concurrent = is_concurrent
        self._addresses: dict[str, str] = {}
        self._prefill = itertools.cycle(prefill)
        self._decode = itertools.cycle(decode)
        self._session = session

    def application(self) -> web.Application:
        """Create the aiohttp application."""
        application = web.Application(client_max_size=MAX_BODY_BYTES)
        for path in GENERATING:
            application.router.add_post(path, self.generate)
        application.router.add_get("/v1/models", self.models)
        application.router.add_get("/health", self.health)
        return application

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Answer a request. If the client disconnects, so does the proxy from the server at work, which then stops."""
        headers = {name: request.headers[name] for name in FORWARDED if name in request.headers}
        headers["X-Request-Id"] = request.headers.get("X-Request-Id") or uuid.uuid4().hex
        try:
            body = _object(await request.read())
            prefill, decode = (next(servers) + request.path for servers in (self._prefill, self._decode))
            async with AsyncExitStack() as stack:
                answer = await self._hand_over(Asked(prefill, decode, body, headers), stack)
                return await _pass_on(request, answer)
        except BadAnswer as error:
            return web.Response(status=error.status, body=error.body, content_type="application/json")

    async def models(self, _request: web.Request) -> web.Response:
        """Return the answer of a decode server."""
        try:
            async with self._reached(next(self._decode) + "/v1/models") as answer:
                body = await answer.read()
                return web.Response(status=answer.status, body=body, content_type="application/json")
        except BadAnswer as error:
            return web.Response(status=error.status, body=error.body, content_type="application/json")

    async def health(self, _request: web.Request) -> web.Response:
        """Return whether all servers are healthy."""
        try:
            for url in self._servers:
                async with self._reached(f"{url}/health") as answer:
                    if answer.status != 200:
                        raise _bad_gateway(f"{url} is not healthy, status {answer.status}")
        except BadAnswer as error:
            return web.Response(status=503, body=error.body, content_type="application/json")
        return web.Response()

    async def _hand_over(self, asked: Asked, stack: AsyncExitStack) -> aiohttp.ClientResponse:
        """Have prefill compute a request that decode continues, and return decode's answer.

        Args:
            asked: The request.
            stack: Closes the answer.

        Raises:
            BadAnswer: A server failed.
        """
        answer, params = None, None
        if asked.prefill in self._addresses:
            answer, params = await self._ask_both(asked, stack)
        if answer is None:
            if params is None:
                params = await self._ask_prefill(asked)
            answer = await stack.enter_async_context(self._decoding(asked, params))
        return answer

    async def _ask_both(
        self, asked: Asked, stack: AsyncExitStack
    ) -> tuple[aiohttp.ClientResponse | None, dict[str, Any] | None]:
        """Ask both servers at the same time.

        Returns:
            Decode's answer, and the parameters from prefill. Without an answer, decode must be asked again with the
            parameters; without either, start over.

        Raises:
            BadAnswer: Prefill failed, or decode did because of the request itself.
        """
        address, transfer = self._addresses[asked.prefill], uuid.uuid4().hex
        told = {"do_remote_prefill": True, "transfer_id": transfer, "remote_engine_id": address}
        answers: list[aiohttp.ClientResponse] = []

        async def ask_decode() -> None:
            answers.append(await stack.enter_async_context(self._decoding(asked, told)))
            if answers[0].status != 200:
                raise DecodeFailed(answers[0].status, await answers[0].read())

        try:
            async with open_tasks() as tasks:
                tasks.start_soon(ask_decode)
                params = await self._ask_prefill(asked, transfer)
        except DecodeFailed as error:
            if error.status < 500:
                raise
            self._addresses.pop(asked.prefill, None)  # prefill may have restarted at another address
            return None, None
        if _address_in(params) != address:
            answers[0].close()
            return None, params
        return answers[0], params

    async def _ask_prefill(self, asked: Asked, transfer: str | None = None) -> dict[str, Any]:
        told = PREFILL_PARAMS if transfer is None else {**PREFILL_PARAMS, "transfer_id": transfer}
        body = {key: value for key, value in asked.body.items() if key not in ("stream_options", "min_tokens")}
        body |= {"stream": False, "max_tokens": 1, "kv_transfer_params": told}
        body |= {name: 1 for name in ("max_completion_tokens", "n", "best_of") if name in body}
        async with self._reached(asked.prefill, body, asked.headers) as answer:
            if answer.status != 200:
                raise BadAnswer(answer.status, await answer.read())
            params = _object(await answer.read(), 502).get("kv_transfer_params")
        if not isinstance(params, dict):
            raise _bad_gateway(
                f"{asked.prefill} answered without kv_transfer_params: is it a prefill server with a connector?"
            )
        address = _address_in(params)
        if self._is_concurrent and address is not None:
            self._addresses[asked.prefill] = address
        return params

    def _decoding(self, asked: Asked, params: dict[str, Any]) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return self._reached(asked.decode, {**asked.body, "kv_transfer_params": params}, asked.headers)

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


def _address_in(params: Mapping[str, Any]) -> str | None:
    """Return the address of prefill's rank from its answer, or None."""
    host, port = params.get("remote_host"), params.get("remote_port")
    if not isinstance(host, str) or not isinstance(port, int):
        return None
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


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
    except aiohttp.ClientError as error:  # the status has been sent already, so the body must contain the error
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
async def serve_proxy(
    prefill: Sequence[str], decode: Sequence[str], host: str, port: int, *, is_concurrent: bool = False
) -> AsyncIterator[str]:
    """Serve until the block is left.

    Args:
        prefill: URLs of the prefill servers.
        decode: URLs of the decode servers.
        host: Host to listen on.
        port: Port to listen on; 0 picks a free one.
        is_concurrent: Ask prefill and decode at the same time.

    Yields:
        The proxy's URL.

    Raises:
        ConfigError: The address cannot be bound.
    """
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        proxy = Proxy(prefill, decode, session, is_concurrent=is_concurrent)
        runner = web.AppRunner(proxy.application(), handler_cancellation=True, access_log=None)
        await runner.setup()
        try:
            try:
                await web.TCPSite(runner, host, port).start()
            except OSError as error:
                raise ConfigError("address cannot be bound", host=host, port=port, detail=error.strerror) from error
            yield f"http://{host}:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

"""The proxy: asks a prefill server and a decode server for each request, at the same time. For vLLM, no router does.

Pages move while prefill computes. For this, decode needs the address of prefill's rank, which the proxy takes from the
server's last answer; until it has one, it asks one server after the other, as routers do. Bodies are scanned once, and
passed on as they are. If nobody will ask prefill for a request any more, because the client has left or decode has
failed, the proxy tells prefill.
"""

import asyncio
import itertools
import sys
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
import anyio.abc
import anyio.to_thread
import msgspec
from aiohttp import web
from typing_extensions import override

from kvflow.cli.tasks import open_tasks
from kvflow.errors import ConfigError

__all__ = ["PREFILL_PARAMS", "serve_proxy"]

PREFILL_PARAMS: Final = {
    **{"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None},
    **{"remote_block_ids": None, "remote_host": None, "remote_port": None},
}
"""Parameters of requests to prefill, with the same keys as routers send."""

HOP_BY_HOP: Final = (
    *("Accept-Encoding", "Connection", "Content-Encoding", "Content-Length", "Content-Type", "Expect", "Host"),
    *("Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "TE", "Trailer", "Transfer-Encoding", "Upgrade"),
)
MAX_BODY_BYTES, MAX_BYTES_AT_ONCE, MAX_CONNECTIONS, MAX_PER_CLIENT = 32 * 2**20, 128 * 2**20, 2_048, 512
CLIENT_S: Final = 30.0
"""Time for a client to send a request, and to read the next part of its answer."""

CONNECT_S, HEALTH_S, ANSWER_S = 5.0, 5.0, 600.0
"""Time for a server to accept a connection, to say that it is healthy, and to send the next part of an answer."""


class BadAnswer(Exception):
    """A request cannot be served; says what the client is told."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status, body)
        self.status, self.body = status, body


@dataclass
class Asked:
    """A request: its servers, path, encoded fields, headers, its name on prefill, and whether prefill may keep it."""

    prefill: str
    decode: str
    path: str
    fields: dict[str, msgspec.Raw]
    headers: Any
    transfer: str = field(default_factory=lambda: uuid.uuid4().hex)
    is_kept: bool = False


class Proxy(web.Server):
    """Uses the servers of each kind in turn; see `serve_proxy`. `tasks` runs what outlives a request."""

    def __init__(
        self, prefill: Sequence[str], decode: Sequence[str], session: aiohttp.ClientSession, tasks: anyio.abc.TaskGroup
    ) -> None:
        super().__init__(self.answer, handler_cancellation=True, access_log=None, keepalive_timeout=CLIENT_S)
        self._servers, self._session, self._tasks = [*prefill, *decode], session, tasks
        self._prefill, self._decode = itertools.cycle(prefill), itertools.cycle(decode)
        self._addresses: dict[str, str] = {}
        self._silent: dict[Any, asyncio.Transport] = {}
        self._num_bytes = 0
        self._counts: Counter[str] = Counter()
        generate = dict.fromkeys((("POST", "/v1/completions"), ("POST", "/v1/chat/completions")), self._generate)
        looked_up = {"/v1/models": self._models, "/health": self._health, "/metrics": self._metrics}
        self._routes: dict[tuple[str, str], Any] = generate | {("GET", path): it for path, it in looked_up.items()}

    @override
    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self._silent[handler] = transport
        asyncio.get_running_loop().call_later(CLIENT_S, self._close_silent, handler)
        ends = [it.transport for it in self.connections if it.transport is not None]
        own = [it for it in ends if _host_of(it) == _host_of(transport)]
        if len(ends) > MAX_CONNECTIONS or len(own) > MAX_PER_CLIENT:  # one that says nothing must go first
            self._close_silent(next(it for it, end in self._silent.items() if end in own))

    def _close_silent(self, handler: Any) -> None:
        if (transport := self._silent.pop(handler, None)) is not None:
            transport.abort()

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request. If the client disconnects, so does the proxy from the server at work, which then stops."""
        self._silent.pop(request.protocol, None)
        status = 499  # the client has left
        try:
            response: web.StreamResponse = await self._routes.get((request.method, request.path), _refuse)(request)
            status = response.status
        except BadAnswer as error:
            status = error.status
            response = web.Response(status=status, body=error.body, content_type="application/json")
        finally:
            self._counts[f'requests_total{{status="{status}"}}'] += 1
        return response

    async def _generate(self, request: web.BaseRequest) -> web.StreamResponse:
        pieces: list[bytes] = []
        try:
            fields = await anyio.to_thread.run_sync(_fields, await self._read_body(request, pieces))
            asked = Asked(next(self._prefill), next(self._decode), request.path, fields, _to_pass_on(request.headers))
            asked.headers.setdefault("X-Request-Id", asked.transfer)
            async with AsyncExitStack() as stack:
                stack.callback(self._withdraw, asked)
                return await _pass_on(request, await self._hand_over(asked, stack))
        finally:
            self._num_bytes -= sum(map(len, pieces))

    async def _read_body(self, request: web.BaseRequest, pieces: list[bytes]) -> bytes:
        size = 0
        try:
            async with asyncio.timeout(CLIENT_S):
                async for piece in request.content.iter_any():
                    pieces.append(piece)
                    size, self._num_bytes = size + len(piece), self._num_bytes + len(piece)
                    if size > MAX_BODY_BYTES or self._num_bytes > MAX_BYTES_AT_ONCE:
                        status = 413 if size > MAX_BODY_BYTES else 503
                        raise BadAnswer(status, _error(status, "request is too large, or others are at this moment"))
        except TimeoutError as error:
            raise BadAnswer(408, _error(408, f"body did not arrive within {CLIENT_S} s")) from error
        return b"".join(pieces)

    async def _models(self, request: web.BaseRequest) -> web.StreamResponse:
        async with self._reached(f"{next(self._decode)}/v1/models", headers=_to_pass_on(request.headers)) as answer:
            return await _pass_on(request, answer)

    async def _health(self, _request: web.BaseRequest) -> web.StreamResponse:
        async def check(url: str) -> None:
            status = 0
            with suppress(TimeoutError, BadAnswer):
                async with asyncio.timeout(HEALTH_S), self._reached(f"{url}/health") as answer:
                    status = answer.status
            if status != 200:
                raise _failed(f"{url} is not healthy: {f'status {status}' if status else 'no answer'}", 503)

        async with open_tasks() as tasks:
            for url in self._servers:
                tasks.start_soon(check, url)
        return web.Response()

    async def _metrics(self, _request: web.BaseRequest) -> web.StreamResponse:
        values = {**self._counts, "connections": len(self.connections), "body_bytes": self._num_bytes}
        return web.Response(text="".join(f"kvflow_proxy_{name} {value}\n" for name, value in sorted(values.items())))

    async def _hand_over(self, asked: Asked, stack: AsyncExitStack) -> aiohttp.ClientResponse:
        """Have prefill compute a request that decode continues; return decode's answer, which `stack` closes."""
        address = self._addresses.get(asked.prefill)
        if address is not None:
            told = {"do_remote_prefill": True, "transfer_id": asked.transfer, "remote_engine_id": address}
            async with open_tasks() as tasks:
                tasks.start_soon(self._ask_prefill, asked)
                answer = await self._ask_decode(asked, told, stack)
                if answer.status != 200:
                    tasks.cancel_scope.cancel()
            if answer.status < 500 and self._addresses.get(asked.prefill) == address:
                return answer
            self._addresses.pop(asked.prefill, None)  # prefill may have restarted at another address
            answer.close()
            self._withdraw(asked)
            asked.transfer = uuid.uuid4().hex
        return await self._ask_decode(asked, await self._ask_prefill(asked), stack)

    async def _ask_prefill(self, asked: Asked) -> msgspec.Raw:
        told = {**PREFILL_PARAMS, "transfer_id": asked.transfer}
        body: dict[str, Any] = {**asked.fields, "stream": False, "max_tokens": 1, "kv_transfer_params": told}
        body |= {name: 1 for name in ("max_completion_tokens", "n", "best_of") if name in body}
        for name in ("stream_options", "min_tokens"):
            body.pop(name, None)
        asked.is_kept = True
        async with self._reached(asked.prefill + asked.path, body, asked.headers) as answer:
            text = await answer.read()
        if answer.status != 200:
            asked.is_kept = False
            raise BadAnswer(answer.status, text)
        params = _fields(text, 502).get("kv_transfer_params", msgspec.Raw(b"null"))
        if not bytes(params).startswith(b"{"):
            raise _failed(f"{asked.prefill} answered without kv_transfer_params: is it a prefill server?")
        found = _fields(bytes(params), 502)
        host, port = (msgspec.json.decode(found.get(f"remote_{name}", b"null")) for name in ("host", "port"))
        if isinstance(host, str) and isinstance(port, int):
            self._addresses[asked.prefill] = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        return params

    async def _ask_decode(self, asked: Asked, params: object, stack: AsyncExitStack) -> aiohttp.ClientResponse:
        body = {**asked.fields, "kv_transfer_params": params}
        answer = await stack.enter_async_context(self._reached(asked.decode + asked.path, body, asked.headers))
        asked.is_kept &= answer.status != 200
        return answer

    def _withdraw(self, asked: Asked) -> None:
        """Tell prefill that nobody will ask for a request, unless decode knows it."""
        if asked.is_kept:
            self._counts["withdrawn_total"] += 1
            params = {"kvflow_withdrawn": asked.transfer}
            fields = {"model": asked.fields.get("model"), "prompt": [0], "max_tokens": 1, "kv_transfer_params": params}
            self._tasks.start_soon(self._tell_prefill, f"{asked.prefill}/v1/completions", fields, asked.headers)

    async def _tell_prefill(self, url: str, fields: object, headers: Any) -> None:
        with suppress(BadAnswer):
            async with self._reached(url, fields, headers) as answer:
                await answer.read()

    @asynccontextmanager
    async def _reached(
        self, url: str, fields: object = None, headers: Any = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        data = None if fields is None else msgspec.json.encode(fields)
        sent = {**(headers or {}), **({"Content-Type": "application/json"} if data else {})}
        try:
            async with self._session.request("POST" if data else "GET", url, data=data, headers=sent) as answer:
                yield answer
        except aiohttp.ClientError as error:
            raise _failed(f"{url} does not answer: {error!r}") from error


async def _refuse(request: web.BaseRequest) -> web.StreamResponse:
    raise BadAnswer(404, _error(404, f"there is nothing at {request.path}"))


def _host_of(transport: asyncio.BaseTransport) -> str:
    return str((transport.get_extra_info("peername") or "?")[0])


def _fields(text: bytes, status: int = 400) -> dict[str, msgspec.Raw]:
    try:
        return msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise BadAnswer(status, _error(status, f"body is not a JSON object: {error}")) from error


def _to_pass_on(headers: Any) -> Any:
    kept = headers.copy()
    for name in HOP_BY_HOP:
        kept.popall(name, None)
    return kept


async def _pass_on(request: web.BaseRequest, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    response = web.StreamResponse(status=answer.status, headers=_to_pass_on(answer.headers))
    response.content_type = answer.content_type
    await response.prepare(request)
    try:
        async for piece in answer.content.iter_any():
            await _write(response, piece)
    except aiohttp.ClientError as error:  # the status has been sent already, so the body must contain the error
        lost = _failed(f"{answer.url} ended in the middle of its answer: {error}")
        await _write(response, b"data: " + lost.body + b"\n\n")
    await response.write_eof()
    return response


async def _write(response: web.StreamResponse, piece: bytes) -> None:
    try:
        async with asyncio.timeout(CLIENT_S):
            await response.write(piece)
    except (ConnectionResetError, TimeoutError) as error:  # the client has left, or does not read
        response.force_close()
        raise BadAnswer(499, b"") from error


def _failed(message: str, status: int = 502) -> BadAnswer:
    with suppress(OSError):
        print(f"kvflow proxy: {message}", file=sys.stderr, flush=True)
    return BadAnswer(status, _error(status, message))


def _error(status: int, message: str) -> bytes:
    return msgspec.json.encode({"error": {"message": message, "type": "proxy_error", "code": status}})


@asynccontextmanager
async def serve_proxy(prefill: Sequence[str], decode: Sequence[str], host: str, port: int) -> AsyncIterator[str]:
    """Serve until the block is left, and yield the proxy's URL; port 0 picks a free one.

    Raises:
        ConfigError: The address cannot be bound.
    """
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=ANSWER_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session, open_tasks() as tasks:
        runner = web.ServerRunner(Proxy(prefill, decode, session, tasks))
        await runner.setup()
        try:
            try:
                await web.TCPSite(runner, host, port).start()
            except OSError as error:
                raise ConfigError("address cannot be bound", host=host, port=port, detail=error.strerror) from error
            yield f"http://{host}:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()
            tasks.cancel_scope.cancel()

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
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, Final

import aiohttp
import anyio.abc
import msgspec
from aiohttp import web
from multidict import CIMultiDict
from typing_extensions import override

from kvflow.addresses import join_address
from kvflow.cli.proxy.asked import Asked, BadAnswer, decode_fields
from kvflow.cli.proxy.conversations import Conversations, LastTurn
from kvflow.cli.proxy.moves import Moves
from kvflow.cli.tasks import open_tasks
from kvflow.errors import ConfigError
from kvflow.resources import report_accept_shortages

__all__ = ["PREFILL_PARAMS", "serve_proxy"]

PREFILL_PARAMS: Final = {
    **{"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None},
    **{"remote_block_ids": None, "remote_host": None, "remote_port": None},
}
"""Parameters of requests to prefill, with the same keys as routers send."""

HOP_BY_HOP: Final = {
    *("accept-encoding", "connection", "content-encoding", "content-length", "expect", "host", "keep-alive"),
    *("proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding", "upgrade"),
}
MAX_BODY_BYTES, MAX_BYTES_AT_ONCE, MAX_CONNECTIONS, MAX_PER_CLIENT = 32 * 2**20, 128 * 2**20, 2_048, 512
CLIENT_S: Final = 30.0
"""Time for a client to send a request, and to read the next part of its answer."""

TURN_S: Final = 1.0
"""Time for a decode server to say what it has kept of a conversation; it may have a queue."""

ANSWER, HEALTH = aiohttp.ClientTimeout(sock_connect=5.0, sock_read=600.0), aiohttp.ClientTimeout(5.0)
"""Time for a server to accept a connection and to send the next part of an answer, and to say that it is healthy."""


class Proxy(web.Server):
    """Uses servers in turn; `tasks` runs what outlives a request. aiohttp bounds headers, in size and in time."""

    def __init__(
        self,
        prefill: Sequence[str],
        decode: Sequence[str],
        session: aiohttp.ClientSession,
        tasks: anyio.abc.TaskGroup,
        *,
        moves: bool,
    ) -> None:
        super().__init__(self.answer, handler_cancellation=True, access_log=None, keepalive_timeout=CLIENT_S)
        self._servers, self._session, self._tasks = [*prefill, *decode], session, tasks
        self._prefills = itertools.cycle(prefill)
        self._moves = Moves(decode, self._reached, tasks, is_enabled=moves)
        self._conversations = Conversations()
        self._addresses: dict[str, str] = {}
        self._counts = Counter(body_bytes=0)
        self._looked_up = {"/v1/models": self._models, "/health": self._health, "/metrics": self._metrics}

    @override
    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        hosts = [(it.peername or "?")[0] for it in (handler, *self.connections)]
        super().connection_made(handler, transport)
        if len(hosts) > MAX_CONNECTIONS or hosts.count(hosts[0]) > MAX_PER_CLIENT:
            transport.abort()

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request. If the client disconnects, so does the proxy from the server at work, which then stops."""
        response: web.StreamResponse = web.Response(status=499)  # the client has left
        try:
            response = await self._looked_up.get(request.path, self._generate)(request)
        except BadAnswer as error:
            response = error.response
        finally:
            self._counts[f'requests_total{{status="{response.status}"}}'] += 1
        return response

    async def _generate(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path not in ("/v1/completions", "/v1/chat/completions"):
            raise BadAnswer(404, f"there is nothing at {request.path}")
        body = bytearray()
        async with AsyncExitStack() as stack:
            stack.callback(lambda: self._counts.subtract({"body_bytes": len(body)}))
            try:
                async with asyncio.timeout(CLIENT_S):
                    async for piece in request.content.iter_any():
                        body += piece
                        self._counts["body_bytes"] += len(piece)
                        if len(body) > MAX_BODY_BYTES:
                            raise BadAnswer(413, f"body has more than {MAX_BODY_BYTES} bytes")
                        if self._counts["body_bytes"] > MAX_BYTES_AT_ONCE:
                            raise BadAnswer(503, f"bodies of all requests have more than {MAX_BYTES_AT_ONCE} bytes")
            except TimeoutError as error:
                raise BadAnswer(408, f"body did not arrive within {CLIENT_S} s") from error
            fields = await asyncio.to_thread(decode_fields, body)
            if (decode := self._moves.next_server()) is None:
                raise BadAnswer(503, "all decode servers are drained")
            asked = Asked(next(self._prefills), decode, request.path, fields, _to_pass_on(request.headers))
            asked.headers.setdefault("X-Request-Id", asked.transfer)
            asked.headers["Content-Type"] = "application/json"
            stack.callback(self._tasks.start_soon, self._withdraw, asked)
            stack.enter_context(self._moves.counted(asked))
            answer = await self._hand_over(asked, stack)
            if asked.is_relayed and (answer.status, answer.content_type) == (200, "text/event-stream"):
                response = await _begun(request, answer)
                text = await self._moves.relay(asked, answer, lambda data: _written(request, response.write(data)))
                if text is not None:
                    turn = LastTurn(asked.decode, asked.transfer)
                    await asyncio.to_thread(self._conversations.keep_turn, asked.fields, text, turn)
                await _written(request, response.write_eof())
                return response
            return await _pass_on(request, answer)

    async def _models(self, request: web.BaseRequest) -> web.StreamResponse:
        async with self._reached(f"{self._servers[0]}/v1/models", _to_pass_on(request.headers)) as answer:
            return await _pass_on(request, answer)

    async def _health(self, _request: web.BaseRequest) -> web.StreamResponse:
        for url in itertools.filterfalse(self._moves.is_drained, self._servers):
            try:
                async with self._session.get(f"{url}/health", timeout=HEALTH, raise_for_status=True):
                    pass
            except (aiohttp.ClientError, TimeoutError) as error:
                raise BadAnswer(503, f"{url} is not healthy: {error!r}") from error
        return web.Response()

    async def control(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request of an operator: drain a decode server, or use it again."""
        server, found = request.query.get("server", "").rstrip("/"), dict[str, int]()
        try:
            match request.method, request.path:
                case "POST", "/drain":
                    found = await self._moves.drain(server, moves=request.query.get("move") != "false")
                case "POST", "/resume":
                    self._moves.resume(server)
                case method, path:
                    return BadAnswer(404, f"there is no {method} {path}").response
        except BadAnswer as error:
            return error.response
        return web.json_response(found)

    async def _metrics(self, _request: web.BaseRequest) -> web.StreamResponse:
        values = {**self._counts, **self._moves.counts, "connections": len(self.connections)}
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
            self._tasks.start_soon(self._withdraw, msgspec.structs.replace(asked))
            asked.transfer, asked.is_kept = uuid.uuid4().hex, True
        return await self._ask_decode(asked, await self._ask_prefill(asked), stack)

    async def _ask_prefill(self, asked: Asked) -> dict[str, Any]:
        told = {**PREFILL_PARAMS, **await self._last_turn(asked), "transfer_id": asked.transfer}
        body: dict[str, Any] = {**asked.fields, "stream": False, "max_tokens": 1, "kv_transfer_params": told}
        body |= {name: 1 for name in ("max_completion_tokens", "n", "best_of") if name in body}
        for name in ("stream_options", "min_tokens"):
            body.pop(name, None)
        async with self._reached(asked.prefill + asked.path, asked.headers, body) as answer:
            text = await answer.read()
        if answer.status != 200:
            asked.is_kept = False
            raise BadAnswer(answer.status, f"{answer.url} answered {answer.status}", text)
        params = msgspec.json.decode(decode_fields(text, 502).get("kv_transfer_params", b"null"))
        if not isinstance(params, dict):
            raise BadAnswer(502, f"{asked.prefill} answered without kv_transfer_params: is it a prefill server?")
        host, port = params.get("remote_host"), params.get("remote_port")
        if isinstance(host, str) and isinstance(port, int):
            self._addresses[asked.prefill] = join_address(host, port)
        return params

    async def _last_turn(self, asked: Asked) -> dict[str, Any]:
        """Return the parameters for what a decode server has kept of the conversation, if it has."""
        if not asked.is_relayed:
            return {}
        turn = await asyncio.to_thread(self._conversations.take_turn, asked.fields)
        if turn is None or self._moves.is_drained(turn.url):
            return {}
        with suppress(BadAnswer, TimeoutError):
            async with asyncio.timeout(TURN_S):
                params = await self._moves.tell(turn.url, asked, {"kvflow_kept": turn.transfer})
            if params.get("do_remote_decode"):
                self._counts["continued_total"] += 1
                return params
        return {}

    async def _ask_decode(
        self, asked: Asked, params: Mapping[str, Any], stack: AsyncExitStack
    ) -> aiohttp.ClientResponse:
        body: dict[str, Any] = {**asked.fields, "kv_transfer_params": params}
        if asked.is_relayed:
            body |= {"return_token_ids": True, "kv_transfer_params": {**params, "transfer_id": asked.transfer}}
        answer = await stack.enter_async_context(self._reached(asked.decode + asked.path, asked.headers, body))
        asked.is_kept &= answer.status != 200
        return answer

    async def _withdraw(self, asked: Asked) -> None:
        """Tell prefill that nobody will ask for a request, unless decode knows it."""
        if asked.is_kept:
            self._counts["withdrawn_total"] += 1
            with suppress(BadAnswer):
                await self._moves.tell(asked.prefill, asked, {"kvflow_withdrawn": asked.transfer})

    @asynccontextmanager
    async def _reached(self, url: str, headers: Any, fields: object = None) -> AsyncIterator[aiohttp.ClientResponse]:
        method, data = ("GET", None) if fields is None else ("POST", msgspec.json.encode(fields))
        try:
            async with self._session.request(method, url, data=data, headers=headers) as answer:
                yield answer
        except aiohttp.ClientError as error:
            raise BadAnswer(502, f"{url} does not answer: {error!r}") from error


def _to_pass_on(headers: Any) -> CIMultiDict[str]:
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in HOP_BY_HOP)


async def _begun(request: web.BaseRequest, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    response = web.StreamResponse(status=answer.status, headers=_to_pass_on(answer.headers))
    await response.prepare(request)
    return response


async def _pass_on(request: web.BaseRequest, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    response = await _begun(request, answer)
    try:
        async for piece in answer.content.iter_any():
            await _written(request, response.write(piece))
    except aiohttp.ClientError as error:  # the status has been sent already, so the body must contain the error
        lost = BadAnswer(502, f"{answer.url} ended in the middle of its answer: {error}").response
        await _written(request, response.write(f"data: {lost.text}\n\n".encode()))
    await _written(request, response.write_eof())
    return response


async def _written(request: web.BaseRequest, writing: Coroutine[Any, Any, None]) -> None:
    try:
        async with asyncio.timeout(CLIENT_S):
            await writing
    except (ConnectionResetError, TimeoutError) as error:  # the client has left, or does not read
        if request.transport is not None:
            request.transport.abort()
        raise BadAnswer(499, "client does not read its answer") from error


@asynccontextmanager
async def serve_proxy(
    prefill: Sequence[str], decode: Sequence[str], host: str, port: int, control_port: int | None = None
) -> AsyncIterator[str]:
    """Serve until the block is left, and yield the proxy's URL; port 0 picks a free one.

    With a `control_port`, which is on loopback, streams can move from one decode server to another.

    Raises:
        ConfigError: The address cannot be bound.
    """
    # vLLM closes connections that are idle for 5 s; a request that crosses the end of one would fail.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    report_accept_shortages(asyncio.get_running_loop(), lambda text: print(f"kvflow proxy: {text}", file=sys.stderr))
    async with aiohttp.ClientSession(timeout=ANSWER, connector=connector) as session, open_tasks() as tasks:
        proxy = Proxy(prefill, decode, session, tasks, moves=control_port is not None)
        async with AsyncExitStack() as stack:
            stack.callback(tasks.cancel_scope.cancel)
            bound = await stack.enter_async_context(_bound(proxy, host, port))
            if control_port is not None:
                control = web.Server(proxy.control, handler_cancellation=True, access_log=None)
                await stack.enter_async_context(_bound(control, "127.0.0.1", control_port))
            yield f"http://{host}:{bound}"


@asynccontextmanager
async def _bound(server: web.Server, host: str, port: int) -> AsyncIterator[int]:
    """Serve at an address until the block is left, and yield the port."""
    runner = web.ServerRunner(server)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise ConfigError("address cannot be bound", host=host, port=port, detail=error.strerror) from error
        yield runner.addresses[0][1]
    finally:
        with anyio.CancelScope(shield=True):
            await runner.cleanup()

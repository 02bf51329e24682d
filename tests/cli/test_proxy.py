"""The proxy in front of fake servers that record their requests."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anyio
import pytest
from aiohttp import web

from kvflow.cli.main import main
from kvflow.cli.proxy import application
from kvflow.cli.proxy.application import PREFILL_PARAMS, serve_proxy

pytestmark = pytest.mark.anyio

TICKET = {"do_remote_prefill": True, "remote_engine_id": "p", "number": 2**64}


class FakeServer:
    """A server that answers as vLLM does, and records its requests.

    Attributes:
        url: Its URL.
        asked: Path, body and id of each request.
        params: `kv_transfer_params` of its answers.
        status: HTTP status of its answers.
        left: Set when a client disconnects in the middle.
        is_slow: It generates without end.
        floods: While it is slow, it sends as much as the other side takes.
        breaks: It closes the connection after its first token.
        awaited: It answers once this is set.
        was_asked: Set when a request arrives.
        expires: A connection ends when it is used a second time, as if it had just been idle for too long.
        withdrawn: Released with each request for which nobody will ask any more.
        headers: Of the last request.
    """

    def __init__(self, params: dict[str, Any] | None = None) -> None:
        self.url = ""
        self.asked: list[tuple[str, dict[str, Any], str]] = []
        self.params = params
        self.status = 200
        self.left = anyio.Event()
        self.is_slow = False
        self.floods = False
        self.breaks = False
        self.awaited: anyio.Event | None = None
        self.expires = False
        self.connections: set[object] = set()
        self.was_asked = anyio.Event()
        self.withdrawn = anyio.Semaphore(0)
        self.headers: Mapping[str, str] = {}

    async def until_withdrawn(self, count: int) -> None:
        """Wait until it was told of requests for which nobody will ask."""
        with anyio.fail_after(20):
            for _ in range(count):
                await self.withdrawn.acquire()

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"authorization": request.headers["Authorization"]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        if self.expires and request.transport in self.connections and request.transport is not None:
            request.transport.abort()
        self.connections.add(request.transport)
        body = await request.json()
        self.headers = request.headers
        if "kvflow_withdrawn" in body["kv_transfer_params"]:
            self.withdrawn.release()
        self.asked.append((request.path, body, request.headers["X-Request-Id"]))
        self.was_asked.set()
        if self.awaited is not None:
            await self.awaited.wait()
        if self.status != 200:
            return web.json_response({"error": "no"}, status=self.status)
        if not body.get("stream"):
            return web.json_response({"choices": [{"text": "one"}], "kv_transfer_params": self.params})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"choices": [{"text": "one"}]}\n\n')
        if self.breaks and request.transport is not None:
            request.transport.abort()
        if self.is_slow:
            try:
                while self.floods:
                    await response.write(bytes(2**20))
                await anyio.sleep_forever()
            finally:
                self.left.set()
        await response.write(b"data: [DONE]\n\n")
        return response

    async def health(self, _request: web.Request) -> web.Response:
        if self.awaited is not None:
            await self.awaited.wait()
        return web.Response(status=self.status)


@asynccontextmanager
async def deployed(prefill: FakeServer, decode: FakeServer) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    runners = []
    for server in (prefill, decode):
        server_application = web.Application()
        server_application.router.add_post("/v1/completions", server.complete)
        server_application.router.add_post("/v1/chat/completions", server.complete)
        server_application.router.add_get("/health", server.health)
        server_application.router.add_get("/v1/models", server.models)
        runner = web.AppRunner(server_application, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        runners.append(runner)
    try:
        async with (
            serve_proxy([prefill.url], [decode.url], "127.0.0.1", 0) as url,
            aiohttp.ClientSession() as client,
        ):
            yield client, url
    finally:
        for runner in runners:
            await runner.cleanup()


async def until_shown(client: aiohttp.ClientSession, url: str, *lines: str) -> None:
    """Wait until the proxy's metrics have some lines."""
    with anyio.fail_after(20):
        while True:
            async with client.get(f"{url}/metrics") as answer:
                if {f"kvflow_proxy_{line}" for line in lines} <= {*(await answer.text()).splitlines()}:
                    return
            await anyio.sleep(0.01)


async def test_prefill_is_asked_first_and_its_ticket_goes_to_decode() -> None:
    prefill, decode = FakeServer(TICKET), FakeServer()
    async with deployed(prefill, decode) as (client, url):
        body = {
            "prompt": "x",
            "max_tokens": 9,
            "min_tokens": 3,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with client.post(f"{url}/v1/completions", json=body, headers={"X-Request-Id": "mine"}) as answer:
            assert answer.content_type == "text/event-stream"
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")
    ((path, asked, name),) = prefill.asked
    assert (path, name) == ("/v1/completions", "mine")
    told = asked.pop("kv_transfer_params")
    assert asked == {"prompt": "x", "max_tokens": 1, "stream": False}
    assert {**told, "transfer_id": None} == PREFILL_PARAMS | {"transfer_id": None}
    assert decode.asked == [("/v1/completions", {**body, "kv_transfer_params": TICKET}, "mine")]


async def test_connections_that_have_just_expired_are_not_used() -> None:
    prefill, decode = FakeServer(TICKET), FakeServer()
    prefill.expires = decode.expires = True
    async with deployed(prefill, decode) as (client, url):
        for _ in range(2):
            async with client.post(f"{url}/v1/completions", json={"prompt": "x"}) as answer:
                assert answer.status == 200, await answer.text()


async def test_chats_have_one_token_of_either_name() -> None:
    prefill, decode = FakeServer(TICKET), FakeServer()
    async with deployed(prefill, decode) as (client, url):
        body = {"messages": [], "max_completion_tokens": 9}
        async with client.post(f"{url}/v1/chat/completions", json=body) as answer:
            assert answer.status == 200
    assert (prefill.asked[0][1]["max_tokens"], prefill.asked[0][1]["max_completion_tokens"]) == (1, 1)
    assert decode.asked[0][1]["max_completion_tokens"] == 9
    assert prefill.asked[0][2] == decode.asked[0][2] != ""


@pytest.mark.parametrize("status", [400, 503])
async def test_an_error_of_prefill_is_the_answer(status: int) -> None:
    prefill, decode = FakeServer(TICKET), FakeServer()
    prefill.status = status
    async with deployed(prefill, decode) as (client, url), client.post(f"{url}/v1/completions", json={}) as answer:
        assert (answer.status, await answer.json()) == (status, {"error": "no"})
    assert decode.asked == []


async def test_prefill_without_a_connector_is_named() -> None:
    prefill, decode = FakeServer(), FakeServer()
    async with deployed(prefill, decode) as (client, url), client.post(f"{url}/v1/completions", json={}) as answer:
        assert answer.status == 502
        assert "without kv_transfer_params" in (await answer.json())["error"]["message"]
    assert decode.asked == []


@pytest.mark.parametrize("body", [b"{", b"[]", b'"x"', b"\xff", b'{"x":' + b"[" * 100_000])
async def test_what_is_no_object_is_refused(body: bytes) -> None:
    prefill, decode = FakeServer(TICKET), FakeServer()
    async with deployed(prefill, decode) as (client, url), client.post(f"{url}/v1/completions", data=body) as answer:
        assert answer.status == 400
    assert prefill.asked == []


async def test_a_dead_server_is_named() -> None:
    prefill, decode = FakeServer(TICKET), FakeServer()
    async with (
        serve_proxy(["http://127.0.0.1:9"], ["http://127.0.0.1:9"], "127.0.0.1", 0) as url,
        aiohttp.ClientSession() as client,
    ):
        async with client.post(f"{url}/v1/completions", json={}) as answer:
            assert answer.status == 502
            assert "http://127.0.0.1:9/v1/completions" in (await answer.json())["error"]["message"]
        async with client.get(f"{url}/health") as answer:
            assert answer.status == 503
    decode.status = 500
    async with deployed(prefill, decode) as (client, url), client.get(f"{url}/health") as answer:
        assert (answer.status, decode.url in await answer.text()) == (503, True)


async def test_decode_that_breaks_off_is_an_error_in_the_stream() -> None:
    prefill, decode = FakeServer(TICKET), FakeServer()
    decode.breaks = True
    body = {"stream": True}
    async with deployed(prefill, decode) as (client, url), client.post(f"{url}/v1/completions", json=body) as answer:
        *_, last = (await answer.text()).strip().splitlines()
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == 502


async def test_a_client_that_leaves_stops_decode() -> None:
    prefill, decode = FakeServer(TICKET), FakeServer()
    decode.is_slow = True
    async with deployed(prefill, decode) as (client, url):
        async with client.post(f"{url}/v1/completions", json={"stream": True}) as answer:
            await answer.content.readline()
        with anyio.fail_after(20):
            await decode.left.wait()
        await until_shown(client, url, 'requests_total{status="499"} 1')


async def test_a_client_that_does_not_read_is_let_go(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(application, "CLIENT_S", 0.2)
    prefill, decode = FakeServer(TICKET), FakeServer()
    decode.is_slow = decode.floods = True
    async with deployed(prefill, decode) as (client, url):
        port = int(url.rpartition(":")[2])
        async with await anyio.connect_tcp("127.0.0.1", port) as stream:
            await stream.send(
                b"POST /v1/completions HTTP/1.1\r\nHost: proxy\r\nContent-Length: 16\r\n\r\n" + b'{"stream": true}'
            )
            with anyio.fail_after(20):
                await decode.left.wait()
            await until_shown(client, url, "connections 1", 'requests_total{status="499"} 1')
    assert not caplog.messages


@asynccontextmanager
async def known(*ports: int) -> AsyncIterator[tuple[FakeServer, FakeServer, Callable[[], Awaitable[int]]]]:
    """Deploy a proxy that has the address of prefill's rank; `ports` are those in prefill's next answers."""
    prefill, decode = FakeServer(TICKET | {"remote_host": "10.0.0.1", "remote_port": ports[0]}), FakeServer()
    async with deployed(prefill, decode) as (client, url):

        async def ask() -> int:
            async with client.post(f"{url}/v1/completions", json={"stream": True}) as answer:
                await answer.read()
                return answer.status

        assert await ask() == 200
        assert decode.asked[0][1]["kv_transfer_params"] == prefill.params
        prefill.asked.clear()
        decode.asked.clear()
        prefill.params = TICKET | {"remote_host": "10.0.0.1", "remote_port": ports[-1]}
        yield prefill, decode, ask


async def test_decode_is_asked_while_prefill_computes() -> None:
    async with known(7000) as (prefill, decode, ask):
        prefill.awaited = decode.was_asked = anyio.Event()
        assert await ask() == 200
    (asked_prefill,), (asked_decode,) = ([it[1]["kv_transfer_params"] for it in one.asked] for one in (prefill, decode))
    assert asked_prefill == PREFILL_PARAMS | {"transfer_id": asked_decode["transfer_id"]}
    assert asked_decode["remote_engine_id"] == "tcp://10.0.0.1:7000"
    assert asked_decode["do_remote_prefill"]


async def test_it_begins_again_where_prefill_was_restarted() -> None:
    async with known(7000, 7001) as (_, decode, ask):
        assert await ask() == 200
        assert [it[1]["kv_transfer_params"].get("remote_port") for it in decode.asked] == [None, 7001]


async def test_it_begins_again_if_decode_fails() -> None:
    async with known(7000) as (prefill, decode, ask):
        decode.status = 500
        assert await ask() == 500
        in_turn = [it[1]["kv_transfer_params"] for it in decode.asked]
        assert ["transfer_id" in params for params in in_turn] == [True, False]
        await prefill.until_withdrawn(2)


@pytest.mark.parametrize("status", [400, 503])
async def test_decode_is_let_go_if_prefill_fails(status: int) -> None:
    async with known(7000) as (prefill, decode, ask):
        prefill.awaited, decode.is_slow = decode.was_asked, True
        prefill.status = status
        assert await ask() == status
        with anyio.fail_after(20):
            await decode.left.wait()


async def test_prefill_is_let_go_if_decode_refuses_the_request() -> None:
    async with known(7000) as (prefill, decode, ask):
        prefill.awaited, decode.status = anyio.Event(), 400
        assert await ask() == 400
        assert len(decode.asked) == 1
        prefill.awaited.set()
        await prefill.until_withdrawn(1)


async def test_prefill_is_told_that_the_client_has_left() -> None:
    """It may have computed the request already, so that closing the connection is not enough."""
    prefill, decode = FakeServer(TICKET), FakeServer()
    decode.awaited = anyio.Event()
    async with deployed(prefill, decode) as (client, url):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: client.post(f"{url}/v1/completions", json={"model": "m"}))
            with anyio.fail_after(20):
                await decode.was_asked.wait()
            tasks.cancel_scope.cancel()
        await prefill.until_withdrawn(1)
    first, told = (body for _, body, _ in prefill.asked)
    assert told["kv_transfer_params"] == {"kvflow_withdrawn": first["kv_transfer_params"]["transfer_id"]}
    assert told["model"] == "m"


async def test_headers_are_passed_on_and_the_rest_of_a_body_is_not_read() -> None:
    prefill, decode = FakeServer(TICKET), FakeServer()
    body = b'{"number": 18446744073709551617, "prompt": "x"}'
    async with deployed(prefill, decode) as (client, url):
        headers = {"Authorization": "Bearer k", "TE": "trailers"}
        async with client.post(f"{url}/v1/completions", data=body, headers=headers) as answer:
            assert answer.status == 200
        async with client.get(f"{url}/v1/models", headers=headers) as answer:
            assert await answer.json() == {"authorization": "Bearer k"}
        await until_shown(client, url, 'requests_total{status="200"} 2')
        async with client.get(f"{url}/else") as answer:
            assert answer.status == 404
    assert decode.headers["Authorization"] == "Bearer k"
    assert "TE" not in decode.headers
    assert decode.asked[0][1]["number"] == 2**64 + 1


@pytest.mark.parametrize(
    ("setting", "value", "statuses"),
    [("CLIENT_S", 0.05, {408}), ("MAX_BODY_BYTES", 4, {413}), ("MAX_BYTES_AT_ONCE", 4, {503})],
)
async def test_bodies_are_bounded(
    monkeypatch: pytest.MonkeyPatch, setting: str, value: float, statuses: set[int]
) -> None:
    monkeypatch.setattr(application, setting, value)
    prefill, decode = FakeServer(TICKET), FakeServer()

    async def slowly() -> AsyncIterator[bytes]:
        yield b'{"prompt": "x"'
        if setting == "CLIENT_S":
            await anyio.sleep_forever()

    async with deployed(prefill, decode) as (client, url):
        async with client.post(f"{url}/v1/completions", data=slowly()) as answer:
            assert answer.status in statuses
        await until_shown(client, url, "body_bytes 0")


async def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One connection too many is closed at once, and one on which no whole request arrives in time."""
    monkeypatch.setattr(application, "MAX_PER_CLIENT", 2)
    monkeypatch.setattr(application, "CLIENT_S", 0.5)
    async with serve_proxy(["http://127.0.0.1:9"], ["http://127.0.0.1:9"], "127.0.0.1", 0) as url:
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        streams = [await anyio.connect_tcp(*address) for _ in range(3)]
        await streams[0].send(b"GET /metrics HTTP/1.1\r\nHost: ")
        for stream in reversed(streams):
            with anyio.fail_after(20), pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await stream.receive()
            await stream.aclose()


@pytest.mark.parametrize("hangs", ["prefill", "decode"])
async def test_a_server_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch, hangs: str) -> None:
    """It answers nothing within the time for an answer."""
    monkeypatch.setattr(application, "ANSWER", aiohttp.ClientTimeout(sock_read=0.1))
    servers = {"prefill": FakeServer(TICKET), "decode": FakeServer()}
    servers[hangs].awaited = anyio.Event()
    async with (
        deployed(**servers) as (client, url),
        client.post(f"{url}/v1/completions", json={"prompt": "x"}) as answer,
    ):
        assert answer.status == 502
        assert f"{servers[hangs].url}/v1/completions does not answer" in await answer.text()


async def test_decode_that_hangs_in_the_middle_is_an_error_in_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "ANSWER", aiohttp.ClientTimeout(sock_read=0.1))
    prefill, decode = FakeServer(TICKET), FakeServer()
    decode.is_slow = True
    async with (
        deployed(prefill, decode) as (client, url),
        client.post(f"{url}/v1/completions", json={"prompt": "x", "stream": True}) as answer,
    ):
        assert "ended in the middle" in await answer.text()
    with anyio.fail_after(20):
        await decode.left.wait()


async def test_health_of_a_server_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "HEALTH", aiohttp.ClientTimeout(0.1))
    prefill, decode = FakeServer(TICKET), FakeServer()
    decode.awaited = anyio.Event()
    async with deployed(prefill, decode) as (client, url), client.get(f"{url}/health") as answer:
        assert (answer.status, decode.url in await answer.text()) == (503, True)


@pytest.mark.parametrize(
    "words",
    [[], ["--prefill", "http://a:1"], ["--decode", "http://a:1"], ["--prefill", "a:1", "--decode", "http://a:1"]],
)
def test_command_says_what_is_missing(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["proxy", *words]) == 2
    assert capsys.readouterr().err.startswith("kvflow proxy: ")

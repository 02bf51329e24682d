"""When released routers leave out a server, and use it again, counted in their own questions about its health."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import aiohttp
import anyio
import pytest
from aiohttp import web

from tests.engines.vllm.routers import smg, vllm_router
from tests.support.ports import unused_port

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(300)]

INTERVAL_S: Final = 1
BREAKER_S: Final = 5
OPTIONS: Final = (
    *("--health-check-interval-secs", str(INTERVAL_S)),
    *("--cb-failure-threshold", "10", "--cb-timeout-duration-secs", str(BREAKER_S)),
)
TO_LEAVE_OUT: Final = 3
TO_USE_AGAIN: Final = 2
LATE: Final = 2
"""Questions that may come before a router has used what the last one told it."""

AFTERWARDS: Final = 20
"""Requests in a row, none of which came to a server, after which the router has left it out."""

PAUSE_S: Final = 0.02


class ScriptedServer:
    """Answers like vLLM, or as a test wants.

    Attributes:
        url: Where it is.
        status: What it answers to requests.
        health: What it answers to the router's questions.
        asked: Requests that came.
        checks: Such questions.
    """

    def __init__(self) -> None:
        self.url = ""
        self.status = self.health = 200
        self.asked = self.checks = 0

    def routes(self) -> list[web.RouteDef]:
        """Return what routers ask."""
        return [
            web.get("/health", self._answer_health),
            web.get("/v1/models", self._answer_models),
            web.post("/v1/completions", self._answer_completion),
        ]

    async def _answer_health(self, _: web.Request) -> web.Response:
        self.checks += 1
        return web.Response(status=self.health)

    async def _answer_models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "vllm"}]})

    async def _answer_completion(self, _: web.Request) -> web.Response:
        self.asked += 1
        if self.status != 200:
            error = {"message": "failed", "type": "InternalServerError", "code": self.status}
            return web.json_response({"error": error}, status=self.status)
        head = {"id": "cmpl", "object": "text_completion", "created": 1, "model": "m", "kv_transfer_params": {}}
        choice = {"index": 0, "text": "", "finish_reason": "length", "logprobs": None}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return web.json_response({**head, "choices": [choice], "usage": usage})


@asynccontextmanager
async def scripted(port: int = 0) -> AsyncIterator[ScriptedServer]:
    """Run a server in this process, at a port or any free one."""
    server, application = ScriptedServer(), web.Application()
    application.add_routes(server.routes())
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()


class Routed:
    """A router in front of a prefill server and two decode servers, one of which the test spoils."""

    def __init__(self, client: aiohttp.ClientSession, router: str, spoiled: ScriptedServer) -> None:
        self._client, self._router, self.spoiled = client, router, spoiled

    async def ask(self) -> int:
        """Return the status of a request."""
        body = {"model": "m", "prompt": "hi", "max_tokens": 2}
        async with self._client.post(f"{self._router}/v1/completions", json=body) as answer:
            await answer.read()
            return answer.status

    async def is_left_out(self) -> bool:
        """Return whether none of some requests goes to the spoiled server."""
        before = self.spoiled.asked
        for _ in range(AFTERWARDS):
            await self.ask()
        return self.spoiled.asked == before

    async def checks_until_used(self) -> int:
        """Return how many questions the spoiled server answers before it gets a request."""
        asked, checks = self.spoiled.asked, self.spoiled.checks
        while self.spoiled.asked == asked:
            await self.ask()
            await anyio.sleep(PAUSE_S)
        return self.spoiled.checks - checks


@pytest.fixture(params=["vllm-router", "smg"])
async def routed(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Routed]:
    async with AsyncExitStack() as stack:
        prefill, decode, spoiled = [await stack.enter_async_context(scripted()) for _ in range(3)]
        if request.param == "smg":
            servers = {prefill.url: "prefill", decode.url: "decode", spoiled.url: "decode"}
            router = await stack.enter_async_context(smg(servers, tmp_path, options=OPTIONS))
        else:
            opened = vllm_router([prefill.url], [decode.url, spoiled.url], tmp_path, options=OPTIONS)
            router = await stack.enter_async_context(opened)
        client = await stack.enter_async_context(aiohttp.ClientSession())
        routed = Routed(client, router, spoiled)
        while not spoiled.asked:
            await routed.ask()
        yield routed


async def test_a_server_that_was_not_well(routed: Routed) -> None:
    """It is used after two answers that it is well."""
    routed.spoiled.health = 503
    checks = routed.spoiled.checks
    while not await routed.is_left_out():
        assert routed.spoiled.checks - checks <= TO_LEAVE_OUT + LATE
    routed.spoiled.health = 200
    assert TO_USE_AGAIN <= await routed.checks_until_used() <= TO_USE_AGAIN + LATE


@pytest.mark.parametrize("routed", ["smg"], indirect=True)
async def test_a_server_that_failed(routed: Routed) -> None:
    """The breaker leaves it out for as long as `--cb-timeout-duration-secs` says, although it is well."""
    routed.spoiled.status = 500
    while not await routed.is_left_out():
        pass
    routed.spoiled.status = 200
    assert 0 < await routed.checks_until_used() <= BREAKER_S / INTERVAL_S + LATE
    assert [await routed.ask() for _ in range(AFTERWARDS)] == AFTERWARDS * [200]


@pytest.mark.parametrize("routed", ["vllm-router"], indirect=True)
async def test_a_server_that_failed_without_a_breaker(routed: Routed) -> None:
    """The options of the breaker have no effect: the router goes on using the server for every second request."""
    routed.spoiled.status = 500
    statuses = [await routed.ask() for _ in range(6 * AFTERWARDS)]
    assert statuses.count(500) == 3 * AFTERWARDS
    routed.spoiled.status = 200
    assert [await routed.ask() for _ in range(AFTERWARDS)] == AFTERWARDS * [200]


async def test_a_server_that_vllm_router_has_waited_for(tmp_path: Path) -> None:
    """A server of its list may come later, but the router's own health needs all of them."""
    port = unused_port()
    later = f"http://127.0.0.1:{port}"
    options = (*OPTIONS, "--worker-startup-timeout-secs", "1")
    async with scripted() as prefill, scripted() as decode, aiohttp.ClientSession() as client:

        async def status_of(path: str) -> int:
            async with client.get(f"{router}{path}") as answer:
                return answer.status

        async with vllm_router([prefill.url], [decode.url, later], tmp_path, options=options) as router:
            routed = Routed(client, router, decode)
            while await status_of("/health") == 200:  # it counts as well until three checks have failed
                await routed.ask()
            assert [await routed.ask() for _ in range(AFTERWARDS)] == AFTERWARDS * [200]
            assert [await status_of(path) for path in ("/health", "/readiness", "/liveness")] == [503, 200, 200]
            async with scripted(port) as joined:
                routed = Routed(client, router, joined)
                assert TO_USE_AGAIN <= await routed.checks_until_used() <= TO_USE_AGAIN + LATE
                assert await status_of("/health") == 200
                assert [await routed.ask() for _ in range(AFTERWARDS)] == AFTERWARDS * [200]

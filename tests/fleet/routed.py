"""Servers that play vLLM behind a real router, and clients that ask it for completions.

A client asks again after a refusal, which must have a type: kvflow's, from a server, or the router's own.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import aiohttp
import anyio
import anyio.to_thread
import msgspec

import kvflow
from kvflow import errors
from kvflow.admin.client import ask, find_sockets
from kvflow.admin.messages import AnnounceDrainRequest, DrainRequest, StatusAnswer, StatusRequest
from kvflow.cli.serve.server import Server
from tests.fleet.openai_server import CLOSED, MODEL, ServerOptions, State, prompt_of, text_of
from tests.support.ports import unused_port
from tests.support.waiting import until

__all__ = ["Clients", "RoutedFleet", "http_client", "open_routed"]

ANSWER_S: Final = 60.0
"""How long a request may take before it counts as stuck."""

PAUSE_S: Final = 0.05
"""Between a refusal and the next attempt."""

ASK_S: Final = 60.0
AFTERWARDS: Final = 40
"""Requests in a row, none of which came to a server, after which the router has left it out."""

NAMES_OF_KVFLOW: Final = {*(reason.value for reason in kvflow.FailureReason), *errors.__all__}
OF_SERVER: Final = re.compile(r'"type": "(\w+)"')
OF_ROUTER: Final = re.compile(r'"code":"(\w+)"|(Network error|No available workers|No eligible P/D pair)')


class Clients:
    """Clients of a router, which check its answers.

    Args:
        client: For all requests.

    Attributes:
        router: URL of the router.
        answered: Right answers.
        refusals: Refusals by what they are called.
    """

    def __init__(self, client: aiohttp.ClientSession) -> None:
        self._client = client
        self._numbers = 0
        self.router = ""
        self.answered = 0
        self.refusals = Counter[str]()

    async def until_answered(self, number: int) -> None:
        """Wait until there were so many right answers."""
        await until(lambda: self.answered >= number)

    async def load(self, at_once: int, over: anyio.Event) -> None:
        """Keep a number of requests open until an event."""
        async with anyio.create_task_group() as tasks:
            for _ in range(at_once):
                tasks.start_soon(self._keep_asking, over)

    async def _keep_asking(self, over: anyio.Event) -> None:
        while not over.is_set():
            number = self._numbers = self._numbers + 1
            is_over = False
            while not is_over:
                is_over = await self._ask(number)
                await anyio.sleep(0.0 if is_over else PAUSE_S)

    async def _ask(self, number: int) -> bool:
        """Ask once; return whether there was an answer."""
        body = {"model": MODEL, "prompt": prompt_of(number), "max_tokens": 4}
        async with self._client.post(f"{self.router}/v1/completions", json=body) as answer:
            status, said = answer.status, await answer.text()
        if status == 200:
            assert json.loads(said)["choices"][0]["text"] == text_of(number), said
            self.answered += 1
            return True
        assert status >= 500, said
        self.refusals[type_in(said)] += 1
        return False

    async def state_of(self, url: str) -> State:
        """Return what a server says of itself."""
        async with self._client.get(f"{url}/state") as answer:
            return msgspec.json.decode(await answer.read(), type=State)


class RoutedFleet(Clients):
    """Servers by name: "prefill-0", "decode-0" and so on.

    Args:
        place: Directory for logs and the sockets of ranks.
        client: For all requests.
        announce: Where the servers announce themselves, "host:port"; None for nowhere.
    """

    def __init__(self, place: Path, client: aiohttp.ClientSession, announce: str | None) -> None:
        super().__init__(client)
        self._place, self._announce = place, announce
        self._servers: dict[str, Server] = {}

    def url_of(self, name: str) -> str:
        """Return the URL of a server, which it keeps when it is replaced."""
        return self._servers[name].url

    async def start(self, *names: str) -> None:
        """Start servers, those that ran before at their old URLs, and wait until they are healthy."""
        for name in names:
            if name not in self._servers:
                self._servers[name] = self._make(name)
            self._servers[name].start()
        for name in names:
            await self._servers[name].wait_until_ready(ANSWER_S)

    def _make(self, name: str) -> Server:
        port = unused_port()
        options = ServerOptions(
            role=name.partition("-")[0], instance=name, port=port, admin=str(self._place), announce=self._announce
        )
        command = [sys.executable, "-m", "tests.fleet.openai_server", msgspec.json.encode(options).decode()]
        return Server(name, command, {}, url=f"http://127.0.0.1:{port}", log=self._place / f"{name}.log")

    def kill(self, name: str) -> None:
        """Kill a server."""
        self._servers[name].kill()

    async def drain(self, name: str) -> None:
        """Drain the rank of a server when the router has left it out, as `kvflow drain --notice` does."""
        await self._tell(name, AnnounceDrainRequest())
        await self._until_left_out(name)
        await self._tell(name, DrainRequest())

    async def _tell(self, name: str, request: AnnounceDrainRequest | DrainRequest) -> None:
        for path in find_sockets(self._place):
            status = (await anyio.to_thread.run_sync(ask, path, StatusRequest(), ASK_S)).parse(StatusAnswer)
            if not isinstance(status, str) and status.instance == name:
                await anyio.to_thread.run_sync(ask, path, request, ASK_S)
                return
        raise LookupError(name)

    async def stop(self, name: str) -> None:
        """Stop a server in an orderly way, and check that no page was left in quarantine."""
        await anyio.to_thread.run_sync(self._servers[name].stop)
        closed = [line for line in self._servers[name].log.read_text().splitlines() if line.startswith(CLOSED)]
        assert closed[-1:] == [f"{CLOSED} 0"], self._servers[name].tail()

    def kill_all(self) -> None:
        """Kill every server."""
        for server in self._servers.values():
            server.kill()

    async def state(self, name: str) -> State:
        """Return what a server says of itself."""
        return await self.state_of(self.url_of(name))

    async def until_used(self, *names: str) -> None:
        """Wait until servers have answered requests since they were started."""
        for name in names:
            await self._until(name, lambda state: state.answered)

    async def _until_left_out(self, name: str) -> None:
        """Wait until the router sends a server nothing any more, and it has finished what it had."""
        while True:
            before = await self.state(name)
            await self.until_answered(self.answered + AFTERWARDS)
            after = await self.state(name)
            if after.asked == before.asked and not after.held:
                return

    async def until_free(self) -> None:
        """Wait until no running server holds pages."""
        for name, server in self._servers.items():
            if not server.has_ended():
                await self._until(name, lambda state: not state.held)

    async def _until(self, name: str, condition: Callable[[State], object]) -> None:
        while not condition(await self.state(name)):  # noqa: ASYNC110 - it depends on another process
            await anyio.sleep(PAUSE_S)


def type_in(said: str) -> str:
    """Return what kvflow or the router calls a refusal; it must have a name."""
    found = OF_SERVER.search(said)
    if found is not None and found[1] in NAMES_OF_KVFLOW:
        return found[1]
    found = OF_ROUTER.search(said)
    assert found is not None, said
    return found[1] or found[2]


def http_client() -> aiohttp.ClientSession:
    """Return a client for any number of requests, each with a connection of its own."""
    connector, timeout = aiohttp.TCPConnector(limit=0, force_close=True), aiohttp.ClientTimeout(total=ANSWER_S)
    return aiohttp.ClientSession(connector=connector, timeout=timeout)


@asynccontextmanager
async def open_routed(place: Path, names: list[str], *, announce: str | None = None) -> AsyncIterator[RoutedFleet]:
    """Start servers, and end their processes with the block. The router is for the caller to start."""
    async with http_client() as client:
        fleet = RoutedFleet(place, client, announce)
        try:
            await fleet.start(*names)
            yield fleet
        finally:
            fleet.kill_all()

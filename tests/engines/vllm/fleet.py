"""Real vLLM servers that join a released router and leave it, and clients that go on asking it.

A client asks again after a refusal, which must say what failed. Texts are compared at the end, with those of a server
that answers nobody else.
"""

import re
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import aiohttp
import anyio
import anyio.to_thread

from benchmarks.vllm_handover.client import MODEL, Answer, ask, metrics, prompt_of
from kvflow.cli.serve.server import Server
from kvflow.cli.serve.vllm import CPU_ARGUMENTS, KVFLOW, VllmServer, halves_of_cpus, vllm_server
from kvflow.cli.smollm2 import prepare_smollm2
from tests.engines.vllm.deployment import BROUGHT, QUIET, SETTLE_S
from tests.engines.vllm.routers import workers_of
from tests.support.ports import unused_port

__all__ = ["Announcers", "Registrar", "VllmFleet", "Workers"]

TOKENS: Final = 6
TIMEOUTS: Final = {"grant_s": 10.0, "open_s": 5.0}
MIDDLEWARE: Final = ("--middleware", "kvflow.engines.vllm.health.RanksHealth")
PAUSE_S: Final = 0.3
"""Between two requests of a client."""

PAUSE_WHILE_ONE_STARTS_S: Final = 4.0
"""Instead: vLLM's processes spin for a second after each step, and leave a server that starts on two cores nothing."""

POLL_S: Final = 0.1
CHECKED_AT_ONCE: Final = 4

AFTERWARDS: Final = 20
"""Requests in a row, none of which came to a server, after which the router has left it out."""

NOTICE_S: Final = 20.0
"""How long a server says that it is about to drain: longer than it takes either router to leave it out."""

DRAINED_S: Final = 60.0
HELD: Final = "kvflow_held_blocks_total"
FREED: Final = "kvflow_freed_blocks_total"
ANSWERED: Final = "request_success_total"
BUSY: Final = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")

KINDS: Final = re.compile(
    r"Decode server \S+ returned|Prefill server \S+ returned|error sending request"  # vllm-router
    r'|"code":\s*"\w+"|No available workers|No eligible P/D pair|No (?:prefill|decode) servers available'
    r'|"type":\s*"\w+"'  # vLLM's own, passed on
)
"""What an error must have: what the router or the server calls it."""


class Registrar(Protocol):
    """Tells a router of servers that come and go."""

    async def admit(self, server: Server) -> None:
        """Let the router use a server."""

    async def dismiss(self, server: Server) -> None:
        """Let the router forget a server."""


class Announcers:
    """Processes beside the servers that announce them to vLLM's router."""

    def __init__(self, address: str, logs: Path) -> None:
        self._address, self._logs = address, logs
        self._processes: dict[str, Server] = {}

    async def admit(self, server: Server) -> None:
        """Announce a server while it is healthy."""
        host = server.url.removeprefix("http://")
        command = [sys.executable, "examples/announce_to_vllm_router.py", role_of(server), host, self._address]
        log = self._logs / f"announcer-{server.name}.log"
        self._processes[server.name] = Server("announcer", command, {}, url=server.url, log=log)
        self._processes[server.name].start()

    async def dismiss(self, server: Server) -> None:
        """Announce it no more."""
        self._processes.pop(server.name).kill()

    def kill_all(self) -> None:
        """Kill every process."""
        for process in self._processes.values():
            process.kill()


class Workers:
    """The list of workers of SGLang's router."""

    def __init__(self, client: aiohttp.ClientSession, router: str) -> None:
        self._client, self._router = client, router

    async def admit(self, server: Server) -> None:
        """Add a server."""
        worker: dict[str, Any] = {"url": server.url, "worker_type": role_of(server)}
        if worker["worker_type"] == "prefill":
            worker |= {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}
        async with self._client.post(f"{self._router}/workers", json=worker) as answer:
            assert answer.status == 202, await answer.text()

    async def dismiss(self, server: Server) -> None:
        """Remove a server."""
        worker = (await workers_of(self._client, self._router))[server.url]
        async with self._client.delete(f"{self._router}/workers/{worker['id']}") as answer:
            assert answer.status < 300, await answer.text()


def role_of(server: Server) -> str:
    """Return the role of "prefill-0" and so on."""
    return server.name.partition("-")[0]


class VllmFleet:
    """Servers by name: "prefill-0", "decode-0" and so on.

    Args:
        place: Directory for logs.
        client: For all requests.

    Attributes:
        router: URL of the router.
        registrar: Tells it of servers.
        texts: Right answers, by prompt.
        refusals: Refusals, by what happened and what they are called.
        step: What happens now.
    """

    registrar: Registrar

    def __init__(self, place: Path, client: aiohttp.ClientSession) -> None:
        self._place, self._client = place, client
        self._servers: dict[str, Server] = {}
        self._numbers = 2_000
        self._pause_s = PAUSE_S
        self.router = ""
        self.step = "begin"
        self.texts: dict[str, str] = {}
        self.refusals = Counter[tuple[str, str]]()

    def __getitem__(self, name: str) -> Server:
        """Return a server."""
        return self._servers[name]

    async def start(self, *names: str) -> None:
        """Start servers, those that ran before at their old addresses, and wait until they are ready."""
        self._pause_s = PAUSE_WHILE_ONE_STARTS_S
        for name in names:
            if name not in self._servers:
                self._servers[name] = self._make(name)
            self[name].start()
        for name in names:
            await self[name].wait_until_ready()
        self._pause_s = PAUSE_S

    def _make(self, name: str) -> Server:
        is_prefill = name.startswith("prefill")
        extra = {"timeouts": TIMEOUTS, **({"port": unused_port()} if is_prefill else {})}
        return vllm_server(
            VllmServer(
                name=name,
                model=str(prepare_smollm2()),
                served_name=MODEL,
                port=unused_port(),
                role="kv_producer" if is_prefill else "kv_consumer",
                connector={
                    **KVFLOW,
                    "engine_id": self.instance_of(name),
                    "kv_load_failure_policy": "fail",
                    "kv_connector_extra_config": extra,
                },
                cpus=halves_of_cpus()[0 if is_prefill else 1],
                arguments=(*CPU_ARGUMENTS, *MIDDLEWARE),
                environment=QUIET,
            ),
            self._place,
        )

    def instance_of(self, name: str) -> str:
        """Return the name of a server's rank, which no other test on this host has."""
        return f"fleet-{name}"

    async def drain(self, name: str) -> None:
        """Let the router notice, then the rank refuse new rooms, and wait until it has finished those that it has."""
        command = [sys.executable, "-m", "kvflow.cli", "drain", "--instance", self.instance_of(name)]
        await anyio.run_process([*command, "--notice", f"{NOTICE_S:.0f}", "--wait", f"{DRAINED_S:.0f}"])

    async def stop(self, name: str) -> None:
        """Stop a server in an orderly way, which has nothing left to do, and check that it holds no blocks."""
        await self.until_free(name)
        await anyio.to_thread.run_sync(self[name].stop)

    def kill_all(self) -> None:
        """Kill every server."""
        for server in self._servers.values():
            server.kill()

    async def num_answered(self, name: str) -> float:
        """Return how many requests a server has answered since it was started."""
        return (await metrics(self._client, self[name].url)).get(ANSWERED, 0.0)

    async def until_used(self, *names: str) -> None:
        """Wait until servers have answered requests that came through the router."""
        for name in names:
            before = await self.num_answered(name)
            while await self.num_answered(name) == before:  # noqa: ASYNC110 - it depends on other processes
                await anyio.sleep(POLL_S)

    async def until_left_out(self, name: str) -> None:
        """Wait until the router sends a server nothing any more."""
        while True:
            before = await self.num_answered(name)
            await self.until_tried(AFTERWARDS)
            if await self.num_answered(name) == before:
                return

    async def until_tried(self, number: int) -> None:
        """Wait until so many more requests have been answered or refused."""
        number += self._num_tried
        while self._num_tried < number:  # noqa: ASYNC110 - it depends on other processes
            await anyio.sleep(POLL_S)

    @property
    def _num_tried(self) -> int:
        return len(self.texts) + self.refusals.total()

    async def until_free(self, *names: str) -> None:
        """Wait until servers have no request and no block in use, also none that was kept from a dead peer."""
        for name in names:
            found: dict[str, float] = {}
            with anyio.move_on_after(2 * SETTLE_S):
                while not _is_free(found):
                    await ask(self._client, self[name].url, "Hello", 2)  # an idle server counts nothing
                    found = await metrics(self._client, self[name].url)
            kept = {key: found.get(key) for key in (*BUSY, HELD, FREED)}
            assert _is_free(found), f"{name} still has {kept}\n{self[name].tail()}"

    async def num_brought(self, name: str) -> float:
        """Return how many tokens of prompts a server has received."""
        return (await metrics(self._client, self[name].url))[BROUGHT]

    @asynccontextmanager
    async def loaded(self, at_once: int) -> AsyncIterator[None]:
        """Keep a number of requests open in the block."""
        over = anyio.Event()
        async with anyio.create_task_group() as tasks:
            for _ in range(at_once):
                tasks.start_soon(self._keep_asking, over)
            try:
                yield
            finally:
                over.set()

    async def _keep_asking(self, over: anyio.Event) -> None:
        while not over.is_set():
            self._numbers += 1
            prompt = prompt_of(self._numbers, 20 + 7 * (self._numbers % 12))
            is_over = False
            while not is_over:
                is_over = await self._ask(prompt)
                await anyio.sleep(self._pause_s)

    async def _ask(self, prompt: str) -> bool:
        """Ask once; return whether there was an answer."""
        answer = await ask(self._client, self.router, prompt, TOKENS)
        if answer.status == 200:
            self.texts[prompt] = answer.text
            return True
        self.refusals[self.step, kind_of(answer)] += 1
        return False

    async def check_texts(self, name: str) -> None:
        """Compare all answers with those of a server that gets no other requests."""
        right: dict[str, str] = {}
        waiting = iter(self.texts)

        async def compute() -> None:
            for prompt in waiting:
                answer = await ask(self._client, self[name].url, prompt, TOKENS)
                assert answer.status == 200, answer.error
                right[prompt] = answer.text

        async with anyio.create_task_group() as tasks:
            for _ in range(CHECKED_AT_ONCE):
                tasks.start_soon(compute)
        assert self.texts == right


def kind_of(answer: Answer) -> str:
    """Return the status of a refusal, and what the server or the router calls it; it must have a name."""
    assert answer.status >= 400, answer
    found = KINDS.findall(answer.error)
    assert found, f"{answer.status}: {answer.error}"
    return f"{answer.status} {' '.join(found)}"


def _is_free(found: dict[str, float]) -> bool:
    return bool(found) and not any(found[name] for name in BUSY) and found.get(HELD, 0.0) == found.get(FREED, 0.0)

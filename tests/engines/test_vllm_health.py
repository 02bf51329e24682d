"""What a router hears of a vLLM server's ranks: real ranks, behind an application that plays vLLM's."""

import json
import math
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio.to_thread
import pytest

from benchmarks.processes import ChildFailed
from kvflow.admin.client import ask, find_sockets
from kvflow.admin.messages import DrainRequest
from kvflow.engines.vllm import health
from kvflow.engines.vllm.health import RanksHealth
from tests.service.test_closing import crash, leave_broken
from tests.support.instances import deploy
from tests.support.prefill_client import prefill_process
from tests.support.stopping import is_stopped
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


@pytest.fixture
def place() -> Iterator[Path]:
    """Return a directory for sockets, whose paths have 107 bytes at most."""
    path = Path(tempfile.mkdtemp(prefix="kv-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(autouse=True)
def asks_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "KEEP_S", 0.0)


class Server:
    """An application with vLLM's configuration and the middleware; `passed` has the requests that reached it."""

    def __init__(self, instance: str = "prefill", **transfer: Any) -> None:
        transfer = {"kv_connector": "KvflowConnector", "kv_connector_extra_config": {}} | transfer
        config = SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id=instance, **transfer))
        self._owner = SimpleNamespace(state=SimpleNamespace(vllm_config=config))
        self._middleware = RanksHealth(self._answer)
        self.passed: list[tuple[str, str, str]] = []

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        self.passed.append((scope["type"], scope.get("method", ""), scope["path"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def ask(
        self, path: str = "/health", *, method: str = "GET", kind: str = "http"
    ) -> tuple[int, dict[str, str]]:
        """Return the status, and what is not well, by rank."""
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": kind, "method": method, "path": path, "raw_path": path.encode(), "app": self._owner}
        await self._middleware(scope, _nothing, send)
        start, body = sent
        if start["status"] == 200:
            return 200, {}
        assert (b"content-length", str(len(body["body"])).encode()) in start["headers"]
        return start["status"], json.loads(body["body"])["ranks"]


async def _nothing() -> dict[str, Any]:
    return {"type": "http.request"}


def beside(place: Path) -> dict[str, Any]:
    return {"kv_connector_extra_config": {"admin": str(place)}}


async def test_a_rank_that_drains_or_is_broken_makes_the_server_unhealthy(place: Path) -> None:
    server = Server(**beside(place))
    async with deploy(sending={"admin": str(place)}) as deployment:
        (rank,) = deployment.prefill
        assert await server.ask() == (200, {})
        rank.start_drain()
        draining = (503, {"prefill prefill/0": "the rank is draining"})
        assert await server.ask() == await server.ask("/readyz") == draining
        assert await server.ask("/livez") == (200, {})
        await crash(rank)
        status, ranks = await server.ask("/livez")
        assert (status, list(ranks)) == (503, ["prefill prefill/0"])
        assert "boom" in ranks["prefill prefill/0"]
        await leave_broken(deployment, rank)
        assert await server.ask() == (200, {})  # closed: what that means is for vLLM to say
    assert server.passed == [("http", "GET", "/health")] * 3


@pytest.mark.parametrize(
    "asked", [{"path": "/v1/completions", "method": "POST"}, {"method": "HEAD"}, {"kind": "websocket"}]
)
async def test_other_requests_are_passed_on(place: Path, asked: dict[str, str]) -> None:
    server = Server(**beside(place))
    async with deploy(sending={"admin": str(place)}) as deployment:
        deployment.prefill[0].start_drain()
        assert await server.ask(**asked) == (200, {})
    assert len(server.passed) == 1


@pytest.mark.parametrize(
    ("instance", "is_own"), [("prefill", True), ("prefil", False), ("other", False)], ids=["own", "prefix", "other"]
)
async def test_only_its_own_ranks_count(place: Path, instance: str, *, is_own: bool) -> None:
    async with deploy(sending={"admin": str(place)}) as deployment:
        deployment.prefill[0].start_drain()
        assert (await Server(instance, **beside(place)).ask())[0] == (503 if is_own else 200)


async def test_every_engine_of_a_server_counts(place: Path) -> None:
    """Data parallelism adds its number to the name."""
    async with deploy(prefill_tp=2, sending={"admin": str(place), "instance": "prefill_dp1"}) as deployment:
        deployment.prefill[1].start_drain()
        found = await Server(**beside(place)).ask()
    assert found == (503, {"prefill prefill_dp1/1": "the rank is draining"})


@pytest.mark.parametrize("admin", [True, False])
async def test_ranks_are_looked_for_where_the_connector_puts_their_sockets(
    place: Path, monkeypatch: pytest.MonkeyPatch, *, admin: bool
) -> None:
    """Also if it is one of several connectors; without sockets there is nobody to ask."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    kvflows = {"kv_connector": "KvflowConnector", "kv_connector_extra_config": {"admin": admin}}
    tier = {"kv_connector": "KvflowOffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 1}}
    several = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [tier, kvflows]}}
    async with deploy(sending={"instance": place.name}) as deployment:
        deployment.prefill[0].start_drain()
        assert (await Server(place.name, **several).ask())[0] == (503 if admin else 200)
        assert await Server(place.name, kv_connector="NixlConnector").ask() == (200, {})


async def test_answers_are_kept_for_a_while(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "KEEP_S", math.inf)
    async with deploy(sending={"admin": str(place)}) as deployment:
        server = Server(**beside(place))
        assert await server.ask() == (200, {})
        deployment.prefill[0].start_drain()
        assert await server.ask() == (200, {})
        assert (await Server(**beside(place)).ask())[0] == 503


async def test_a_rank_that_stops_answering_counts_if_it_has_answered_before(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "ASK_S", 0.2)
    async with prefill_process(None, 0, admin=str(place)) as process:
        before, after = Server(**beside(place)), Server(**beside(place))
        monkeypatch.setattr(health, "ASK_S", 60.0)
        assert await before.ask() == (200, {})
        monkeypatch.setattr(health, "ASK_S", 0.2)
        process.send_signal(signal.SIGSTOP)
        try:
            await until(lambda: is_stopped(process.pid))
            for _ in range(2):
                status, ranks = await before.ask()
                assert (status, list(ranks)) == (503, ["prefill prefill/0"])
                assert "does not answer within" in ranks["prefill prefill/0"]
            assert await after.ask() == (200, {})
        finally:
            process.send_signal(signal.SIGCONT)
        monkeypatch.setattr(health, "ASK_S", 60.0)
        assert await before.ask() == (200, {})


async def test_a_rank_that_was_killed_counts(place: Path) -> None:
    """It has left its socket behind, which one that closes does not."""
    async with prefill_process(None, 0, admin=str(place)) as process:
        before, after = Server(**beside(place)), Server(**beside(place))
        assert await before.ask() == (200, {})
        process.send_signal(signal.SIGKILL)
        with pytest.raises(ChildFailed, match="ended without a report"):
            await process.expect("anything")
        assert await before.ask() == (503, {"prefill prefill/0": "nobody listens"})
        assert await after.ask() == (200, {})


async def test_kvflow_drain_reaches_the_router(place: Path) -> None:
    server = Server(**beside(place))
    async with prefill_process(None, 0, admin=str(place)):
        assert await server.ask() == (200, {})
        (path,) = find_sockets(place)
        await anyio.to_thread.run_sync(ask, path, DrainRequest(), 60.0)
        assert await server.ask() == (503, {"prefill prefill/0": "the rank is draining"})


async def test_a_server_without_connectors_is_vllms_own(place: Path) -> None:
    server = Server()
    server._owner.state.vllm_config.kv_transfer_config = None
    assert await server.ask() == (200, {})

"""`kvflow registry list` asks a registry for all ranks."""

import json
from contextlib import nullcontext

import anyio.to_thread
import pytest

import kvflow
from kvflow.cli import main as cli
from tests.support.instances import deploy, make_pool, prefill_config
from tests.support.ports import unused_port
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def commands_run_in_any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the main thread may set a handler of signals, and it runs the ranks."""
    monkeypatch.setattr(cli, "_ended_by_interrupt", lambda _: nullcontext())


async def run(*words: str) -> int:
    return await anyio.to_thread.run_sync(cli.main, ["registry", "list", "--timeout", "20", *words])


async def test_all_instances_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    async with deploy(prefill_tp=2) as deployment:
        address = deployment.registry.endpoint
        other = prefill_config(address, instance="another")
        async with kvflow.PrefillRank(other, make_pool().layout) as rank:
            await until(lambda: deployment.registry.statistics().ranks == 3)
            assert await run("--registry", address) == 0
            lines = [line.split() for line in capsys.readouterr().out.splitlines()]
            assert lines[0] == ["RANK", "INCARNATION", "RANKS", "ADDRESS", "BACKEND"]
            assert [line[0] for line in lines] == ["RANK", "another/0", "prefill/0", "prefill/1"]
            assert lines[1][1:] == [f"{rank.me.incarnation:016x}", "1", rank.endpoint, "memory"]
            assert await run("--registry", address, "--json") == 0
            rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
            assert [(row["rank"], row["num_ranks"]) for row in rows] == [
                ("another/0", 1),
                ("prefill/0", 2),
                ("prefill/1", 2),
            ]


async def test_what_is_no_registry_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert await run() == 2
    assert "--registry tcp://HOST:PORT" in capsys.readouterr().err
    assert await run("--registry", f"tcp://127.0.0.1:{unused_port()}", "--timeout", "0.2") == 2
    assert "connection refused" in capsys.readouterr().err
    async with kvflow.PrefillRank(prefill_config(None), make_pool().layout) as rank:
        assert await run("--registry", rank.endpoint) == 0
        assert "prefill/0" in capsys.readouterr().out

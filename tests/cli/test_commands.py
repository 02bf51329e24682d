"""The smaller commands."""

import itertools
import json
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

import kvflow
from kvflow import __version__
from kvflow.cli.main import main
from kvflow.observe.logs import get_logger
from kvflow.registry import RegistryClient
from tests.support.distributions import build_wheel, unpack
from tests.support.instances import make_pool, prefill_config
from tests.support.waiting import until

PIGEON = """
from kvflow.backends.memory import MemoryBackend

class PigeonBackend(MemoryBackend):
    name = "pigeon"
"""


@pytest.mark.parametrize("backend", ["memory", "nixl", "mooncake"])
def test_bench_idle_gives_one_row(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "idle", "--backend", backend, "--seconds", "0.1", "--pairs", "2", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["bench"], row["group"]) == ("idle", f"connected ranks over {backend}")
    assert row["facts"]["ranks"] == 4
    assert row["facts"]["seconds"] >= 0.1
    assert row["kvflow"] >= 0
    assert row["bare"] is None


def test_bench_plan_gives_rows_and_the_handshake(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["bench", "plan", "--layers", "2", "--tokens", "64,128"]
    assert main([*options, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    seen = {(row["split"], row["tokens"], row["page_size"], row["table"]) for row in result["rows"]}
    splits, tables = ["equal", "4 to 2", "2 to 4", "mla"], ["contiguous", "half", "random"]
    assert seen == set(itertools.product(splits, [64, 128], [1, 16, 64], tables))
    assert all(row["descriptors"] > 0 and row["plan_ms"] > 0 for row in result["rows"])
    assert result["handshake"]["routes_ms"] > 0
    assert main(options) == 0
    assert "compiled in" in capsys.readouterr().out


@pytest.mark.parametrize("backend", ["memory", "nixl"])
def test_bench_digest_gives_rows_and_transfers(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["bench", "digest", "--backend", backend, "--megabytes", "2", "--rounds", "1"]
    assert main([*options, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    seen = {(row["order"], row["page_size"], row["heads"], row["table"]) for row in result["rows"]}
    assert seen == set(itertools.product(["NHD", "HND"], [1, 16, 64], [1, 8], ["contiguous", "random"]))
    assert all(row["gb_per_s"] > 0 for row in result["rows"])
    assert (result["transfer"]["backend"], result["transfer"]["megabytes"]) == (backend, 2)
    assert result["transfer"]["digest_ms"] > 0
    assert main(options) == 0
    assert f"2 MB over {backend}" in capsys.readouterr().out


def test_bench_failures_gives_a_row_for_each_case(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["bench", "failures", "--rounds", "1", "--cases", "abort-decode"]
    assert main([*options, "--json"]) == 0
    shown = capsys.readouterr()
    row = json.loads(shown.out)
    assert (row["case"], row["rounds"], row["ok"], row["next_transfer_ok"]) == ("abort-decode", 1, 1, 1)
    assert 0 < row["known_ms_p50"] <= row["known_ms_p99"] <= row["known_ms_max"]
    assert (row["faults"], row["quarantined_pages"], shown.err) == ({}, 0, "")
    assert main(options) == 0
    shown = capsys.readouterr()
    assert "abort-decode" in shown.out
    assert "abort-decode: 1 of 1" in shown.err


@pytest.mark.parametrize(("options", "named"), [(["--cases", "abort-all"], "abort-all"), (["--lease", "0"], "--lease")])
def test_bench_failures_names_what_it_cannot_run(
    options: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "failures", *options]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("command", ["bench idle", "bench digest", "bench failures", "demo --model tiny"])
def test_unknown_transport_is_refused_with_those_that_there_are(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), "--backend", "raven"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    for name in ("raven", "mooncake", "nixl"):
        assert name in shown.err


def test_transport_that_reaches_no_other_process_is_refused_where_there_are_two(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "failures", "--backend", "memory"]) == 2
    assert "memory" in capsys.readouterr().err


def test_transport_of_a_plugin_can_be_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = build_wheel(tmp_path, "pigeon_post", {"pigeon_post.py": PIGEON}, {"pigeon": "pigeon_post:PigeonBackend"})
    unpack(wheel, tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert main(["bench", "idle", "--backend", "pigeon", "--seconds", "0.1"]) == 0
    assert "connected ranks over pigeon" in capsys.readouterr().out


def test_bench_idle_for_a_person(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "idle", "--backend", "memory", "--seconds", "0.1"]) == 0
    assert "connected ranks over memory: CPU of a rank" in capsys.readouterr().out


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_registry_serves_until_it_is_told_to_stop(sent: signal.Signals) -> None:
    command = [sys.executable, "-m", "kvflow.cli", "registry", "--bind", "tcp://127.0.0.1:0", "--log", "json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        endpoint = process.stdout.readline().strip()
        assert json.loads(process.stderr.readline())["endpoint"] == endpoint
        anyio.run(_register_and_find, endpoint)
        process.send_signal(sent)
        assert process.wait() == 0
        assert f"stopped by {sent.name}" in process.stderr.read()


async def _register_and_find(endpoint: str) -> None:
    async with kvflow.PrefillRank(prefill_config(endpoint), make_pool().layout) as rank:
        async with anyio.create_task_group() as tasks:
            client = RegistryClient(endpoint, get_logger())
            tasks.start_soon(client.run)
            (card,) = await client.lookup("prefill", 5.0)
            assert card.peer == rank.me
            tasks.cancel_scope.cancel()
        client.close()


def test_registry_address_that_cannot_be_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["registry", "--bind", "tcp://192.0.2.1:7000"]) == 2
    assert "192.0.2.1" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["--version"])
    assert exited.value.code == 0
    assert capsys.readouterr().out == f"kvflow {__version__}\n"


@pytest.mark.parametrize("options", [["--pairs", "0"], ["--seconds", "0"], ["--seconds", "inf"]])
def test_bench_idle_refuses_what_cannot_be_measured(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "idle", *options]) == 2
    assert "must be positive" in capsys.readouterr().err


def test_interrupted_command_says_so() -> None:
    command = [sys.executable, "-m", "kvflow.cli", "bench", "idle", "--backend", "memory", "--seconds", "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        anyio.run(until, lambda: is_measuring(process.pid))
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert (process.returncode, out, err) == (130, "", "kvflow bench: interrupted\n")


def is_measuring(pid: int) -> bool:
    """ZMQ's threads run, so its ranks are being opened or open."""
    return len(list(Path(f"/proc/{pid}/task").iterdir())) > 2

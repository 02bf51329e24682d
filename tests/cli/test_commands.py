"""The smaller commands."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

import kvflow
from kvflow import __version__
from kvflow.cli.main import main
from kvflow.directory import RegistryClient
from kvflow.observe.logs import get_logger
from kvflow.wire.messages import RankRecord
from tests.support.instances import make_pool, prefill_config
from tests.support.reading import reading_context
from tests.support.waiting import until


def test_unknown_transport_is_refused_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--model", "tiny", "--backend", "raven"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    for name in ("raven", "mooncake", "nixl"):
        assert name in shown.err


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_registry_serves_until_it_is_told_to_stop(sent: signal.Signals) -> None:
    command = [sys.executable, "-m", "kvflow.cli", "registry", "--bind", "tcp://127.0.0.1:0", "--log", "json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        endpoint = process.stdout.readline().strip()
        assert json.loads(process.stderr.readline())["endpoint"] == endpoint
        process.send_signal(signal.SIGHUP)  # it continues with the keys that it has
        anyio.run(_register_and_find, endpoint)
        process.send_signal(sent)
        assert process.wait() == 0
        told = process.stderr.read()
        assert f"stopped by {sent.name}" in told
        assert "\nkvflow registry: " in f"\n{told.rpartition('kvflow registry: stopped')[0]}"


def test_proxy_serves_until_it_is_told_to_stop() -> None:
    command = [sys.executable, "-m", "kvflow.cli", "proxy", "--port", "0"]
    command += ["--prefill", "http://127.0.0.1:9/", "--decode", "http://127.0.0.1:9"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("http://127.0.0.1:")
        process.terminate()
        assert process.wait() == 0
        assert process.stderr.read() == "kvflow proxy: stopped by SIGTERM\n"


async def _register_and_find(endpoint: str) -> None:
    found: list[tuple[RankRecord, ...]] = []
    async with kvflow.PrefillRank(prefill_config(endpoint), make_pool().layout) as rank:
        log = get_logger()
        client = RegistryClient(endpoint, log, reading_context(log), lambda *told: found.append(told[1]))
        try:
            while not found or not found[-1]:  # the rank's own registration may be in flight
                count = len(found)
                client.look_up("prefill")
                await until(lambda count=count: len(found) > count)  # type: ignore[misc]
        finally:
            client.close()
        assert [record.peer for record in found[-1]] == [rank.me]


def test_registry_address_that_cannot_be_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["registry", "--bind", "tcp://192.0.2.1:7000"]) == 2
    assert "trust=kvflow.load_trust" in capsys.readouterr().err
    assert main(["registry", "--bind", "tcp://192.0.2.1:7000", "--plain"]) == 2
    assert "cannot be bound" in capsys.readouterr().err
    assert main(["registry", "--keys", "/nowhere"]) == 2
    assert "key file does not exist" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["--version"])
    assert exited.value.code == 0
    assert capsys.readouterr().out == f"kvflow {__version__}\n"


@pytest.mark.parametrize("words", [[], ["keys"], ["quarantine"]])
def test_help_is_shown_if_the_action_is_missing(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(" ".join(["usage: kvflow", *words, "[-h]"]))


def test_proxy_says_which_servers_are_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["proxy"]) == 2
    assert "--prefill is missing" in capsys.readouterr().err
    assert main(["proxy", "--prefill", "http://127.0.0.1:9"]) == 2
    assert "--decode is missing" in capsys.readouterr().err


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_command_whose_output_nobody_reads_ends_quietly(unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, "-m", "kvflow.cli", "doctor", "--no-probe", "--socket", "/nowhere"]
        variables = os.environ | {"PYTHONUNBUFFERED": unbuffered}
        ended = subprocess.run(
            command, check=False, stdout=writer, stderr=subprocess.PIPE, text=True, env=variables, timeout=60
        )
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, "")


COMMANDS = ["demo", "registry", "incident", "proxy", "serve"]


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_defaults_where_there_are_some(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = " ".join(help_of(command, capsys).split())
    for nothing in ("None", "False", "[]", ""):
        assert f"(default: {nothing})" not in shown
    assert "(default: " in shown


@pytest.mark.parametrize("command", [*COMMANDS, "keys new", "keys trust", "keys show"])
def test_help_begins_with_a_sentence(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    _usage, description, *_ = help_of(command, capsys).split("\n\n")
    assert re.fullmatch(r"[A-Z].*\.", description, re.DOTALL)


INTERRUPTED = {
    "benchmarks handover": "-m benchmarks handover --shape tiny --pool-megabytes 1 --rounds 100000",
    "kvflow demo": "-m kvflow.cli demo --model tiny --tokens 100000",
}


@pytest.mark.parametrize("command", INTERRUPTED)
def test_interrupted_command_says_so(command: str) -> None:
    check_interrupted(command, lambda pid: bool(children_of(pid)))


@pytest.mark.parametrize("command", INTERRUPTED)
def test_command_that_is_still_loading_can_be_interrupted(command: str) -> None:
    """The interrupt comes once numpy's library is loaded, when many modules are still to be imported."""
    check_interrupted(command, lambda pid: "numpy" in Path(f"/proc/{pid}/maps").read_text())


def check_interrupted(command: str, is_time: Callable[[int], bool]) -> None:
    line = [sys.executable, *INTERRUPTED[command].split()]
    with subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            anyio.run(until, lambda: is_time(process.pid))
            children = children_of(process.pid)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            out, err = process.communicate(timeout=100)
        finally:
            process.kill()
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == f"{command}: interrupted"
    assert "Traceback" not in err
    assert "KeyboardInterrupt" not in err
    anyio.run(until, lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

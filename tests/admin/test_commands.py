"""The commands that ask ranks, against ranks in processes of their own."""

import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

import anyio.to_thread
import pytest

from benchmarks.processes import ChildProcess
from kvflow.admin.client import ask, find_sockets
from kvflow.admin.messages import RoomsAnswer, RoomsRequest
from kvflow.cli import main as cli
from kvflow.cli import status
from kvflow.cli.main import main
from kvflow.cli.tasks import open_tasks
from tests.observe.lines import printed
from tests.support.blocking_process import ReceiverOptions
from tests.support.instances import deploy
from tests.support.prefill_client import give_ticket, prefill_process
from tests.support.stopping import is_stopped
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def commands_run_in_any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the main thread may set a handler of signals, and it runs the ranks."""
    monkeypatch.setattr(cli, "_ended_by_interrupt", lambda _: nullcontext())


async def run(capsys: Capture, command: str, *options: object) -> tuple[int, str, str]:
    code = await anyio.to_thread.run_sync(main, [*command.split(), *map(str, options)])
    return code, *capsys.readouterr()


def is_granted(directory: Path, pid: int) -> bool:
    """Return whether the decode rank has asked the prefill rank of a process for its room."""
    (path,) = [path for path in find_sockets(directory) if path.name.startswith(f"{pid}-")]
    answer = ask(path, RoomsRequest(), 30.0).parse(RoomsAnswer)
    return not isinstance(answer, str) and any(row.peers for row in answer.rooms)


@asynccontextmanager
async def stuck(directory: Path) -> AsyncIterator[tuple[ChildProcess, ChildProcess]]:
    """Start a prefill process that is stopped in the middle of a room, and a decode process that aborts it."""
    async with prefill_process(None, 0, admin=str(directory)) as prefill, open_tasks() as tasks:
        options = ReceiverOptions(await give_ticket(prefill, 1), str(directory))
        async with ChildProcess("decode", "tests.support.blocking_process", options, tasks) as decode:
            await decode.expect("ready")
            await prefill.tell("send", room=1)
            await prefill.expect("half", 1)
            while not await anyio.to_thread.run_sync(is_granted, directory, prefill.pid):
                pass
            prefill.send_signal(signal.SIGSTOP)
            await until(lambda: is_stopped(prefill.pid))
            try:
                await decode.tell("abort")
                await decode.expect("quarantined")
                yield prefill, decode
            finally:
                prefill.send_signal(signal.SIGCONT)
                await prefill.tell("abort")
                await prefill.expect("over", 1)


async def test_a_stuck_quarantine_is_found_explained_and_released(tmp_path: Path, capsys: Capture) -> None:
    async with stuck(tmp_path) as (prefill, decode):
        here = ("--socket", tmp_path, "--timeout", 0.5)

        code, out, err = await run(capsys, "status", *here)
        assert code == 1
        head, first, second, *_ = out.splitlines()
        assert head.split()[:4] == ["RANK", "ROLE", "PID", "UP"]
        assert first.split()[:3] == ["decode/0", "decode", str(decode.pid)]
        assert second.split()[:4] == ["process", str(prefill.pid), "-", str(prefill.pid)]
        assert "decode/0 is degraded: transfers in quarantine: 1; the oldest is room 1" in out
        assert f"process {prefill.pid}: it does not answer within 0.5 s" in err

        code, out, _ = await run(capsys, "rooms", "--instance", "decode", *here)
        assert code == 0
        row = out.splitlines()[1].split()
        assert (row[1], row[4:6]) == ("1", ["aborted", "quarantined"])
        assert "prefill/0@" in out

        code, out, _ = await run(capsys, "quarantine list", *here)
        assert code == 1  # the stopped process may have more
        name, number = out.splitlines()[1].split()[:2]
        assert name == "decode/0"
        assert f"decode/0 {number}: prefill/0@" in out
        assert "must be reached again" in out or "must send Drained" in out

        assert (await run(capsys, "health --live --pid", decode.pid, *here))[0] == 0
        assert (await run(capsys, "health --ready --pid", decode.pid, *here))[0] == 0
        code, out, _ = await run(capsys, "health --pid", decode.pid, *here)
        assert (code, "degraded" in out) == (1, True)
        code, out, _ = await run(capsys, "health --live --pid", prefill.pid, *here)
        assert (code, "does not answer" in out) == (1, True)

        with pytest.raises(SystemExit):  # a reason is needed
            main(["quarantine", "release", number])
        capsys.readouterr()
        code, _, err = await run(capsys, "quarantine release 99 --because", "a guess", *here)
        assert (code, "no rank has it" in err) == (2, True)
        code, out, _ = await run(capsys, "quarantine release", number, "--because", "it is stopped", *here)
        assert (code, out) == (0, "decode/0 has released the pages of room 1\n")
        assert "because='it is stopped'" in (await decode.expect("logged"))["text"]
        await decode.expect("released")
        assert (await run(capsys, "health", "--instance", "decode", *here))[0] == 0
    assert find_sockets(tmp_path) == []


async def test_ranks_are_found_selected_and_drained(tmp_path: Path, capsys: Capture) -> None:
    settings = {"admin": str(tmp_path)}
    async with deploy(prefill_tp=2, sending=settings, receiving=settings) as deployment:
        here = ("--socket", tmp_path)
        code, out, err = await run(capsys, "status", *here, "--json")
        assert (code, err) == (0, "")
        names = [(one["instance"], one["engine_rank"]) for one in map(json.loads, out.splitlines())]
        assert names == [("decode", 0), ("prefill", 0), ("prefill", 1)]
        _, out, _ = await run(capsys, "status --instance prefill --rank 1", *here)
        assert [line.split()[0] for line in out.splitlines()] == ["RANK", "prefill/1"]
        code, _, err = await run(capsys, "status --instance other", *here)
        assert (code, "no rank was found" in err) == (2, True)

        code, _, err = await run(capsys, "drain")
        assert (code, "select ranks" in err) == (2, True)
        assert not any(rank.is_draining for rank in deployment.prefill)
        async with deployment.prefill[0].send("a\nroom", label="x" * 100) as sender:
            _, out, _ = await run(capsys, "rooms --rank 0 --instance prefill", *here)
            assert len(out.splitlines()) == 2
            assert "'a\\nroom'" in out
            assert "x" * 57 + "..." in out
            code, out, _ = await run(capsys, "drain --instance prefill --wait 0.01", *here)
            assert code == 1
            assert out.splitlines() == ["prefill/0 is draining; open transfers: 1", "prefill/1 has finished"]
            sender.abort()
        assert (await run(capsys, "drain --instance prefill --wait 30", *here))[0] == 0
        assert [rank.is_drained for rank in deployment.prefill] == [True, True]
        assert not deployment.decode[0].is_drained
        with printed() as lines:
            assert (await run(capsys, "drain --instance decode --notice 0.01 --wait 30", *here))[0] == 0
        assert [line["event"] for line in lines.objects()] == ["drain_announced", "rank_draining"]
        assert (await run(capsys, "health --ready --instance prefill", *here))[0] == 1
        assert (await run(capsys, "health --live", *here))[0] == 0


async def test_ranks_of_this_user_are_found_by_themselves(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    async with deploy(sending={"instance": "here"}, receiving={"instance": "there"}):
        _, out, _ = await run(capsys, "status")
        names = {line.split()[0] for line in out.splitlines()}
        assert names >= {"here/0", "there/0"}


def test_watch_asks_again_until_it_is_interrupted(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[object] = []

    def show(arguments: object) -> int:
        shown.append(arguments)
        if len(shown) == 3:
            raise KeyboardInterrupt
        return 0

    monkeypatch.setattr(status, "_show", show)
    monkeypatch.setattr(status, "WATCH_S", 0.0)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert main(["status", "--watch", "--socket", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "kvflow status: interrupted\n"

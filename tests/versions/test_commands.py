"""Commands of either version ask processes of the other one."""

import json
import signal
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.processes import ChildProcess
from kvflow.cli.tasks import open_tasks
from tests.support.stopping import is_stopped
from tests.support.waiting import until
from tests.versions.commands import CommandOptions
from tests.versions.ranks import Ranks, open_ranks
from tests.versions.version import NEWER, Version

pytestmark = pytest.mark.anyio


class Ended(NamedTuple):
    """What has become of a command."""

    code: int
    out: str
    err: str


class Commands:
    """Commands for the ranks whose sockets are in a directory."""

    def __init__(self, child: ChildProcess, sockets: Path) -> None:
        self._child = child
        self._sockets = sockets

    async def run(self, *words: object, pid: int | None = None, timeout_s: float = 30.0) -> Ended:
        """Run a command that asks all ranks, or that of a process; fail if it ends with a traceback."""
        asked = self._sockets if pid is None else next(self._sockets.glob(f"{pid}-*.sock"))
        return await self.run_anywhere(*words, "--socket", asked, "--timeout", timeout_s)

    async def run_anywhere(self, *words: object) -> Ended:
        """Run any command; fail if it ends with a traceback."""
        await self._child.tell("run", words=list(map(str, words)))
        report = await self._child.expect("ended")
        assert "Traceback" not in report["err"]
        return Ended(report["code"], report["out"], report["err"])


@asynccontextmanager
async def open_commands(version: Version, sockets: Path) -> AsyncIterator[Commands]:
    """Start the process that runs commands of a version."""
    async with open_tasks() as tasks:
        module, environment = "tests.versions.commands", version.environment
        child = ChildProcess(f"{version.name} commands", module, CommandOptions(), tasks, environment=environment)
        async with child:
            assert (await child.expect("ready"))["library"] == version.library
            yield Commands(child, sockets)


def table(shown: str) -> list[list[str]]:
    """Return the cells of a table, without its head."""
    return [line.split() for line in shown.splitlines()[1:]]


@pytest.mark.parametrize("is_command_newer", [False, True], ids=["older commands", "newer commands"])
async def test_commands_ask_ranks_of_the_other_version(older: Version, is_command_newer: bool, sockets: Path) -> None:
    version, other = (NEWER, older) if is_command_newer else (older, NEWER)
    async with (
        open_ranks(other, other, other, admin=str(sockets)) as ranks,
        open_commands(version, sockets) as commands,
    ):
        await ranks.hand_over(0, by_ticket=False)
        await ranks.prefill[0].tell("send", room=1, is_text=True)
        ticket = await ranks.give_ticket(1)
        await check_what_is_told(commands, ranks, ticket)
        await check_what_is_written(commands, sockets)
        await check_release(commands, ranks)
        await ranks.receive(1, ticket, is_text=True)
        assert (await ranks.decode.expect("received", 1))["why"] == ""
        if is_command_newer:
            noticed = await commands.run("drain", "--all", "--notice", 0.01, pid=ranks.prefill[0].pid)
            assert noticed.code == 1
            assert "prefill/0: the drain was not announced: " in noticed.err
        drained = await commands.run("drain", "--all", "--wait", 30)
        assert drained == (0, "decode/0 has finished\nprefill/0 has finished\n", "")
        ready = await commands.run("health", "--ready")
        assert (ready.code, ready.out.count("the rank is draining")) == (1, 2)


async def check_what_is_told(commands: Commands, ranks: Ranks, ticket: object) -> None:
    """Check what healthy ranks tell: one room has ended, and one is open."""
    status, as_json = await commands.run("status"), await commands.run("status", "--json")
    rooms, health = await commands.run("rooms"), await commands.run("health")
    quarantine, doctor = await commands.run("quarantine", "list"), await commands.run("doctor", "--no-probe")
    peer = await commands.run("doctor", json.dumps(ticket))
    listed = await commands.run_anywhere("registry", "list", "--registry", ranks.at)
    assert [(row[0], row[1], row[4:7]) for row in table(status.out)] == [
        ("decode/0", "decode", ["nixl", "ok", "0"]),
        ("prefill/0", "prefill", ["nixl", "ok", "1"]),
    ]
    told = [json.loads(line) for line in as_json.out.splitlines()]
    assert [(one["instance"], one["pid"]) for one in told] == [
        ("decode", ranks.decode.pid),
        ("prefill", ranks.prefill[0].pid),
    ]
    (room,) = table(rooms.out)
    assert (room[:4], room[5:8]) == (["prefill/0", "request", "1", "-"], ["pending", "held", "5"])
    assert health.out == "decode/0 transfer: ok\nprefill/0 transfer: ok\n"
    assert table(quarantine.out) == []
    assert "running ranks: decode/0, prefill/0: nothing stands out" in doctor.out
    assert "fingerprint 'test-model' is that of decode/0 here" in peer.out
    assert [(row[0], row[2:]) for row in table(listed.out)] == [("prefill/0", ["1", told[1]["endpoint"], "nixl"])]
    assert {one.code for one in (status, as_json, rooms, health, quarantine, doctor, peer, listed)} == {0}


async def check_what_is_written(commands: Commands, sockets: Path) -> None:
    """Check a report, and what files about incidents tell of the room that has ended."""
    archive = sockets / "report.tar.gz"
    report = await commands.run("report", "--no-probe", "--output", archive)
    with tarfile.open(archive) as parts:
        names = parts.getnames()
    assert [sum(f"-{kind}.json" in name for name in names) for kind in ("status", "rooms", "quarantine")] == [2, 2, 2]
    assert report.code == 0
    written = await commands.run("incident", "--now")
    assert (written.code, written.err) == (0, "")
    files = written.out.split()
    story = await commands.run_anywhere("incident", *files, "--room", 0)
    assert [Path(file).name.partition("-")[0] for file in files] == ["decode", "prefill"]
    assert "ended: decode/0: " in story.out
    assert "first: nothing that is recorded here" in story.out
    assert story.err == ""


async def check_release(commands: Commands, ranks: Ranks) -> None:
    """Check what is told of a prefill rank that is stopped, and release what it may still write to."""
    (prefill,) = ranks.prefill
    await ranks.receive(2, "prefill", is_text=False)
    await prefill.tell("asked")
    await prefill.expect("asked")
    prefill.send_signal(signal.SIGSTOP)
    try:
        await until(lambda: is_stopped(prefill.pid))
        assert (await ranks.decode.expect("received", 2))["why"] != ""
        live = await commands.run("health", "--live", pid=prefill.pid, timeout_s=0.1)
        assert (live.code, f"process {prefill.pid} does not answer" in live.out) == (1, True)
        status = await commands.run("status", pid=ranks.decode.pid)
        assert "decode/0 is degraded: transfers in quarantine: 1; the oldest is room 2" in status.out
        quarantine = await commands.run("quarantine", "list", pid=ranks.decode.pid)
        (row,) = [row for row in table(quarantine.out) if row[2:3] == ["2"]]
        words = ("quarantine", "release", row[1], "--because", "a test")
        released = await commands.run(*words, pid=ranks.decode.pid)
        assert released == (0, "decode/0 has released the pages of room 2\n", "")
    finally:
        prefill.send_signal(signal.SIGCONT)

"""The name of a prefill host leads to another host while ranks run."""

import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from benchmarks.processes import ChildProcess
from kvflow.cli.tasks import open_tasks
from tests.support.machine import has_ipv6
from tests.support.ports import unused_port
from tests.support.prefill_client import prefill_process
from tests.support.resolving_process import ResolvingOptions

pytestmark = pytest.mark.anyio

PREPARE = ["unshare", "--mount", "mount", "--make-rprivate", "/"]

NAME = "prefill.moving.test"


class Names:
    """The host names of one process, and where each prefill process listens."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "hosts"
        self.port = unused_port()

    @property
    def address(self) -> str:
        return f"tcp://{NAME}:{self.port}"

    def lead_to(self, host: str) -> None:
        """Let the name lead to a host. The file stays the same, which is mounted elsewhere."""
        self.file.write_text(f"127.0.0.1 localhost\n{host} {NAME}\n", "utf-8")


@pytest.fixture
def names(tmp_path: Path) -> Names:
    try:
        subprocess.run(PREPARE, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a process cannot have host names of its own: {error}")
    return Names(tmp_path)


def prefill_at(names: Names, host: str) -> AbstractAsyncContextManager[ChildProcess]:
    return prefill_process(None, names.port, host=host, advertise=NAME)


@asynccontextmanager
async def decode_with(names: Names) -> AsyncIterator[ChildProcess]:
    options = ResolvingOptions(str(names.file), names.address)
    async with (
        open_tasks() as tasks,
        ChildProcess("decode", "tests.support.resolving_process", options, tasks) as decode,
    ):
        await decode.expect("ready")
        yield decode


async def hand_over(prefill: ChildProcess, decode: ChildProcess, room: int) -> None:
    await decode.tell("receive", room=room)
    await prefill.tell("send", room=room)
    await prefill.expect("half", room)
    await prefill.tell("finish")
    await decode.expect("received", room)
    await prefill.expect("over", room)


async def test_pages_of_a_process_that_hangs_stay_held_although_its_name_leads_elsewhere(names: Names) -> None:
    """Neither the refusal of the other host nor the successor there proves that the first process has ended."""
    names.lead_to("127.0.0.2")
    async with decode_with(names) as decode, prefill_at(names, "127.0.0.2") as former:
        await hand_over(former, decode, 1)
        await decode.tell("receive", room=2)
        await former.tell("send", room=2)
        await former.expect("half", 2)
        await former.tell("wait")
        await former.expect("granted", 2)
        former.send_signal(signal.SIGSTOP)
        names.lead_to("127.0.0.3")  # which refuses connections
        assert (await decode.expect("failed", 2))["reason"] == "peer_lost"
        async with prefill_at(names, "127.0.0.3") as successor:
            await hand_over(successor, decode, 3)
            await decode.tell("look", room=2)
            assert (await decode.expect("memory", 2))["state"] in ("draining", "quarantined")
            former.send_signal(signal.SIGKILL)
            await decode.expect("safe", 2)
            await hand_over(successor, decode, 4)


@pytest.mark.slow
async def test_a_killed_process_is_replaced_on_another_host(names: Names) -> None:
    names.lead_to("127.0.0.2")
    async with decode_with(names) as decode:
        for number, host in enumerate(["127.0.0.2", "127.0.0.3", "127.0.0.2"]):
            names.lead_to(host)
            async with prefill_at(names, host) as prefill:
                await hand_over(prefill, decode, number)
                prefill.send_signal(signal.SIGKILL)


async def test_a_name_gets_an_address_of_the_other_family(names: Names) -> None:
    """Before anybody has answered; libzmq looks for the family only that it was told at first."""
    if not has_ipv6():
        pytest.skip("this host has no IPv6")
    names.lead_to("127.0.0.4")
    async with decode_with(names) as decode, prefill_at(names, "[::1]") as prefill:
        with socket.create_server(("127.0.0.4", names.port)) as other:
            await decode.tell("receive", room=1)
            attempt, _ = await anyio.to_thread.run_sync(other.accept)
        names.lead_to("::1")
        attempt.close()
        await prefill.tell("send", room=1)
        await prefill.expect("half", 1)
        await prefill.tell("finish")
        await decode.expect("received", 1)

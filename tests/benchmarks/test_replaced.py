"""What the benchmark of replaced servers counts in the processes of a server."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from benchmarks.vllm_replaced.standing import Standing, standing_in

HTTP_PORT: Final = 1

OPENS: Final = """
import mmap, os, select, socket, subprocess, sys
held = []

def connected():
    listener = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(listener.getsockname())
    far, _ = listener.accept()
    listener.close()
    return near, far

print("ready", flush=True)
for line in sys.stdin:
    match line.strip():
        case "sockets":
            held += connected()
        case "half":
            near, far = connected()
            far.close()
            held.append(near)
            near.recv(1)  # the end has arrived
        case "epoll":
            held.append(select.epoll())
        case "eventfd":
            held.append(os.eventfd(0))
        case "memfd":
            file = os.memfd_create("page")
            os.ftruncate(file, 2 * 2**20)
            held.append(file)
            held.append(mmap.mmap(file, 2 * 2**20))
        case "child":
            held.append(subprocess.Popen(["/bin/sleep", "100"]))
        case "http":
            held.append(socket.create_server(("127.0.0.1", 0)))
            print(held[-1].getsockname()[1], flush=True)
            continue
    print("done", flush=True)
"""


class Holder:
    """A process group that opens things on request."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.pid = process.pid
        self._process = process

    def open(self, what: str) -> str:
        """Let it open something, and return its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()


@contextmanager
def holding() -> Iterator[Holder]:
    command = [sys.executable, "-c", OPENS]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield Holder(process)
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("what", "counted"),
    [
        ("sockets", {"descriptors": 2.0, "sockets": 2.0}),
        ("half", {"descriptors": 1.0, "sockets": 1.0, "half_closed": 1.0}),
        ("epoll", {"descriptors": 1.0, "epolls": 1.0}),
        ("eventfd", {"descriptors": 1.0, "eventfds": 1.0}),
        ("memfd", {"shared": 2.0, "descriptors": 2.0, "shared_mib": 2.0}),  # mmap duplicates the descriptor
    ],
)
def test_what_a_process_opens_is_counted(what: str, counted: dict[str, float], tmp_path: Path) -> None:
    with holding() as holder:
        before = standing_in(holder.pid, HTTP_PORT, tmp_path / "none")
        assert holder.open(what) == "done"
        grown = standing_in(holder.pid, HTTP_PORT, tmp_path / "none").beyond(before)
    assert grown._replace(mappings=0.0, resident_mib=0.0) == Standing(**counted)
    assert grown.mappings >= counted.get("shared", 0.0) / 2


def test_all_processes_of_the_group_count(tmp_path: Path) -> None:
    with holding() as holder:
        before = standing_in(holder.pid, HTTP_PORT, tmp_path / "none")
        holder.open("child")
        grown = standing_in(holder.pid, HTTP_PORT, tmp_path / "none").beyond(before)
    assert grown.threads == 1
    assert grown.resident_mib > 0


def test_sockets_of_the_http_port_do_not_count(tmp_path: Path) -> None:
    with holding() as holder:
        port = int(holder.open("http"))
        with_it, without = (standing_in(holder.pid, one, tmp_path / "none") for one in (HTTP_PORT, port))
    assert with_it.beyond(without)._replace(resident_mib=0.0) == Standing(descriptors=1.0, sockets=1.0)


def test_agents_that_were_not_removed_are_known(tmp_path: Path) -> None:
    events = [("agent_added", "one"), ("agent_added", "two"), ("agent_added", "one"), ("agent_removed", "one")]
    trace = tmp_path / "trace"
    lines = [json.dumps({"at": 0.0, "event": event, "requests": [name], "values": {}}) for event, name in events]
    trace.write_text("\n".join(lines) + "\n")
    with holding() as holder:
        assert standing_in(holder.pid, HTTP_PORT, trace).agents == 1

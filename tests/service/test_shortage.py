"""A process that runs out of descriptors, or whose engine holds the event loop: it blames itself, and lives on."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import anyio
import pytest

from kvflow.aio.pulse import PULSE_S, Pulse
from kvflow.errors import Stage
from kvflow.resources import RESERVED
from tests.observe.lines import printed
from tests.support.instances import deploy
from tests.support.slow import slow_except
from tests.support.waiting import until

ROOT: Final = Path(__file__).parents[2]

linux = pytest.mark.skipif(sys.platform != "linux", reason="limits are those of Linux")

PROGRAM = """
import json, os, resource, sys
import anyio, numpy as np, kvflow
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
shape = "page token head dim"
pools = [{"k": [np.zeros((8, 4, 2, 16), "float32")]} for _ in range(2)]
layouts = [kvflow.layout_from_tensors(pool, axes=shape, heads=(0, 2), fingerprint="m") for pool in pools]
timeouts = kvflow.Timeouts(handshake_s=HANDSHAKE_S)

def take_all():
    taken = []
    try:
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        return taken

async def receive(rank, room, port):
    try:
        where = kvflow.Endpoint.parse(f"tcp://127.0.0.1:{port}")
        async with rank.receive(room, prefill=where, tokens=(0, 4), pages={"kv": [room]}) as receiver:
            await receiver.done()
        return "success", ""
    except kvflow.TransferFailed as error:
        return error.reason.value, error.detail

"""

USE = """
from contextlib import suppress
from kvflow.resources import descriptors

async def main():
    config = kvflow.PrefillConfig(instance="p", backend="memory", bind="tcp://127.0.0.1:0")
    prefill = kvflow.PrefillRank(config, layouts[0])
    config = kvflow.DecodeConfig(instance="d", backend="memory", timeouts=timeouts)
    async with prefill, kvflow.DecodeRank(config, layouts[1]) as decode, prefill.send(1) as sender:
        taken = take_all()
        for _ in range(int(sys.argv[1])):
            os.close(taken.pop())
        await sender.finish((0, 4), {"kv": [1]}, metadata=b"")
        ended = [await receive(decode, 1, prefill.endpoint.rpartition(":")[2])]
        with suppress(kvflow.Shortage):
            while True:
                descriptors.draw(1)
                taken += take_all()
        async with anyio.create_task_group() as group:

            async def take_freed():
                while True:  # libzmq closes what the first contact no longer needs whenever its thread runs
                    taken.extend(take_all())
                    await anyio.sleep(0.001)

            group.start_soon(take_freed)
            ended.append(await receive(decode, 2, 7996))
            group.cancel_scope.cancel()
        for fd in taken:
            os.close(fd)
        print(json.dumps([ended, decode.statistics().anomalies]))

anyio.run(main)
"""

USE_TWICE = """
async def main():
    configs = [kvflow.PrefillConfig(instance=name, backend="memory", bind="tcp://127.0.0.1:0") for name in "ab"]
    config = kvflow.DecodeConfig(instance="d", backend="memory", timeouts=timeouts)
    first, second = [kvflow.PrefillRank(config, layouts[0]) for config in configs]
    async with first, second, kvflow.DecodeRank(config, layouts[1]) as decode:
        ended = []
        for room, prefill in enumerate((first, second), 1):
            async with prefill.send(room) as sender:
                await sender.finish((0, 4), {"kv": [1]}, metadata=b"")
                ended.append(await receive(decode, room, prefill.endpoint.rpartition(":")[2]))
            if room == 1:
                take_all()
        print(json.dumps(ended))

anyio.run(main)
"""

ACCEPT = """
import socket

async def main():
    config = kvflow.PrefillConfig(instance="p", backend="memory", bind="tcp://127.0.0.1:0")
    async with kvflow.PrefillRank(config, layouts[0]) as prefill, prefill.send(1) as sender:
        await sender.finish((0, 4), {"kv": [1]}, metadata=b"")
        strangers = [socket.socket() for _ in range(3)]
        taken = take_all()
        for stranger in strangers:
            stranger.connect(("127.0.0.1", int(prefill.endpoint.rpartition(":")[2])))
        while "descriptor_shortage" not in prefill.statistics().anomalies:
            await anyio.sleep(0.01)
        for stranger in strangers:
            stranger.settimeout(20)
            await anyio.to_thread.run_sync(stranger.recv, 1)
        for fd in taken:
            os.close(fd)
        config = kvflow.DecodeConfig(instance="d", backend="memory")
        async with kvflow.DecodeRank(config, layouts[1]) as decode:
            ended = await receive(decode, 1, prefill.endpoint.rpartition(":")[2])
        print(json.dumps([ended, prefill.statistics().anomalies]))

anyio.run(main)
"""

SAY_AT_ONCE = """
import socket
from kvflow.control import channel

channel.SHORTAGE_S = 3600.0

async def main():
    config = kvflow.PrefillConfig(instance="p", backend="memory", bind="tcp://127.0.0.1:0")
    async with kvflow.PrefillRank(config, layouts[0]) as prefill:
        strangers = [socket.socket() for _ in range(16)]
        taken = take_all()
        while "descriptor_shortage" not in prefill.statistics().anomalies:
            if strangers:  # libzmq may accept some, with descriptors that are free for a moment
                stranger = strangers.pop()
                stranger.connect(("127.0.0.1", int(prefill.endpoint.rpartition(":")[2])))
            await anyio.sleep(0.1)
        stranger.settimeout(20)
        answer = stranger.recv(1)
        for fd in taken:
            os.close(fd)
        print(json.dumps(len(answer)))

anyio.run(main)
"""

SERVE = """
import asyncio, logging, socket
from kvflow.blocking import LoopThread

said = []

class Said(logging.Handler):
    def emit(self, record):
        said.append(record.msg)

logging.getLogger("kvflow").addHandler(Said())
with LoopThread() as loop, loop.use() as portal:
    served = asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    server = portal.start_task_soon(lambda: served).result()
    other = socket.socket()
    taken = take_all()
    other.connect(server.sockets[0].getsockname())
    while not said:
        pass
    for fd in taken:
        os.close(fd)
    other.settimeout(20)
    answer = other.recv(1)
    portal.call(server.close)
print(json.dumps([said, len(answer)]))
"""

OPEN = """
async def open_rank(kind, config, layout):
    try:
        async with kind(config, layout):
            return "opened"
    except kvflow.KvflowError as error:
        return type(error).__name__
    except OSError as error:  # of the event loop
        return "OSError"

def outcome(left):
    number = os.fork()
    if number:
        return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
    taken = take_all()
    for _ in range(left):
        os.close(taken.pop())
    config = kvflow.PrefillConfig(instance="p", backend="memory", bind="tcp://127.0.0.1:0")
    try:
        said = anyio.run(open_rank, kvflow.PrefillRank, config, layouts[0])
    except OSError:
        said = "OSError"
    os._exit({"opened": 0, "OSError": 3, "Shortage": 4}.get(said, 5))

warm_up = anyio.run(anyio.sleep, 0)
print(json.dumps([outcome(left) for left in (0, 6, 9, 12, 40)]))
"""


def run(program: str, *arguments: str) -> Any:
    text = PROGRAM.replace("HANDSHAKE_S", "0.5") + program
    command = [sys.executable, "-W", "ignore", "-c", text, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    return json.loads(done.stdout)


@linux
def test_a_listener_says_that_it_cannot_accept_and_goes_on_once_it_can() -> None:
    """While somebody waits, libzmq tries again all the time, which keeps a core busy, and says nothing."""
    ended, anomalies = run(ACCEPT)
    assert ended == ["success", ""]
    assert anomalies["descriptor_shortage"] == 1


@linux
def test_a_listener_says_so_when_somebody_connects_and_not_when_it_next_looks() -> None:
    assert run(SAY_AT_ONCE) in (0, 1), "closed, or accepted: libzmq may take the descriptor that closing it needs"


@linux
def test_an_http_port_that_cannot_accept_is_one_line() -> None:
    said, num_bytes = run(SERVE)
    (line,) = said
    assert "RLIMIT_NOFILE is 256" in line
    assert num_bytes == 0  # accepted and closed, after all


@linux
@pytest.mark.parametrize("left", slow_except([0, 2], range(RESERVED + 1)))
def test_first_contact_has_its_descriptors_and_later_ones_name_the_limit(left: int) -> None:
    (first, *later), anomalies = run(USE, str(left))
    assert first == ["success", ""]
    ((reason, detail),) = later
    assert reason == "shortage"
    assert "EMFILE" in detail
    assert "RLIMIT_NOFILE is 256" in detail
    assert anomalies["descriptor_shortage"] >= 1


@linux
def test_the_reserve_is_full_again_after_a_contact() -> None:
    assert run(USE_TWICE) == [["success", ""]] * 2


@linux
def test_a_rank_that_cannot_open_says_so() -> None:
    codes = run(OPEN)
    assert set(codes) == {0, 3, 4}  # a code below zero is an abort


@pytest.mark.anyio
@pytest.mark.parametrize("hold_s", [0.6, 2.0])
async def test_an_engine_that_holds_the_event_loop_is_named_with_how_long(hold_s: float) -> None:
    async with deploy() as deployment, deployment.prefill[0].send(1) as sender:
        deployment.prefill[0]._anomalies._interval_s = 0.0  # a busy machine may hold the loop as well, just before
        with printed() as lines:

            def said() -> list[dict[str, Any]]:
                found = [line for line in lines.named("event_loop_starved") if line["instance"] == "prefill"]
                return [line for line in found if line["held_s"] >= 0.9 * held_s]

            began = time.monotonic()
            await anyio.sleep(random.uniform(1, 2) * PULSE_S)  # at least one beat has been seen since  # noqa: S311
            held_since = time.monotonic()
            time.sleep(hold_s)  # noqa: ASYNC251 - the engine
            held_s = time.monotonic() - held_since
            await until(said)
            within_s = time.monotonic() - began
            line = said()[0]
        sender.abort()
        assert line["held_s"] <= within_s
        assert line["level"] == "warning"
        assert "at least" not in line["detail"]


@pytest.mark.anyio
async def test_a_post_is_not_charged_with_the_time_that_the_engine_held_the_loop() -> None:
    async with deploy() as deployment:
        (faults,), (prefill,) = deployment.faults, deployment.prefill
        request = deployment.request(1, 8)
        faults.hold()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(request.hand_over)
            await until(lambda: prefill.statistics().posted)
            began = time.monotonic()
            time.sleep(1.0)  # noqa: ASYNC251 - the engine
            held_s = time.monotonic() - began
            faults.release()
            await until(lambda: not prefill.statistics().posted)
            within_s = time.monotonic() - began
        assert prefill.statistics().times.stages[Stage.SUBMIT].maximum <= within_s - held_s + 2 * PULSE_S


@pytest.mark.anyio
@pytest.mark.parametrize("hold_s", [0.6, 2.0, 5.0])
@pytest.mark.parametrize("phase_s", [0.0, 0.01, 0.05, 0.09, 0.0999])
async def test_a_hold_is_measured_wherever_it_begins(hold_s: float, phase_s: float) -> None:
    clock = [0.0]
    said: list[float] = []
    pulse = Pulse(lambda: clock[0], lambda: False, said.append)
    pulse.start()
    clock[0] = phase_s + hold_s
    assert pulse.late_s == pytest.approx(hold_s, abs=1.01 * PULSE_S)
    await until(lambda: said)
    assert said == [pytest.approx(hold_s, rel=0.1)]
    assert not pulse.is_running
    before = pulse.late_s
    clock[0] = 90.0
    assert pulse.late_s == before


@pytest.mark.anyio
async def test_the_pulse_of_a_rank_beats_only_while_a_transfer_is_open() -> None:
    async with deploy() as deployment:
        (prefill,), (decode,) = deployment.prefill, deployment.decode
        request = deployment.request(1, 8)
        assert not prefill._pulse.is_running
        await request.hand_over()
        await until(lambda: not (prefill._pulse.is_running or decode._pulse.is_running))

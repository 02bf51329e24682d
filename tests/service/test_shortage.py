"""A process that runs out of descriptors, or whose engine holds the event loop: it blames itself, and lives on."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import pytest

from kvflow.aio.pulse import Pulse
from tests.support.instances import deploy
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
        async with rank.receive(room, prefill=where, tokens=(0, 4), pages={"kv": [0]}) as receiver:
            await receiver.done()
        return "success", ""
    except kvflow.TransferFailed as error:
        return error.reason.value, error.detail

"""

USE = """
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
        ended.append(await receive(decode, 2, 7996))
        ended.append(await receive(decode, 3, 7995))
        for fd in taken:
            os.close(fd)
        print(json.dumps([ended, decode.statistics().anomalies]))

anyio.run(main)
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
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@linux
@pytest.mark.parametrize("left", [0, 2])
def test_first_contact_has_its_descriptors_and_later_ones_name_the_limit(left: int) -> None:
    (first, *later), anomalies = run(USE, str(left))
    assert first == ["success", ""]
    reason, detail = later[-1]
    assert reason == "shortage"
    assert "EMFILE" in detail
    assert "RLIMIT_NOFILE is 256" in detail
    assert anomalies["descriptor_shortage"] >= 1


@linux
def test_a_rank_that_cannot_open_says_so() -> None:
    codes = run(OPEN)
    assert set(codes) == {0, 3, 4}  # a code below zero is an abort


@pytest.mark.anyio
async def test_an_engine_that_holds_the_event_loop_is_named() -> None:
    async with deploy() as deployment:
        request = deployment.request(1, 8)
        await request.hand_over()

        def is_said() -> bool:
            time.sleep(0.6)  # the engine
            return any("event_loop_starved" in statistics.anomalies for statistics in deployment.statistics())

        await until(is_said)


@pytest.mark.anyio
async def test_time_that_the_engine_takes_is_not_the_transports() -> None:
    clock = [0.0]
    pulse = Pulse(lambda: clock[0])
    pulse.start()
    clock[0] = 2.0
    assert 1.9 <= pulse.held_s < 2.0
    pulse.stop()
    clock[0] = 9.0
    assert pulse.held_s < 2.0

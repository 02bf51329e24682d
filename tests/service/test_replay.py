"""Replays of recordings of real ranks, which must make the same decisions."""

import logging
import os
import signal
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec
import numpy as np
import pytest

import kvflow
from benchmarks.processes import ChildProcess
from kvflow.bounds import Bounds
from kvflow.cli.main import main
from kvflow.config import Timeouts
from kvflow.observe.logs import configure_logging
from kvflow.state.recorder import LENGTH_BYTES
from kvflow.state.replay import Replay, read_recording, replay
from tests.support.failures import catch
from tests.support.instances import UNTOUCHED, Deployment, decode_config, deploy, make_pool
from tests.support.pools import Pool
from tests.support.prefill_client import hand_over, prefill_process, receive
from tests.support.prefill_process import FILL
from tests.support.waiting import until

SLOTS = {"staging_slot_bytes": 1024, "staging_bytes": 8 * 1024}
"""Slots of 1024 bytes; a page takes 768."""

PATIENT_LEASE = Timeouts(lease_s=1.0, drain_s=0.3)


def frames(data: bytes) -> list[bytes]:
    """Return the complete frames of a recording."""
    found, at = [], 0
    while at + LENGTH_BYTES <= len(data):
        end = at + LENGTH_BYTES + int.from_bytes(data[at : at + LENGTH_BYTES], "little")
        if end > len(data):
            break
        found.append(data[at:end])
        at = end
    return found


def kinds_of(path: Path) -> Counter[str]:
    """Count the events of a recording by kind."""
    return Counter(msgspec.msgpack.decode(frame[LENGTH_BYTES:])[1] for frame in frames(path.read_bytes())[1:])


def replayed(path: Path) -> Replay:
    """Replay a recording, and check that it gives the same effects for every event."""
    with path.open("rb") as file:
        result = replay(read_recording(file))
    assert result.difference is None
    assert result.num_events == kinds_of(path).total()
    return result


@pytest.mark.slow
@pytest.mark.anyio
async def test_two_processes_with_packing_cancels_and_a_death(tmp_path: Path) -> None:
    killed, follower, own = (tmp_path / name for name in ("killed", "follower", "decode"))
    pool = make_pool()
    settings: dict[str, Any] = {"packing": "always", **SLOTS}
    async with kvflow.Registry() as registry:
        config = decode_config(
            registry.endpoint, backend="nixl", timeouts=PATIENT_LEASE, record=own, staging_slots=2, **SLOTS
        )
        async with kvflow.DecodeRank(config, pool.layout) as decode:
            async with prefill_process(registry.endpoint, 0, record=str(killed), **settings) as first:
                for room in range(1, 25):
                    await hand_over(decode, first, room)
                await give_up_on_decode(decode, first, 30)
                await give_up_on_prefill(decode, first, 31)
                await die(decode, pool, first, 32)
            async with prefill_process(registry.endpoint, 0, record=str(follower), **settings) as second:
                await until(lambda: not decode.quarantined())
                await hand_over(decode, second, 40)
    assert replayed(own).role == "decode"
    kinds = kinds_of(own)
    assert kinds["Scattered"] >= 50
    assert (kinds["ReceiveAborted"], kinds["ReceiveOpened"]) == (1, 28)
    assert kinds["TransportClosed"] == 1
    assert replayed(follower).role == "prefill"
    assert kinds_of(follower)["TransportClosed"] == 1
    assert replayed(killed).role == "prefill"
    assert kinds_of(killed)["SendOpened"] == 27  # the last one just before the kill
    assert kinds_of(killed)["TransportClosed"] == 0


async def give_up_on_decode(decode: kvflow.DecodeRank, prefill: ChildProcess, room: int) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(receive, decode, room)
        await prefill.tell("send", room=room)
        await prefill.expect("half", room)
        tasks.cancel_scope.cancel()
    await prefill.tell("finish")
    await prefill.expect("over", room)


async def give_up_on_prefill(decode: kvflow.DecodeRank, prefill: ChildProcess, room: int) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(catch, partial(receive, decode, room))
        await prefill.tell("send", room=room)
        await prefill.expect("half", room)
        await prefill.tell("abort")
    await prefill.expect("over", room)


async def die(decode: kvflow.DecodeRank, pool: Pool, prefill: ChildProcess, room: int) -> None:
    """Kill the prefill process when a part of the room has arrived."""
    for buffer in pool.buffers:
        buffer[:] = UNTOUCHED
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(catch, partial(receive, decode, room))
        await prefill.tell("send", room=room)
        await prefill.expect("half", room)
        await until(lambda: any((buffer == FILL).any() for buffer in pool.buffers))
        prefill.send_signal(signal.SIGKILL)


# Ranks of one process ------------------------------------------------------------------------------------------------


METADATA: Final = b"the first token"
CAPABILITY: Final = "a capability"


async def record_both(folder: Path) -> None:
    """Record packed pieces, aborts of both sides, a failed write, and closing, to files that others may read."""
    for role in ("prefill", "decode"):
        (folder / role).touch(0o644)
    async with deploy(
        limits=Bounds(bytes_per_post=1),
        sending={"packing": "always", "record": folder / "prefill", **SLOTS},
        receiving={"staging_slots": 2, "record": folder / "decode", **SLOTS},
    ) as deployment:
        for room in (1, 2, 3):
            request = deployment.request(room, 10)
            await request.hand_over(chunk=4)
            request.assert_arrived()
        for room, side in ((4, "prefill"), (5, "decode")):
            await leave_in_the_middle(deployment, room, side)
        deployment.faults[0].plan.append("fail")
        request = deployment.request(6, 10)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(catch, request.send)
            tasks.start_soon(catch, request.receive)
        await hand_over_secrets(deployment, 7)
        await deployment.settle()


async def hand_over_secrets(deployment: Deployment, room: int) -> None:
    request, decode = deployment.request(room, 10), deployment.decode[0]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(request.send, metadata=METADATA))
        receiver = decode.receive(
            room, prefill="prefill", tokens=(0, 10), pages={"kv": request.dst_tables[0]}, capability=CAPABILITY
        )
        async with receiver:
            assert (await receiver.done()).metadata == METADATA


async def leave_in_the_middle(deployment: Deployment, room: int, side: str) -> None:
    """Cancel one side with a post in flight."""
    request, (faults,) = deployment.request(room, 10), deployment.faults
    scopes = {"prefill": anyio.CancelScope(), "decode": anyio.CancelScope()}
    faults.hold()
    num_posted = len(faults.posted)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_within, scopes["prefill"], request.send)
        tasks.start_soon(run_within, scopes["decode"], request.receive)
        await until(lambda: len(faults.posted) > num_posted)
        scopes[side].cancel()
        await anyio.wait_all_tasks_blocked()
        faults.release()


async def run_within(scope: anyio.CancelScope, act: Callable[[], Awaitable[object]]) -> None:
    with scope, suppress(kvflow.TransferFailed):
        await act()


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the recordings `prefill` and `decode`."""
    folder = tmp_path_factory.mktemp("recordings")
    anyio.run(record_both, folder)
    return folder


EXPECTED = {
    "prefill": {"SendOpened": 7, "SendAborted": 1, "TransportClosed": 1},
    "decode": {"ReceiveOpened": 7, "ReceiveAborted": 1, "TransportClosed": 1},
}


@pytest.mark.parametrize("role", EXPECTED)
def test_a_recording_is_decided_in_the_same_way_again(recordings: Path, role: str) -> None:
    result = replayed(recordings / role)
    assert (result.role, result.me.rank.instance) == (role, role)
    kinds = kinds_of(recordings / role)
    assert {kind: kinds[kind] for kind in EXPECTED[role]} == EXPECTED[role]
    assert kinds["PostEnded" if role == "prefill" else "Scattered"] >= 9


@pytest.mark.parametrize("role", EXPECTED)
def test_a_recording_has_no_secrets_and_only_its_owner_can_read_it(recordings: Path, role: str) -> None:
    data = (recordings / role).read_bytes()
    assert METADATA not in data
    assert CAPABILITY.encode() not in data
    assert stat.S_IMODE((recordings / role).stat().st_mode) == 0o600


@pytest.mark.parametrize("role", EXPECTED)
def test_a_recording_that_is_cut_off_is_replayed_as_far_as_it_goes(recordings: Path, role: str) -> None:
    data = (recordings / role).read_bytes()
    counts = []
    for cut in np.linspace(len(frames(data)[0]), len(data) - 1, 7).astype(int):
        result = replay(read_recording(BytesIO(data[:cut])))
        assert result.difference is None
        assert result.num_events == len(frames(data[:cut])) - 1
        counts.append(result.num_events)
    assert counts[0] == 0
    assert counts[-1] == len(frames(data)) - 2


RECORD: Final = "import sys; from tests.service.test_replay import record_with_logs; record_with_logs(sys.argv[1])"


def record_with_logs(folder: str) -> None:
    configure_logging("json", logging.DEBUG, sys.stdout)
    anyio.run(record_both, Path(folder))


def test_addresses_with_bit_63_are_whole_in_recordings_and_logs(tmp_path: Path) -> None:
    environment = os.environ | {"FAKE_DEVICE": "high"}
    command = [sys.executable, "-c", RECORD, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=100, text=True)
    for role in EXPECTED:
        replayed(tmp_path / role)
        whole = list(
            numbers_in(msgspec.msgpack.decode(frame[LENGTH_BYTES:]) for frame in frames((tmp_path / role).read_bytes()))
        )
        assert any(number >= 2**63 for number in whole)
        assert all(number >= -1 for number in whole)
    logged = list(numbers_in(msgspec.json.decode(line) for line in done.stdout.splitlines()))
    assert min(logged) >= -1
    assert "-0x" not in done.stdout


def numbers_in(value: object) -> Iterator[int]:
    """Yield the integers in decoded messages."""
    if isinstance(value, int):
        yield value
    elif isinstance(value, Mapping):
        yield from numbers_in(value.values())
    elif isinstance(value, Iterable) and not isinstance(value, str | bytes):
        for one in value:
            yield from numbers_in(one)


def rewritten(path: Path, folder: Path, number: int, entry: dict[int, object]) -> Path:
    """Return a copy of a recording with changed fields in one event's entry."""
    every = frames(path.read_bytes())
    fields = msgspec.msgpack.decode(every[number + 1][LENGTH_BYTES:])
    for at, value in entry.items():
        fields[at] = value
    data = msgspec.msgpack.encode(fields)
    every[number + 1] = len(data).to_bytes(LENGTH_BYTES, "little") + data
    copy = folder / "rewritten"
    copy.write_bytes(b"".join(every))
    return copy


def test_command_says_that_code_and_recording_agree(recordings: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["incident", str(recordings / "decode")]) == 0
    head, *_, found = capsys.readouterr().out.splitlines()
    result = replayed(recordings / "decode")
    assert head.startswith(f"decode rank decode/0@{result.me.incarnation:016x}: {result.num_events} events of ")
    assert found.startswith(f"replay of decode/0: {result.num_events} events, {result.num_effects} effects: ")
    assert found.endswith("code and recording agree")


def test_command_shows_the_first_difference(
    recordings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = rewritten(recordings / "prefill", tmp_path, 4, {3: [["DisconnectTransport", {"peer": 1}]]})
    assert main(["incident", str(path)]) == 1
    text = capsys.readouterr().out
    kind = msgspec.msgpack.decode(frames(path.read_bytes())[5][LENGTH_BYTES:])[1]
    head, difference, *lists = text[text.index("replay of ") :].splitlines()
    assert ": 5 events, " in head
    assert head.endswith("code and recording differ")
    assert difference.startswith("  event 4, at ")
    assert f" s: {kind}(" in difference
    assert lists[:2] == ["  recorded:", "    ('DisconnectTransport', {'peer': 1})"]
    assert lists[2] == "  replayed:"
    assert len(lists) > 3


def test_command_shows_an_error_that_was_recorded(
    recordings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = rewritten(recordings / "decode", tmp_path, 0, {3: [], 4: "CapacityExceeded"})
    assert main(["incident", str(path)]) == 1
    assert "  recorded:\n    CapacityExceeded\n  replayed:\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("number", "entry", "said"),
    [(1, {1: "Nonsense"}, "unknown kind"), (1, {0: "noon"}, "damaged"), (1, {2: [1, 2, 3]}, "damaged")],
    ids=["kind", "entry", "event"],
)
def test_command_refuses_a_damaged_recording(
    recordings: Path,
    tmp_path: Path,
    number: int,
    entry: dict[int, object],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["incident", str(rewritten(recordings / "decode", tmp_path, number, entry))]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert f"written_by='{kvflow.__version__}'" in told


@pytest.mark.parametrize("content", [None, b"", b"no recording at all", b"\x01\0\0\0\xc1"])
def test_command_refuses_what_is_no_recording(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    assert main(["incident", str(path)]) == 2
    assert "recording" in capsys.readouterr().err

"""Five staged incidents, each told by `kvflow incident` from the files of both sides."""

import json
import re
import signal
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread
import msgspec
import pytest

import kvflow
from kvflow import incidents
from kvflow.admin.client import ask, find_sockets
from kvflow.admin.incident_files import ENDING
from kvflow.admin.messages import IncidentAnswer, IncidentRequest
from kvflow.cli import main as cli
from kvflow.cli.incident import command
from kvflow.cli.incident.sides import read_sides
from kvflow.cli.main import main
from kvflow.config import Timeouts
from kvflow.state import events as ev
from kvflow.state import recorder
from kvflow.state.part_replay import room_of
from kvflow.state.recorder import LENGTH_BYTES, Entry, encode, frame
from kvflow.state.replay import read_recording
from kvflow.wire.messages import PeerId, RankId
from kvflow.wire.ticket import Ticket
from simulation.scenario import play
from simulation.script import ScenarioError
from tests.incidents.test_black_box import corrupt, settings_in
from tests.service.test_replay import frames
from tests.support.failures import catch
from tests.support.instances import decode_config, deploy, make_pool
from tests.support.ports import unused_port
from tests.support.prefill_client import prefill_process, receive
from tests.support.prefill_process import FILL
from tests.support.waiting import until

Capture = pytest.CaptureFixture[str]
Stage = Callable[[Path], Awaitable[None]]

AGREE = "code and recording agree"


def told(directory: Path, capsys: Capture, *options: str) -> str:
    """Return what the command says about all files in a directory."""
    capsys.readouterr()
    assert main(["incident", *map(str, sorted(directory.glob(f"*{ENDING}"))), *options]) == 0
    return capsys.readouterr().out


async def ask_now(directory: Path) -> None:
    """Have all ranks with sockets in a directory write files."""
    for path in find_sockets(directory):
        answer = (await anyio.to_thread.run_sync(ask, path, IncidentRequest(), 30.0)).parse(IncidentAnswer)
        assert isinstance(answer, IncidentAnswer)
        await until(Path(answer.path).exists)


def for_both(directory: Path, **settings: object) -> dict[str, Any]:
    return {side: {"black_box": directory, **settings} for side in ("sending", "receiving")}


async def stage_corruption(directory: Path) -> None:
    async with deploy(digest_every=1, **settings_in(directory)) as deployment:
        await deployment.request(2, 8).hand_over()
        await corrupt(deployment)


async def stage_killed_peer(directory: Path) -> None:
    """Kill a prefill process that has sent a part; its own recording is that of `record`."""
    timeouts = Timeouts(lease_s=1.0, drain_s=0.3)
    pool = make_pool()
    async with kvflow.Registry() as registry:
        config = decode_config(registry.endpoint, backend="nixl", timeouts=timeouts, black_box=directory)
        async with (
            kvflow.DecodeRank(config, pool.layout) as decode,
            prefill_process(registry.endpoint, 0, record=str(directory / f"p{ENDING}")) as prefill,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(catch, partial(receive, decode, 1))
            await prefill.tell("send", room=1)
            await prefill.expect("half", 1)
            await until(lambda: any((buffer == FILL).any() for buffer in pool.buffers))
            prefill.send_signal(signal.SIGKILL)
            await until(lambda: not decode.statistics().rooms and not decode.quarantined())  # the proof takes a while


async def stage_partition(directory: Path) -> None:
    """Let no message of decode through while a write hangs: decode gives up, and prefill does not know."""
    async with deploy(**for_both(directory, admin=directory)) as deployment:
        (faults,), (decode,), (prefill,) = deployment.faults, deployment.decode, deployment.prefill
        await deployment.request(2, 8).hand_over()
        faults.hold()
        request = deployment.request(1, 8)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(catch, request.send)
            async with request.receiver(timeout_s=2.0) as receiver:
                await until(lambda: len(faults.posted) == 2)
                connections = decode._connections
                connections.send, before = lambda *_: None, connections.send  # type: ignore[method-assign]
                await catch(receiver.done)
            await until(partial(is_later, prefill, prefill._now() + 1.0))
            async with prefill.send(3) as sender:
                sender.abort()
            await ask_now(directory)
            connections.send = before  # type: ignore[method-assign]
            faults.release()


def is_later(rank: kvflow.PrefillRank, at: float) -> bool:
    return rank._now() > at


async def stage_quarantine(directory: Path) -> None:
    """Abort a room whose write hangs."""
    async with deploy(**for_both(directory)) as deployment:
        (faults,), (decode,), (prefill,) = deployment.faults, deployment.decode, deployment.prefill
        faults.hold()
        request = deployment.request(1, 8)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(catch, request.send)
            async with request.receiver() as receiver:
                await until(lambda: faults.posted)
                receiver.abort()
            await until(lambda: decode.quarantined() and prefill.quarantined())
            faults.release()


async def stage_crossing(directory: Path) -> None:
    """Let a cancel be under way together with its grant while prefill opens the room."""
    async with deploy(**for_both(directory, admin=directory)) as deployment:
        await deployment.request(2, 8).hand_over()
        request = deployment.request(1, 8)
        receiver = request.receiver()
        receiver._open_room()
        receiver.abort()
        await catch(request.send)
        await receiver.until_safe()
        await ask_now(directory)


async def stage_open_rooms(directory: Path) -> None:
    """Ask for files while rooms wait for one side or the other, for tokens, and for a write."""
    async with deploy(**for_both(directory, admin=directory)) as deployment:
        (faults,), (prefill,) = deployment.faults, deployment.prefill
        await deployment.request(2, 8).hand_over()
        requests = {room: deployment.request(room, 8) for room in (1, 3, 4, 5)}
        senders = {room: prefill.send(room) for room in (1, 4, 5)}
        receivers = {room: requests[room].receiver() for room in (3, 4, 5)}
        for opened in (*senders.values(), *receivers.values()):
            opened._open_room()
        await senders[1].finish((0, 8), requests[1].src_pages(0, (0, 8)))
        await senders[4].chunk((0, 4), requests[4].src_pages(0, (0, 4)))
        box = deployment.decode[0]._incidents._box
        assert box is not None
        await until(lambda: b"".join(box.kept().batches).count(b"NoticeDelivered") == 2)
        await until(lambda: not prefill.statistics().posted)
        faults.hold()
        await senders[5].finish((0, 8), requests[5].src_pages(0, (0, 8)))
        await until(lambda: prefill.statistics().posted and prefill.statistics().waiting_grants == 1)
        await ask_now(directory)
        for receiver in receivers.values():
            receiver.abort()
        senders[1].abort()
        faults.release()


WRONG: Final[dict[Stage, tuple[str, ...]]] = {
    stage_corruption: (
        r"first: .* decode/0: what has arrived is not what was sent: prefill/0: tokens 0:8 of component kv",
        r"ended: decode/0: failed, safe \(corrupt\)",
    ),
    stage_killed_peer: (
        r"first: .* decode/0: the (connection to|process of) prefill/0@\w+ (was lost|has ended)",
        r"still open: prefill/0: ",
        r"the process of prefill/0|probe_finished",
    ),
    stage_partition: (
        r"lost: (grant|cancel) from decode/0 at .* did not arrive at prefill/0",
        r"under way: the write of prefill/0 to decode/0 from",
        r"first: .* decode/0: deadline: ",
        r"ended: prefill/0: failed, quarantined \(deadline\)",
        r"missing proof: decode/0: prefill/0@\w+ must send Drained",
    ),
    stage_quarantine: (
        r"first: .* decode/0: the engine gave the room up",
        r"missing proof: decode/0: prefill/0@\w+ must send Drained",
        r"missing proof: prefill/0: the transport of this rank must report the end of its writes",
    ),
    stage_crossing: (
        r"first: .* decode/0: the engine gave the room up",
        r"ended: prefill/0: failed, safe \(aborted\)",
        r"prefill/0  message_arrived room=1 .* message=cancel",
    ),
}
"""What is said of each incident."""


class Directories:
    """The files of each incident, which is staged when it is needed first."""

    def __init__(self, make: pytest.TempPathFactory) -> None:
        self._make = make
        self._found: dict[Stage, Path] = {}

    def __getitem__(self, stage: Stage) -> Path:
        if stage not in self._found:
            directory = self._make.mktemp("incident")
            anyio.run(stage, directory)
            self._found[stage] = directory
        return self._found[stage]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    return Directories(tmp_path_factory)


@pytest.mark.host_memory
@pytest.mark.parametrize("stage", WRONG)
def test_an_incident_is_told_and_replayed(stage: Stage, directories: Directories, capsys: Capture) -> None:
    text = told(directories[stage], capsys, "--room", "1")
    for pattern in WRONG[stage]:
        assert re.search(pattern, text), (pattern, text)
    assert len(re.findall(AGREE, text)) == 2
    assert re.search(r"clock of decode/0: [\d.]+ s (behind|ahead of) prefill/0, give or take [\d.]+ ms", text)
    times = [float(time) for time in re.findall(r"^ +(-?\d+\.\d{6})  ", text, re.MULTILINE)]
    assert len(times) > 5
    assert times == sorted(times)
    assert times[0] == 0.0


REASONS: Final[dict[Stage, tuple[str, str, str]]] = {
    stage_killed_peer: ("failed", "safe", "peer_lost"),
    stage_partition: ("failed", "quarantined", "deadline"),
    stage_quarantine: ("aborted", "safe", "aborted"),
    stage_crossing: ("aborted", "safe", "aborted"),
}
"""How the room ends on decode, in the scenario as in the recording."""


@pytest.mark.parametrize("stage", REASONS)
def test_an_incident_becomes_a_scenario_that_fails_alike(
    stage: Stage, directories: Directories, tmp_path: Path, capsys: Capture
) -> None:
    told(directories[stage], capsys, "--room", "1", "--seed", str(tmp_path / "seed"))
    with pytest.raises(ScenarioError) as failed:
        play((tmp_path / "seed").read_text())
    assert failed.value.text == "expect D 1: success, safe"
    assert failed.value.values["found"] == REASONS[stage]


@pytest.mark.host_memory
def test_a_scenario_says_what_it_does_not_play(directories: Directories, tmp_path: Path, capsys: Capture) -> None:
    told(directories[stage_corruption], capsys, "--seed", str(tmp_path / "seed"))
    scenario = (tmp_path / "seed").read_text()
    assert "# Not played: bytes were wrong" in scenario
    play(scenario)


def test_one_side_is_told_and_makes_no_scenario(directories: Directories, tmp_path: Path, capsys: Capture) -> None:
    (path,) = directories[stage_quarantine].glob("decode-*")
    assert main(["incident", str(path)]) == 0
    assert "first: " in capsys.readouterr().out
    assert main(["incident", str(path), "--seed", str(tmp_path / "seed")]) == 2
    assert "a scenario needs the files of one prefill and one decode rank" in capsys.readouterr().err


def test_a_ticket_of_a_process_that_has_ended_is_told(tmp_path: Path, capsys: Capture) -> None:
    path, issuer = tmp_path / f"d{ENDING}", PeerId(RankId("prefill", 0), 7)
    layout, port = make_pool().layout, unused_port()
    ticket = Ticket(1, f"tcp://127.0.0.1:{port}", issuer, layout.fingerprint, own_address=True).as_dict()

    async def follow_ticket() -> None:
        async with kvflow.DecodeRank(decode_config(None, record=str(path)), layout) as decode:
            await catch(partial(receive, decode, 1, ticket))

    anyio.run(follow_ticket)
    assert main(["incident", str(path)]) == 0
    text = capsys.readouterr().out
    assert re.search(rf"first: .* decode/0: tcp://127.0.0.1:{port} refuses connections", text)
    assert AGREE in text


def test_the_time_line_can_be_looked_at(directories: Directories, tmp_path: Path, capsys: Capture) -> None:
    pytest.importorskip("matplotlib")
    trace, picture = tmp_path / "trace.json", tmp_path / "picture.png"
    told(directories[stage_partition], capsys, "--room", "1", "--perfetto", str(trace), "--png", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")
    items = json.loads(trace.read_text())["traceEvents"]
    assert [item["args"]["name"].partition("@")[0] for item in items if item["ph"] == "M"] == [
        "prefill prefill/0",
        "decode decode/0",
    ]
    sent, heard = ({item["id"]: item for item in items if item["ph"] == phase} for phase in "sf")
    assert sent.keys() == heard.keys()
    assert {"grant", "failed"} <= {item["name"] for item in sent.values()}
    assert all(sent[number]["ts"] <= heard[number]["ts"] for number in sent)
    assert [item["name"] for item in items if item["ph"] == "b"] == ["room 1", "write 0", "room 1"]
    assert any("deadline: not complete within 2.0 s" in item["name"] for item in items)


# While rooms are open ----------------------------------------------------------------------------------------------


def first_files(directory: Path) -> list[str]:
    """Return the files that were asked for; closing ranks may write others."""
    return [str(path) for path in sorted(directory.glob(f"*-0001{ENDING}"))]


def test_open_rooms_are_told_and_what_they_wait_for(directories: Directories, capsys: Capture) -> None:
    assert main(["incident", *first_files(directories[stage_open_rooms])]) == 0
    rooms = dict(re.findall(r"^room (\d+)\n(.*?)\n\n", capsys.readouterr().out, re.MULTILINE | re.DOTALL))
    assert set(rooms) == {"1", "3", "4", "5"}
    assert (
        "still open: prefill/0: no decode rank has asked for it\n  ended: decode/0: nothing is recorded" in rooms["1"]
    )
    assert re.search(r"prefill/0: decode has asked for it at \S+, and prefill's engine has not opened it", rooms["3"])
    assert re.search(r"decode/0: nothing has arrived from prefill rank 0, which was asked at \d", rooms["3"])
    assert re.search(
        r"still open: prefill/0: prefill's engine has offered tokens up to 4, at \S+, and none", rooms["4"]
    )
    assert re.search(r"still open: decode/0: nothing has arrived since ", rooms["4"])
    assert re.search(r"still open: prefill/0: writes that have not ended: 1, the last one from ", rooms["5"])
    assert not any("first:" in text for text in rooms.values())


def test_more_open_rooms_than_are_shown_are_listed(
    directories: Directories, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "MAX_ROOMS", 2)
    monkeypatch.setattr(command, "MAX_LISTED", 1)
    assert main(["incident", *first_files(directories[stage_open_rooms])]) == 0
    text = capsys.readouterr().out
    assert len(re.findall(r"^room ", text, re.MULTILINE)) == 2
    assert re.search(r"^further rooms, shown with --room: \d, and 1 more$", text, re.MULTILINE)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_nothing_is_said_of_what_happened_before_a_file(
    role: str, directories: Directories, tmp_path: Path, capsys: Capture
) -> None:
    """Begin the file when room 3 is asked for, on decode by a repetition: each side may have done more before."""
    (path,) = directories[stage_open_rooms].glob(f"{role}-*-0001{ENDING}")
    recording = read_recording(BytesIO(path.read_bytes()))
    _, *entries = frames(path.read_bytes())
    first = next(number for number, moment in enumerate(recording.moments) if room_of(moment.event) == 3)
    if role == "decode":
        opened = msgspec.msgpack.decode(entries[first][LENGTH_BYTES:], type=Entry)
        repeated = msgspec.structs.replace(opened, kind="TimePassed", event=msgspec.Raw(encode(ev.TimePassed())))
        entries[first] = frame(encode(repeated))
    header = msgspec.structs.replace(recording.header, first=first, lasting=None)
    (tmp_path / path.name).write_bytes(b"".join([frame(encode(header)), *entries[first:]]))
    assert f"still open: {role}/0: its beginning is missing; the last event was at " in told(tmp_path, capsys)


def test_a_room_that_is_in_no_file_is_an_error_that_names_those_that_are(
    directories: Directories, capsys: Capture
) -> None:
    assert main(["incident", *first_files(directories[stage_open_rooms]), "--room", "1", "--room", "77"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert re.fullmatch(r"kvflow incident: the files do not have this room \(room='77', rooms='2, .*\)\n", said.err)


def test_a_file_lasts_until_it_was_asked_for(directories: Directories) -> None:
    for side in read_sides(list(map(Path, first_files(directories[stage_open_rooms])))):
        assert side.span[1] >= side.causes[-1].at > side.moments[0].now


# Without the beginning ---------------------------------------------------------------------------------------------


async def fill_boxes(directory: Path, **packing: object) -> None:
    """Hand over rooms, the last of which fails, until the boxes have dropped their first events."""
    async with deploy(digest_every=1, **for_both(directory, **packing)) as deployment:
        for room in range(10, 40):
            request = deployment.request(room, 10)
            await request.hand_over(chunk=4)
            deployment.give_back(request)
        await corrupt(deployment)


def fill_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with files of ranks whose boxes hold only their last events."""
    monkeypatch.setattr(recorder, "BATCH", 16)
    monkeypatch.setattr(incidents, "BlackBox", lambda write: recorder.BlackBox(write, max_bytes=25_000))
    anyio.run(fill_boxes, tmp_path)
    for role in ("prefill", "decode"):
        for path in sorted(tmp_path.glob(f"{role}-*"))[:-1]:
            path.unlink()
    return tmp_path


@pytest.mark.host_memory
def test_rooms_opened_within_a_recording_are_replayed(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = fill_later(tmp_path, monkeypatch)
    text = told(later, capsys, "--room", "1")
    replayed = re.findall(r"replay of \w+/0: in part, (\d+) rooms that were opened meanwhile.*: code and (.*)", text)
    assert [found for _, found in replayed] == ["recording agree"] * 2
    assert all(int(count) > 5 for count, _ in replayed)
    assert "what has arrived is not what was sent" in text


@pytest.mark.host_memory
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_difference_within_a_part_is_found(
    role: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = fill_later(tmp_path, monkeypatch)
    (path,) = later.glob(f"{role}-*")
    found = frames(path.read_bytes())
    reports = [number for number, data in enumerate(found) if b"Report" in data and b"success" in data]
    changed = found[reports[-1]].replace(b"success", b"aborted")
    path.write_bytes(b"".join([*found[: reports[-1]], changed, *found[reports[-1] + 1 :]]))
    assert main(["incident", str(path)]) == 1
    text = capsys.readouterr().out
    assert "code and recording differ" in text
    assert re.search(r"recorded:\n.*aborted", text)
    assert "the reason may be a room that was opened before" in text


@pytest.mark.host_memory
def test_a_part_without_its_connections_cannot_be_replayed(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = fill_later(tmp_path, monkeypatch)
    (path,) = later.glob("decode-*")
    recording = read_recording(BytesIO(path.read_bytes()))
    header = msgspec.structs.replace(recording.header, lasting=None)
    entries = frames(path.read_bytes())[1 + len(recording.lasting) :]
    path.write_bytes(b"".join([frame(encode(header)), *entries]))
    assert "replay of decode/0: not possible: the events that made the connections were" in told(later, capsys)


@pytest.mark.host_memory
def test_a_part_is_replayed_until_a_room_matters_that_was_left_out(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = fill_later(tmp_path, monkeypatch)
    (path,) = later.glob("prefill-*")
    recording = read_recording(BytesIO(path.read_bytes()))
    num_before = 1 + len(recording.lasting)
    chunks = [at for at, moment in enumerate(recording.moments) if isinstance(moment.event, ev.ChunkOffered)]
    all_frames = frames(path.read_bytes())
    twice = all_frames[num_before + chunks[-1]]  # as if the fresh core were a chunk ahead
    path.write_bytes(b"".join([*all_frames[: num_before + chunks[-1]], twice, *all_frames[num_before + chunks[-1] :]]))
    text = told(later, capsys)
    number = recording.header.first + chunks[-1] + 1
    assert f"up to event {number}, as it depends on one of these: code and recording agree" in text


def test_what_made_the_connections_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "LASTING_BYTES", 1_000)
    box = recorder.BlackBox(max_bytes=1_000)
    for number in range(2_000):
        box.recent.append((ev.ReplyLost(b"one"), float(number), [], ""))
        if len(box.recent) == box.batch:
            box.pack()
    assert box.kept().lasting is None


@pytest.mark.host_memory
def test_files_of_one_rank_are_joined(directories: Directories, tmp_path: Path, capsys: Capture) -> None:
    (path,) = directories[stage_corruption].glob("decode-*")
    recording = read_recording(BytesIO(path.read_bytes()))
    _, *entries = frames(path.read_bytes())
    later = msgspec.structs.replace(recording.header, first=5, lasting=None)
    (tmp_path / f"later{ENDING}").write_bytes(b"".join([frame(encode(later)), *entries[5:]]))
    assert "not possible" in told(tmp_path, capsys)
    (tmp_path / f"before{ENDING}").write_bytes(b"".join([frame(encode(recording.header)), *entries[:8]]))
    assert AGREE in told(tmp_path, capsys)
    (tmp_path / f"before{ENDING}").write_bytes(b"".join([frame(encode(recording.header)), *entries[:3]]))
    assert "not possible, as events between its files are missing" in told(tmp_path, capsys)


@pytest.mark.parametrize("options", [[], ["file", "--now"], ["/nowhere"]])
def test_what_cannot_be_read_is_an_error(options: list[str], capsys: Capture) -> None:
    assert main(["incident", *options]) == 2
    assert "kvflow incident: " in capsys.readouterr().err


@pytest.mark.anyio
async def test_files_are_written_now(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_ended_by_interrupt", lambda _: nullcontext())  # only the main thread may have handlers
    options = ["incident", "--now", "--socket", str(tmp_path), "--timeout", "30"]
    async with deploy(**for_both(tmp_path / "files", admin=tmp_path)):
        assert await anyio.to_thread.run_sync(main, options) == 0
        paths = capsys.readouterr().out.splitlines()
    assert sorted(map(Path, paths)) == sorted((tmp_path / "files").iterdir())
    assert len(paths) == 2

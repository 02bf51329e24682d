"""What ranks keep of their last events, and when they write it to files."""

import stat
from collections.abc import Iterator
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

import kvflow
from kvflow.admin.client import ask, find_sockets
from kvflow.admin.incident_files import ENDING, MAX_FILES, find_directory, save_incident
from kvflow.admin.messages import IncidentAnswer, IncidentRequest
from kvflow.state import events as ev
from kvflow.state.recorder import KEPT_S, BlackBox
from kvflow.state.replay import Recording, read_recording, replay
from tests.support.failures import catch
from tests.support.instances import Deployment, deploy
from tests.support.waiting import until

METADATA = b"the first token"


def files_in(directory: Path) -> list[Path]:
    return sorted(directory.glob(f"*{ENDING}"))


def read(path: Path) -> Recording:
    return read_recording(BytesIO(path.read_bytes()))


def only_file(directory: Path, role: str) -> Recording:
    (path,) = directory.glob(f"{role}-*{ENDING}")
    return read(path)


async def corrupt(deployment: Deployment, room: int = 1) -> None:
    """Hand a room over, a byte of which is wrong."""
    deployment.faults[0].plan.append("corrupt")
    request = deployment.request(room, 8)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(catch, partial(request.send, metadata=METADATA))
        tasks.start_soon(catch, request.receive)


def settings_in(directory: Path) -> dict[str, Any]:
    return {"sending": {"black_box": directory}, "receiving": {"black_box": str(directory)}}


@pytest.mark.host_memory
@pytest.mark.anyio
async def test_both_sides_write_a_failure_without_secrets_for_their_owner_alone(tmp_path: Path) -> None:
    async with deploy(digest_every=1, **settings_in(tmp_path / "new" / "place")) as deployment:
        await deployment.request(2, 8).hand_over()
        await corrupt(deployment)
    for role in ("prefill", "decode"):
        recording = only_file(tmp_path / "new" / "place", role)
        assert recording.header.version == kvflow.__version__
        (cause,) = recording.header.causes
        assert (cause.room, cause.text.partition(":")[0]) == (1, "corrupt")
        result = replay(recording)
        assert result.difference is None
        assert result.num_events == len(recording.moments) > 10
    for path in files_in(tmp_path / "new" / "place"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert METADATA not in path.read_bytes()


@pytest.mark.anyio
async def test_tokens_of_grants_are_replaced_alike_in_grants_and_notices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens: set[int] = set()
    pack = BlackBox.pack

    def watch(self: BlackBox) -> None:
        tokens.update(event.notice.token for event, *_ in self.recent if isinstance(event, ev.NoticeDelivered))
        pack(self)

    monkeypatch.setattr(BlackBox, "pack", watch)
    async with deploy(sending={"record": tmp_path / "p"}, receiving={"record": tmp_path / "d"}) as deployment:
        for room in (1, 2):
            await deployment.request(room, 8).hand_over()
    assert len(tokens) == 2
    for name in ("p", "d"):
        data = (tmp_path / name).read_bytes()
        assert not any(msgspec.msgpack.encode(token) in data for token in tokens)
        assert replay(read(tmp_path / name)).difference is None


@pytest.mark.anyio
async def test_an_engines_own_abort_is_no_incident(tmp_path: Path) -> None:
    async with deploy(**settings_in(tmp_path)) as deployment, deployment.request(1, 8).receiver() as receiver:
        receiver.abort()
    assert files_in(tmp_path) == []


@pytest.mark.anyio
async def test_somebody_can_ask_for_a_file(tmp_path: Path) -> None:
    directory = find_directory(tmp_path / "files")
    async with deploy(
        sending={"admin": tmp_path, "black_box": directory}, receiving={"admin": False, "black_box": False}
    ) as deployment:
        await deployment.request(1, 8).hand_over()
        (path,) = find_sockets(tmp_path)
        answer = (await anyio.to_thread.run_sync(ask, path, IncidentRequest(), 30.0)).parse(IncidentAnswer)
        assert isinstance(answer, IncidentAnswer)
        await until(lambda: Path(answer.path).exists())
        assert [cause.text for cause in read(Path(answer.path)).header.causes] == ["asked for"]
    assert len(files_in(directory)) == 1


@pytest.mark.anyio
async def test_a_rank_that_keeps_nothing_says_so(tmp_path: Path) -> None:
    async with deploy(sending={"admin": tmp_path, "black_box": False}, receiving={"admin": False}):
        (path,) = find_sockets(tmp_path)
        answer = (await anyio.to_thread.run_sync(ask, path, IncidentRequest(), 30.0)).parse(IncidentAnswer)
        assert "black_box is False" in str(answer)


@pytest.mark.anyio
async def test_a_file_that_cannot_be_written_is_reported_and_nothing_else_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    async with deploy(digest_every=1, **settings_in(tmp_path / "file")) as deployment:
        await corrupt(deployment)
        await deployment.request(2, 8).hand_over()
    assert "incident_unwritten" in caplog.text


def test_what_is_kept_is_bounded_in_bytes_and_seconds() -> None:
    box = BlackBox(max_bytes=10_000)
    for number in range(10_000):
        box.recent.append((ev.TimePassed(), number / 1e3, [], ""))
        if len(box.recent) == box.batch:
            box.pack()
    first, batches, lasting = box.kept()
    assert lasting == []
    assert sum(map(len, batches)) <= 10_000
    entries = [entry for batch in batches for entry in msgspec.msgpack.decode(batch)]
    assert first + len(entries) == 10_000
    assert entries[0][0] == first / 1e3
    box.recent.append((ev.TimePassed(), 1e3 + KEPT_S, [], ""))
    assert box.kept().first == 10_000


def test_old_files_are_removed(tmp_path: Path) -> None:
    for number in range(MAX_FILES + 3):
        save_incident(tmp_path / f"{number:02d}{ENDING}", [b"one ", b"%d" % number])
    names = [path.name for path in tmp_path.iterdir()]
    assert len(names) == MAX_FILES
    assert f"{MAX_FILES + 2:02d}{ENDING}" in names


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    def frames() -> Iterator[bytes]:
        yield b"part"
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        save_incident(tmp_path / f"one{ENDING}", frames())
    assert list(tmp_path.iterdir()) == []

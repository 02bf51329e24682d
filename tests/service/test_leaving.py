"""Rooms that are left early, recordings of ranks in service, and calls without an event loop."""

import io
import os
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

import kvflow
from kvflow.errors import ConfigError, FailureReason, LocalProtocolError, TransferFailed
from kvflow.state.replay import read_recording, replay
from kvflow.state.tables import Memory, Outcome
from tests.support.failures import catch, undisturbed
from tests.support.instances import decode_config, deploy, make_pool

pytestmark = pytest.mark.anyio

# Missing calls -----------------------------------------------------------------------------------------------------


async def test_a_room_that_is_left_without_finish_says_so() -> None:
    async with deploy() as deployment:
        request = deployment.request(1, 8)
        async with anyio.create_task_group() as tasks:
            failures: list[TransferFailed] = []

            async def receive() -> None:
                failures.append(await catch(request.receive))

            tasks.start_soon(receive)
            with pytest.raises(LocalProtocolError, match="the transfer was aborted"):
                async with deployment.prefill[0].send(1) as sender:
                    await sender.chunk((0, 8), request.src_pages(0, (0, 8)))
        assert failures[0].reason is FailureReason.ABORTED
        assert (sender.outcome, sender.memory) == (Outcome.ABORTED, Memory.SAFE)


async def test_a_room_that_is_given_up_on_purpose_is_left_without_an_error() -> None:
    async with deploy() as deployment:
        async with deployment.prefill[0].send(1) as sender:
            sender.abort()
        assert (sender.outcome, sender.memory) == (Outcome.ABORTED, Memory.SAFE)
        assert sender.failure is not None
        assert sender.failure.reason is FailureReason.ABORTED


# Recordings --------------------------------------------------------------------------------------------------------


async def test_what_both_ranks_have_recorded_can_be_replayed(tmp_path: Path) -> None:
    sending, receiving = ({"record": tmp_path / name} for name in ("prefill", "decode"))
    async with deploy(sending=sending, receiving=receiving) as deployment:
        request = deployment.request(1, 30)
        await request.hand_over(chunk=7)
        aborted = deployment.request(2, 8)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(catch, aborted.send)
            async with aborted.receiver():
                pass
        await undisturbed(deployment)
    for name in ("prefill", "decode"):
        replayed = replay(read_recording(io.BytesIO((tmp_path / name).read_bytes())))
        assert (replayed.role, replayed.difference) == (name, None)
        assert replayed.num_events > 10


async def test_recording_is_complete_while_the_rank_is_open(tmp_path: Path) -> None:
    """A recording must be readable after a kill of the process."""
    path = tmp_path / "decode"
    async with deploy(receiving={"record": path}) as deployment:
        await deployment.request(1, 8).hand_over()
        recorded = path.read_bytes()
    assert b"NoticeDelivered" in recorded
    assert replay(read_recording(io.BytesIO(recorded))).difference is None


async def test_rank_goes_on_when_its_recording_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    async with deploy(receiving={"record": path}) as deployment:
        os.close(reader)
        await deployment.request(1, 8).hand_over()
    assert "recording_ended" in caplog.text


async def test_recording_that_cannot_be_begun_is_refused() -> None:
    rank = kvflow.DecodeRank(decode_config("tcp://127.0.0.1:1", record="/dev/full"), make_pool().layout)
    with pytest.raises(ConfigError, match="cannot be written"):
        async with rank:
            raise AssertionError


def test_nothing_of_this_needs_an_event_loop_before_a_rank_is_opened() -> None:
    rank = kvflow.DecodeRank(decode_config("tcp://127.0.0.1:1"), make_pool().layout)
    receiver = rank.receive(1, prefill="prefill", tokens=(0, 4), pages={"kv": [1]})
    assert (receiver.outcome, receiver.memory, receiver.failure) == (Outcome.PENDING, Memory.SAFE, None)
    with pytest.raises(LocalProtocolError, match="not open"):
        rank.statistics()

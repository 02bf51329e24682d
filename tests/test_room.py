"""Valid rooms, and transfers with both kinds of room."""

import logging

import anyio
import numpy as np
import pytest

from kvflow.errors import LocalProtocolError
from kvflow.room import as_room
from tests.observe.lines import printed
from tests.support.instances import deploy


@pytest.mark.parametrize(
    "value",
    [0, 2**63 - 1, np.uint64(7), "0", "x" * 256, "é" * 128, "cmpl-9f3e", "a\x00b"],
    ids=lambda value: repr(value)[:20],
)
def test_rooms(value: object) -> None:
    assert as_room(value) == value


@pytest.mark.parametrize(
    "value",
    [-1, 2**63, 1.0, True, np.bool_(1), "", "x" * 257, "é" * 129, "\ud800", b"x", None, ()],
    ids=lambda value: repr(value)[:20],
)
def test_no_rooms(value: object) -> None:
    assert as_room(value) is None


@pytest.mark.anyio
async def test_a_number_and_its_digits_are_two_rooms() -> None:
    async with deploy() as deployment:
        prefill, decode = deployment.prefill[0], deployment.decode[0]
        handed: dict[str, bytes] = {}

        async def send(room: int | str) -> None:
            async with prefill.send(room) as sender:
                await sender.finish((0, 4), {"kv": [1]}, metadata=repr(room).encode())

        async def receive(room: int | str, page: int) -> None:
            async with decode.receive(room, prefill="prefill", tokens=(0, 4), pages={"kv": [page]}) as receiver:
                handed[repr(room)] = (await receiver.done()).metadata

        async with anyio.create_task_group() as tasks:
            rooms: tuple[int | str, ...] = (5, "5", "cmpl-" + "é" * 100)
            for page, room in enumerate(rooms):
                tasks.start_soon(send, room)
                tasks.start_soon(receive, room, page)
        assert handed == {name: name.encode() for name in handed}
        assert len(handed) == 3


@pytest.mark.anyio
async def test_the_label_of_an_engine_is_in_its_log_lines() -> None:
    with printed("json", logging.DEBUG) as lines:
        async with deploy() as deployment:
            prefill, decode = deployment.prefill[0], deployment.decode[0]
            async with (
                prefill.send("room", label="p-1") as sender,
                decode.receive("room", prefill="prefill", tokens=(0, 4), pages={"kv": [1]}, label="d-1") as receiver,
            ):
                await sender.finish((0, 4), {"kv": [1]})
                await receiver.done()
    (sent,), (received,) = lines.named("send_finished"), lines.named("receive_finished")
    assert (sent["label"], received["label"]) == ("p-1", "d-1")
    assert (sent["room"], received["room"]) == ("room", "room")


@pytest.mark.parametrize("label", [5, b"x", "x" * 257])
@pytest.mark.anyio
async def test_what_is_no_label(label: object) -> None:
    async with deploy() as deployment:
        with pytest.raises(LocalProtocolError, match="label"):
            deployment.prefill[0].send(1, label=label)  # type: ignore[arg-type]

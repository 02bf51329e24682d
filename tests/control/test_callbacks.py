"""Callbacks of control sockets: when and in which order they are called."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import pytest
import zmq

from kvflow.control import dialer, sockets
from kvflow.control.channel import ZmqConnection, ZmqControl, ZmqListener
from kvflow.errors import Unreachable
from tests.control.ends import LOCAL, Client, Server, connected, meet
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

NUM_ROUNDS = 500


async def test_answers_from_within_callbacks_go_on_and_on() -> None:
    """Each message is sent while another is read, and ZMQ's file descriptor alone does not signal all of them."""
    answered: list[bytes] = []

    def answer(name: bytes, frames: Sequence[bytes]) -> None:
        listener.send(name, frames[0])

    def go_on(frames: Sequence[bytes]) -> None:
        answered.append(frames[0])
        if len(answered) < NUM_ROUNDS:
            connection.send(b"%d" % len(answered))

    with (
        closing(ZmqControl().listen(LOCAL, None, answer)) as listener,
        closing(ZmqControl().connect(listener.endpoint, go_on, lambda: None)) as connection,
    ):
        connection.send(b"0")
        await until(lambda: len(answered) == NUM_ROUNDS)
    assert answered == [b"%d" % number for number in range(NUM_ROUNDS)]


async def test_the_event_loop_has_its_turn_within_many_messages() -> None:
    loop = asyncio.get_running_loop()
    turns: list[int] = [0]
    taken: list[int] = []

    def count() -> None:
        turns[0] += 1
        if len(taken) < 200:
            loop.call_soon(count)

    with (
        closing(ZmqControl().listen(LOCAL, None, lambda *_: taken.append(turns[0]))) as listener,
        closing(Client(listener.endpoint)) as client,
    ):
        loop.call_soon(count)
        for _ in range(200):
            client.send(b"x")
        await until(lambda: len(taken) == 200)
    assert max(Counter(taken).values()) <= sockets.MESSAGES_AT_ONCE


async def test_what_came_before_a_break_is_told_before_it() -> None:
    told: list[bytes] = []
    with (
        closing(Server()) as server,
        closing(
            ZmqControl().connect(server.endpoint, lambda frames: told.append(frames[0]), lambda: told.append(b"lost"))
        ) as connection,
    ):
        connection.send(b"hello")
        name, _ = await server.receive()
        for _ in range(200):
            server.send(name, b"x")
        server.close()
        await until(lambda: b"lost" in told)
    assert told == [b"x"] * 200 + [b"lost"]


@pytest.mark.parametrize("num_messages", [0, 1, sockets.MESSAGES_AT_ONCE, sockets.MESSAGES_AT_ONCE * 2])
async def test_the_last_message_of_a_turn_may_be_the_last_of_all(num_messages: int) -> None:
    """Connections report a break after the last message was read; no later ZMQ event would trigger that."""
    taken: list[bytes] = []
    counts: list[int] = []
    with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.PAIR) as sender:
        sender.bind("inproc://last")
        receiver = context.socket(zmq.PAIR)
        receiver.connect("inproc://last")
        inbox = sockets.Inbox(receiver, lambda frames: taken.append(frames[0]), lambda: counts.append(len(taken)))
        for _ in range(num_messages):
            sender.send(b"x")
        inbox.read_messages()
        await until(lambda: counts)
        inbox.close()
    assert counts[-1] == len(taken) == num_messages


async def test_a_callback_that_fails_at_the_last_message_hides_no_break() -> None:
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    told: list[bool] = []

    def fail(_: object) -> None:
        raise ValueError("bad")

    try:
        with (
            closing(Server()) as server,
            closing(ZmqControl().connect(server.endpoint, fail, lambda: told.append(True))) as connection,
        ):
            connection.send(b"hello")
            name, _ = await server.receive()
            server.send(name, b"x")
            server.close()
            await until(lambda: told)
    finally:
        asyncio.get_running_loop().set_exception_handler(None)


async def test_a_connection_that_was_never_made_is_not_lost(free_port: int) -> None:
    with closing(Server()) as server, closing(Client(f"tcp://127.0.0.1:{free_port}")) as client:
        client.send(b"hello?")
        with closing(Client(server.endpoint)) as other:
            await meet(server, other)
        assert (client.num_lost, client.received) == (0, [])


async def test_messages_from_before_a_connection_are_lost_if_it_cannot_take_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be broken again by the time that it is made. AnyIO fails the test if an exception reaches the loop."""
    tried: list[bytes] = []

    def refuse(_: object, payload: bytes) -> None:
        tried.append(payload)
        raise Unreachable("connection is gone")

    with connected() as (server, client):
        client.send(b"first")
        client.send(b"second")
        with monkeypatch.context() as patch:
            patch.setattr(dialer._DialedSocket, "send", refuse)
            await until(lambda: tried)
        await meet(server, client)
        assert tried == [b"first"]


async def test_closing_is_no_loss_and_nothing_is_told_after_it() -> None:
    with connected() as (server, client):
        name = await meet(server, client)
        client.close()
        client.close()
        with pytest.raises(Unreachable):
            client.send(b"too late")
        await until(lambda: is_gone(server, name))
        assert (client.num_lost, client.received) == (0, [])


def is_gone(server: Server, name: bytes) -> bool:
    try:
        server.send(name, b"still there?")
    except Unreachable:
        return True
    return False


async def test_a_listener_may_be_closed_by_its_callback() -> None:
    taken: list[bytes] = []

    def take(_: bytes, frames: Sequence[bytes]) -> None:
        taken.append(frames[0])
        listener.close()

    listener: ZmqListener = ZmqControl().listen(LOCAL, None, take)
    with closing(Client(listener.endpoint)) as client:
        for _ in range(100):
            client.send(b"x")
        await until(lambda: client.num_lost)
    assert taken == [b"x"]
    with pytest.raises(Unreachable):
        listener.send(b"anybody", b"too late")


@pytest.mark.parametrize("callback", ["on_message", "on_lost"])
async def test_a_connection_may_be_closed_by_its_callbacks(callback: str) -> None:
    told: list[str] = []

    def tell(what: str) -> None:
        told.append(what)
        if what == callback:
            connection.close()

    with closing(Server()) as server:
        connection: ZmqConnection = ZmqControl().connect(
            server.endpoint, lambda _: tell("on_message"), lambda: tell("on_lost")
        )
        connection.send(b"hello")
        name, _ = await server.receive()
        for _ in range(5):
            server.send(name, b"x")
        if callback == "on_message":
            await until(lambda: is_gone(server, name))
        server.close()
        await until(lambda: callback in told)
    assert told == (["on_message"] if callback == "on_message" else ["on_message"] * 5 + ["on_lost"])


async def test_a_callback_that_fails_is_reported_and_the_next_message_comes() -> None:
    loop = asyncio.get_running_loop()
    reported: list[dict[str, Any]] = []
    taken: list[bytes] = []

    def take(_: bytes, frames: Sequence[bytes]) -> None:
        taken.append(frames[0])
        if frames[0] == b"bad":
            raise ValueError("bad")

    loop.set_exception_handler(lambda _, context: reported.append(context))
    try:
        with closing(ZmqControl().listen(LOCAL, None, take)) as listener, closing(Client(listener.endpoint)) as client:
            for payload in (b"bad", b"good", b"bad", b"good"):
                client.send(payload)
            await until(lambda: len(taken) == 4)
    finally:
        loop.set_exception_handler(None)
    assert [str(context["exception"]) for context in reported] == ["bad", "bad"]

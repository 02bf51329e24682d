"""Stand-ins for decode ranks: each is a connection that shakes hands, receives one room and pings.

`python -m benchmarks.limits_worker OPTIONS` makes some of them in one process. They have no pools, so the process that
runs the prefill rank provides the memory.
"""

import asyncio
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import anyio
import msgspec
import zmq
from msgspec.structs import replace

from benchmarks.processes import Line, next_order, run_child
from kvflow.backends.metadata import PeerMetadata
from kvflow.control.routes import introduce, new_name
from kvflow.control.sockets import NOBLOCK, Inbox, sockets
from kvflow.geometry import KVLayout
from kvflow.geometry.routes import compile_routes
from kvflow.stages.context import agent_name
from kvflow.wire.codec import decode, encode
from kvflow.wire.messages import (
    OLDEST_VERSION,
    PAGE_BYTES,
    PROTOCOL_VERSION,
    Ack,
    Goodbye,
    Grant,
    Hello,
    Message,
    Notice,
    PeerId,
    Ping,
    Pong,
    RankId,
    StagingWindow,
    Welcome,
)

__all__ = ["PATIENCE_S", "StandInOptions", "main", "name_of"]

PATIENCE_S: Final = 600.0
"""Lease and timeout of everything, in seconds."""

AGAIN_S: Final = 5.0
"""Pause before a message that was not answered is repeated, in seconds. Prefill admits 256 Hellos in a second."""

AT_ONCE: Final = 64
"""Number of stand-ins of a process that wait for an answer at the same time."""


def name_of(number: int) -> PeerId:
    """Return the incarnation that a stand-in claims to be."""
    return PeerId(RankId(f"decode{number}", 0), number + 1)


class StandInOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which stand-ins to make, and of what.

    Attributes:
        endpoint: Control address of the prefill rank.
        prefill: Its incarnation.
        layout: Layout of its pools, and of those that the stand-ins claim to have.
        metadata: What each says about its transport, but for its name.
        numbers: The stand-ins, `[first, last)`.
    """

    endpoint: str
    prefill: PeerId
    layout: KVLayout
    metadata: PeerMetadata
    numbers: tuple[int, int]


class StandIn:
    """One connection that acts as a decode rank: it repeats what is not answered.

    Args:
        options: What it is made of.
        number: Its number, which is also the room that it receives.
        on_done: Called when it has received the room, and when a Ping was answered.
    """

    def __init__(self, options: StandInOptions, number: int, on_done: Callable[[], None]) -> None:
        self._room = number
        self._me = name_of(number)
        self._on_done = on_done
        self._again: asyncio.TimerHandle | None = None
        made = self._socket = sockets.make(zmq.DEALER)
        made.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(PATIENCE_S * 1e3))  # all share this machine's cores
        introduce(made, new_name())
        made.connect(options.endpoint)
        self._inbox = Inbox(made, self._take)
        layout = options.layout
        hello = Hello(
            peer=self._me,
            to=options.prefill,
            attempt=1,
            versions=(OLDEST_VERSION, PROTOCOL_VERSION),
            lease_s=PATIENCE_S,
            backend="memory",
            backend_metadata=replace(options.metadata, agent=agent_name(self._me).encode()).pack(),
            layout=layout,
            route=compile_routes({0: layout}, layout, decode_rank=0)[0],
            staging=StagingWindow(address=layout.components[0].regions[0].address, slot_bytes=PAGE_BYTES, num_slots=1),
        )
        self._ask(hello)

    def ping(self) -> None:
        """Send a Ping."""
        self._ask(Ping(peer=self._me))

    def say_goodbye(self) -> None:
        """Say goodbye."""
        self._send(Goodbye(peer=self._me))

    def _send(self, message: Message) -> None:
        with suppress(zmq.Again):  # it has broken, and is made again
            self._socket.send(encode(message), NOBLOCK)
        self._inbox.schedule_read()

    def _ask(self, question: Message) -> None:
        """Send a message until `_answered`."""
        self._question = type(question)
        self._send(question)
        self._again = asyncio.get_running_loop().call_later(AGAIN_S, self._ask, question)

    def _answered(self, question: type[Message]) -> bool:
        """Stop sending a message of this kind; return whether one was not answered yet."""
        if self._again is None or self._question is not question:
            return False
        self._again.cancel()
        self._again = None
        return True

    def _take(self, frames: Sequence[bytes]) -> None:
        match decode(*frames):
            case Welcome() if self._answered(Hello):
                grant = Grant(
                    room=self._room,
                    generation=0,
                    token=1,
                    ranges={"kv": (0, 1)},
                    pages={"kv": bytes(PAGE_BYTES)},
                    num_decode_ranks=1,
                    timeout_s=PATIENCE_S,
                    progress_s=PATIENCE_S,
                    priority=1,
                    digest=False,
                )
                self._ask(grant)
            case Notice():
                self._send(Ack(room=self._room, generation=0))
                if self._answered(Grant):
                    self._on_done()
            case Pong() if self._answered(Ping):
                self._on_done()
            case _:
                pass


async def _serve(options: StandInOptions, line: Line) -> None:
    """Make the stand-ins when told to, and let each ping or say goodbye when told to."""
    places = asyncio.Semaphore(AT_ONCE)
    stand_ins: list[StandIn] = []
    line.report("ready")
    while True:
        match await next_order(line):
            case {"do": "receive"}:
                for number in range(*options.numbers):
                    await places.acquire()
                    stand_ins.append(StandIn(options, number, places.release))
            case {"do": "ping"}:
                for one in stand_ins:
                    await places.acquire()
                    one.ping()
            case {"do": "say goodbye"}:
                for one in stand_ins:
                    one.say_goodbye()
            case _:
                break
        for _ in range(AT_ONCE):
            await places.acquire()
        for _ in range(AT_ONCE):
            places.release()
        line.report("done")


def main() -> int:
    """Run one process, and return the exit code."""
    return run_child(lambda options, line: anyio.run(_serve, options, line), StandInOptions)


if __name__ == "__main__":
    sys.exit(main())

"""Which decode server answers, and how requests move from one to another while they are answered.

A request that moves is stopped at a token; its server keeps what it has computed, and answers with a ticket for it. The
next server receives that, and computes the token that was sampled last. The client's stream goes on.
"""

import itertools
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager, suppress
from typing import Any, Final

import aiohttp
import anyio
import msgspec

from kvflow.cli.proxy.asked import Asked, BadAnswer, decode_fields
from kvflow.cli.proxy.stream import MovableStream, is_movable, split_events

__all__ = ["Moves", "Running"]

AT_ONCE: Final = 4
"""Requests that move at the same time: a server keeps only so many blocks of what has ended."""

Reach = Callable[[str, Any, object], AbstractAsyncContextManager[aiohttp.ClientResponse]]
Write = Callable[[bytes], Awaitable[None]]


class Broken(Exception):
    """A server has failed in the middle of a stream. The client gets the event."""

    def __init__(self, event: bytes) -> None:
        super().__init__(event)
        self.event = event

    @classmethod
    def because(cls, message: str) -> "Broken":
        """Make the error that the client gets of the proxy itself."""
        return cls((BadAnswer(502, message).response.text or "").encode())


class Running:
    """A request whose stream may move.

    Attributes:
        asked: The request; `decode` is the server that answers now.
        stream: What the client has.
        is_ordered: Its server was asked to stop it, or is about to be.
        answered: Set when the server has answered to that; None while it was not asked.
        is_doubtful: The server has not answered, but may have stopped the request.
        ticket: What the server that goes on needs, once the request stops for it.
        arrived: Set when the next server has begun, or the stream has ended.
        left: The server before, until the next one has begun: it may have to send what it has computed.
    """

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.stream = MovableStream(asked.path, asked.fields)
        self.arrived = anyio.Event()
        self.left: str | None = None
        self.begin_part()

    def begin_part(self) -> None:
        """Forget the move that has just been made."""
        self.is_ordered = self.is_doubtful = False
        self.answered: anyio.Event | None = None
        self.ticket: dict[str, Any] | None = None


class Moves:
    """Takes decode servers in turn, and moves requests away from those that are drained.

    Args:
        decode: URLs of decode servers.
        reach: Opens a request to a URL, with headers and fields; raises BadAnswer if there is no answer.
        tasks: Runs what outlives a request.
        is_enabled: Streams are relayed so that they can move.

    Attributes:
        counts: What was moved, for metrics.
    """

    def __init__(self, decode: Sequence[str], reach: Reach, tasks: anyio.abc.TaskGroup, *, is_enabled: bool) -> None:
        self.counts = Counter(moved_total=0, stayed_total=0, recomputed_total=0) if is_enabled else Counter[str]()
        self._decode, self._in_turn = decode, itertools.cycle(decode)
        self._reach, self._tasks, self._is_enabled = reach, tasks, is_enabled
        self._drained: set[str] = set()
        self._num_at: Counter[str] = Counter()
        self._running: dict[Running, None] = {}
        self._changed = anyio.Event()
        self._slots = anyio.Semaphore(AT_ONCE)

    def next_server(self, but: Collection[str] = ()) -> str | None:
        """Return the next decode server that is in use, other than some; None if there is none."""
        in_turn = itertools.islice(self._in_turn, len(self._decode))
        return next((url for url in in_turn if url not in self._drained and url not in but), None)

    def is_drained(self, url: str) -> bool:
        """Return whether a server gets no requests, so that it may be stopped."""
        return url in self._drained

    @contextmanager
    def counted(self, asked: Asked) -> Iterator[None]:
        """Count a request where it is answered, and decide whether its stream can move."""
        asked.is_relayed = self._is_enabled and is_movable(asked.path, asked.fields)
        self._num_at[asked.decode] += 1
        try:
            yield
        finally:
            self._num_at[asked.decode] -= 1
            self._note_change()

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    # Draining --------------------------------------------------------------------------------------------------------

    async def drain(self, server: str, *, moves: bool = True) -> dict[str, int]:
        """Give a server no more requests and, with `moves`, move those that it has; return when none is left there.

        Raises:
            BadAnswer: There is no such decode server, or it is used again meanwhile.
        """
        if server not in self._decode:
            raise BadAnswer(404, f"{server} is not a decode server of this proxy")
        before = self.counts.copy()
        self._drained.add(server)
        while self._num_at[server]:
            changed = self._changed
            for running in self._running if moves and {*self._decode} - self._drained else ():
                if running.asked.decode == server and running.stream.can_move and not running.is_ordered:
                    running.is_ordered = True
                    self._tasks.start_soon(self._order, running)
            await changed.wait()
            if server not in self._drained:
                raise BadAnswer(409, f"{server} is in use again")
        return {name.removesuffix("_total"): count - before[name] for name, count in self.counts.items()}

    def resume(self, server: str) -> None:
        """Use a server again that was drained."""
        self._drained.discard(server)
        self._note_change()

    async def tell(self, url: str, asked: Asked, params: Mapping[str, Any]) -> dict[str, Any]:
        """Tell a server something about a request, with a request of its own; return the parameters of its answer."""
        fields = {"model": asked.fields.get("model"), "prompt": [0], "max_tokens": 1, "kv_transfer_params": params}
        async with self._reach(f"{url}/v1/completions", asked.headers, fields) as answer:
            found = decode_fields(await answer.read(), 502).get("kv_transfer_params", b"null")
        decoded = msgspec.json.decode(found)
        return decoded if isinstance(decoded, dict) else {}

    async def _order(self, running: Running) -> None:
        """Ask the server of a request to stop it, and hold a slot until it has moved."""
        asked = running.asked
        async with self._slots:
            if not running.stream.can_move:
                return
            running.answered, running.arrived = anyio.Event(), anyio.Event()
            try:
                running.is_doubtful = True
                ticket = await self.tell(asked.decode, asked, {"kvflow_moved": asked.transfer})
                running.is_doubtful = False
                if isinstance(limit := ticket.pop("kvflow_max_tokens", None), int):
                    running.ticket = ticket
                    running.stream.note_limit(limit)
            except (BadAnswer, aiohttp.ClientError):
                pass
            finally:
                running.answered.set()
            if running.ticket is None:
                self.counts["stayed_total"] += 1
            elif running in self._running:
                await running.arrived.wait()

    # Relaying --------------------------------------------------------------------------------------------------------

    async def relay(self, asked: Asked, answer: aiohttp.ClientResponse, write: Write) -> str | None:
        """Relay an answer, from whichever server it comes; `write` passes data to the client.

        Returns:
            Its text; None if there was an error.
        """
        running = Running(asked)
        text = None
        self._running[running] = None
        try:
            async with AsyncExitStack() as stack:
                try:
                    while not await self._relay_part(running, answer, write):
                        answer = await self._go_on(running, stack)
                    text = running.stream.text
                except Broken as broken:
                    await write(b"data: " + broken.event + b"\n\n")
                await write(b"data: [DONE]\n\n")
        finally:
            del self._running[running]
            running.arrived.set()
            self._drop_ticket(running)
            self._note_arrival(running)
        return text

    async def _relay_part(self, running: Running, answer: aiohttp.ClientResponse, write: Write) -> bool:
        """Relay what one server answers; return whether that is the end. Raises Broken if no other can go on."""
        stream, arrived = running.stream, running.arrived
        try:
            async for chunk in _received(answer):
                await self._settle_order(running, chunk)
                could_move = stream.can_move
                for told in stream.take_chunk(chunk):
                    await write(b"data: " + msgspec.json.encode(told) + b"\n\n")
                arrived.set()
                self._note_arrival(running)
                if stream.can_move and not could_move:
                    self._note_change()
                if not stream.is_complete:
                    break
        except Broken:
            if stream.limit is None:  # its server has never said that it could go on elsewhere
                raise
            self._drop_ticket(running)
            return False
        finally:
            answer.close()
        return stream.is_complete

    async def _settle_order(self, running: Running, chunk: Mapping[str, Any]) -> None:
        """Wait for what the server says about a request that ends, if it may have been stopped."""
        ends = any(choice.get("finish_reason") == "length" for choice in chunk.get("choices") or ())
        if ends and running.answered is not None:
            await running.answered.wait()
            if running.is_doubtful and running.stream.limit is None:
                raise Broken.because(f"{running.asked.decode} may have stopped a request early")

    async def _go_on(self, running: Running, stack: AsyncExitStack) -> aiohttp.ClientResponse:
        """Let another server go on, or the same one if there is no other; raise Broken if none does.

        The first one gets the ticket, if there is one; others compute all tokens that the client has.
        """
        self._note_arrival(running)  # the server in between has failed before it began
        asked, left = running.asked, running.asked.decode
        fields, rest = running.stream.next_part()
        others = [self.next_server(but=(left,)), *(url for url in self._decode if url not in self._drained), left]
        for url in dict.fromkeys(url for url in others if url is not None):
            transfer = uuid.uuid4().hex
            params = {**(running.ticket or {}), "transfer_id": transfer, "kvflow_rest": rest}
            body = {**fields, "kv_transfer_params": params}
            with suppress(BadAnswer):
                answer = await stack.enter_async_context(self._reach(f"{url}/v1/completions", asked.headers, body))
                if answer.status == 200:
                    self.counts["moved_total" if running.ticket else "recomputed_total"] += 1
                    self._num_at[url] += 1
                    asked.decode, asked.transfer = url, transfer
                    running.begin_part()
                    running.is_ordered = url == left  # nobody else would have it
                    running.left = left
                    return answer
            self._drop_ticket(running)
        raise Broken.because(f"no server goes on with a request of {left}")

    def _note_arrival(self, running: Running) -> None:
        """Note that a server goes on, so that the one before is not needed any more."""
        if running.left is not None:
            self._num_at[running.left] -= 1
            running.left = None
            self._note_change()

    def _drop_ticket(self, running: Running) -> None:
        """Tell the server of a ticket that nobody will ask for it."""
        if running.ticket is not None:
            running.ticket = None
            self._tasks.start_soon(self._withdraw, running.asked.decode, running.asked, running.asked.transfer)

    async def _withdraw(self, url: str, asked: Asked, transfer: str) -> None:
        with suppress(BadAnswer, aiohttp.ClientError):
            await self.tell(url, asked, {"kvflow_withdrawn": transfer})


async def _received(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Yield the chunks of an answer; raise Broken if one is an error, or if the connection ends before the last."""
    buffer = bytearray()
    try:
        async for piece in answer.content.iter_any():
            buffer += piece
            for data in split_events(buffer):
                if data == b"[DONE]":
                    return
                chunk = msgspec.json.decode(data)
                if "error" in chunk:
                    raise Broken(data)
                yield chunk
    except aiohttp.ClientError as error:
        raise Broken.because(f"{answer.url} ended in the middle of its answer: {error}") from error

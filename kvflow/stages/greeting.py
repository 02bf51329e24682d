"""First stage, decode side: instances are found and greeted, once.

The decode rank looks its prefill instance up, works out which prefill rank owes it which cells, and says hello to all
of them at once. Afterwards it holds a line to each.
"""

import itertools
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress

import anyio
import anyio.to_thread

from kvflow.backends.base import Backend
from kvflow.errors import FailureReason, KvflowError, RemoteProtocolError, RouteError, Stage, Unreachable
from kvflow.geometry.layout import KVLayout
from kvflow.geometry.routes import Route, bind_route, compile_routes
from kvflow.stages.context import StageContext
from kvflow.state.events import GreetedRank, InstanceGreeted, InstanceUnreachable, PeerGone, PeerLeft
from kvflow.state.staging import StagingArea
from kvflow.wire.channel import Dialer
from kvflow.wire.codec import decode_frames, encode
from kvflow.wire.messages import (
    OLDEST_VERSION,
    PROTOCOL_VERSION,
    Card,
    Goodbye,
    Hello,
    Message,
    PeerId,
    Refuse,
    Welcome,
)
from kvflow.wire.probe import is_refused

__all__ = ["DecodeBootstrap"]

LOOK_AGAIN_S = 0.5
"""How often the registry is asked for other lives of the ranks while a handshake takes long."""

MAX_ENDPOINTS = 1_024
"""Lives of ranks whose address is remembered after they have left."""


class _Line:
    """A connection to one prefill rank, and the answer to its hello while one is awaited."""

    def __init__(self, endpoint: str) -> None:
        self.dialer = Dialer(endpoint)
        self.scope = anyio.CancelScope()
        self.has_left = False
        self._answer: Welcome | Refuse | None = None
        self._answered: anyio.Event | None = None

    async def ask(self, hello: Hello, give_up: float, pause_s: float) -> Welcome | Refuse | None:
        """Say hello and wait for the answer; None if there is none in time.

        A hello that may have been lost with a connection is said again, after `pause_s` and then less and less often.
        """
        self._answer, self._answered = None, anyio.Event()
        with anyio.CancelScope(deadline=give_up):
            while not self._answered.is_set():
                self.dialer.send(encode(hello))
                with anyio.move_on_after(pause_s):
                    await self._answered.wait()
                pause_s *= 2
        self._answered = None
        return self._answer

    def answer(self, message: Welcome | Refuse) -> bool:
        """Take an answer in; False if nobody waits for one. A refusal of what was said before the hello is none."""
        if self._answered is None or self._answered.is_set():
            return False
        if isinstance(message, Refuse) and message.to is None:
            return True
        self._answer = message
        self._answered.set()
        return True


def _all_or_first_error(results: list[GreetedRank | KvflowError]) -> tuple[GreetedRank, ...]:
    """Ranks in order.

    Raises:
        KvflowError: The first among the results.
    """
    for result in results:
        if isinstance(result, KvflowError):
            raise result
    ranks = [result for result in results if isinstance(result, GreetedRank)]
    return tuple(sorted(ranks, key=lambda rank: rank.peer.rank.engine_rank))


class DecodeBootstrap:
    """The decode side: greets instances, and holds one line to each of their ranks.

    Args:
        context: Of this rank.
        layout: Of this rank.
        backend: Its metadata goes into the hello.
        lookup: Finds the ranks of an instance by name, within a time.
        on_message: Takes every message of a greeted peer.
        staging: Has a window for each rank that is greeted; nobody packs if None.
    """

    def __init__(
        self,
        context: StageContext,
        layout: KVLayout,
        backend: Backend,
        lookup: Callable[[str, float], Awaitable[tuple[Card, ...]]],
        on_message: Callable[[PeerId, Message], None],
        *,
        staging: StagingArea | None = None,
    ) -> None:
        self._staging = staging
        self._context = context
        self._layout = layout
        self._backend = backend
        self._lookup = lookup
        self._on_message = on_message
        self._lines: dict[PeerId, _Line] = {}
        self._endpoints: OrderedDict[PeerId, str] = OrderedDict()
        self._probes: dict[PeerId, None] = {}
        self._outlasting: dict[PeerId, None] = {}
        self._attempts = itertools.count()
        self._compilations = anyio.CapacityLimiter(1)

    def greet(self, instance: str) -> None:
        """Begin the handshake with an instance; the core hears how it ended."""
        self._context.start_task(self._greet, instance)

    def send(self, peer: PeerId, message: Message) -> None:
        """Send to a greeted peer. A message that it does not take is lost: it comes round, or its lease ends."""
        line = self._lines.get(peer)
        if line is None:
            return
        try:
            line.dialer.send(encode(message))
        except Unreachable as error:
            self._context.oddities.count("message_lost", peer, stage=Stage.BOOTSTRAP.value, detail=str(error))

    def probe(self, peer: PeerId) -> None:
        """Find out whether the process of a silent peer still exists; the core hears of it if it does not."""
        if peer in self._endpoints:
            self._start_probe(peer, self._endpoints[peer])

    def _start_probe(self, peer: PeerId, endpoint: str) -> None:
        if peer not in self._probes:
            self._probes[peer] = None
            self._context.start_task(self._probe, peer, endpoint)

    async def _probe(self, peer: PeerId, endpoint: str) -> None:
        try:
            is_gone = await is_refused(endpoint, self._context.config.timeouts.lease_s)
        finally:
            del self._probes[peer]
        if is_gone:  # it had its control port open all its life
            self._is_over(peer)

    def _is_over(self, peer: PeerId) -> None:
        """Say that the process of a peer has ended, and once more when what it has written is all here."""
        self._context.dispatch(PeerGone(peer))
        if not self._backend.capabilities.ends_with_process and peer not in self._outlasting:
            self._outlasting[peer] = None
            self._context.start_task(self._outlast, peer)

    async def _outlast(self, peer: PeerId) -> None:
        try:
            is_quiet = await self._backend.outlast()
        finally:
            del self._outlasting[peer]
        if is_quiet:
            self._context.dispatch(PeerGone(peer, is_quiet=True))

    def forget(self, peer: PeerId) -> None:
        """Close the line to a peer that has left."""
        line = self._lines.pop(peer, None)
        if line is not None:
            line.scope.cancel()

    async def _greet(self, instance: str) -> None:
        began = self._context.now()
        try:
            ranks = await self._greet_all(instance, began + self._context.config.timeouts.handshake_s)
        except KvflowError as error:
            reason = FailureReason.UNREACHABLE if isinstance(error, Unreachable) else FailureReason.REFUSED
            failure = self._context.failure(reason, Stage.BOOTSTRAP, str(error))
            self._context.dispatch(InstanceUnreachable(instance, failure))
            return
        self._context.times.add(Stage.BOOTSTRAP, self._context.now() - began)
        for rank in ranks:
            self._remember(rank.peer, self._lines[rank.peer].dialer.endpoint)
        self._context.dispatch(InstanceGreeted(instance, ranks))

    def _remember(self, peer: PeerId, endpoint: str) -> None:
        """Note where a rank listens; whoever had that port before is gone."""
        before = [other for other, where in self._endpoints.items() if where == endpoint and other != peer]
        self._endpoints[peer] = endpoint
        for other in before:
            del self._endpoints[other]
            self._is_over(other)
        while len(self._endpoints) > MAX_ENDPOINTS:
            self._endpoints.popitem(last=False)

    async def _greet_all(self, instance: str, give_up: float) -> tuple[GreetedRank, ...]:
        """Shake hands with every rank of an instance, and start again if one of them turns out to have restarted.

        A rank that died stays in the registry until its lease ends, so its card may be found first.
        """
        cards = await self._lookup(instance, give_up - self._context.now())
        while True:
            greeted, newer = await self._greet_until_changed(instance, cards, give_up)
            if newer is None:
                return _all_or_first_error(greeted)
            cards = newer

    async def _greet_until_changed(
        self, instance: str, cards: tuple[Card, ...], give_up: float
    ) -> tuple[list[GreetedRank | KvflowError], tuple[Card, ...] | None]:
        """Shake hands with some ranks; give what became of it, or the cards of other lives if those appear first."""
        greeted: list[GreetedRank | KvflowError] = []
        newer: tuple[Card, ...] | None = None
        strangers = [card for card in cards if card.peer not in self._lines]

        async def look_again() -> None:
            nonlocal newer
            newer = await self._changed_cards(instance, cards, give_up)
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(look_again)
            greeted = await self._greet_cards(cards, give_up)
            tasks.cancel_scope.cancel()
        left = [rank.peer for rank in greeted if isinstance(rank, GreetedRank) and self._has_left(rank.peer)]
        if left:
            greeted.append(Unreachable("rank left during the handshake", rank=str(left[0].rank)))
        if not greeted or any(isinstance(result, KvflowError) for result in greeted):
            for card in strangers:  # nobody else would ever close their lines
                self.forget(card.peer)
                if self._staging is not None:  # a life that is over gives its window back
                    self._start_probe(card.peer, card.endpoint)
        return greeted, None if greeted else newer

    def _has_left(self, peer: PeerId) -> bool:
        line = self._lines.get(peer)
        return line is None or line.has_left

    async def _changed_cards(self, instance: str, known: tuple[Card, ...], give_up: float) -> tuple[Card, ...]:
        """Wait until the registry knows other lives of the ranks; for ever if it does not."""
        while True:
            await anyio.sleep(LOOK_AGAIN_S)
            with suppress(Unreachable):
                found = await self._lookup(instance, give_up - self._context.now())
                if [card.peer for card in found] != [card.peer for card in known]:
                    return found

    async def _greet_cards(self, cards: tuple[Card, ...], give_up: float) -> list[GreetedRank | KvflowError]:
        """Shake hands with some ranks at once; the first refusal or silence ends it for all."""
        try:
            routes = await self._compile(cards, give_up)
        except KvflowError as error:
            return [error]
        greeted: list[GreetedRank | KvflowError] = []

        async def greet(card: Card, route: Route) -> None:
            try:
                greeted.append(await self._greet_rank(card, route, give_up))
            except KvflowError as error:
                greeted.append(error)
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for card, route in zip(cards, routes, strict=True):
                tasks.start_soon(greet, card, route)
        return greeted

    async def _compile(self, cards: tuple[Card, ...], give_up: float) -> tuple[Route, ...]:
        """Work out who owes what, beside the event loop."""
        layouts = {card.peer.rank.engine_rank: card.layout for card in cards}
        my_rank = self._context.me.rank.engine_rank
        with anyio.CancelScope(deadline=give_up):
            return await anyio.to_thread.run_sync(
                lambda: compile_routes(layouts, self._layout, decode_rank=my_rank),
                abandon_on_cancel=True,
                limiter=self._compilations,
            )
        raise Unreachable("routes could not be compiled in time", ranks=len(cards))

    async def _greet_rank(self, card: Card, route: Route, give_up: float) -> GreetedRank:
        debts = bind_route(route, card.layout, self._layout).debts
        staging = self._staging.window(card.peer) if self._staging is not None and route.pieces else None
        hello = Hello(
            peer=self._context.me,
            to=card.peer,
            attempt=next(self._attempts),
            versions=(OLDEST_VERSION, PROTOCOL_VERSION),
            lease_s=self._context.config.timeouts.lease_s,
            backend=self._backend.name,
            backend_metadata=self._backend.metadata(),
            layout=self._layout,
            route=route,
            staging=staging,
        )
        answer = await self._line(card).ask(hello, give_up, self._context.config.timeouts.repeat_s)
        if isinstance(answer, Refuse) and answer.peer != card.peer:
            self._is_over(card.peer)
            await anyio.sleep_until(give_up)  # it has restarted; its new card will be found meanwhile
        if answer is None:
            raise Unreachable("rank did not answer", rank=str(card.peer.rank), endpoint=card.endpoint)
        if isinstance(answer, Refuse):
            raise RouteError("rank refused", rank=str(card.peer.rank), detail=answer.detail)
        return GreetedRank(card.peer, debts, route.pieces, staging)

    def _line(self, card: Card) -> _Line:
        """The line to a rank, opened if there is none yet."""
        if card.peer not in self._lines:
            line = _Line(card.endpoint)
            self._lines[card.peer] = line
            self._context.start_task(self._read, card.peer, line)
        return self._lines[card.peer]

    async def _read(self, peer: PeerId, line: _Line) -> None:
        """Take messages from one rank until its line is given up; the only place that closes a line."""
        try:
            with line.scope:
                while True:
                    self._take_frames(peer, line, await line.dialer.receive())
        finally:
            line.dialer.close()

    def _take_frames(self, peer: PeerId, line: _Line, frames: list[bytes]) -> None:
        try:
            self._take(peer, line, decode_frames(frames))
        except RemoteProtocolError as error:
            self._context.oddities.count("message_rejected", peer, stage=Stage.BOOTSTRAP.value, detail=str(error))

    def _take(self, peer: PeerId, line: _Line, message: Message) -> None:
        if isinstance(message, (Welcome, Refuse)) and line.answer(message):
            return
        line.has_left |= isinstance(message, Goodbye)
        if isinstance(message, Refuse) and message.peer != peer:
            self._is_over(peer)  # somebody else answers at its port
        elif isinstance(message, Refuse):
            detail = f"{peer.rank} does not know this rank any more: {message.detail}"
            failure = self._context.failure(FailureReason.PEER_LOST, Stage.BOOTSTRAP, detail)
            self._context.dispatch(PeerLeft(peer, failure))
        else:
            self._on_message(peer, message)

"""The decode side's handshake without tasks: what `DecodeBootstrap` does, step by step in virtual time."""

from typing import TYPE_CHECKING, Final

from kvflow.errors import FailureReason, Stage
from kvflow.geometry.routes import Route
from kvflow.simulation.shapes import routes_to
from kvflow.state.events import GreetedRank, InstanceGreeted, InstanceUnreachable
from kvflow.wire.codec import encode
from kvflow.wire.messages import (
    OLDEST_VERSION,
    PROTOCOL_VERSION,
    Card,
    Hello,
    PeerId,
    Refuse,
    StagingWindow,
    Welcome,
)

if TYPE_CHECKING:
    from kvflow.simulation.decode_host import DecodeHost

__all__ = ["Greeting"]

LOOK_AGAIN_S: Final = 0.1


class Greeting:
    """One handshake with an instance; the core hears how it ended.

    Args:
        host: The decode rank.
        instance: Whom to greet.
    """

    def __init__(self, host: "DecodeHost", instance: str) -> None:
        self._host = host
        self._instance = instance
        self._give_up = host.world.schedule.now + host.config.timeouts.handshake_s
        self._cards: tuple[Card, ...] = ()
        self._awaited: dict[PeerId, None] = {}
        self._strangers: list[PeerId] = []
        self._left: list[PeerId] = []
        self._is_over = False

    def begin(self) -> None:
        """Look the instance up, and say hello when it is complete."""
        self._look()

    def _look(self) -> None:
        """Ask the registry, again and again: a rank that died stays in it for a while."""
        if self._is_over:
            return
        world = self._host.world
        if world.schedule.now >= self._give_up:
            missing = [str(peer.rank) for peer in self._awaited]
            self._fail(FailureReason.UNREACHABLE, f"rank did not answer: {missing or self._instance}")
            return
        cards = world.registry.cards(self._instance)
        if cards and [card.peer for card in cards] != [card.peer for card in self._cards]:
            self._drop_strangers()
            self._cards = cards
            self._say_hello()
        world.schedule.after(LOOK_AGAIN_S, self._host.call, self._look)

    def _say_hello(self) -> None:
        host, world = self._host, self._host.world
        shapes = world.instances[self._instance].shape, host.shape
        self._routes, self._bound = routes_to(world.model, *shapes, host.me.rank.engine_rank)
        self._strangers = [card.peer for card in self._cards if card.peer not in host.lines]
        self._awaited = {card.peer: None for card in self._cards}
        self._left = []
        for card, route in zip(self._cards, self._routes, strict=True):
            host.line_to(card.peer)
            self._ask(self._hello(card, route), host.config.timeouts.repeat_s)

    def _hello(self, card: Card, route: Route) -> Hello:
        host = self._host
        return Hello(
            peer=host.me,
            to=card.peer,
            attempt=next(host.attempts),
            versions=(OLDEST_VERSION, PROTOCOL_VERSION),
            lease_s=host.config.timeouts.lease_s,
            backend=host.backend.name,
            backend_metadata=host.backend.metadata(),
            layout=host.pool.table.layout,
            route=route,
            staging=self._window(card.peer, route),
        )

    def _window(self, peer: PeerId, route: Route) -> StagingWindow | None:
        area = self._host.core.staging
        return area.window(peer) if area is not None and route.pieces else None

    def _ask(self, hello: Hello, pause_s: float) -> None:
        """Say hello, and say it again less and less often: it may have been lost with a connection."""
        host, world = self._host, self._host.world
        line = host.lines.get(hello.to)
        is_awaited = hello.to in self._awaited and any(card.peer == hello.to for card in self._cards)
        if self._is_over or not is_awaited or line is None:
            return
        world.network.to_server(line, encode(hello))
        world.schedule.after(pause_s, host.call, self._ask, hello, 2 * pause_s)

    def answer(self, peer: PeerId, message: Welcome | Refuse) -> bool:
        """Take an answer in; False if nobody waits for one."""
        if self._is_over or peer not in self._awaited:
            return False
        if isinstance(message, Refuse) and message.peer != peer:
            return True  # it has restarted; its new card will be found meanwhile
        del self._awaited[peer]
        if isinstance(message, Refuse):
            self._fail(FailureReason.REFUSED, f"rank refused: {message.detail}")
        elif not self._awaited:
            self._succeed()
        return True

    def left(self, peer: PeerId) -> None:
        """Note that a rank said goodbye during the handshake."""
        self._left.append(peer)

    def _succeed(self) -> None:
        left = [peer for peer in self._left if peer in self._strangers]
        if left:
            self._fail(FailureReason.UNREACHABLE, f"rank left during the handshake: {left[0].rank}")
            return
        self._is_over = True
        ranks = tuple(
            GreetedRank(card.peer, bound.debts, route.pieces, self._window(card.peer, route))
            for card, bound, route in zip(self._cards, self._bound, self._routes, strict=True)
        )
        for rank in ranks:
            self._host.remember(rank.peer)
        self._host.dispatch(InstanceGreeted(self._instance, ranks))

    def _fail(self, reason: FailureReason, detail: str) -> None:
        self._is_over = True
        self._drop_strangers()
        failure = self._host.context.failure(reason, Stage.BOOTSTRAP, detail)
        self._host.dispatch(InstanceUnreachable(self._instance, failure))

    def _drop_strangers(self) -> None:
        """Close the lines to ranks that were met in vain; nobody else would."""
        for peer in self._strangers:
            self._host.forget_line(peer)
        self._strangers = []

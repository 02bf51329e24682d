"""Drivers for cores without a shell: events in, effects out. A driver plays the shell and the peers of its core."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from msgspec.structs import replace

from kvflow.bounds import Bounds
from kvflow.config import Limits, Proofs, Timeouts
from kvflow.errors import FailureReason, KvflowError, Stage
from kvflow.geometry.layout import KVLayout
from kvflow.geometry.pages import WIRE_PAGES, pages_spanned
from kvflow.geometry.routes import Route, compile_routes
from kvflow.geometry.split import SplitPolicy
from kvflow.room import RoomId
from kvflow.state import events as ev
from kvflow.state.decode.core import DecodeCore
from kvflow.state.effects import (
    CheckHello,
    CompileRoutes,
    CountAnomaly,
    DecodeEffect,
    PrefillEffect,
    Reply,
    ReportReceiver,
    ReportSender,
    SendMessage,
    YieldTurn,
)
from kvflow.state.prefill.core import PrefillCore
from kvflow.state.settings import DecodeSettings, LocalStagingSettings, PrefillSettings, WindowSettings
from kvflow.wire.messages import (
    OLDEST_VERSION,
    PROTOCOL_VERSION,
    Failure,
    Grant,
    Hello,
    Message,
    PeerId,
    Ping,
    Pong,
    RankId,
    RankRecord,
    StagingWindow,
    Welcome,
)
from simulation.explore.snapshot import fingerprint
from simulation.invariants import check_invariants
from tests.support.small_routes import PAGE_TOKENS, layout, peer_route, rank_routes

__all__ = [
    "ABORTED",
    "BACKEND",
    "DECODE",
    "LEASE_S",
    "OTHER_DECODE",
    "OTHER_PREFILL",
    "PREFILL",
    "DecodeDriver",
    "Effect",
    "PrefillDriver",
    "abort_failure",
    "anomalies",
    "connection_of",
    "endpoint_of",
    "grant",
    "messages",
    "of_kind",
    "pages_for",
    "peer",
    "peer_of",
    "records",
    "reports",
    "welcome_of",
]

Effect = PrefillEffect | DecodeEffect

BACKEND = "host"
LEASE_S = 3.0


def peer(instance: str, engine_rank: int = 0, incarnation: int = 1) -> PeerId:
    return PeerId(RankId(instance, engine_rank), incarnation)


PREFILL = peer("prefill")
OTHER_PREFILL = peer("prefill", 1)
DECODE = peer("decode")
OTHER_DECODE = peer("decode", 1)


def abort_failure(detail: str = "gone") -> Failure:
    return Failure(FailureReason.ABORTED, Stage.ENQUEUE, "x/0", detail)


ABORTED = abort_failure()


def connection_of(sender: PeerId, number: int = 0) -> bytes:
    """Return the name of a connection from a decode rank; successive connections have different numbers."""
    return f"{sender.rank.instance}/{sender.rank.engine_rank}/{sender.incarnation}/{number}".encode()


def peer_of(connection: bytes) -> PeerId:
    """Return the decode rank of a connection."""
    instance, engine_rank, incarnation, _ = connection.decode().split("/")
    return peer(instance, int(engine_rank), int(incarnation))


REQUESTS = (
    ev.SendOpened,
    ev.ChunkOffered,
    ev.QuiesceAsked,
    ev.QuarantineReleased,
    ev.ReceiveOpened,
    ev.ReceiveGranted,
    ev.OfferMade,
)
"""Events that a core may refuse."""


@contextmanager
def unchanged_if_refused(core: PrefillCore | DecodeCore, event: object) -> Iterator[None]:
    """Check that a core which refuses a request is as it was before."""
    before = fingerprint(core) if isinstance(event, REQUESTS) else b""
    try:
        yield
    except KvflowError:
        assert fingerprint(core) == before
        raise


class PrefillDriver:
    """The core of a prefill rank with a clock of its own; checks the invariants after every event.

    Args:
        me: The rank.
        timeouts: Defaults if None.
        limits: Defaults if None.
        side: Its layout.
        staging: Its staging memory.
        in_band_notices: Whether its transport delivers notices in band.
        max_descriptor_bytes: Limit of its transport.
        continues: Send `TurnContinued` as soon as the core asks for it; otherwise the test does.
        domain: Where its bytes in flight can be seen.
        takes_offers: Whether its engine takes offers.
    """

    def __init__(
        self,
        timeouts: Timeouts | None = None,
        limits: Limits | None = None,
        *,
        me: PeerId = PREFILL,
        side: KVLayout | None = None,
        staging: LocalStagingSettings | None = None,
        in_band_notices: bool = True,
        max_descriptor_bytes: int | None = None,
        continues: bool = True,
        domain: bytes = b"",
        takes_offers: bool = False,
    ) -> None:
        self.me = me
        self.side = side or layout()
        settings = PrefillSettings(
            domain=domain,
            timeouts=timeouts or Timeouts(),
            limits=Bounds.from_limits(limits or Limits()),
            layout=self.side,
            backend=BACKEND,
            in_band_notices=in_band_notices,
            max_descriptor_bytes=max_descriptor_bytes,
            staging=staging,
            endpoint=endpoint_of(me),
            takes_offers=takes_offers,
        )
        self.core = PrefillCore(me, settings)
        self.now = 100.0
        self._continues = continues
        self._attempts: dict[PeerId, int] = {}
        self._connections: dict[PeerId, bytes] = {}

    def __call__(self, event: ev.PrefillEvent) -> list[PrefillEffect]:
        with unchanged_if_refused(self.core, event):
            effects = self.core.handle(event, self.now)
        check_invariants(self.core)
        while self._continues and any(isinstance(effect, YieldTurn) for effect in effects):
            effects = [effect for effect in effects if not isinstance(effect, YieldTurn)]
            effects += self.core.handle(ev.TurnContinued(), self.now)
            check_invariants(self.core)
        return effects

    def hear(self, sender: PeerId, message: Message) -> list[PrefillEffect]:
        """Receive a message on the latest connection of a decode rank."""
        connection = self._connections.get(sender, connection_of(sender))
        return self(ev.MessageArrived(connection, message))  # type: ignore[arg-type]

    def sleep(self, seconds: float) -> list[PrefillEffect]:
        """Let time pass, deadline by deadline, as a clock task would. Pings to silent peers are lost."""
        effects: list[PrefillEffect] = []
        end = self.now + seconds
        while (deadline := self.core.timers.next()) is not None and deadline <= end:
            self.now = max(self.now, deadline)
            due = self(ev.TimePassed())
            for reply in [effect for effect in of_kind(due, Reply) if isinstance(effect.message, Ping)]:
                due += self(ev.ReplyLost(reply.connection))
            effects += due
        self.now = end
        return effects

    def pass_time(self, seconds: float) -> list[PrefillEffect]:
        """Let time pass while every peer sends a Ping each second."""
        effects: list[PrefillEffect] = []
        for _ in range(round(seconds)):
            for other in list(self.core.peers._peers.values()):
                self.hear(other.id, Ping(peer=other.id))
            effects += self.sleep(1.0)
        return effects

    def hello(
        self,
        sender: PeerId = DECODE,
        *,
        wants: bool = True,
        target: KVLayout | None = None,
        window: StagingWindow | None = None,
        lease_s: float = LEASE_S,
        **changes: Any,
    ) -> Hello:
        """Return the Hello of a decode rank, each with a new attempt number.

        Args:
            sender: The decode rank.
            wants: Whether it wants everything that this rank holds, or nothing.
            target: Its layout; None for the layout of this rank.
            window: Its staging window.
            lease_s: Silence after which it is lost.
            changes: Other values of fields.
        """
        attempt = self._attempts[sender] = self._attempts.get(sender, -1) + 1
        target = target or self.side
        engine_rank = self.me.rank.engine_rank
        (route,) = compile_routes({engine_rank: self.side}, target, decode_rank=0)
        hello = Hello(
            peer=sender,
            to=self.me,
            attempt=attempt,
            versions=(OLDEST_VERSION, PROTOCOL_VERSION),
            lease_s=lease_s,
            backend=BACKEND,
            backend_metadata=b"",
            layout=target,
            route=route if wants else Route(engine_rank, ()),
            staging=window,
        )
        return replace(hello, **changes)

    def checked(
        self, hello: Hello, *, connection: bytes | None = None, split_policy: SplitPolicy | None = None
    ) -> ev.HelloChecked:
        """Return the event that the shell sends for a compatible hello."""
        route = peer_route(self.side, hello.layout, hello.route, split_policy=split_policy, staging=hello.staging)
        return ev.HelloChecked(connection or connection_of(hello.peer), hello, route)

    def connect(
        self,
        other: PeerId = DECODE,
        *,
        connection: bytes | None = None,
        split_policy: SplitPolicy | None = None,
        principal: str = "",
        num_bytes: int = 0,
        **fields: Any,
    ) -> list[PrefillEffect]:
        """Complete the handshake with a decode rank; see `MessageArrived`, and `hello` for `fields`."""
        connection = self._connections[other] = connection or connection_of(other)
        hello = self.hello(other, **fields)
        effects = self(ev.MessageArrived(connection, hello, principal=principal, num_bytes=num_bytes))
        for pinged in [effect for effect in of_kind(effects, Reply) if isinstance(effect.message, Ping)]:
            effects = self(ev.ReplyLost(pinged.connection))  # the process of the previous incarnation has ended
        assert effects[-1] == CheckHello(connection, hello)
        return effects[:-1] + self(self.checked(hello, connection=connection, split_policy=split_policy))


def endpoint_of(other: PeerId) -> str:
    """Return the endpoint of a prefill rank; each incarnation has its own port."""
    return f"tcp://127.0.0.1:{20_000 + 100 * other.rank.engine_rank + other.incarnation}"


def welcome_of(other: PeerId, hello: Hello, **changes: Any) -> Welcome:
    """Return the Welcome with which a prefill rank accepts a hello."""
    fields: dict[str, Any] = {"attempt": hello.attempt, "version": PROTOCOL_VERSION, "endpoint": endpoint_of(other)}
    return Welcome(peer=other, **(fields | changes))


def records(*others: PeerId) -> tuple[RankRecord, ...]:
    """Return the directory records of a whole instance."""
    return tuple(
        RankRecord(peer=other, num_ranks=len(others), endpoint=endpoint_of(other), backend=BACKEND, layout=layout())
        for other in others
    )


class DecodeDriver:
    """The core of a decode rank with a clock of its own; checks the invariants after every event.

    Args:
        me: The rank.
        timeouts: Defaults if None.
        limits: Defaults if None.
        side: Its layout.
        ends_with_process: Property of its transport.
        staging: Its staging memory.
        proofs: Defaults if None.
    """

    def __init__(
        self,
        timeouts: Timeouts | None = None,
        limits: Limits | None = None,
        *,
        me: PeerId = DECODE,
        side: KVLayout | None = None,
        ends_with_process: bool = True,
        staging: WindowSettings | None = None,
        proofs: Proofs | None = None,
    ) -> None:
        self.me = me
        settings = DecodeSettings(
            timeouts=timeouts or Timeouts(),
            limits=limits or Limits(),
            layout=side or layout(),
            backend=BACKEND,
            backend_metadata=b"",
            ends_with_process=ends_with_process,
            staging=staging,
            proofs=proofs or Proofs(),
        )
        self.core = DecodeCore(me, settings)
        self.now = 100.0

    def __call__(self, event: ev.DecodeEvent) -> list[DecodeEffect]:
        with unchanged_if_refused(self.core, event):
            effects = self.core.handle(event, self.now)
        check_invariants(self.core)
        return effects

    def hear(self, sender: PeerId, message: Message, host: str = "") -> list[DecodeEffect]:
        return self(ev.MessageReceived(sender, message, host))  # type: ignore[arg-type]

    def sleep(self, seconds: float) -> list[DecodeEffect]:
        """Let time pass, deadline by deadline, as a clock task would."""
        effects: list[DecodeEffect] = []
        end = self.now + seconds
        while (deadline := self.core.timers.next()) is not None and deadline <= end:
            self.now = max(self.now, deadline)
            effects += self(ev.TimePassed())
        self.now = end
        return effects

    def pass_time(self, seconds: float) -> list[DecodeEffect]:
        """Let time pass while every connected peer sends a Pong each second."""
        effects: list[DecodeEffect] = []
        for _ in range(round(seconds)):
            for other in [peer.id for peer in self.core.peers._peers.values() if peer.is_connected]:
                effects += self.hear(other, Pong(peer=other))
            effects += self.sleep(1.0)
        return effects

    def found(self, *others: PeerId) -> list[DecodeEffect]:
        """Answer a lookup with every rank of an instance."""
        return self(ev.InstanceFound(others[0].rank.instance, records(*others)))

    def compiled(
        self,
        effects: Sequence[Effect],
        *,
        silent: Iterable[PeerId] = (),
        head_bytes: int = 2,
        num_layers: int = 1,
    ) -> list[DecodeEffect]:
        """Compile the requested routes; each rank holds one head, except that `silent` ranks hold nothing wanted."""
        (compile_routes_,) = [effect for effect in effects if isinstance(effect, CompileRoutes)]
        unwanted = list(silent)
        sides, num_heads = [], 0
        for record in compile_routes_.records:
            if record.peer in unwanted:
                sides.append(layout("other"))
                continue
            sides.append(layout(heads=(num_heads, num_heads + 1), head_bytes=head_bytes, num_layers=num_layers))
            num_heads += 1
        if not num_heads:
            routes = tuple(ev.RankRoute(Route(rank, ()), {}) for rank in range(len(sides)))
        else:
            target = layout(heads=(0, num_heads), head_bytes=head_bytes, num_layers=num_layers)
            routes = rank_routes(sides, target)
        return self(ev.RoutesCompiled(compile_routes_.instance, compile_routes_.attempt, routes))

    def welcome(self, hellos: Sequence[Effect], domain: bytes = b"") -> list[DecodeEffect]:
        """Receive a Welcome from each rank for its Hello among `hellos`, and from those that are sent one then."""
        effects: list[DecodeEffect] = []
        unanswered = deque(messages(hellos, Hello))
        while unanswered:
            to, hello = unanswered.popleft()
            assert isinstance(hello, Hello)
            answered = self.hear(to, welcome_of(to, hello, domain=domain))
            unanswered += messages(answered, Hello)
            effects += answered
        return effects

    def connect(
        self,
        *others: PeerId,
        silent: Iterable[PeerId] = (),
        head_bytes: int = 2,
        num_layers: int = 1,
        domain: bytes = b"",
    ) -> list[DecodeEffect]:
        """Complete the handshake with an instance, from the lookup on; return the effects of the Welcomes.

        Args:
            others: All of its ranks.
            silent: Those of its ranks that hold nothing wanted.
            head_bytes: Bytes of a token in each layer that each of the others sends.
            num_layers: Layers that each of the others sends.
            domain: Transport domain in their Welcome.
        """
        self.core.instances.reconnect(others[0].rank.instance, self.now)  # a room would do this
        effects = self.found(*others)
        hellos = self.compiled(effects, silent=silent, head_bytes=head_bytes, num_layers=num_layers)
        return self.welcome(hellos, domain)


def grant(room: RoomId = 7, generation: int = 1, tokens: tuple[int, int] = (0, 8), **changes: object) -> Grant:
    fields: dict[str, object] = {
        "token": 99,
        "pages": {"kv": pages_for(tokens)},
        "num_decode_ranks": 1,
        "timeout_s": 60.0,
        "progress_s": 30.0,
        "priority": 0,
        "digest": False,
    }
    return Grant(room=room, generation=generation, **({"ranges": {"kv": tokens}} | fields | changes))  # type: ignore[arg-type]


def pages_for(tokens: tuple[int, int], first: int = 0) -> bytes:
    """Return a page table that fits some tokens in a `layout`, from page `first` on."""
    return np.arange(first, first + pages_spanned(tokens, PAGE_TOKENS), dtype=WIRE_PAGES).tobytes()


def messages(effects: Sequence[Effect], kind: type[Message]) -> list[tuple[PeerId, Message]]:
    """Return the messages of one kind among effects, with their receivers."""
    found: list[tuple[PeerId, Message]] = []
    for effect in effects:
        match effect:
            case SendMessage(to, message) if isinstance(message, kind):
                found.append((to, message))
            case Reply(connection, message) if isinstance(message, kind):
                found.append((peer_of(connection), message))
            case _:
                pass
    return found


def of_kind(effects: Sequence[Effect], kind: type[Any]) -> list[Any]:
    """Return the effects of one kind."""
    return [effect for effect in effects if isinstance(effect, kind)]


def reports(effects: Sequence[Effect]) -> list[tuple[str, str]]:
    """Return outcome and memory of each report among effects."""
    return [
        (effect.outcome.value, effect.memory.value)
        for effect in effects
        if isinstance(effect, (ReportSender, ReportReceiver))
    ]


def anomalies(effects: Sequence[Effect]) -> list[str]:
    """Return the kinds of the counted anomalies among effects."""
    return [effect.kind for effect in effects if isinstance(effect, CountAnomaly)]

"""Real cores of both sides in a simulated world that tracks every write.

Two prefill ranks and two decode ranks share one room. `World` plays the shells, the directory and the network: it
executes effects, keeps messages until a test delivers, loses or repeats them, tracks the posts in flight, and checks
each promise as it is made. It does nothing by itself; tests drive it step by step.
"""

from dataclasses import dataclass, field

from kvflow.bounds import Bounds
from kvflow.config import Timeouts
from kvflow.errors import FailureReason, Stage
from kvflow.geometry.layout import KVLayout
from kvflow.geometry.ranges import TokenRange
from kvflow.state import effects as ef
from kvflow.state import events as ev
from kvflow.state.events import Chunk, DeliveryId
from kvflow.state.tables import Memory
from kvflow.wire.messages import Drained, Failed, Failure, Grant, Hello, Message, Notice, PeerId, RankId
from tests.support.cores import (
    DecodeDriver,
    Effect,
    PrefillDriver,
    connection_of,
    pages_for,
    peer,
    peer_of,
    records,
)
from tests.support.small_routes import layout, rank_routes

__all__ = ["BROKEN", "DECODE", "NUM_TOKENS", "ROOM", "Post", "World"]

DECODE = [peer("decode", rank) for rank in range(2)]
ROOM = 7
NUM_TOKENS = 6
TIMEOUTS = Timeouts(
    handshake_s=10.0,
    open_s=10.0,
    grant_s=10.0,
    progress_s=8.0,
    drain_s=4.0,
    lease_s=6.0,
    transfer_s=40.0,
)
LIMITS = Bounds(descriptors_planned_inline=3)
"""Chunks of more than about one token are planned off the event loop."""

BROKEN = Failure(FailureReason.WRITE_FAILED, Stage.SUBMIT, "prefill/0", "broken")

Ends = tuple[PeerId, PeerId]
"""Sender and receiver of messages, or a decode rank and a prefill rank."""

Transfer = tuple[PeerId, int]
"""A decode rank and one of its generations."""

Opening = tuple[PeerId, int]
"""A prefill rank, and how many times it has opened the room."""

PieceKey = tuple[PeerId, DeliveryId, int]
"""A prefill rank, and the delivery and number of a piece that it sends."""


@dataclass
class Post:
    """A post in flight."""

    rank: PeerId
    delivery: DeliveryId
    notice: Notice
    tokens: TokenRange
    opening: Opening


@dataclass
class World:
    """Everything outside the cores.

    Attributes:
        wanted: Tokens that each decode rank wants.
        holding: For each prefill rank, whether it holds any of them.
        prefill: The current incarnation of each prefill rank.
        wires: Messages in flight.
        connections: Number of each connection, by decode and prefill rank.
        breaks: Broken connections that their decode rank has yet to notice.
        lookups: Decode ranks that wait for an answer of the directory.
        compiling: Route compilations in progress.
        checking: Hellos that are being checked.
        released: Pages that an operator has released from quarantine; no promise covers them.
        promised: Deliveries for which a prefill rank has promised that it writes nothing any more.
    """

    wanted: dict[PeerId, TokenRange]
    holding: tuple[bool, bool] = (True, True)
    prefill: list[PeerId] = field(default_factory=lambda: [peer("prefill", rank) for rank in range(2)])
    dead: list[PeerId] = field(default_factory=list)
    senders: dict[PeerId, PrefillDriver] = field(default_factory=dict)
    receivers: dict[PeerId, DecodeDriver] = field(default_factory=dict)
    wires: dict[Ends, list[Message]] = field(default_factory=dict)
    connections: dict[Ends, int] = field(default_factory=dict)
    num_connections: int = 0
    breaks: dict[Ends, None] = field(default_factory=dict)
    lookups: dict[PeerId, None] = field(default_factory=dict)
    compiling: list[tuple[PeerId, ef.CompileRoutes]] = field(default_factory=list)
    checking: list[tuple[PeerId, bytes, Hello]] = field(default_factory=list)
    probes: dict[Ends, None] = field(default_factory=dict)
    plans: dict[PieceKey, ef.Piece] = field(default_factory=dict)
    planned: dict[PieceKey, ef.Piece] = field(default_factory=dict)
    posts: dict[PieceKey, Post] = field(default_factory=dict)
    written: dict[Transfer, dict[PeerId, set[int]]] = field(default_factory=dict)
    granted: dict[Transfer, dict[PeerId, None]] = field(default_factory=dict)
    memory: dict[Transfer, str] = field(default_factory=dict)
    outcome: dict[Transfer, str] = field(default_factory=dict)
    openings: dict[PeerId, int] = field(default_factory=dict)
    served: dict[Opening, dict[PeerId, int]] = field(default_factory=dict)
    source: dict[Opening, tuple[str, str]] = field(default_factory=dict)
    released: dict[Transfer | Opening, None] = field(default_factory=dict)
    promised: dict[tuple[PeerId, DeliveryId], None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for rank in self.prefill:
            self.senders[rank] = self._sender(rank)
        for rank in DECODE:
            self.receivers[rank] = DecodeDriver(TIMEOUTS, me=rank, side=layout(heads=(0, sum(self.holding))))

    def _sender(self, rank: PeerId) -> PrefillDriver:
        return PrefillDriver(TIMEOUTS, LIMITS, me=rank, side=self._sides[rank.rank.engine_rank])

    @property
    def _sides(self) -> list[KVLayout]:
        """Layouts of the prefill ranks: each holds one wanted head, or none."""
        heads = [sum(self.holding[:rank]) for rank in range(2)]
        return [
            layout(heads=(head, head + 1)) if holds else layout("other")
            for head, holds in zip(heads, self.holding, strict=True)
        ]

    # Engines and operators -----------------------------------------------------------------------------------------

    def open_sender(self, rank: PeerId) -> None:
        if ROOM not in self.senders[rank].core.rooms.rooms:
            self.openings[rank] = self.openings.get(rank, 0) + 1
            self.run_prefill(rank, ev.SendOpened(ROOM))

    def compute(self, rank: PeerId, size: int) -> None:
        room = self.senders[rank].core.rooms.rooms.get(ROOM)
        if room is None or not room.state.is_pending or room.is_finished:
            return
        start = room._chunks[-1].tokens[1] if room._chunks else 0
        stop = min(start + size, NUM_TOKENS)
        chunk = Chunk((start, stop), {"kv": (start, stop)}, last=stop == NUM_TOKENS)
        self.run_prefill(rank, ev.ChunkOffered(ROOM, chunk))

    def open_receiver(self, rank: PeerId) -> None:
        if ROOM in self.receivers[rank].core.rooms.generations:
            return
        generation = 1 + max((number for owner, number in self.memory if owner == rank), default=0)
        self.memory[rank, generation] = "held"
        tokens = self.wanted[rank]
        pages = pages_for(tokens, NUM_TOKENS * generation)
        opened = ev.ReceiveOpened(
            ROOM, generation, "prefill", {"kv": tokens}, {"kv": pages}, 2, 40.0, b"secret of the test"
        )
        self.run_decode(rank, opened)

    def abort(self, rank: PeerId) -> None:
        if rank in DECODE:
            self.run_decode(rank, ev.ReceiveAborted(ROOM, BROKEN))
        else:
            self.run_prefill(rank, ev.SendAborted(ROOM, BROKEN))

    def release(self, rank: PeerId) -> None:
        """Release the quarantined pages of a rank, as an operator would."""
        if rank in DECODE:
            rooms = self.receivers[rank].core.rooms.rooms
            for generation in [key for key, room in rooms.items() if room.state.memory is Memory.QUARANTINED]:
                self.released[rank, generation] = None
                self.run_decode(rank, ev.QuarantineReleased(generation))
            return
        room = self.senders[rank].core.rooms.rooms.get(ROOM)
        if room is not None and room.state.memory is Memory.QUARANTINED:
            self.released[rank, self.openings[rank]] = None
            self.run_prefill(rank, ev.QuarantineReleased(ROOM))

    def restart(self, which: int) -> None:
        """Kill a prefill process, whose posts no longer land, and replace it."""
        old = self.prefill[which]
        self.dead.append(old)
        self.plans = {key: piece for key, piece in self.plans.items() if key[0] != old}
        self.posts = {key: post for key, post in self.posts.items() if post.rank != old}
        self.checking = [check for check in self.checking if check[0] != old]
        for ends in self.connections:
            if ends[1] == old:
                self.breaks[ends] = None
        new = PeerId(RankId("prefill", which), old.incarnation + 1)
        self.prefill[which] = new
        self.senders[new] = self._sender(new)
        self.senders[new].now = self.senders[old].now

    # The network ---------------------------------------------------------------------------------------------------

    def busy(self) -> list[Ends]:
        return [ends for ends, wire in self.wires.items() if wire]

    def deliver(self, ends: Ends, place: int = 0, *, keep: bool = False) -> None:
        """Deliver a message; with `keep`, it stays in flight and can be delivered again."""
        sender, receiver = ends
        message = self.wires[ends][place] if keep else self.wires[ends].pop(place)
        if receiver in DECODE:
            if (receiver, sender) in self.connections:
                self.run_decode(receiver, ev.MessageReceived(sender, message))  # type: ignore[arg-type]
        elif ends in self.connections and receiver not in self.dead:
            connection = connection_of(sender, self.connections[ends])
            self.run_prefill(receiver, ev.MessageArrived(connection, message))  # type: ignore[arg-type]

    def break_connection(self, ends: Ends) -> None:
        """Lose the messages in flight; replace the connection by one with another number."""
        self._connect(*ends)
        self.breaks[ends] = None

    def notice_break(self, ends: Ends) -> None:
        del self.breaks[ends]
        if ends in self.connections:
            self.run_decode(ends[0], ev.ConnectionLost(ends[1]))

    def _connect(self, decode: PeerId, rank: PeerId) -> None:
        self.num_connections += 1
        self.connections[decode, rank] = self.num_connections
        self.wires[decode, rank] = []
        self.wires[rank, decode] = []

    def _put(self, sender: PeerId, receiver: PeerId, message: Message) -> None:
        wire = self.wires.setdefault((sender, receiver), [])
        if message not in wire:
            wire.append(message)

    # The directory, and work off the event loop --------------------------------------------------------------------

    def answer_lookup(self, decode: PeerId, *, is_stale: bool = False) -> None:
        """Answer with the registered ranks; a stale answer has the incarnations before a restart."""
        del self.lookups[decode]
        found = list(self.prefill)
        if is_stale:
            found = [next((old for old in self.dead if old.rank == rank.rank), rank) for rank in found]
        self.run_decode(decode, ev.InstanceFound("prefill", records(*found)))

    def compile(self, place: int) -> None:
        decode, asked = self.compiling.pop(place)
        routes = rank_routes(self._sides, layout(heads=(0, sum(self.holding))))
        self.run_decode(decode, ev.RoutesCompiled("prefill", asked.attempt, routes))

    def check(self, place: int) -> None:
        rank, connection, hello = self.checking.pop(place)
        self.run_prefill(rank, self.senders[rank].checked(hello, connection=connection))

    def answer_probe(self, ends: Ends) -> None:
        """Answer a probe: the host refuses connections only if the process is dead."""
        del self.probes[ends]
        self.run_decode(ends[0], ev.ProbeFinished(ends[1], ends[1] in self.dead))

    # The transport -------------------------------------------------------------------------------------------------

    def finish_plan(self, key: PieceKey, failure: Failure | None = None) -> None:
        piece = self.plans.pop(key)
        if failure is not None:
            self.run_prefill(key[0], ev.PlanFailed(*key[1:], failure))
            return
        self.planned[key] = piece
        self.run_prefill(key[0], ev.PlanFinished(*key[1:]))

    def end_post(self, key: PieceKey, ends: str) -> None:
        rank, delivery, seq = key
        if ends == "in doubt":
            self.run_prefill(rank, ev.PostInDoubt(delivery, seq, BROKEN))
            return
        post = self.posts.pop(key)
        if ends == "badly":
            self.run_prefill(rank, ev.PostEnded(delivery, seq, BROKEN))
            return
        cells = self.written.setdefault((delivery.peer, delivery.generation), {}).setdefault(rank, set())
        cells.update(range(*post.tokens))
        if ends == "well":
            self.run_decode(delivery.peer, ev.NoticeDelivered(post.notice))
        self.run_prefill(rank, ev.PostEnded(delivery, seq, None))

    # Time ----------------------------------------------------------------------------------------------------------

    def alive(self) -> list[PeerId]:
        return [*self.prefill, *DECODE]

    def driver(self, rank: PeerId) -> PrefillDriver | DecodeDriver:
        return self.receivers[rank] if rank in DECODE else self.senders[rank]

    def pass_time(self, seconds: float) -> None:
        """Let time pass, and fire the deadlines of all ranks in order."""
        now = self.receivers[DECODE[0]].now
        end = now + seconds
        while (due := self._due(end)) is not None:
            when, rank = due
            now = max(now, when)
            self._set_clocks(now)
            if rank in DECODE:
                self.run_decode(rank, ev.TimePassed())
            else:
                self.run_prefill(rank, ev.TimePassed())
        self._set_clocks(end)

    def _due(self, end: float) -> tuple[float, PeerId] | None:
        deadlines = [(self.driver(rank).core.timers.next(), rank) for rank in self.alive()]
        return min([(when, rank) for when, rank in deadlines if when is not None and when <= end], default=None)

    def _set_clocks(self, now: float) -> None:
        for rank in [*self.senders, *self.receivers]:
            self.driver(rank).now = now

    def settle(self) -> None:
        """Deliver all messages and finish all pending work, successfully and in order."""
        while self.busy() or self.is_working:
            for ends in self.busy():
                if self.wires[ends]:
                    self.deliver(ends)
            self.work()
            for ends in list(self.breaks):
                self.notice_break(ends)
            for decode in list(self.lookups):
                self.answer_lookup(decode)

    def settle_handshakes(self) -> None:
        """Complete every pending handshake."""
        for decode in list(self.lookups):
            self.answer_lookup(decode)
        while self.compiling:
            self.compile(0)
        for _ in range(2):  # hellos, then their answers
            for ends in self.busy():
                for _ in range(len(self.wires[ends])):
                    if self.wires[ends]:
                        self.deliver(ends)
            while self.checking:
                self.check(0)

    @property
    def is_working(self) -> bool:
        """Whether work off the event loop is pending."""
        return any((self.plans, self.posts, self.lookups, self.compiling, self.checking, self.probes, self.breaks))

    def work(self) -> None:
        """Finish the pending work off the event loop."""
        while self.compiling:
            self.compile(0)
        while self.checking:
            self.check(0)
        for ends in list(self.probes):
            self.answer_probe(ends)
        while self.plans:
            self.finish_plan(next(iter(self.plans)))
        for key in list(self.posts):
            if key in self.posts:
                self.end_post(key, "well")

    # Execution of effects ------------------------------------------------------------------------------------------

    def run_prefill(self, rank: PeerId, event: ev.PrefillEvent) -> None:
        effects = self.senders[rank](event)
        room = self.senders[rank].core.rooms.rooms.get(ROOM)
        if room is not None:
            generations = {item.id.peer: item.id.generation for item in room.deliveries.values()}
            self.served.setdefault((rank, self.openings[rank]), {}).update(generations)
        for effect in effects:
            self._carry_out_on_prefill(rank, effect)

    def run_decode(self, rank: PeerId, event: ev.DecodeEvent) -> None:
        for effect in self.receivers[rank](event):
            self._carry_out_on_decode(rank, effect)

    def _carry_out_on_prefill(self, rank: PeerId, effect: Effect) -> None:
        match effect:
            case ef.Reply(connection, message):
                receiver = peer_of(connection)
                self._note_promise(rank, receiver, message)
                number = self.connections.get((receiver, rank))
                if number is not None and connection == connection_of(receiver, number):
                    self._put(rank, receiver, message)
            case ef.CheckHello(connection, hello):
                self.checking.append((rank, connection, hello))
            case ef.PostPiece(piece):
                self._post(rank, piece, piece.notice)
            case ef.PlanPiece(piece):
                self.plans[rank, piece.delivery, piece.seq] = piece
            case ef.PostPlan(delivery, seq, notice):
                self._post(rank, self.planned.pop((rank, delivery, seq)), notice)
            case ef.DropPlan(delivery, seq):
                del self.planned[rank, delivery, seq]
            case ef.ReportSender():
                self.source[rank, self.openings[rank]] = (effect.outcome.value, effect.memory.value)
            case _:
                pass

    def _carry_out_on_decode(self, rank: PeerId, effect: Effect) -> None:
        match effect:
            case ef.SendMessage(receiver, message):
                if isinstance(message, Grant):
                    self.granted.setdefault((rank, message.generation), {})[receiver] = None
                if (rank, receiver) in self.connections:
                    self._put(rank, receiver, message)
            case ef.LookUp():
                self.lookups[rank] = None
            case ef.CompileRoutes():
                self.compiling.append((rank, effect))
            case ef.Connect(other):
                assert (rank, other) not in self.connections, "connected twice at once"
                self._connect(rank, other)
            case ef.Disconnect(other):
                del self.connections[rank, other]
                self.breaks.pop((rank, other), None)
            case ef.ProbePeer(other):
                assert (rank, other) not in self.probes, "probed twice at once"
                self.probes[rank, other] = None
            case ef.ReportReceiver():
                before = self.outcome.get((rank, effect.generation), "pending")
                assert before in ("pending", effect.outcome.value), "decided twice"
                self.memory[rank, effect.generation] = effect.memory.value
                self.outcome[rank, effect.generation] = effect.outcome.value
            case _:
                pass

    def _post(self, rank: PeerId, piece: ef.Piece, notice: Notice) -> None:
        assert (rank, piece.delivery) not in self.promised, "posted after saying that nothing can be written"
        opening = (rank, self.openings[rank])
        key = (rank, piece.delivery, piece.seq)
        self.posts[key] = Post(rank, piece.delivery, notice, piece.ranges["kv"], opening)

    def _note_promise(self, sender: PeerId, receiver: PeerId, message: Message) -> None:
        if isinstance(message, Drained) or (isinstance(message, Failed) and message.drained):
            delivery = DeliveryId(message.room, receiver, message.generation)
            under_way = [post for post in self.posts.values() if (post.rank, post.delivery) == (sender, delivery)]
            assert not under_way, "said that nothing can be written while a write is under way"
            self.promised[sender, delivery] = None

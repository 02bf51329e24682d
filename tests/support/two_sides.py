"""Real cores of both sides, what lies between them, and the truth about memory beside them.

Two prefill ranks and two decode ranks share one room. `World` is the shell and the network: it carries effects out,
keeps messages until somebody delivers, loses or repeats them, knows which writes are under way, and checks each
promise as it is made. It does nothing by itself; tests say what happens next.
"""

from dataclasses import dataclass, field

from kvflow.config import Timeouts
from kvflow.errors import FailureReason, Stage
from kvflow.state import effects as ef
from kvflow.state import events as ev
from kvflow.state.events import Chunk, DeliveryId
from kvflow.state.tables import Memory
from kvflow.wire.messages import Drained, Failed, Failure, Grant, Message, Notice, PeerId, RankId, Refuse
from tests.support.cores import CoreDriver, debts, peer

__all__ = ["DECODE", "NUM_TOKENS", "ROOM", "Post", "World"]

DECODE = [peer("decode", rank) for rank in range(2)]
ROOM = 7
NUM_TOKENS = 6
TIMEOUTS = Timeouts(
    open_s=10.0, grant_s=10.0, first_bytes_s=20.0, progress_s=8.0, drain_s=4.0, lease_s=6.0, transfer_s=40.0
)
BROKEN = Failure(FailureReason.WRITE_FAILED, Stage.SUBMIT, "prefill/0", "broken")
LEFT = Failure(FailureReason.PEER_LOST, Stage.BOOTSTRAP, "decode/0", "it does not know this rank any more")

Transfer = tuple[PeerId, int]
"""A decode rank and a generation of it."""

Opening = tuple[PeerId, int]
"""A prefill rank, and how often it has opened the room."""


@dataclass
class Post:
    """A write that is under way."""

    rank: PeerId
    delivery: DeliveryId
    notice: Notice
    tokens: tuple[int, int]
    opening: Opening


@dataclass
class World:
    """Everything outside of the cores.

    Attributes:
        wanted: Tokens that each decode rank wants.
        owing: Prefill ranks that hold any of them.
        prefill: The present life of each prefill rank.
        wires: Messages on their way, by sender and receiver.
        known: Decode ranks that have a line, as each prefill rank sees it.
        lines: The same as each decode rank sees it.
        released: Pages that an operator has taken back; nothing is promised for them.
        promised: Deliveries of which a prefill rank has said that nothing can be written any more.
    """

    wanted: dict[PeerId, tuple[int, int]]
    owing: tuple[bool, bool] = (True, True)
    prefill: list[PeerId] = field(default_factory=lambda: [peer("prefill", rank) for rank in range(2)])
    dead: list[PeerId] = field(default_factory=list)
    cores: dict[PeerId, CoreDriver] = field(default_factory=dict)
    wires: dict[tuple[PeerId, PeerId], list[Message]] = field(default_factory=dict)
    known: dict[tuple[PeerId, PeerId], None] = field(default_factory=dict)
    lines: dict[tuple[PeerId, PeerId], None] = field(default_factory=dict)
    greeting: dict[PeerId, None] = field(default_factory=dict)
    probes: dict[tuple[PeerId, PeerId], None] = field(default_factory=dict)
    plans: list[tuple[PeerId, DeliveryId, int, tuple[int, int]]] = field(default_factory=list)
    planned: dict[tuple[PeerId, DeliveryId, int], tuple[int, int]] = field(default_factory=dict)
    posts: dict[tuple[PeerId, DeliveryId, int], Post] = field(default_factory=dict)
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
        for rank in [*self.prefill, *DECODE]:
            self.cores[rank] = CoreDriver(rank, TIMEOUTS)

    # Engines and operators -----------------------------------------------------------------------------------------

    def open_sender(self, rank: PeerId) -> None:
        if ROOM not in self.cores[rank].core.senders.rooms:
            self.openings[rank] = self.openings.get(rank, 0) + 1
            self.run(rank, ev.SendOpened(ROOM))

    def compute(self, rank: PeerId, size: int) -> None:
        sender = self.cores[rank].core.senders.rooms.get(ROOM)
        if sender is None or not sender.state.is_pending or sender.is_finished:
            return
        start = sender._chunks[-1].tokens[1] if sender._chunks else 0
        stop = min(start + size, NUM_TOKENS)
        self.run(rank, ev.ChunkOffered(ROOM, Chunk((start, stop), {"kv": (start, stop)}, last=stop == NUM_TOKENS)))

    def open_receiver(self, rank: PeerId) -> None:
        core = self.cores[rank].core
        if ROOM in core.receivers.rooms:
            return
        generation = 1 + max((number for owner, number in self.memory if owner == rank), default=0)
        self.memory[rank, generation] = "held"
        wish = ev.ReceiveOpened(
            ROOM, generation, "prefill", {"kv": self.wanted[rank]}, {"kv": b""}, 2, 40.0, b"secret of the test"
        )
        self.run(rank, wish)

    def release(self, rank: PeerId) -> None:
        core = self.cores[rank].core
        quarantined = [key for key, item in core.receivers.receivers.items() if item.state.memory is Memory.QUARANTINED]
        for generation in quarantined:
            self.released[rank, generation] = None
            self.run(rank, ev.QuarantineReleased(generation))
        sender = core.senders.rooms.get(ROOM)
        if sender is not None and sender.state.memory is Memory.QUARANTINED:
            self.released[rank, self.openings[rank]] = None
            self.run(rank, ev.QuarantineReleased(ROOM))

    def restart(self, which: int) -> None:
        """Kill a prefill process: its writes land no more. Another one takes its place."""
        old = self.prefill[which]
        self.dead.append(old)
        self.plans = [plan for plan in self.plans if plan[0] != old]
        self.posts = {key: post for key, post in self.posts.items() if post.rank != old}
        new = PeerId(RankId("prefill", which), old.incarnation + 1)
        self.prefill[which] = new
        self.cores[new] = CoreDriver(new, TIMEOUTS)
        self.cores[new].now = self.cores[old].now

    # The network ---------------------------------------------------------------------------------------------------

    def busy(self) -> list[tuple[PeerId, PeerId]]:
        return [ends for ends, wire in self.wires.items() if wire]

    def deliver(self, ends: tuple[PeerId, PeerId], place: int = 0, *, keep: bool = False) -> None:
        """Hand a message over; one that is kept will come again."""
        sender, receiver = ends
        message = self.wires[ends][place] if keep else self.wires[ends].pop(place)
        if receiver in self.dead:
            return
        if receiver in DECODE:
            self._arrive_at_decode(sender, receiver, message)
        elif (receiver, sender) in self.known:
            self.run(receiver, ev.MessageReceived(sender, message))
        elif (sender, receiver) in self.lines:
            self._put(receiver, sender, Refuse(peer=receiver, to=None, detail="say hello first"))

    def _arrive_at_decode(self, sender: PeerId, receiver: PeerId, message: Message) -> None:
        if (receiver, sender) not in self.lines:
            return
        if isinstance(message, Refuse):
            self.run(receiver, ev.PeerLeft(sender, LEFT))
        else:
            self.run(receiver, ev.MessageReceived(sender, message))

    def _put(self, sender: PeerId, receiver: PeerId, message: Message) -> None:
        wire = self.wires.setdefault((sender, receiver), [])
        if message not in wire:
            wire.append(message)

    def greet(self, decode: PeerId, *, num_reached: int = 2) -> None:
        """End a handshake: well, or badly after some prefill ranks have taken the hello for good."""
        del self.greeting[decode]
        strangers = [rank for rank in self.prefill if (decode, rank) not in self.lines]
        for rank in self.prefill[:num_reached]:
            if rank in strangers:  # a new connection; what was on the old one is lost
                self.wires[rank, decode] = []
            if rank in strangers or (rank, decode) not in self.known:  # what came before the hello was refused
                self.wires[decode, rank] = []
            self.known[rank, decode] = None
            self.lines[decode, rank] = None
            owed = ("kv",) if self.owing[rank.rank.engine_rank] else ()
            self.run(rank, ev.PeerGreeted(decode, TIMEOUTS.lease_s, owed))
        if num_reached == len(self.prefill):
            ranks = [ev.GreetedRank(rank, debts(2 * self.owing[rank.rank.engine_rank])) for rank in self.prefill]
            self.run(decode, ev.InstanceGreeted("prefill", tuple(ranks)))
            return
        for rank in strangers:
            self.lines.pop((decode, rank), None)
        self.run(decode, ev.InstanceUnreachable("prefill", LEFT))

    def answer_probe(self, decode: PeerId, rank: PeerId) -> None:
        """Only of a dead process does the host say that nobody listens."""
        del self.probes[decode, rank]
        if rank in self.dead:
            self.run(decode, ev.PeerGone(rank))

    # The transport -------------------------------------------------------------------------------------------------

    def finish_plan(self, place: int) -> None:
        rank, delivery, seq, tokens = self.plans.pop(place)
        self.planned[rank, delivery, seq] = tokens
        self.run(rank, ev.PlanFinished(delivery, seq, 2 * (tokens[1] - tokens[0])))

    def end_post(self, key: tuple[PeerId, DeliveryId, int], ends: str) -> None:
        rank, delivery, seq = key
        if ends == "in doubt":
            self.run(rank, ev.PostDoubted(delivery, seq, BROKEN))
            return
        post = self.posts.pop(key)
        if ends == "badly":
            self.run(rank, ev.PostSettled(delivery, seq, BROKEN))
            return
        cells = self.written.setdefault((delivery.peer, delivery.generation), {}).setdefault(rank, set())
        cells.update(range(*post.tokens))
        if ends == "well":
            self.run(delivery.peer, ev.NoticeDelivered(post.notice))
        self.run(rank, ev.PostSettled(delivery, seq, None))

    # Time ----------------------------------------------------------------------------------------------------------

    def alive(self) -> list[PeerId]:
        return [*self.prefill, *DECODE]

    def pass_time(self, seconds: float) -> None:
        """Let deadlines come up, the earliest first, whoever has them."""
        now = self.cores[DECODE[0]].now
        end = now + seconds
        while (due := self._due(end)) is not None:
            when, rank = due
            now = max(now, when)
            self._set_clocks(now)
            self.run(rank, ev.TimePassed())
        self._set_clocks(end)

    def _due(self, end: float) -> tuple[float, PeerId] | None:
        deadlines = [(self.cores[rank].core.next_deadline(), rank) for rank in self.alive()]
        return min([(when, rank) for when, rank in deadlines if when is not None and when <= end], default=None)

    def _set_clocks(self, now: float) -> None:
        for core in self.cores.values():
            core.now = now

    def settle(self) -> None:
        """Do everything that is to be done now, well and in order."""
        while self.busy() or self.plans or self.posts or self.greeting or self.probes:
            for ends in self.busy():
                self.deliver(ends)
            for decode in list(self.greeting):
                self.greet(decode)
            for decode, rank in list(self.probes):
                self.answer_probe(decode, rank)
            while self.plans:
                self.finish_plan(0)
            for key in list(self.posts):
                self.end_post(key, "well")

    # How effects are carried out -----------------------------------------------------------------------------------

    def run(self, rank: PeerId, event: ev.Event) -> None:
        effects = self.cores[rank](event)
        sender = self.cores[rank].core.senders.rooms.get(ROOM)
        if sender is not None:
            generations = {to: item.id.generation for to, item in sender.deliveries.items()}
            self.served.setdefault((rank, self.openings[rank]), {}).update(generations)
        for effect in effects:
            self._carry_out(rank, effect)

    def _carry_out(self, rank: PeerId, effect: ef.Effect) -> None:
        match effect:
            case ef.SendMessage(receiver, message):
                self._note(rank, receiver, message)
                if (rank, receiver) in (self.lines if rank in DECODE else self.known):
                    self._put(rank, receiver, message)
            case ef.GreetInstance():
                assert rank not in self.greeting, "greeted twice at once"
                self.greeting[rank] = None
            case ef.ProbePeer(other):
                self.probes[rank, other] = None
            case ef.ForgetPeer(other):
                (self.lines if rank in DECODE else self.known).pop((rank, other), None)
            case ef.ReportSender():
                self.source[rank, self.openings[rank]] = (effect.outcome.value, effect.memory.value)
            case ef.ReportReceiver():
                before = self.outcome.get((rank, effect.generation), "pending")
                assert before in ("pending", effect.outcome.value), "decided twice"
                self.memory[rank, effect.generation] = effect.memory.value
                self.outcome[rank, effect.generation] = effect.outcome.value
            case _:
                self._move(rank, effect)

    def _move(self, rank: PeerId, effect: ef.Effect) -> None:
        match effect:
            case ef.EnqueueChunk(delivery, seq, ranges):
                self.plans.append((rank, delivery, seq, ranges["kv"]))
            case ef.DropChunks(delivery):
                self.plans = [plan for plan in self.plans if plan[:2] != (rank, delivery)]
            case ef.PostPlan(delivery, seq, notice):
                assert (rank, delivery) not in self.promised, "posted after saying that nothing can be written"
                tokens = self.planned.pop((rank, delivery, seq))
                opening = (rank, self.openings[rank])
                self.posts[rank, delivery, seq] = Post(rank, delivery, notice, tokens, opening)
            case ef.DropPlan(delivery, seq):
                self.planned.pop((rank, delivery, seq))

    def _note(self, sender: PeerId, receiver: PeerId, message: Message) -> None:
        """Remember what was granted and what was promised."""
        if isinstance(message, Grant):
            self.granted.setdefault((sender, message.generation), {})[receiver] = None
        elif isinstance(message, Drained) or (isinstance(message, Failed) and message.drained):
            delivery = DeliveryId(message.room, receiver, message.generation)
            under_way = [post for post in self.posts.values() if (post.rank, post.delivery) == (sender, delivery)]
            assert not under_way, "said that nothing can be written while a write is under way"
            self.promised[sender, delivery] = None

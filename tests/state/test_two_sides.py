"""Real cores of both sides, an adversary between them, and the truth about memory beside them.

Two prefill ranks and two decode ranks talk over connections that keep their order but not their pace. Writes end when
the adversary likes, well or badly, and engines give up when it likes. After every step the promises are checked
against what was really written.
"""

from collections import deque

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvflow.errors import FailureReason, Stage
from kvflow.state import effects as ef
from kvflow.state import events as ev
from kvflow.state.events import Chunk, DeliveryId
from kvflow.wire.messages import Failure, Message, Notice, PeerId
from tests.support.cores import CoreDriver, debts, peer

PREFILL = [peer("prefill", rank) for rank in range(2)]
DECODE = [peer("decode", rank) for rank in range(2)]
ROOM = 7
NUM_TOKENS = 6
LEASE_S = 1e6  # nobody falls silent here; the simulation of whole instances is where peers die
BROKEN = Failure(FailureReason.WRITE_FAILED, Stage.SUBMIT, "prefill/0", "broken")

pick = st.integers(0, 1_000_000)


class TwoSides(RuleBasedStateMachine):
    """The world."""

    @initialize(tokens=st.tuples(st.integers(0, NUM_TOKENS), st.integers(0, NUM_TOKENS)))
    def build(self, tokens: tuple[int, int]) -> None:
        self.wanted = (min(tokens), max(tokens))
        self.cores = {rank: CoreDriver(rank) for rank in PREFILL + DECODE}
        self.wires: dict[tuple[PeerId, PeerId], deque[Message]] = {}
        self.planning: list[tuple[PeerId, DeliveryId, int, tuple[int, int]]] = []
        self.planned_tokens: dict[tuple[PeerId, DeliveryId, int], tuple[int, int]] = {}
        self.posted: dict[tuple[PeerId, DeliveryId, int], tuple[tuple[int, int], Notice]] = {}
        self.written: dict[tuple[PeerId, int], dict[PeerId, set[int]]] = {}
        self.memory: dict[tuple[PeerId, int], str] = {}
        self.outcome: dict[tuple[PeerId, int], str] = {}
        self.source: dict[PeerId, tuple[str, str]] = {}
        self.offered = dict.fromkeys(PREFILL, 0)
        self.opened = dict.fromkeys(PREFILL, False)
        self.generation = dict.fromkeys(DECODE, 0)
        for prefill in PREFILL:
            for decode in DECODE:
                self.run(prefill, ev.PeerGreeted(decode, LEASE_S, owed=("kv",)))
        for decode in DECODE:
            ranks = tuple(ev.GreetedRank(prefill, debts()) for prefill in PREFILL)
            self.run(decode, ev.InstanceGreeted("prefill", ranks))

    # What engines do ---------------------------------------------------------------------------------------------

    @precondition(lambda self: not all(self.opened.values()))
    @rule(which=pick)
    def open_sender(self, which: int) -> None:
        closed = [rank for rank in PREFILL if not self.opened[rank]]
        rank = closed[which % len(closed)]
        self.opened[rank] = True
        self.run(rank, ev.SendOpened(ROOM))

    @rule(which=pick, size=st.integers(1, 3))
    def compute(self, which: int, size: int) -> None:
        rank = PREFILL[which % 2]
        start = self.offered[rank]
        if not self.opened[rank] or start == NUM_TOKENS or self.source.get(rank, ("pending", ""))[0] != "pending":
            return
        stop = min(start + size, NUM_TOKENS)
        self.offered[rank] = stop
        self.run(rank, ev.ChunkOffered(ROOM, Chunk((start, stop), {"kv": (start, stop)}, last=stop == NUM_TOKENS)))

    @rule(which=pick)
    def open_receiver(self, which: int) -> None:
        rank = DECODE[which % 2]
        if any(memory in ("held", "draining") for (owner, _), memory in self.memory.items() if owner == rank):
            return
        self.generation[rank] += 1
        self.memory[rank, self.generation[rank]] = "held"
        self.run(
            rank,
            ev.ReceiveOpened(
                ROOM, self.generation[rank], "prefill", {"kv": self.wanted}, {"kv": b""}, 2, 1e5, b"secret of the test"
            ),
        )

    @rule(which=pick)
    def abort_sender(self, which: int) -> None:
        self.run(PREFILL[which % 2], ev.SendAborted(ROOM, BROKEN))

    @rule(which=pick)
    def abort_receiver(self, which: int) -> None:
        self.run(DECODE[which % 2], ev.ReceiveAborted(ROOM, BROKEN))

    # What the world does -----------------------------------------------------------------------------------------

    @precondition(lambda self: any(self.wires.values()))
    @rule(which=pick)
    def deliver(self, which: int) -> None:
        busy = [ends for ends, wire in self.wires.items() if wire]
        sender, receiver = busy[which % len(busy)]
        self.run(receiver, ev.MessageReceived(sender, self.wires[sender, receiver].popleft()))

    @precondition(lambda self: self.planning)
    @rule(which=pick)
    def finish_plan(self, which: int) -> None:
        rank, delivery, seq, tokens = self.planning.pop(which % len(self.planning))
        self.planned_tokens[rank, delivery, seq] = tokens
        self.run(rank, ev.PlanFinished(delivery, seq, 2 * (tokens[1] - tokens[0])))

    @precondition(lambda self: self.posted)
    @rule(which=pick, ends=st.sampled_from(["well", "well", "well", "badly", "in doubt"]))
    def end_post(self, which: int, ends: str) -> None:
        key = list(self.posted)[which % len(self.posted)]
        rank, delivery, seq = key
        if ends == "in doubt":
            self.run(rank, ev.PostDoubted(delivery, seq, BROKEN))
            return
        tokens, notice = self.posted.pop(key)
        if ends == "badly":
            self.run(rank, ev.PostSettled(delivery, seq, BROKEN))
            return
        cells = self.written.setdefault((delivery.peer, delivery.generation), {}).setdefault(rank, set())
        cells.update(range(*tokens))
        self.run(delivery.peer, ev.NoticeDelivered(notice))
        self.run(rank, ev.PostSettled(delivery, seq, None))

    # What must hold ----------------------------------------------------------------------------------------------

    @invariant()
    def no_write_is_under_way_to_pages_that_were_given_back(self) -> None:
        for rank, delivery, _ in getattr(self, "posted", {}):
            assert self.memory[delivery.peer, delivery.generation] != "safe"
            assert self.source.get(rank, ("", "held"))[1] != "safe"

    @invariant()
    def success_is_true(self) -> None:
        for (rank, generation), outcome in getattr(self, "outcome", {}).items():
            if outcome == "success":
                for prefill in PREFILL:
                    cells = self.written.get((rank, generation), {}).get(prefill, set())
                    assert cells == set(range(*self.wanted))

    @invariant()
    def a_sender_succeeds_only_after_every_receiver(self) -> None:
        for outcome, _ in getattr(self, "source", {}).values():
            if outcome == "success":
                successes = {rank for (rank, _), result in self.outcome.items() if result == "success"}
                assert successes == set(DECODE)

    def teardown(self) -> None:
        """Whatever happened, everything ends once engines let go and the world catches up."""
        if not hasattr(self, "cores"):
            return
        for _ in range(3):
            for rank in PREFILL:
                self.abort_sender(PREFILL.index(rank))
            for rank in DECODE:
                self.abort_receiver(DECODE.index(rank))
            while self.planning or self.posted or any(self.wires.values()):
                if self.planning:
                    self.finish_plan(0)
                if self.posted:
                    self.end_post(0, "well")
                if any(self.wires.values()):
                    self.deliver(0)
                self.no_write_is_under_way_to_pages_that_were_given_back()
                self.success_is_true()
        assert set(self.memory.values()) <= {"safe"}
        for core in self.cores.values():
            assert core.core.is_idle

    # How effects are carried out ---------------------------------------------------------------------------------

    def run(self, rank: PeerId, event: ev.Event) -> None:
        for effect in self.cores[rank](event):
            self.carry_out(rank, effect)

    def carry_out(self, rank: PeerId, effect: ef.Effect) -> None:
        match effect:
            case ef.SendMessage(receiver, message):
                self.wires.setdefault((rank, receiver), deque()).append(message)
            case ef.EnqueueChunk(delivery, seq, ranges):
                self.planning.append((rank, delivery, seq, ranges["kv"]))
            case ef.PostPlan(delivery, seq, notice):
                assert self.memory[delivery.peer, delivery.generation] != "safe", "posted to pages that were given back"
                self.posted[rank, delivery, seq] = (self.planned_tokens.pop((rank, delivery, seq)), notice)
            case ef.DropPlan(delivery, seq):
                self.planned_tokens.pop((rank, delivery, seq))
            case ef.ReportSender():
                self.source[rank] = (effect.outcome.value, effect.memory.value)
            case ef.ReportReceiver():
                self.memory[rank, effect.generation] = effect.memory.value
                self.outcome[rank, effect.generation] = effect.outcome.value


TwoSides.TestCase.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestTwoSides = TwoSides.TestCase

"""Real cores of both sides and an adversary between them.

The adversary drops, repeats and reorders messages, lets time pass, ends writes well, badly or not at all, cuts peers
off until they are lost, kills prefill processes, and releases quarantines. Engines give up when it likes. After every
step the promises are checked against what was really written; and when the adversary stops, everything ends.
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvflow.state import events as ev
from kvflow.state.core import Core
from kvflow.wire.messages import PeerId
from tests.support.two_sides import BROKEN, DECODE, NUM_TOKENS, ROOM, World

MAX_RESTARTS = 2
PATIENCE_S = 200
"""Longer than every deadline one after another."""

pick = st.integers(0, 1_000_000)
ranges = st.tuples(st.integers(0, NUM_TOKENS), st.integers(0, NUM_TOKENS)).map(lambda ends: (min(ends), max(ends)))
wishes = st.one_of(ranges, ranges, st.just((0, NUM_TOKENS)), st.just((0, NUM_TOKENS + 1)))


class TwoSides(RuleBasedStateMachine):
    """What may happen next."""

    world: World

    @initialize(first=wishes, second=wishes, owing=st.sampled_from([(True, True), (True, True), (True, False)]))
    def build(self, first: tuple[int, int], second: tuple[int, int], owing: tuple[bool, bool]) -> None:
        self.world = World(dict(zip(DECODE, (first, second), strict=True)), owing)

    # What engines and operators do ---------------------------------------------------------------------------------

    @rule(which=pick)
    def open_sender(self, which: int) -> None:
        self.world.open_sender(self.world.prefill[which % 2])

    @rule(which=pick, size=st.integers(1, 3))
    def compute(self, which: int, size: int) -> None:
        self.world.compute(self.world.prefill[which % 2], size)

    @rule(which=pick)
    def open_receiver(self, which: int) -> None:
        self.world.open_receiver(DECODE[which % 2])

    @rule(which=pick)
    def begin(self, which: int) -> None:
        """What a router does: everybody starts, and the handshakes succeed."""
        for rank in self.world.prefill:
            self.world.open_sender(rank)
            self.world.compute(rank, 1 + which % NUM_TOKENS)
        for rank in DECODE:
            self.world.open_receiver(rank)
        for rank in list(self.world.greeting):
            self.world.greet(rank)

    @rule(which=pick)
    def abort_or_release(self, which: int) -> None:
        """Rarely, or nothing would ever succeed."""
        rank = self.world.alive()[which // 8 % 4]
        if which % 8 == 0:
            self.world.run(rank, ev.ReceiveAborted(ROOM, BROKEN) if rank in DECODE else ev.SendAborted(ROOM, BROKEN))
        elif which % 8 < 4:
            self.world.release(rank)

    # What the network does -----------------------------------------------------------------------------------------

    @precondition(lambda self: self.world.busy())
    @rule(which=pick, place=pick, keep=st.sampled_from([False, False, True]))
    def deliver(self, which: int, place: int, keep: bool) -> None:
        ends = self._ends(which)
        self.world.deliver(ends, place % len(self.world.wires[ends]), keep=keep)

    @precondition(lambda self: self.world.busy())
    @rule(which=pick)
    def deliver_all_of_one_wire(self, which: int) -> None:
        ends = self._ends(which)
        for _ in range(len(self.world.wires[ends])):
            if self.world.wires[ends]:
                self.world.deliver(ends)

    @precondition(lambda self: self.world.busy())
    @rule(which=pick, place=pick)
    def drop(self, which: int, place: int) -> None:
        wire = self.world.wires[self._ends(which)]
        del wire[place % len(wire)]

    def _ends(self, which: int) -> tuple[PeerId, PeerId]:
        busy = self.world.busy()
        return busy[which % len(busy)]

    @precondition(lambda self: self.world.greeting)
    @rule(which=pick, num_reached=st.sampled_from([0, 1, 2, 2]))
    def greet(self, which: int, num_reached: int) -> None:
        waiting = list(self.world.greeting)
        self.world.greet(waiting[which % len(waiting)], num_reached=num_reached)

    @precondition(lambda self: self.world.probes)
    @rule(which=pick)
    def answer_probe(self, which: int) -> None:
        probes = list(self.world.probes)
        self.world.answer_probe(*probes[which % len(probes)])

    # What transports, processes and clocks do ----------------------------------------------------------------------

    @precondition(lambda self: self.world.plans)
    @rule(which=pick)
    def finish_plan(self, which: int) -> None:
        self.world.finish_plan(which % len(self.world.plans))

    @precondition(lambda self: self.world.posts)
    @rule(which=pick, ends=st.sampled_from(["well", "well", "well", "without its notice", "badly", "in doubt"]))
    def end_post(self, which: int, ends: str) -> None:
        self.world.end_post(list(self.world.posts)[which % len(self.world.posts)], ends)

    @precondition(lambda self: self.world.plans or self.world.posts)
    @rule()
    def work(self) -> None:
        """Every plan is finished and every post ends well."""
        while self.world.plans:
            self.world.finish_plan(0)
        for key in list(self.world.posts):
            self.world.end_post(key, "well")

    @precondition(lambda self: len(self.world.dead) < MAX_RESTARTS)
    @rule(which=pick)
    def restart(self, which: int) -> None:
        if which % 8 == 0:
            self.world.restart(which // 8 % 2)

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.0, 2.0, 5.0, 5.0, 12.0, 90.0]))
    def pass_time_in_silence(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule(seconds=st.integers(1, 8))
    def pass_time_with_messages(self, seconds: int) -> None:
        """Writes and plans stay as they are."""
        for _ in range(seconds):
            self.world.pass_time(1.0)
            for ends in self.world.busy():
                for _ in range(len(self.world.wires[ends])):
                    if self.world.wires[ends]:
                        self.world.deliver(ends)

    # What must hold ------------------------------------------------------------------------------------------------

    @invariant()
    def no_write_is_under_way_to_or_from_pages_that_were_given_back(self) -> None:
        for post in self.world.posts.values():
            target = (post.delivery.peer, post.delivery.generation)
            assert self.world.memory[target] != "safe" or target in self.world.released
            source = self.world.source.get(post.opening, ("", "held"))
            assert source[1] != "safe" or post.opening in self.world.released

    @invariant()
    def success_is_true(self) -> None:
        for transfer, outcome in self.world.outcome.items():
            if outcome == "success":
                start, stop = self.world.wanted[transfer[0]]
                lives = {life.rank.engine_rank: life for life in self.world.granted[transfer]}
                for rank, life in lives.items():
                    cells = self.world.written.get(transfer, {}).get(life, set())
                    assert cells == (set(range(start, stop)) if self.world.owing[rank] else set())

    @invariant()
    def a_sender_succeeds_only_after_every_receiver_that_it_owes_something(self) -> None:
        for opening, (outcome, _) in self.world.source.items():
            if outcome == "success" and self.world.owing[opening[0].rank.engine_rank]:
                served = self.world.served[opening]
                assert set(served) == set(DECODE)
                assert {self.world.outcome.get(transfer) for transfer in served.items()} == {"success"}

    def teardown(self) -> None:
        """When the adversary stops, everything ends by itself, but for an engine that never finishes its prompt."""
        if not hasattr(self, "world"):
            return
        world = self.world
        for rank in world.prefill:
            world.compute(rank, NUM_TOKENS)
        for _ in range(PATIENCE_S):
            world.settle()
            self.no_write_is_under_way_to_or_from_pages_that_were_given_back()
            self.success_is_true()
            if not any(left_open(world.cores[rank].core) for rank in world.alive()):
                break
            world.pass_time(1.0)
        world.settle()
        self.a_sender_succeeds_only_after_every_receiver_that_it_owes_something()
        assert set(world.memory.values()) <= {"safe"}
        assert set(world.outcome.values()) <= {"success", "failed", "aborted"}
        for rank in world.alive():
            core = world.cores[rank].core
            assert left_open(core) == 0
            assert len(core.deadlines) <= 3 * len(core.peers), "only acquaintances have deadlines"


def left_open(core: Core) -> int:
    """How much a core still waits for."""
    rooms = len(core.senders.rooms) + len(core.receivers.receivers) + len(core.quarantine)
    return rooms + len(core.senders.waiting) + len(core.senders.unproved)


TwoSides.TestCase.settings = settings(
    max_examples=300, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestTwoSides = TwoSides.TestCase

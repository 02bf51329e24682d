"""Real cores of both sides and an adversary between them.

The adversary drops, repeats and reorders messages, breaks connections, lets time pass, ends writes well, badly or not
at all, answers late or with outdated facts, kills prefill processes, and releases quarantines. Engines abort when it
wants. After every step the promises are checked against the actual writes; and when the adversary stops, everything
ends.
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvflow.state.prefill.core import PrefillCore
from kvflow.wire.messages import PeerId
from tests.support.cores import DecodeDriver, PrefillDriver
from tests.support.examples import examples
from tests.support.two_sides import BROKEN, DECODE, NUM_TOKENS, World

MAX_RESTARTS = 2
PATIENCE_S = 200
"""Longer than all deadlines in a row."""

pick = st.integers(0, 1_000_000)
ranges = st.tuples(st.integers(0, NUM_TOKENS), st.integers(0, NUM_TOKENS)).map(lambda ends: (min(ends), max(ends)))
everything = st.just((0, NUM_TOKENS))
requests = st.one_of(*[ranges] * 3, *[everything] * 4, st.just((0, NUM_TOKENS + 1)))


class TwoSides(RuleBasedStateMachine):
    """The steps that the adversary may take."""

    world: World

    @initialize(first=requests, second=requests, holding=st.sampled_from([(True, True), (True, True), (True, False)]))
    def build(self, first: tuple[int, int], second: tuple[int, int], holding: tuple[bool, bool]) -> None:
        self.world = World(dict(zip(DECODE, (first, second), strict=True)), holding)

    # Engines and operators -----------------------------------------------------------------------------------------

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
        """Do what a router does: open everything, and let the handshakes succeed."""
        for rank in self.world.prefill:
            self.world.open_sender(rank)
            self.world.compute(rank, 1 + which % NUM_TOKENS)
        for rank in DECODE:
            self.world.open_receiver(rank)
        self.world.settle_handshakes()

    @rule(which=pick)
    def abort_or_release(self, which: int) -> None:
        """Abort or release a room, rarely enough that some succeed."""
        rank = self.world.alive()[which // 8 % 4]
        if which % 8 == 0:
            self.world.abort(rank)
        elif which % 8 < 4:
            self.world.release(rank)

    # The network ---------------------------------------------------------------------------------------------------

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
        transfer = self.world.wires[self._ends(which)]
        del transfer[place % len(transfer)]

    def _ends(self, which: int) -> tuple[PeerId, PeerId]:
        busy = self.world.busy()
        return busy[which % len(busy)]

    @precondition(lambda self: self.world.connections)
    @rule(which=pick)
    def break_connection(self, which: int) -> None:
        """Break a connection, rarely enough that some transfers succeed."""
        connections = list(self.world.connections)
        if which % 4 == 0:
            self.world.break_connection(connections[which // 4 % len(connections)])

    @precondition(lambda self: self.world.breaks)
    @rule(which=pick)
    def notice_break(self, which: int) -> None:
        breaks = list(self.world.breaks)
        self.world.notice_break(breaks[which % len(breaks)])

    @precondition(lambda self: self.world.lookups)
    @rule(which=pick, is_stale=st.sampled_from([False, False, False, True]))
    def answer_lookup(self, which: int, is_stale: bool) -> None:
        waiting = list(self.world.lookups)
        self.world.answer_lookup(waiting[which % len(waiting)], is_stale=is_stale)

    @precondition(lambda self: self.world.compiling)
    @rule(which=pick)
    def compile(self, which: int) -> None:
        self.world.compile(which % len(self.world.compiling))

    @precondition(lambda self: self.world.checking)
    @rule(which=pick)
    def check(self, which: int) -> None:
        self.world.check(which % len(self.world.checking))

    @precondition(lambda self: self.world.probes)
    @rule(which=pick)
    def answer_probe(self, which: int) -> None:
        probes = list(self.world.probes)
        self.world.answer_probe(probes[which % len(probes)])

    # Transports, processes and clocks ------------------------------------------------------------------------------

    @precondition(lambda self: self.world.plans)
    @rule(which=pick)
    def finish_plan(self, which: int) -> None:
        """Finish a plan, rarely with a failure."""
        plans = list(self.world.plans)
        self.world.finish_plan(plans[which // 8 % len(plans)], BROKEN if which % 8 == 0 else None)

    @precondition(lambda self: self.world.posts)
    @rule(which=pick, ends=st.sampled_from(["well", "well", "well", "without its notice", "badly", "in doubt"]))
    def end_post(self, which: int, ends: str) -> None:
        self.world.end_post(list(self.world.posts)[which % len(self.world.posts)], ends)

    @precondition(lambda self: self.world.plans or self.world.posts)
    @rule()
    def work(self) -> None:
        """Let all plans and posts end well."""
        self.world.work()

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
        """Deliver messages while writes and plans stay as they are."""
        for _ in range(seconds):
            self.world.pass_time(1.0)
            for ends in self.world.busy():
                for _ in range(len(self.world.wires[ends])):
                    if self.world.wires[ends]:
                        self.world.deliver(ends)

    # Invariants ----------------------------------------------------------------------------------------------------

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
                ranks = {rank.rank.engine_rank: rank for rank in self.world.granted[transfer]}
                for engine_rank, rank in ranks.items():
                    cells = self.world.written.get(transfer, {}).get(rank, set())
                    assert cells == (set(range(start, stop)) if self.world.holding[engine_rank] else set())

    @invariant()
    def a_sender_succeeds_only_after_every_receiver_that_it_sends_something(self) -> None:
        for opening, (outcome, _) in self.world.source.items():
            if outcome == "success" and self.world.holding[opening[0].rank.engine_rank]:
                served = self.world.served[opening]
                assert set(served) == set(DECODE)
                assert {self.world.outcome.get(transfer) for transfer in served.items()} == {"success"}

    def teardown(self) -> None:
        """Check that everything ends once the adversary stops, except an engine that never finishes its prompt."""
        if not hasattr(self, "world"):
            return
        world = self.world
        for rank in world.prefill:
            world.compute(rank, NUM_TOKENS)
        for _ in range(PATIENCE_S):
            world.settle()
            self.no_write_is_under_way_to_or_from_pages_that_were_given_back()
            self.success_is_true()
            if not any(left_open(world.driver(rank)) for rank in world.alive()):
                break
            world.pass_time(1.0)
        world.settle()
        self.a_sender_succeeds_only_after_every_receiver_that_it_sends_something()
        assert set(world.memory.values()) <= {"safe"}
        assert set(world.outcome.values()) <= {"success", "failed", "aborted"}
        for rank in world.alive():
            driver = world.driver(rank)
            assert left_open(driver) == 0
            most = 3 * (len(driver.core.peers) + len(world.prefill)) + 1  # a handshake may still be running
            assert len(driver.core.timers) <= most, "only peers, hellos and a lookup have timers"


def left_open(driver: PrefillDriver | DecodeDriver) -> int:
    """Return how many things a core still waits for."""
    core = driver.core
    count = len(core.rooms.rooms) + len(core.quarantine)
    if isinstance(core, PrefillCore):
        count += len(core.requests.waiting) + len(core.rooms.unfenced) + len(core.queue._under_way) + len(core.queue)
    return count


TwoSides.TestCase.settings = settings(
    max_examples=examples(300), stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestTwoSides = TwoSides.TestCase

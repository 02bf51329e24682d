"""The world of the explorations, and an adversary who does more than their steps and faults, in long random runs.

The adversary drops, repeats and reorders messages, breaks connections, lets time pass, ends writes well, badly or not
at all, answers late or with outdated facts, kills prefill processes, and releases quarantines. Engines abort when it
wants. The world checks the promises against the actual writes after every step; and when the adversary stops,
everything ends.
"""

import sys
from collections.abc import Callable

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvflow.config import Timeouts
from kvflow.errors import FailureReason, Stage
from kvflow.geometry.pages import WIRE_PAGES
from kvflow.state import events as ev
from kvflow.state.decode.core import DecodeCore
from kvflow.state.prefill.core import PrefillCore
from kvflow.state.tables import Memory, Outcome
from kvflow.wire.messages import Failure, RankRecord
from simulation.explore import Setup, SmallWorld
from simulation.explore.world import Channel
from tests.support.examples import examples

ROOM = 7
NUM_TOKENS = 6
MAX_RESTARTS = 2
PATIENCE_S = 200
"""Longer than all deadlines in a row."""

BROKEN = Failure(FailureReason.WRITE_FAILED, Stage.SUBMIT, "P/0", "broken")
TIMEOUTS = Timeouts(
    handshake_s=10.0,
    open_s=10.0,
    grant_s=10.0,
    progress_s=8.0,
    drain_s=4.0,
    lease_s=6.0,
    transfer_s=40.0,
)
SETUP = Setup(
    num_prefill=2,
    num_decode=2,
    rooms=(),
    num_writes=NUM_TOKENS // 2,
    max_faults=0,
    is_connected=False,
    spare_pages=1_000,
    timeouts=TIMEOUTS,
    planned_inline=1,
    has_pings=True,
)
"""Chunks of more than a token are planned off the event loop."""

pick = st.integers(0, 1_000_000)
ranges = st.tuples(st.integers(0, NUM_TOKENS), st.integers(0, NUM_TOKENS)).map(lambda ends: (min(ends), max(ends)))
everything = st.just((0, NUM_TOKENS))
requests = st.one_of(*[ranges] * 3, *[everything] * 4, st.just((0, NUM_TOKENS + 1)))


class TwoSides(RuleBasedStateMachine):
    """The steps that the adversary may take."""

    world: SmallWorld
    wants: tuple[tuple[int, int], tuple[int, int]]
    first_records: tuple[RankRecord, ...]
    num_opened = 0
    num_restarts = 0

    @initialize(first=requests, second=requests, holds=st.sampled_from([(True, True), (True, True), (True, False)]))
    def build(self, first: tuple[int, int], second: tuple[int, int], holds: tuple[bool, bool]) -> None:
        self.world = SmallWorld(SETUP._replace(holds=holds))
        self.world.may_lack_proof = True
        self.wants = (first, second)
        self.first_records = self.world.records

    # Engines and operators -----------------------------------------------------------------------------------------

    @rule(which=pick)
    def open_sender(self, which: int) -> None:
        if ROOM not in self.sender(which).rooms.rooms:
            self.world.tell("P", which % 2, ev.SendOpened(ROOM))

    @rule(which=pick, size=st.integers(1, 3))
    def compute(self, which: int, size: int) -> None:
        room = self.sender(which).rooms.rooms.get(ROOM)
        if room is None or not room.state.is_pending or room.is_finished:
            return
        start = room._chunks[-1].tokens[1] if room._chunks else 0
        stop = min(start + size, NUM_TOKENS)
        chunk = ev.Chunk((start, stop), {"kv": (start, stop)}, last=stop == NUM_TOKENS)
        self.world.tell("P", which % 2, ev.ChunkOffered(ROOM, chunk))

    @rule(which=pick)
    def open_receiver(self, which: int) -> None:
        number = which % 2
        if ROOM in self.world.decode[number].rooms.generations:
            return
        self.num_opened += 1
        start, stop = self.wants[number]
        first = self.num_opened * (NUM_TOKENS + 1)
        pages = np.arange(first, first + stop - start, dtype=WIRE_PAGES).tobytes()
        opened = ev.ReceiveOpened(
            ROOM, self.num_opened, "P", {"kv": (start, stop)}, {"kv": pages}, 2, 40.0, b"secret of the test"
        )
        self.world.tell("D", number, opened)

    @rule(which=pick)
    def begin(self, which: int) -> None:
        """Do what a router does: open everything, and let the handshakes succeed."""
        for number in range(2):
            self.open_sender(number)
            self.compute(number, 1 + which % NUM_TOKENS)
            self.open_receiver(number)
        self.take_all(lambda label: not is_work(label))
        if which % 2:
            self.take_all(is_plan)

    @rule(which=pick)
    def abort_or_release(self, which: int) -> None:
        """Abort or release a room, rarely enough that some succeed."""
        side, number = "PPDD"[which // 8 % 4], which // 8 % 2
        if which % 8 == 0:
            event = ev.SendAborted(ROOM, BROKEN) if side == "P" else ev.ReceiveAborted(ROOM, BROKEN)
            self.world.tell(side, number, event)
        elif which % 8 < 4:
            core = self.sender(number) if side == "P" else self.world.decode[number]
            states = {key: room.state for key, room in core.rooms.rooms.items()}
            for key in [key for key, state in states.items() if state.memory is Memory.QUARANTINED]:
                self.world.release(side, number, key)

    def sender(self, which: int) -> PrefillCore:
        core = self.world.prefill[which % 2]
        assert core is not None
        return core

    # What goes on, and the network ---------------------------------------------------------------------------------

    @rule(which=pick)
    def step(self, which: int) -> None:
        """Take a step in which nothing goes wrong."""
        steps = list(self.world.steps())
        if steps:
            steps[which % len(steps)].take(self.world)

    def take_all(self, is_taken: Callable[[str], bool]) -> None:
        """Take all steps of some kind in which nothing goes wrong, and those that follow."""
        while step := next((step for step in self.world.steps() if is_taken(step.label)), None):
            step.take(self.world)

    @precondition(lambda self: self.busy())
    @rule(which=pick, place=pick, keep=st.sampled_from([False, False, True]))
    def deliver(self, which: int, place: int, keep: bool) -> None:
        channel, length = self.channel(which)
        self.world.deliver(channel, at=place % length, keep=keep)

    @precondition(lambda self: self.busy())
    @rule(which=pick)
    def deliver_all_of_one_channel(self, which: int) -> None:
        channel, length = self.channel(which)
        for _ in range(length):
            if self.world.channels.get(channel):
                self.world.deliver(channel)

    @precondition(lambda self: self.busy())
    @rule(which=pick, place=pick)
    def drop(self, which: int, place: int) -> None:
        channel, length = self.channel(which)
        del self.world.channels[channel][place % length]

    def busy(self) -> list[Channel]:
        return [channel for channel, queue in self.world.channels.items() if queue]

    def channel(self, which: int) -> tuple[Channel, int]:
        channel = self.busy()[which % len(self.busy())]
        return channel, len(self.world.channels[channel])

    @precondition(lambda self: self.world.connected)
    @rule(which=pick)
    def break_connection(self, which: int) -> None:
        """Break a connection, rarely enough that some transfers succeed."""
        connections = list(self.world.connected)
        if which % 4 == 0:
            self.world.break_connection(*connections[which // 4 % len(connections)])

    # Transports, processes and clocks ------------------------------------------------------------------------------

    @rule(which=pick)
    def answer_with_outdated_records(self, which: int) -> None:
        if asked := self.tasks(ev.InstanceFound):
            _, number, event = self.world.tasks.pop(asked[which % len(asked)])
            self.world.tell("D", number, ev.InstanceFound(event.instance, self.first_records))

    @rule(which=pick)
    def fail_plan(self, which: int) -> None:
        """Fail a plan, rarely."""
        if which % 8 == 0 and (plans := self.tasks(ev.PlanFinished)):
            self.world.fail_plan(plans[which // 8 % len(plans)])

    def tasks(self, kind: type[object]) -> list[int]:
        return [number for number, (_, _, event) in enumerate(self.world.tasks) if isinstance(event, kind)]

    @rule()
    def plan(self) -> None:
        """Let all plans succeed."""
        self.take_all(is_plan)

    @precondition(lambda self: self.world.posts)
    @rule(which=pick, ends=st.sampled_from(["well", "well", "well", "without its notice", "badly", "in doubt"]))
    def end_post(self, which: int, ends: str) -> None:
        number = which % len(self.world.posts)
        if ends == "badly":
            self.world.fail(number)
        elif ends == "in doubt":
            self.world.doubt(number)
        else:
            self.world.land(number, has_notice=ends == "well")

    @rule()
    def work(self) -> None:
        """Let all plans and posts end well."""
        self.take_all(is_work)

    @precondition(lambda self: self.world.in_doubt)
    @rule(which=pick)
    def resolve_doubt(self, which: int) -> None:
        self.world.resolve(which % len(self.world.in_doubt))

    @precondition(lambda self: self.num_restarts < MAX_RESTARTS)
    @rule(which=pick)
    def restart(self, which: int) -> None:
        """Kill a prefill process, whose last messages may still arrive, and replace it; rarely."""
        if which % 8 == 0:
            self.num_restarts += 1
            self.world.kill(which // 8 % 2, is_flushed=True)
            self.world.restart()

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.0, 2.0, 5.0, 5.0, 12.0, 90.0]))
    def pass_time_in_silence(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule(seconds=st.integers(1, 8))
    def pass_time_with_messages(self, seconds: int) -> None:
        """Deliver messages while writes and plans stay as they are."""
        for _ in range(seconds):
            self.world.pass_time(1.0)
            self.take_all(is_message)

    # The end -------------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Check that everything ends once the adversary stops."""
        if not hasattr(self, "world") or sys.exc_info()[0] is not None:  # a step has failed, which is told
            return
        world = self.world
        for number in range(2):
            self.compute(number, NUM_TOKENS)  # an engine may never finish its prompt; these do
        for _ in range(PATIENCE_S):
            self.take_all(lambda _: True)
            while world.in_doubt:
                world.resolve(0)
            self.take_all(lambda _: True)
            if not any(left_open(core) for core in (*world.prefill, *world.decode)):
                break
            world.pass_time(1.0)
        self.take_all(lambda _: True)
        assert len(world.received) == self.num_opened
        for outcome, memory in (*world.sent.values(), *world.received.values()):
            assert outcome is not Outcome.PENDING
            assert memory is Memory.SAFE
        for core in (*world.prefill, *world.decode):
            assert core is not None
            assert left_open(core) == 0
            most = 3 * (len(core.peers) + len(world.prefill)) + 1  # a handshake may still be running
            assert len(core.timers) <= most, "only peers, hellos and a lookup have timers"


def is_message(label: str) -> bool:
    return label.startswith("(")


def is_plan(label: str) -> bool:
    return label.endswith("PlanFinished")


def is_work(label: str) -> bool:
    return is_plan(label) or label.startswith("write ") or label.endswith(("NoticeDelivered", "PostEnded"))


def left_open(core: PrefillCore | DecodeCore | None) -> int:
    """Return how many things a core still waits for."""
    if core is None:
        return 0
    count = len(core.rooms.rooms) + len(core.quarantine)
    if isinstance(core, PrefillCore):
        count += len(core.requests.waiting) + len(core.rooms.unfenced) + len(core.queue._under_way) + len(core.queue)
    return count


TwoSides.TestCase.settings = settings(
    max_examples=examples(300), stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestTwoSides = TwoSides.TestCase

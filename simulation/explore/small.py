"""A small world in which engines follow a script: the steps that it can take next, and how it must end."""

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from kvflow.errors import FailureReason, KvflowError, Stage
from kvflow.room import RoomId
from kvflow.state import events as ev
from kvflow.state.decode.core import DecodeCore
from kvflow.state.prefill.core import PrefillCore
from kvflow.state.tables import Memory, Outcome
from kvflow.wire.messages import Failure, Offer
from simulation.explore.setup import GIVE_UP_S, LEASE_S, MAX_TRIALS, Setup
from simulation.explore.snapshot import copied, fingerprint
from simulation.explore.world import PromiseBroken, World

__all__ = ["SmallWorld", "Step"]

UNORDERED: Final = {
    *("channels", "connected", "landed", "openings", "promised", "received", "sent", "served", "staged", "wanted"),
    *("answered", "passed"),
}
"""Tables of a world in which the order of the entries makes no difference."""

EPILOGUE_S: Final = 1_000_000.0
EPILOGUE_STEPS: Final = 20_000

OFFER: Final = 1

FIRST_TRIAL_ROOM: Final = 1_000
TRIAL_S: Final = 10.0
"""Pause between two such transfers, longer than the retransmission interval of a lost hello."""

SLOT_S: Final = LEASE_S / 2
"""The same pause if pieces are packed, longer than the interval after which prefill asks for an unreturned slot."""


class Step(NamedTuple):
    """A possible next step of a world.

    Attributes:
        label: Text for people.
        is_fault: Whether the step counts as a fault.
        take: Applies the step to a world.
    """

    label: str
    is_fault: bool
    take: Callable[["SmallWorld"], None]


class SmallWorld(World):
    """A world whose engines follow a script. `steps` yields what can happen next."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._generations = {room: number for number, room in enumerate(setup.rooms, 1)}
        self.script = [item for room in setup.rooms for item in self._requests(room)]
        if setup.offers:
            self.script += [("D", number, _offer()) for number in range(setup.num_decode)]
        if setup.is_connected:
            self._connect_all()

    def copy(self) -> "SmallWorld":
        """Return an independent copy."""
        constants = (self.setup, self.setup.timeouts, self._layout, *self._prefill_settings, self.records)
        shared = {id(item): item for item in constants}
        result: SmallWorld = copied(self, shared)
        return result

    def fingerprint(self) -> bytes:
        """Return a digest that is equal for worlds with the same possible futures."""
        unordered = {name: sorted(table.items()) for name, table in self.__dict__.items() if name in UNORDERED}
        return fingerprint([self.__dict__ | unordered | {"_prefill_settings": None}])

    # What may happen -------------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[Step]:
        """Yield every possible next step."""
        first_of_rank: dict[tuple[str, int], None] = {}
        for number, (side, rank, event) in enumerate(self.script):
            if (side, rank) not in first_of_rank:
                first_of_rank[side, rank] = None
                yield Step(f"{side}{rank} {type(event).__name__}", False, lambda world, n=number: world.act(n))  # type: ignore[misc]
        for number, (side, rank, event) in enumerate(self.tasks):
            yield Step(f"{side}{rank} {type(event).__name__}", False, lambda world, n=number: world.finish(n))  # type: ignore[misc]
        for channel, queue in self.channels.items():
            if queue:
                label = f"{channel} {type(queue[0]).__name__}"
                yield Step(label, False, lambda world, c=channel: world.deliver(c))  # type: ignore[misc]
        for number, post in enumerate(self.posts):
            yield Step(f"write {post.seq} of P{post.prefill} ends", False, lambda world, n=number: world.land(n))  # type: ignore[misc]
        if self.num_faults < self.setup.max_faults:
            yield from self._faults()

    def _faults(self) -> Iterator[Step]:  # noqa: C901, PLR0912 - one branch per kind of fault
        kinds = self.setup.faults
        for channel, queue in self.channels.items():
            if queue and "lose" in kinds:
                yield Step(f"lose {channel}", True, lambda world, c=channel: world.lose(c))  # type: ignore[misc]
            if queue and "duplicate" in kinds:
                yield Step(f"duplicate {channel}", True, lambda world, c=channel: world.deliver(c, keep=True))  # type: ignore[misc]
            if len(queue) > 1 and "overtake" in kinds:
                yield Step(f"overtake {channel}", True, lambda world, c=channel: world.deliver(c, at=1))  # type: ignore[misc]
        for number in range(len(self.posts)):
            if "fail" in kinds:
                yield Step("write fails", True, lambda world, n=number: world.fail(n))  # type: ignore[misc]
            if "doubt" in kinds:
                yield Step("write in doubt", True, lambda world, n=number: world.doubt(n))  # type: ignore[misc]
        for number, core in enumerate(self.prefill):
            if core is None:
                continue
            if "kill" in kinds:
                yield Step(f"kill P{number}", True, lambda world, n=number: world.kill(n))  # type: ignore[misc]
            for room in core.rooms.rooms:
                failure = _failure(f"P/{number}")
                if "abort" in kinds:
                    event: Any = ev.SendAborted(room, failure)
                    yield Step(f"P{number} aborts", True, lambda world, n=number, e=event: world.tell("P", n, e))  # type: ignore[misc]
                if "reclaim" in kinds:
                    event = ev.ReclaimAsked(room, True, failure)
                    yield Step(f"P{number} reclaims", True, lambda world, n=number, e=event: world.tell("P", n, e))  # type: ignore[misc]
        for number, decode in enumerate(self.decode):
            for room in decode.rooms.generations if "abort" in kinds else ():
                abort = ev.ReceiveAborted(room, _failure(f"D/{number}"))
                yield Step(f"D{number} aborts", True, lambda world, n=number, e=abort: world.tell("D", n, e))  # type: ignore[misc]
        if "timeout" in kinds:
            for side, number, _ in self._cores():
                if self._gives_up(side, number) is not None:
                    yield Step(f"timeout {side}{number}", True, lambda world, s=side, n=number: world.time_out(s, n))  # type: ignore[misc]

    # Steps -----------------------------------------------------------------------------------------------------------

    def act(self, number: int) -> None:
        """Pass an engine's next event to its core."""
        side, rank, event = self.script.pop(number)
        try:
            self.tell(side, rank, event)
        except KvflowError:
            has_failed = isinstance(event, ev.ReceiveGranted) and (rank, event.generation) in self.received
            if side == "D" and not has_failed:
                raise
            # the room has failed meanwhile: the engine has nothing left to offer or grant

    def time_out(self, side: str, number: int) -> None:
        """Let a core time out on what it waits for."""
        due = self._gives_up(side, number)
        if due is not None:
            self.may_lack_proof = True
            self.now = max(self.now, due)
            self.tell(side, number, ev.TimePassed())

    # The end ---------------------------------------------------------------------------------------------------------

    def check_end(self) -> None:
        """Run everything that can happen without faults, time included, and check that service has recovered.

        Every transfer must end, and must succeed if there were no faults. After the killed processes have restarted, a
        new transfer between all ranks must succeed.

        Raises:
            PromiseBroken: One of these does not hold, or pages stay in quarantine although every process could prove
                that no write can land in them.
        """
        self.settle()
        outcomes = [outcome for outcome, _ in (*self.sent.values(), *self.received.values())]
        if not self.num_faults and any(outcome is not Outcome.SUCCESS for outcome in outcomes):
            raise PromiseBroken("a transfer fails without any fault", sent=str(self.sent))
        self._check_offers()
        self.restart()
        for number in range(MAX_TRIALS):
            if self._succeeds(FIRST_TRIAL_ROOM + number):
                return
            self._wait(self.now + (SLOT_S if self.setup.slots else TRIAL_S))
        raise PromiseBroken("service does not recover", sent=str(self.sent), received=str(self.received))

    def _check_offers(self) -> None:
        """Check that every offer has ended, and as the engines have decided if there were no faults."""
        made = [core.me for core in self.decode] if self.setup.offers else []
        unanswered = [peer for peer in made if (peer, OFFER) not in self.answered]
        if unanswered or any(len(core.offers) for _, _, core in self._cores()):
            raise PromiseBroken("an offer does not end", unanswered=unanswered)
        if not self.num_faults and self.answered != self.passed:
            raise PromiseBroken("an offer fails without any fault", answered=self.answered)

    def _succeeds(self, room: int) -> bool:
        """Run one more transfer between all ranks, and return whether it succeeds on all of them."""
        self._generations[room] = room
        self.script += self._requests(room)
        self.settle()
        sent = [self.sent[number, room] for number in range(self.setup.num_prefill)]
        received = [self.received[number, room] for number in range(self.setup.num_decode)]
        return all(outcome is Outcome.SUCCESS for outcome, _ in (*sent, *received))

    def settle(self) -> None:
        """Run until every transfer is over.

        Raises:
            PromiseBroken: A transfer does not end, or its pages are not released.
        """
        for _ in range(EPILOGUE_STEPS):
            step = next((step for step in self.steps() if not step.is_fault), None)
            if step is not None:
                step.take(self)
                continue
            if self._is_over():
                return
            if not self.wake(EPILOGUE_S):
                break
        raise PromiseBroken("a transfer does not end", sent=str(self.sent), received=str(self.received))

    def _wait(self, until: float) -> None:
        """Advance time to `until`, and take every step without a fault meanwhile."""
        while True:
            step = next((step for step in self.steps() if not step.is_fault), None)
            if step is not None:
                step.take(self)
            elif not self.wake(until):
                self.now = max(self.now, until)
                return

    def _is_over(self) -> bool:
        if any(len(core.offers) for _, _, core in self._cores()):
            return False
        is_quiet = not self.in_doubt
        for outcome, memory in (*self.sent.values(), *self.received.values()):
            is_settled = memory is Memory.SAFE or (memory is Memory.QUARANTINED and not is_quiet)
            if outcome is Outcome.PENDING or not is_settled:
                return False
        return not is_quiet or all(_is_idle(core) for _, _, core in self._cores())

    def _gives_up(self, side: str, number: int) -> float | None:
        """Return when a core gives up next, or None; leases and retransmissions are due later than that."""
        core = self.prefill[number] if side == "P" else self.decode[number]
        due = core.timers.next() if core is not None else None
        return due if due is not None and due <= self.now + GIVE_UP_S else None

    # The beginning ---------------------------------------------------------------------------------------------------

    def _requests(self, room: RoomId) -> list[tuple[str, int, Any]]:
        """Return what the engines of all ranks do for one room."""
        num_tokens = self._num_tokens
        rooms = (*self.setup.rooms, *range(FIRST_TRIAL_ROOM, FIRST_TRIAL_ROOM + MAX_TRIALS))
        first = num_tokens * rooms.index(room)  # each room has its own pages; those of another may be in quarantine
        pages = np.arange(first, first + num_tokens, dtype="<u4")
        pages.flags.writeable = False
        script: list[tuple[str, int, Any]] = []
        for number in range(self.setup.num_prefill):
            script += [("P", number, ev.SendOpened(room)), ("P", number, self._chunk(room, 0))]
            if self.setup.quiesces:
                script.append(("P", number, ev.QuiesceAsked(room)))
        for number in range(self.setup.num_decode):
            opened = ev.ReceiveOpened(
                room=room,
                generation=self._generations[room],
                instance="P",
                ranges={"kv": (0, num_tokens)},
                pages={"kv": pages.tobytes()},
                num_decode_ranks=self.setup.num_decode,
                timeout_s=GIVE_UP_S,
                secret=b"explored",
            )
            script += [("D", number, event) for event in self._received_as(opened)]
        return script

    def _received_as(self, opened: ev.ReceiveOpened) -> list[Any]:
        """Return the events that receive a room at once, or announce it and grant it pages later."""
        if not self.setup.announces:
            return [opened]
        announced = msgspec.structs.replace(opened, ranges={}, pages={}, is_announced=True)
        granted = ev.ReceiveGranted(opened.room, opened.generation, opened.ranges, opened.pages, opened.timeout_s)
        return [announced, granted]

    def _connect_all(self) -> None:
        """Complete the handshakes: every decode rank looks up the prefill instance and connects to it."""
        script, self.script = self.script, []
        for number, core in enumerate(self.decode):
            for effect in core.instances.reconnect("P", self.now):
                self._carry_out_decode(number, effect, None)
        while (step := next((step for step in self.steps() if not step.is_fault), None)) is not None:
            step.take(self)
        self.script = script


def _offer() -> ev.OfferMade:
    return ev.OfferMade("P", Offer(number=OFFER, ticket=b"{}", tokens=(0, 1), timeout_s=GIVE_UP_S))


def _is_idle(core: PrefillCore | DecodeCore) -> bool:
    """Return whether a core holds neither a page nor a slot."""
    has_slots = isinstance(core, PrefillCore) and (
        len(core.slots) or core.counts().slots_taken or core.counts().slots_lost
    )
    return not core.rooms.rooms and not has_slots


def _failure(rank: str) -> Failure:
    return Failure(FailureReason.ABORTED, Stage.ENQUEUE, rank, "explored")

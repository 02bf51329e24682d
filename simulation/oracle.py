"""The oracle: tracks the true state, and checks what the ranks report against it. It never asks the code under test."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NoReturn

from kvflow.config import Timeouts
from kvflow.errors import FailureReason, PagesInUse
from kvflow.open_transfers import QuarantineRecord
from kvflow.receiver import Handover
from kvflow.room import RoomId
from kvflow.state.tables import Memory, Outcome
from kvflow.wire.messages import Hello, RankId
from simulation.loop import Violation
from simulation.memory import Lease, Pool
from simulation.model import KV, STATE, Model, Shape, components_sent, content_of
from simulation.network import HEARTBEAT_S
from simulation.requests import Receiving, Request, Sending

if TYPE_CHECKING:
    from simulation.dataplane import Segment, SimulatedBackend, Write
    from simulation.faults import Faults
    from simulation.loop import Process
    from simulation.world import World

__all__ = ["Instance", "Oracle"]

MARGIN_S: Final = 0.02
"""How late a running process may notice a deadline."""

MOST_ERROR_S: Final = 1e-6
"""Maximum difference between the parts of a transfer and the whole, for rounding, in seconds."""

NOTICED_S: Final = 0.5
"""Time within which peers notice a death that the network shows."""

RECONNECTED_S: Final = 1.0
"""Time after the last fault by which connections are up again."""

EXCUSES: Final = frozenset(
    {
        FailureReason.PEER_LOST,
        FailureReason.PEER_CLOSED,
        FailureReason.PEER_FAILING,
        FailureReason.DEADLINE,
        FailureReason.NOT_GRANTED,
        FailureReason.STALLED,
        FailureReason.WRITE_FAILED,
        FailureReason.ABORTED,
        FailureReason.BROKEN,
    }
)
"""Reasons for which a prefill rank may not learn that decode has everything."""

MUTING: Final = frozenset(
    {
        "lost message",
        "full queue",
        "reset handshake",
        "no sockets left",
        "no thread",
        "broken connection",
        "half-open connection",
        "partition",
        "registry restart",
        "refused peer",
        "blocked loop",
        "process suspended",
        "host suspended",
    }
)
"""Faults after which the announcements of a decode rank may reach prefill late or not at all."""


@dataclass(frozen=True)
class Instance:
    """A prefill or decode server of several ranks."""

    name: str
    is_decode: bool
    shape: Shape

    @property
    def ranks(self) -> list[RankId]:
        """Ranks of its workers."""
        return [RankId(self.name, rank) for rank in range(self.shape.num_ranks)]


@dataclass
class _Mark:
    """The subject of a write: the room whose bytes it moves, and the lease that it reads; None if they are staged."""

    room: RoomId
    lease: Lease | None


class Oracle:
    """Checks the promises; the witness of a data plane.

    Args:
        world: Source of the true state.
        model: The model that the ranks share.
        instances: Instances, by name.
        timeouts: Timeouts of every rank.
        announced_s: Maximum time for which decode engines keep a room announced.
        may_lose_messages: A rank that leaves in order may be unable to tell its peers.
        hosts: For each decode instance that lives in the processes of a prefill instance, the name of the latter;
            agents are named after it.
    """

    def __init__(  # noqa: PLR0913 - one caller
        self,
        world: "World",
        model: Model,
        instances: dict[str, Instance],
        timeouts: Timeouts,
        announced_s: float,
        *,
        may_lose_messages: bool = False,
        hosts: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._world = world
        self._model = model
        self._instances = instances
        self._timeouts, self._announced_s = timeouts, announced_s
        self._hosts = hosts
        self.requests: dict[RoomId, list[Request]] = {}
        self.sendings: list[Sending] = []
        self.receivings: list[Receiving] = []
        self._rooms: dict[int, RoomId] = {}
        self._pools: dict[str, Pool] = {}
        self._windows: dict[tuple[str, int], tuple[int, str]] = {}
        self._issuers: dict[Lease, str] = {}
        self._gone: dict[str, float] = {}
        self._succeeded: dict[RoomId, dict[RankId, None]] = {}
        self._ends: list[tuple[str, float]] = []
        self._writes: dict[Process, list[Write]] = {}
        self._at_bytes: dict[tuple[Process, RoomId], Callable[[], None]] = {}
        self._shows_deaths = shows_deaths(world.faults)
        self._loses_until = math.inf if may_lose_messages else 0.0
        world.plane.witness = self
        world.network.on_hello = self._note_window

    def routed(self, request: Request) -> None:
        """Register one try of a room."""
        self.requests.setdefault(request.room, []).append(request)
        self._rooms[request.content] = request.room

    def knows(self, process_name: str, pool: Pool) -> None:
        """Register the memory of a process that has just started."""
        self._pools[process_name] = pool

    # Pages are safe --------------------------------------------------------------------------------------------------

    def posted(self, write: "Write", segments: "list[Segment]") -> None:
        """Determine the room of a write, from the pages that it reads or from the contents of its staging slot."""
        pool = self._pools[write.sender.process.name]
        self._writes.setdefault(write.sender.process, []).append(write)
        first = segments[0]
        if pool.holds(first.src):
            lease = pool.owner_of(first.src, first.length)
            if lease is None:
                self._violated(f"write {write.number} is posted from pages that are nobody's")
            write.mark = _Mark(lease.room, lease)
            return
        content = content_of(int.from_bytes(write.sender.read(first.src, 8), "little"))
        room = self._rooms.get(content)
        if room is None:
            self._violated(f"write {write.number} is posted from a slot without the cells of any request")
        write.mark = _Mark(room, None)

    def reading(self, write: "Write", piece: "list[Segment]") -> None:
        """Check that a write reads only pages that are still held for its transfer."""
        mark = write.mark
        if not isinstance(mark, _Mark) or mark.lease is None:
            return
        pool = self._pools[write.sender.process.name]
        for src, _, length in piece:
            if pool.owner_of(src, length) is not mark.lease:
                self._violated(f"write {write.number} reads pages of {mark.lease.name} that were given back")

    def at_bytes(self, process: "Process", room: RoomId, call: Callable[[], None]) -> None:
        """Call a function when the next bytes of a room land that a process writes or receives."""
        self._at_bytes[process, room] = call

    def landing(self, write: "Write", target: "SimulatedBackend", piece: "list[Segment]") -> None:
        """Check that bytes land only in pages held for their room, or in the window of the rank that wrote them."""
        mark = write.mark
        if isinstance(mark, _Mark):
            for process in (write.sender.process, target.process):
                if (call := self._at_bytes.pop((process, mark.room), None)) is not None:
                    call()
        pool = self._pools[target.process.name]
        for _, dst, length in piece:
            if not pool.holds(dst):
                self._check_window(write, target, dst)
                continue
            lease = pool.owner_of(dst, length)
            self._check_issuer(write, lease)
            if lease is None or not isinstance(mark, _Mark) or lease.room != mark.room:
                owner = "nobody" if lease is None else lease.name
                room = mark.room if isinstance(mark, _Mark) else "unknown"
                self._violated(f"write {write.number} of room {room} lands in pages of {owner} at {target.process}")

    def _check_issuer(self, write: "Write", lease: Lease | None) -> None:
        """Check that, of the rank that issued a ticket, only the issuing incarnation writes to the ticket's pages."""
        issuer = None if lease is None else self._issuers.get(lease)
        sender = write.sender.agent_name
        if issuer is not None and sender != issuer and sender.partition("@")[0] == issuer.partition("@")[0]:
            self._violated(f"write {write.number} of {sender} lands in pages for a ticket of {issuer}")

    def _note_window(self, hello: Hello) -> None:
        """Record from a hello which prefill rank gets a part of staging memory as its window."""
        window = hello.staging
        if window is not None:
            end = window.address + window.slot_bytes * window.num_slots
            self._windows[hello.agent or str(hello.peer), window.address] = (end, str(hello.to))

    def _check_window(self, write: "Write", target: "SimulatedBackend", address: int) -> None:
        for (name, start), (end, owner) in self._windows.items():
            if name == target.agent_name and start <= address < end:
                if owner != write.sender.agent_name:
                    self._violated(f"write {write.number} of {write.sender.process} lands in the window of {owner}")
                return
        self._violated(f"write {write.number} lands outside of every pool and window of {target.process}")

    def check_refused(self, one: Receiving, refusal: PagesInUse | None) -> None:
        """Check that pages of a transfer that is not safe are refused to another room, and that the error names it."""
        if refusal is None:
            self._violated(f"pages of {one} are received into for another room, while memory is {one.memory.value}")
        component, page = refusal.values["component"], refusal.values["page"]
        if refusal.values["held_by"] != one.request.room or page not in one.lease.pages[str(component)]:
            self._violated(f"pages of {one} are refused for another reason: {refusal}")

    def check_record(self, one: Sending | Receiving, records: Sequence[QuarantineRecord]) -> QuarantineRecord:
        """Return the record of a transfer in quarantine; check that it lists its pages and the missing proofs."""
        held = {name: set(pages) for name, pages in one.lease.pages.items()}
        found = [
            record
            for record in records
            if record.room == one.request.room
            and all(held.get(name, set()).issuperset(pages.tolist()) for name, pages in record.pages.items())
        ]
        if not found or not all(proof.detail for proof in found[0].missing):
            self._violated(f"{one} is in quarantine without a record: {list(map(str, records))}")
        if not found[0].missing:
            self._violated(f"{one} is in quarantine, but its record misses no proof: {found[0]}")
        return found[0]

    # Success is true -------------------------------------------------------------------------------------------------

    def check_handover(self, one: Receiving, handover: Handover) -> None:
        """Check that the metadata handed to the decode engine is what prefill passed, and where the time went."""
        expected = one.request.metadata
        if any(found != expected for found in handover.metadata_by_rank.values()) or handover.metadata != expected:
            self._violated(f"{one}: metadata is not {expected!r}: {handover}")
        breakdown = handover.breakdown
        if (breakdown is None) is not (handover.num_notices == 0):
            self._violated(f"{one}: breakdown of {handover.num_notices} notices is {breakdown}")
        if breakdown is not None:
            parts, took_s = breakdown.parts, one.transfer._elapsed_s
            if min(parts.values()) < 0 or abs(sum(parts.values()) - took_s) > MOST_ERROR_S:
                self._violated(f"{one}: took {took_s} s, but its parts are {breakdown}")

    def check_success(self, one: Receiving) -> None:
        """Check that a receiver that succeeds has exactly the cells that it asked for."""
        if one.has_succeeded:
            return
        one.has_succeeded = True
        issuer = self._issuers.get(one.lease)
        if issuer is not None and self._gone.get(issuer, math.inf) < one.began_at and self._wants_of(one, issuer):
            self._violated(f"{one} succeeds by a ticket of {issuer}, which had ended before")
        room = one.request.room
        for component, tokens in one.ranges.items():
            if tokens[0] < tokens[1]:
                contents = [request.content for request in self.requests[room]]
                problem = one.pool.find_wrong_cell(one.lease, component, tokens, contents)
                if problem is not None:
                    self._violated(f"{one} succeeds, but {problem}")
        self._succeeded.setdefault(room, {})[one.rank] = None

    def _wants_of(self, one: Receiving, agent: str) -> bool:
        """Return whether a prefill rank has to send something to a receiver; if not, its death may go unnoticed."""
        prefill, decode = self._instances[one.request.prefill].shape, self._instances[one.request.decode].shape
        number = int(agent.partition("@")[0].rpartition("/")[2])
        sent = components_sent(self._model, prefill, decode, number, one.rank.engine_rank)
        return any(name in sent for name in one.ranges)

    def check_delivered(self, one: Sending) -> None:
        """Check that a sender succeeds only after every decode rank, of some try, that it sends to."""
        for receiving in self.receivings:
            if receiving.request.room == one.request.room and receiving.outcome is Outcome.SUCCESS:
                self.check_success(receiving)
        succeeded = self._succeeded.get(one.request.room, {})
        tries = self.requests[one.request.room]
        if not any(set(self._receivers(one, request)) <= set(succeeded) for request in tries):
            self._violated(f"{one} succeeds, but only {list(map(str, succeeded))} have everything")

    def _receivers(self, one: Sending, request: Request) -> list[RankId]:
        """Return the decode ranks of a try that a prefill rank sends to."""
        prefill = self._instances[one.rank.instance].shape
        decode = self._instances[request.decode]
        found = []
        for rank in decode.ranks:
            sent = components_sent(self._model, prefill, decode.shape, one.rank.engine_rank, rank.engine_rank)
            if KV in sent or (request.wants_state and STATE in sent):
                found.append(rank)
        return found

    # Every transfer ends ---------------------------------------------------------------------------------------------

    def opened(self, one: Sending | Receiving) -> None:
        """Watch a transfer from now on; a receiver must be decided by its timeout."""
        if isinstance(one, Sending):
            self.sendings.append(one)
            return
        self.receivings.append(one)
        if one.is_announced:
            self._expect(one, one.timeout_s, is_memory=False)
        else:
            self.granted(one)

    def granted(self, one: Receiving) -> None:
        """Record that a receiver now has pages."""
        one.opened_at = self._world.now
        ticket = one.request.reference
        if isinstance(ticket, Mapping):
            self._issuers[one.lease] = "{instance}/{engine_rank}@{incarnation}".format_map(ticket)
        self._expect(one, one.timeout_s, is_memory=False)

    def finished(self, one: Sending) -> None:
        """Record that the engine has offered everything: from now on, the sender's time is bounded."""
        self._expect(one, self._timeouts.grant_s + self._timeouts.transfer_s, is_memory=False)

    def check_not_lost(self, one: Sending) -> None:
        """Check that prefill has not given up a room that all decode ranks, still alive, have asked for in time."""
        request, failure = one.request, one.failure
        if (
            failure is None
            or failure.reason is not FailureReason.NOT_GRANTED
            or not MUTING.isdisjoint(self._world.injected)
        ):
            return
        since = self._world.now - self._timeouts.grant_s
        keeping = {
            other.rank
            for other in self.receivings
            if other.request == request and other.began_at < since and self._keeps(other)
        }
        if len(self.requests[request.room]) == 1 and len(keeping) == request.num_decode_ranks:
            self._violated(f"{one} is given up, though every decode rank has asked for it: {failure}")

    def _keeps(self, one: Receiving) -> bool:
        """Return whether a decode rank wants a room, or has just learnt that prefill gave it up."""
        is_wanted = one.outcome is Outcome.PENDING or (
            one.failure is not None and one.failure.detected_by.startswith(f"{one.request.prefill}/")
        )
        return is_wanted and one.process.is_alive and one.process.stopped_so_far_s() == 0.0

    def check_announced(self, one: Receiving) -> None:
        """Check that the memory of a room without pages is safe."""
        if one.is_announced and one.memory is not Memory.SAFE:
            self._violated(f"{one} is announced, but memory is {one.memory.value}")

    def left(self, one: Sending | Receiving) -> None:
        """Expect memory to be safe or in quarantine within a bound, because the engine gives up or has its outcome."""
        self._expect(one, self._timeouts.drain_s, is_memory=True)

    def check_told(self, one: Receiving) -> None:
        """Check that an engine is told an outcome when it is decided, not when its pages are safe."""
        if one.is_told or one.outcome is Outcome.PENDING:
            return
        stopped_s = one.process.stopped_so_far_s()
        if one.seen_decided_s == stopped_s:
            self._violated(f"{one} is {one.outcome.value}, but its engine is not told")
        one.seen_decided_s = stopped_s

    def died(self, process: "Process") -> None:
        """Expect that receivers waiting for the rest of a dead process's write notice its death soon."""
        writes = self._writes.pop(process, [])
        if not self._shows_deaths:
            return
        for write in writes:
            target = self._world.plane.endpoints.get(write.peer)
            if target is None or not write.pieces or write.has_ended or not isinstance(write.mark, _Mark):
                continue
            for one in self.receivings:
                is_meant = one.process is target.process and one.request.room == write.mark.room
                if is_meant and one.outcome is Outcome.PENDING:
                    self._expect(one, NOTICED_S, is_memory=False)

    def _expect(self, one: Sending | Receiving, within_s: float, *, is_memory: bool) -> None:
        one.stopped_s = one.process.stopped_so_far_s()
        limit = self._world.now + within_s + MARGIN_S
        check = functools.partial(self._check_ended, one, one.lease, limit, one.stopped_s, is_memory=is_memory)
        self._world.loop.call_in(within_s + MARGIN_S, check)

    def _check_ended(
        self, one: Sending | Receiving, lease: Lease, limit: float, stopped_s: float, *, is_memory: bool
    ) -> None:
        """Check that a transfer has ended in time; the time for which its process was stopped is added."""
        if one.lease is not lease and not is_memory:  # granted or preempted meanwhile, which has started another bound
            return
        is_decided, is_quiet = one.outcome is not Outcome.PENDING, one.memory in (Memory.SAFE, Memory.QUARANTINED)
        has_ended = is_quiet if is_memory else is_decided
        if has_ended or not one.process.is_alive:
            return
        extended = limit + one.process.stopped_so_far_s() - stopped_s
        if not is_memory and self._is_announced(one):
            extended += self._announced_s + self._timeouts.lease_s
        now = self._world.now
        if not one.process.is_running or now < extended:
            again = max(extended - now, 0.1) + MARGIN_S
            check = functools.partial(self._check_ended, one, lease, limit, stopped_s, is_memory=is_memory)
            self._world.loop.call_in(again, check)
            return
        what = "memory is neither safe nor in quarantine" if is_memory else "has no outcome"
        self._violated(f"{one} {what} at its bound: {one.outcome.value}, {one.memory.value}")

    def _is_announced(self, one: Sending | Receiving) -> bool:
        """Return whether a sender's room has been announced, which extends the wait for its grants."""
        return isinstance(one, Sending) and any(
            other.request.room == one.request.room and other.announced_at is not None for other in self.receivings
        )

    # At the end ------------------------------------------------------------------------------------------------------

    def healed(self) -> None:
        """Record that faults are over.

        Once connections are re-established, ranks that leave in order can tell their peers.
        """
        if self._loses_until == 0.0:
            return
        self._loses_until = self._world.now + RECONNECTED_S

    def ended(self, name: str, *, in_order: bool) -> None:
        """Record that a process has ended; in order means that it could tell all of its peers."""
        if not in_order or self._world.now < self._loses_until:
            self._ends.append((name, self._world.now))

    def gone(self, agent: str) -> None:
        """Record that an incarnation, identified by its agent name, has ended: its tickets are invalid from now on."""
        self._gone[agent] = self._world.now

    def overtaken(self, name: str, at: float) -> None:
        """Record that a peer may meet the successor of a rank that left in order before the Goodbye arrives."""
        self._ends.append((name, at))

    def is_excused(self, one: Sending | Receiving) -> bool:
        """Return whether pages may stay in quarantine, because there can be no proof that nothing lands in them.

        This is the case if a process that could write to them is gone and its transport does not prove anything by
        that, or if bytes of a failed write continued to land after its end.
        """
        if isinstance(one, Sending):
            return False
        plane, writers = self._world.plane, f"{one.request.prefill}/"
        if any(
            sender.startswith(writers) and peer.startswith(self._agents_of(str(one.rank)))
            for sender, peer in plane.lingered
        ):
            return True
        # A death that its peers could not have noticed when they asked counts too.
        since = one.opened_at - self._timeouts.lease_s - 2 * HEARTBEAT_S - one.process.stopped_so_far_s()
        is_gone = any(name.startswith(writers) and at >= since for name, at in self._ends)
        return is_gone and not plane.proves_ends

    def _agents_of(self, name: str) -> str:
        """Return the prefix of the agent names of a rank."""
        instance, _, number = name.rpartition("/")
        return f"{self._hosts.get(instance, instance)}/{number}@"

    def check_windows(self, name: str, num_taken: int) -> None:
        """Check that windows belong to live ranks, or to ranks whose writes cannot be proved to be over."""
        num_prefill = sum(len(one.ranks) for one in self._instances.values() if not one.is_decode)
        plane = self._world.plane
        num_excused = sum(peer.startswith(self._agents_of(name)) for _, peer in plane.lingered)
        if not plane.ends_with_process:
            num_excused += sum(not self._instances[ended.partition("/")[0]].is_decode for ended, _ in self._ends)
        if num_taken > num_prefill + num_excused:
            self._violated(f"{num_taken} windows of {name} are taken, by {num_prefill} ranks")

    def check_agreement(self) -> None:
        """Check that prefill reports success if all decode ranks have everything, unless it has an excuse."""
        for sending in self.sendings:
            request = sending.request
            if len(self.requests[request.room]) > 1 or not sending.process.is_alive:
                continue
            succeeded = self._succeeded.get(request.room, {})
            if len(succeeded) < request.num_decode_ranks or sending.outcome is Outcome.SUCCESS:
                continue
            failure = sending.failure
            if failure is None or failure.reason not in EXCUSES or not self._world.injected:
                self._violated(f"decode has all of {request}, but {sending} ends with {failure}")

    def _violated(self, message: str) -> NoReturn:
        """Stop the run, wherever this is called from, so that the code under test cannot hide the violation."""
        violation = Violation(message)
        self._world.loop.fail(violation)
        raise violation


def shows_deaths(faults: "Faults") -> bool:
    """Return whether the peers of a dead process see its connections close, without any fault in between."""
    return not (
        faults.partitions
        or faults.half_open
        or faults.breaks
        or faults.handshake_reset
        or faults.connect_fails
        or faults.stops
        or faults.blocks
        or faults.clock_stops
    )

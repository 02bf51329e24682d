"""A small world of prefill ranks, decode ranks and messages in flight, and the steps that it can take next."""

import math
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal, NamedTuple, assert_never, get_args

import msgspec
import numpy as np

from kvflow.bounds import Bounds
from kvflow.config import Timeouts
from kvflow.errors import FailureReason, KvflowError, Stage
from kvflow.geometry.binding import bind_route
from kvflow.geometry.layout import Component, KVLayout, MemoryRange, Region
from kvflow.geometry.pages import PageTable
from kvflow.geometry.routes import compile_routes
from kvflow.room import RoomId
from kvflow.state import effects as ef
from kvflow.state import events as ev
from kvflow.state.decode.core import DecodeCore
from kvflow.state.prefill.core import PrefillCore
from kvflow.state.prefill.link import link_for
from kvflow.state.settings import DecodeSettings, LocalStagingSettings, PrefillSettings, WindowSettings
from kvflow.state.tables import Memory, Outcome
from kvflow.wire.messages import Ack, AnyMessage, Failure, Notice, PeerId, Ping, Pong, RankId, RankRecord
from simulation.explore.snapshot import copied, fingerprint
from simulation.invariants import check_invariants

__all__ = ["FAULTS", "PromiseBroken", "Setup", "SmallWorld", "Step"]

Fault = Literal["lose", "duplicate", "overtake", "fail", "doubt", "abort", "reclaim", "kill", "timeout"]

FAULTS: Final[tuple[Fault, ...]] = get_args(Fault)

TOKEN_BYTES: Final = 16
STAGING_ADDRESS: Final = 2**20
RESTARTED: Final = 1_000
"""Difference between the incarnation of a killed process and that of its successor."""

GIVE_UP_S: Final = 1.0
"""Limit of every phase, so that a timeout is one step."""

LEASE_S: Final = 100.0
TIMEOUTS: Final = Timeouts(
    handshake_s=GIVE_UP_S,
    transfer_s=GIVE_UP_S,
    open_s=GIVE_UP_S,
    grant_s=GIVE_UP_S,
    progress_s=GIVE_UP_S,
    drain_s=GIVE_UP_S,
    lease_s=LEASE_S,
)

EPILOGUE_S: Final = 1_000_000.0
EPILOGUE_STEPS: Final = 20_000

FIRST_TRIAL_ROOM: Final = 1_000
MAX_TRIALS: Final = 2
"""Transfers attempted after the last fault. One of them must succeed; an earlier one may fail because of that fault."""

TRIAL_S: Final = 10.0
"""Pause between two such transfers, longer than the retransmission interval of a lost hello."""

SLOT_S: Final = LEASE_S / 2
"""The same pause if pieces are packed, longer than the interval after which prefill asks for an unreturned slot."""


class PromiseBroken(KvflowError):
    """A world has reached a state that kvflow promises to prevent."""


class Setup(NamedTuple):
    """What a world consists of.

    Attributes:
        num_prefill: Ranks of the prefill instance.
        num_decode: Ranks of the decode instance.
        rooms: Requests, each served by every rank.
        num_writes: Pieces of each room.
        max_faults: Faults in one run.
        faults: Kinds of faults.
        is_connected: The handshakes are done at the start; otherwise they are explored too.
        posts_per_peer: Limit of posts in flight to one decode rank.
        slots: Staging slots of each prefill rank, and of its window on each decode rank. If not zero, every piece is
            packed.
        quiesces: The prefill engines quiesce each room once, at any time after they have offered everything, and resume
            from the position that they get back.
        announces: The decode engines announce each room, and grant it pages at any later time.
    """

    num_prefill: int = 1
    num_decode: int = 1
    rooms: tuple[RoomId, ...] = (1,)
    num_writes: int = 1
    max_faults: int = 1
    faults: tuple[Fault, ...] = FAULTS
    is_connected: bool = True
    posts_per_peer: int = 16
    slots: int = 0
    quiesces: bool = False
    announces: bool = False


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


class Post(NamedTuple):
    """A write in flight.

    Attributes:
        prefill: Number of the rank that writes.
        decode: Number of the rank whose memory is written.
        local: Staging slot that the write reads; None if it goes directly from pages to pages.
        address: Address of the staging slot that it writes to; None if it goes directly from pages to pages.
    """

    prefill: int
    decode: int
    delivery: ev.DeliveryId
    seq: int
    notice: Notice
    local: int | None = None
    address: int | None = None


class PieceId(NamedTuple):
    """Identifies the bytes of one write, wherever they are."""

    generation: int
    prefill: int
    decode: int
    seq: int


Slot = tuple[int, int]
"""A staging slot of a decode rank: number of the rank and address of the slot."""


Facts = tuple[Outcome, Memory]
"""Outcome and memory state of a transfer on one side."""

BEGUN: Final = (Outcome.PENDING, Memory.HELD)

Channel = tuple[str, int, int]
"""Direction ("up" to prefill, "down" to decode), number of the prefill rank, number of the decode rank."""


def _layout(num_layers: int, num_tokens: int) -> KVLayout:
    """Return a layout with one head and `num_layers` layers, which prefill ranks share as replicas."""
    address, size = 4096, num_tokens * TOKEN_BYTES
    regions = tuple(
        Region(
            "k", layer, address + layer * size, num_tokens, TOKEN_BYTES, 1, TOKEN_BYTES, (0, 1), TOKEN_BYTES,
            TOKEN_BYTES, "uint8",
        )
        for layer in range(num_layers)
    )  # fmt: skip
    return KVLayout((Component("kv", regions),), "explored", (MemoryRange(address, num_layers * size),))


def _staging(setup: Setup) -> tuple[LocalStagingSettings | None, WindowSettings | None]:
    """Return the staging settings of both sides: a slot holds one write, and each prefill rank can get a window."""
    if not setup.slots:
        return None, None
    slot_bytes = TOKEN_BYTES * setup.num_prefill
    local = LocalStagingSettings(setup.slots, slot_bytes, 0.0, "always", gathers_inline=True)
    num_bytes = setup.num_prefill * setup.slots * slot_bytes
    return local, WindowSettings(STAGING_ADDRESS, num_bytes, slot_bytes, setup.slots)


class SmallWorld:
    """Real cores, and the channels and writes between them. `steps` yields what can happen next."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.now = 0.0
        self.num_faults = 0
        self.may_lack_proof = False
        num_tokens = setup.num_writes * setup.num_prefill
        layout = _layout(setup.num_prefill, num_tokens * (len(setup.rooms) + MAX_TRIALS))
        limits = Bounds(bytes_per_post=TOKEN_BYTES * setup.num_prefill, posts_per_peer=setup.posts_per_peer)
        local, windows = _staging(setup)
        self._prefill_settings = tuple(
            PrefillSettings(TIMEOUTS, limits, layout, "explored", staging=local, endpoint=f"tcp://p:{number + 1}")
            for number in range(setup.num_prefill)
        )
        self.prefill: list[PrefillCore | None] = [
            PrefillCore(PeerId(RankId("P", number), number + 1), settings)
            for number, settings in enumerate(self._prefill_settings)
        ]
        self.decode = [
            DecodeCore(
                PeerId(RankId("D", number), number + 101),
                DecodeSettings(TIMEOUTS, limits, layout, "explored", b"", ends_with_process=True, staging=windows),
            )
            for number in range(setup.num_decode)
        ]
        self._layout = layout
        self._records = tuple(
            RankRecord(
                peer=core.me,
                num_ranks=setup.num_prefill,
                endpoint=self._prefill_settings[number].endpoint,
                backend="explored",
                layout=layout,
            )
            for number, core in enumerate(self.prefill)
            if core is not None
        )
        self.channels: dict[Channel, list[AnyMessage]] = {}
        self.posts: list[Post] = []
        self.in_doubt: list[Post] = []
        self.landed: dict[PieceId, None] = {}
        self.staged: dict[Slot, PieceId] = {}
        self.scattering: dict[PieceId, Slot] = {}
        self.tasks: list[tuple[str, int, Any]] = []
        self._num_tokens = num_tokens
        self._generations = {room: number for number, room in enumerate(setup.rooms, 1)}
        self.script: list[tuple[str, int, Any]] = [item for room in setup.rooms for item in self._requests(room)]
        self.quiescing: dict[tuple[int, RoomId], None] = {}
        self.announced: dict[tuple[int, int], None] = {}
        self.sent: dict[tuple[int, RoomId], tuple[Outcome, Memory]] = {}
        self.received: dict[tuple[int, RoomId], tuple[Outcome, Memory]] = {}
        if setup.is_connected:
            self._connect_all()

    def copy(self) -> "SmallWorld":
        """Return an independent copy."""
        shared = {id(item): item for item in (self.setup, self._layout, *self._prefill_settings, self._records)}
        result: SmallWorld = copied(self, shared)
        return result

    def fingerprint(self) -> bytes:
        """Return a digest that is equal for worlds with the same possible futures."""
        cores = [core for core in (*self.prefill, *self.decode) if core is not None]
        due = [sorted(core.timers._due.values(), key=lambda entry: entry[:2]) for core in cores]
        timers = [[(when, key) for when, _, key in entries] for entries in due]
        held = []
        for core in (*self.prefill, *self.decode):
            if core is not None:
                held.append((core, core.timers))
                core.timers = None  # type: ignore[assignment] # covered by `timers`, regardless of insertion order
        try:
            return fingerprint([self.__dict__ | {"_timers": timers, "_prefill_settings": None}])
        finally:
            for core, kept in held:
                core.timers = kept

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

    def finish(self, number: int) -> None:
        """Complete one of the shell's pending tasks."""
        side, rank, event = self.tasks.pop(number)
        if isinstance(event, ev.ProbeFinished):
            event = ev.ProbeFinished(event.peer, self._prefill_at(event.peer) is None)
        elif isinstance(event, ev.Scattered):
            self._end_scatter(rank, event)
        self.tell(side, rank, event)

    def deliver(self, channel: Channel, *, at: int = 0, keep: bool = False) -> None:
        """Deliver a message."""
        queue = self.channels[channel]
        message = queue[at] if keep else queue.pop(at)
        direction, prefill, decode = channel
        if direction == "up":
            self.tell("P", prefill, ev.MessageArrived(_connection(prefill, decode), message))
        else:
            self.tell("D", decode, ev.MessageReceived(self._records[prefill].peer, message))

    def lose(self, channel: Channel) -> None:
        """Lose a message."""
        self.may_lack_proof = True
        self.channels[channel].pop(0)

    def land(self, number: int) -> None:
        """Complete a write: its bytes land. Its notice and its completion follow in any order."""
        post = self.posts.pop(number)
        piece = _piece_of(post)
        if post.address is not None:
            self.staged[post.decode, post.address] = piece
        else:
            memory = self.received.get((post.decode, piece.generation), (None, None))[1]
            if memory is Memory.SAFE:
                raise PromiseBroken("a write lands in pages that were released", post=post.seq)
            self.landed[piece] = None
        self._add_task("D", post.decode, ev.NoticeDelivered(post.notice))
        self._add_task("P", post.prefill, ev.PostEnded(post.delivery, post.seq, None))

    def fail(self, number: int) -> None:
        """Fail a write: nothing lands."""
        post = self.posts.pop(number)
        failure = Failure(FailureReason.WRITE_FAILED, Stage.SUBMIT, f"P/{post.prefill}", "explored")
        self._add_task("P", post.prefill, ev.PostEnded(post.delivery, post.seq, failure))

    def doubt(self, number: int) -> None:
        """Report a write as in doubt: whether it has ended is unknown, and it may land at any time."""
        post = self.posts.pop(number)
        self.may_lack_proof = True
        self.in_doubt.append(post)
        failure = Failure(FailureReason.WRITE_FAILED, Stage.SUBMIT, f"P/{post.prefill}", "explored")
        self._add_task("P", post.prefill, ev.PostInDoubt(post.delivery, post.seq, failure))

    def kill(self, number: int) -> None:
        """Kill a prefill process: its posts and messages are lost, and its connections break."""
        self.prefill[number] = None
        self.posts = [post for post in self.posts if post.prefill != number]
        self.in_doubt = [post for post in self.in_doubt if post.prefill != number]
        self.sent = {key: facts for key, facts in self.sent.items() if key[0] != number}
        self.script = [item for item in self.script if item[:2] != ("P", number)]
        self.tasks = [item for item in self.tasks if item[:2] != ("P", number)]
        for channel in list(self.channels):
            if channel[1] == number:
                del self.channels[channel]
        for decode in range(len(self.decode)):
            self._add_task("D", decode, ev.ConnectionLost(self._records[number].peer))

    def time_out(self, side: str, number: int) -> None:
        """Let a core time out on what it waits for."""
        due = self._gives_up(side, number)
        if due is not None:
            self.may_lack_proof = True
            self.now = max(self.now, due)
            self.tell(side, number, ev.TimePassed())

    def tell(self, side: str, number: int, event: Any) -> None:
        """Pass an event to a core, carry out the effects, and check the promises."""
        core = self.prefill[number] if side == "P" else self.decode[number]
        if core is None:
            return
        if isinstance(core, PrefillCore):
            if isinstance(event, ev.QuiesceAsked):
                self.quiescing[number, event.room] = None
            for effect in core.handle(event, self.now):
                self._carry_out_prefill(number, effect, event)
            self._check_told(number)
        else:
            effects = core.handle(event, self.now)
            if isinstance(event, ev.ReceiveOpened) and event.is_announced:
                self.announced[number, event.generation] = None
            elif isinstance(event, ev.ReceiveGranted):
                del self.announced[number, event.generation]
            for decode_effect in effects:
                self._carry_out_decode(number, decode_effect, event)
        check_invariants(core)

    # Effects ---------------------------------------------------------------------------------------------------------

    def _carry_out_prefill(self, number: int, effect: ef.PrefillEffect, event: Any) -> None:
        match effect:
            case ef.Reply(connection, message):
                self._send(("down", number, connection[1]), message)
            case ef.CheckHello(connection, hello):
                link = link_for(hello, self._prefill_settings[number])
                self._add_task("P", number, ev.HelloChecked(connection, hello, link))
            case ef.PostPiece(piece):
                self._post(number, piece)
            case ef.YieldTurn():
                self._add_task("P", number, ev.TurnContinued())
            case ef.ReportSender(room, outcome, memory):
                before = self.sent.get((number, room), BEGUN)
                self._check_change(before, (outcome, memory), event)
                self.sent[number, room] = (outcome, memory)
                self._check_sent(number, room)
            case ef.ReportQuiesced(room, resume_at):
                self._check_quiesced(number, room)
                if resume_at is not None:
                    self.script.append(("P", number, self._chunk(room, resume_at)))
            case ef.ReportGranted() | ef.DisconnectTransport() | ef.AdmitChunks() | ef.CountAnomaly() | ef.LogEvent():
                pass  # no chunk waits for capacity here, and logs are not read
            case ef.PlanPiece() | ef.PostPlan() | ef.DropPlan() | ef.AwaitData():
                raise PromiseBroken("explored worlds plan immediately", effect=type(effect).__name__)
            case _:
                assert_never(effect)

    def _carry_out_decode(self, number: int, effect: ef.DecodeEffect, event: Any) -> None:
        match effect:
            case ef.SendMessage(peer, message):
                prefill = self._prefill_at(peer)
                if prefill is not None:
                    self._send(("up", prefill, number), message)
            case ef.LookUp(instance):
                self._add_task("D", number, ev.InstanceFound(instance, self._records))
            case ef.CompileRoutes(instance, attempt, records):
                self._add_task("D", number, ev.RoutesCompiled(instance, attempt, self._routes(number, records)))
            case ef.ProbePeer(peer):
                self._add_task("D", number, ev.ProbeFinished(peer, is_gone=False))
            case ef.ScatterStaged():
                self._begin_scatter(number, effect)
            case ef.ReportReceiver():
                before = self.received.get((number, effect.generation), BEGUN)
                self._check_change(before, (effect.outcome, effect.memory), event)
                self._check_received(number, effect)
            case ef.Connect() | ef.Disconnect() | ef.WatchNotices() | ef.CountAnomaly() | ef.LogEvent():
                pass  # connections exist as soon as something is sent over them
            case ef.WaitForFence() | ef.WaitForLanding() | ef.NoteEnds() | ef.VerifyDigests():
                raise PromiseBroken("explored worlds have no digests and no fences", effect=type(effect).__name__)
            case _:
                assert_never(effect)

    # Writes ----------------------------------------------------------------------------------------------------------

    def _post(self, number: int, piece: ef.Piece) -> None:
        """Start a write, out of one staging slot and into another if the piece has slots.

        Raises:
            PromiseBroken: One of these slots is in use.
        """
        decode = self._decode_of(piece.delivery.peer)
        local = address = None
        if piece.slots is not None and piece.link.staging is not None:
            local, address = piece.slots.local, piece.link.staging.slot_address(piece.slots.remote)
        post = Post(number, decode, piece.delivery, piece.seq, piece.notice, local, address)
        if address is not None:
            writes = (*self.posts, *self.in_doubt)
            if any((other.prefill, other.local) == (number, local) for other in writes):
                raise PromiseBroken("a slot is packed while a write may read it", slot=local)
            self._check_not_written((decode, address))
            if any(slot == (decode, address) and self._counts(read) for read, slot in self.scattering.items()):
                raise PromiseBroken("a slot is written while it is scattered", address=address)
        self.posts.append(post)

    def _begin_scatter(self, number: int, effect: ef.ScatterStaged) -> None:
        notice, window = effect.notice, effect.rank.staging
        if notice.staged is None or window is None:
            raise PromiseBroken("scattered data is in no slot", seq=notice.seq)
        slot = (number, window.slot_address(notice.staged.slot))
        piece = PieceId(notice.generation, notice.engine_rank, number, notice.seq)
        self._check_not_written(slot)
        if self.staged.get(slot) != piece:
            raise PromiseBroken("a slot is scattered for bytes that it does not hold", piece=piece)
        self.scattering[piece] = slot
        self._add_task("D", number, ev.Scattered(notice.generation, notice, None))

    def _end_scatter(self, number: int, event: ev.Scattered) -> None:
        piece = PieceId(event.generation, event.notice.engine_rank, number, event.notice.seq)
        del self.scattering[piece]
        if self._counts(piece):
            self.landed[piece] = None

    def _counts(self, piece: PieceId) -> bool:
        """Return whether a transfer may still succeed; if not, anything may be scattered into the pages it holds."""
        return self.received.get((piece.decode, piece.generation), BEGUN)[0] is Outcome.PENDING

    def _check_not_written(self, slot: Slot) -> None:
        if any((post.decode, post.address) == slot for post in (*self.posts, *self.in_doubt)):
            raise PromiseBroken("a slot is used while a write may land in it", address=slot[1])

    # Promises --------------------------------------------------------------------------------------------------------

    def _check_change(self, before: Facts, after: Facts, event: Any) -> None:
        """Check that an event may change a transfer in this way.

        Raises:
            PromiseBroken: A decided outcome changes, released pages are no longer free, or the event does not justify
                the change.
        """
        outcome, memory = after
        told = {"before": before, "after": after, "event": type(event).__name__}
        if before[0] is not Outcome.PENDING and outcome is not before[0]:
            raise PromiseBroken("a decided outcome changes", **told)
        if before[1] is Memory.SAFE and memory is not Memory.SAFE:
            raise PromiseBroken("released pages are no longer free", **told)
        if outcome is not Outcome.PENDING and memory is Memory.HELD:
            raise PromiseBroken("an ended transfer still holds pages", **told)
        is_given_up = isinstance(event, (ev.SendAborted, ev.ReceiveAborted))
        is_decided = before[0] is Outcome.PENDING and outcome is not Outcome.PENDING
        if is_decided and (outcome is Outcome.ABORTED) != is_given_up:
            raise PromiseBroken("a transfer must end as aborted exactly when its engine aborts it", **told)
        is_unfenced = self.may_lack_proof and isinstance(event, (ev.TimePassed, ev.PostInDoubt))
        if memory is Memory.QUARANTINED and before[1] is not memory and not is_unfenced:
            raise PromiseBroken("pages are in quarantine although a proof may come", **told)
        is_acknowledged = isinstance(event, ev.MessageArrived) and isinstance(event.message, Ack)
        if outcome is Outcome.SUCCESS and is_acknowledged and before[1] is not Memory.SAFE:
            raise PromiseBroken("pages are held until decode has everything, although every write has ended", **told)

    def _check_sent(self, number: int, room: RoomId) -> None:
        outcome, memory = self.sent[number, room]
        is_reading = any(
            post.prefill == number and post.delivery.room == room for post in (*self.posts, *self.in_doubt)
        )
        if memory is Memory.SAFE and is_reading:
            raise PromiseBroken("source pages are released while a write may read them", room=room)
        generation = self._generations[room]
        received = [self.received.get((decode, generation)) for decode in range(self.setup.num_decode)]
        if outcome is Outcome.SUCCESS and any(facts is None or facts[0] is not outcome for facts in received):
            raise PromiseBroken("prefill reports success before decode does", room=room)

    def _check_received(self, number: int, report: ef.ReportReceiver) -> None:
        generation = report.generation
        self.received[number, generation] = (report.outcome, report.memory)
        if (number, generation) in self.announced and report.memory is not Memory.SAFE:
            raise PromiseBroken("a room that has no pages is not safe", generation=generation)
        if report.outcome is Outcome.SUCCESS:
            for prefill in range(self.setup.num_prefill):
                num_landed = sum(piece[:3] == (generation, prefill, number) for piece in self.landed)
                if self._sends(prefill, number) and num_landed < self.setup.num_writes:
                    raise PromiseBroken("success without every byte", generation=generation, prefill=prefill)
        if report.memory is Memory.SAFE and report.outcome is not Outcome.SUCCESS:
            direct = [post for post in (*self.posts, *self.in_doubt) if post.address is None]
            if any((post.decode, post.delivery.generation) == (number, generation) for post in direct):
                raise PromiseBroken("pages are released while a write may land", generation=generation)
        if report.memory is Memory.SAFE:
            for piece in self.scattering:
                if (piece.decode, piece.generation) == (number, generation):
                    raise PromiseBroken("pages are released while bytes are scattered into them", piece=piece)

    def _check_told(self, number: int) -> None:
        """Check that an engine that has asked to quiesce a room is told once every write has ended."""
        for rank, room in self.quiescing:
            if rank == number and self.sent.get((number, room)) == (Outcome.PENDING, Memory.SAFE):
                raise PromiseBroken("pages are quiesced, but the engine is not told", room=room)

    def _check_quiesced(self, number: int, room: RoomId) -> None:
        if (number, room) not in self.quiescing:
            raise PromiseBroken("an engine is told that its pages are quiesced, but has not asked", room=room)
        del self.quiescing[number, room]
        writes = [post for post in (*self.posts, *self.in_doubt) if post.local is None]
        if any((post.prefill, post.delivery.room) == (number, room) for post in writes):
            raise PromiseBroken("a write may read pages that are reported as quiesced", room=room)

    def _sends(self, prefill: int, decode: int) -> bool:
        return bool(self._routes(decode, self._records)[prefill].expected)

    def _routes(self, decode: int, records: tuple[RankRecord, ...]) -> tuple[ev.RankRoute, ...]:
        layouts = {record.peer.rank.engine_rank: record.layout for record in records}
        routes = compile_routes(layouts, self._layout, decode_rank=decode)
        return tuple(
            ev.RankRoute(route, bind_route(route, record.layout, self._layout).expected)
            for record, route in zip(records, routes, strict=True)
        )

    def _send(self, channel: Channel, message: Any) -> None:
        """Queue a message, unless it is a ping, which changes nothing here, or is in flight already."""
        queue = self.channels.setdefault(channel, [])
        if not isinstance(message, (Ping, Pong)) and message not in queue:
            queue.append(message)

    def _add_task(self, side: str, number: int, event: Any) -> None:
        if (side, number, event) not in self.tasks:
            self.tasks.append((side, number, event))

    # The end ---------------------------------------------------------------------------------------------------------

    def check_end(self) -> None:
        """Run everything that can happen without faults, time included, and check that service has recovered.

        Every transfer must end, and must succeed if there were no faults. After the killed processes have restarted, a
        new transfer between all ranks must succeed.

        Raises:
            PromiseBroken: One of these does not hold, or pages stay in quarantine although every process could prove
                that no write can land in them.
        """
        self._settle()
        outcomes = [outcome for outcome, _ in (*self.sent.values(), *self.received.values())]
        if not self.num_faults and any(outcome is not Outcome.SUCCESS for outcome in outcomes):
            raise PromiseBroken("a transfer fails without any fault", sent=str(self.sent))
        self._restart()
        for number in range(MAX_TRIALS):
            if self._succeeds(FIRST_TRIAL_ROOM + number):
                return
            self._wait(self.now + (SLOT_S if self.setup.slots else TRIAL_S))
        raise PromiseBroken("service does not recover", sent=str(self.sent), received=str(self.received))

    def _restart(self) -> None:
        """Restart the killed prefill processes, with new incarnations."""
        for number, core in enumerate(self.prefill):
            if core is None:
                record = self._records[number]
                peer = PeerId(record.peer.rank, record.peer.incarnation + RESTARTED)
                self.prefill[number] = PrefillCore(peer, self._prefill_settings[number])
                changed = msgspec.structs.replace(record, peer=peer)
                self._records = (*self._records[:number], changed, *self._records[number + 1 :])

    def _succeeds(self, room: int) -> bool:
        """Run one more transfer between all ranks, and return whether it succeeds on all of them."""
        self._generations[room] = room
        self.script += self._requests(room)
        self._settle()
        sent = [self.sent[number, room] for number in range(self.setup.num_prefill)]
        received = [self.received[number, room] for number in range(self.setup.num_decode)]
        return all(outcome is Outcome.SUCCESS for outcome, _ in (*sent, *received))

    def _settle(self) -> None:
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
            if not self._wake(EPILOGUE_S):
                break
        raise PromiseBroken("a transfer does not end", sent=str(self.sent), received=str(self.received))

    def _wait(self, until: float) -> None:
        """Advance time to `until`, and take every step without a fault meanwhile."""
        while True:
            step = next((step for step in self.steps() if not step.is_fault), None)
            if step is not None:
                step.take(self)
            elif not self._wake(until):
                self.now = max(self.now, until)
                return

    def _wake(self, until: float) -> bool:
        """Advance time to the next timer, and return whether one is due before `until`."""
        dues = [(core.timers.next(), side, number) for side, number, core in self._cores()]
        due, side, number = min((math.inf if due is None else due, side, number) for due, side, number in dues)
        if due >= until:
            return False
        self.now = max(self.now, due)
        self.tell(side, number, ev.TimePassed())
        return True

    def _is_over(self) -> bool:
        is_quiet = not self.in_doubt
        for outcome, memory in (*self.sent.values(), *self.received.values()):
            is_settled = memory is Memory.SAFE or (memory is Memory.QUARANTINED and not is_quiet)
            if outcome is Outcome.PENDING or not is_settled:
                return False
        return not is_quiet or all(_is_idle(core) for _, _, core in self._cores())

    def _cores(self) -> Iterator[tuple[str, int, PrefillCore | DecodeCore]]:
        for number, core in enumerate(self.prefill):
            if core is not None:
                yield "P", number, core
        for number, decode in enumerate(self.decode):
            yield "D", number, decode

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

    def _chunk(self, room: RoomId, start: int) -> ev.ChunkOffered:
        """Return the last chunk of a room."""
        tokens = (start, self._num_tokens)
        table = PageTable(np.arange(*tokens, dtype="<u4"), start, 1)
        return ev.ChunkOffered(room, ev.Chunk(tokens, {"kv": tokens}, {"kv": table}, last=True, metadata=b"m"))

    def _connect_all(self) -> None:
        """Complete the handshakes: every decode rank looks up the prefill instance and connects to it."""
        script, self.script = self.script, []
        for number, core in enumerate(self.decode):
            for effect in core.instances.reconnect("P", self.now):
                self._carry_out_decode(number, effect, None)
        while (step := next((step for step in self.steps() if not step.is_fault), None)) is not None:
            step.take(self)
        self.script = script

    def _prefill_at(self, peer: PeerId) -> int | None:
        """Return the number of a live prefill rank, or None."""
        return next((n for n, core in enumerate(self.prefill) if core is not None and core.me == peer), None)

    def _decode_of(self, peer: PeerId) -> int:
        return peer.rank.engine_rank


def _is_idle(core: PrefillCore | DecodeCore) -> bool:
    """Return whether a core holds neither a page nor a slot."""
    has_slots = isinstance(core, PrefillCore) and (
        len(core.slots) or core.counts().slots_taken or core.counts().slots_lost
    )
    return not core.rooms.rooms and not has_slots


def _piece_of(post: Post) -> PieceId:
    return PieceId(post.delivery.generation, post.prefill, post.decode, post.seq)


def _connection(prefill: int, decode: int) -> bytes:
    return bytes([prefill, decode])


def _failure(rank: str) -> Failure:
    return Failure(FailureReason.ABORTED, Stage.ENQUEUE, rank, "explored")

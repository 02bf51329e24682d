"""A small world of ranks, and of messages and writes in flight. It checks every promise as it is made."""

import math
from collections.abc import Iterator
from typing import Any, Final, NamedTuple, assert_never

import msgspec
import numpy as np

from kvflow.bounds import Bounds
from kvflow.errors import FailureReason, KvflowError, Stage
from kvflow.geometry.binding import bind_route
from kvflow.geometry.pages import PageTable
from kvflow.geometry.ranges import TokenRange
from kvflow.geometry.routes import compile_routes
from kvflow.room import RoomId
from kvflow.state import effects as ef
from kvflow.state import events as ev
from kvflow.state.decode.core import DecodeCore
from kvflow.state.packing import link_for
from kvflow.state.prefill.core import PrefillCore
from kvflow.state.settings import DecodeSettings, PrefillSettings
from kvflow.state.tables import Memory, Outcome
from kvflow.wire.messages import (
    Ack,
    AnyMessage,
    Drained,
    Failed,
    Failure,
    Message,
    Notice,
    PeerId,
    Ping,
    Pong,
    RankId,
    RankRecord,
)
from simulation.explore.setup import MAX_TRIALS, TOKEN_BYTES, Setup, make_layout, make_staging
from simulation.invariants import check_invariants

__all__ = ["PromiseBroken", "World"]

RESTARTED: Final = 1_000
"""Difference between the incarnation of a killed process and that of its successor."""


class PromiseBroken(KvflowError):
    """A world has reached a state that kvflow promises to prevent."""


class Post(NamedTuple):
    """A write in flight.

    Attributes:
        prefill: Number of the rank that writes.
        decode: Number of the rank whose memory is written.
        opening: How many times the rank had opened the room.
        local: Staging slot that the write reads; None if it goes directly from pages to pages.
        address: Address of the staging slot that it writes to; None if it goes directly from pages to pages.
    """

    prefill: int
    decode: int
    delivery: ev.DeliveryId
    seq: int
    notice: Notice
    opening: int
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


class World:
    """Real cores, and the channels and writes between them. It does nothing by itself: its methods are what may happen.

    Attributes:
        prefill: The prefill cores; None for a killed process.
        decode: The decode cores.
        script: What engines do next: side, number of the rank, event.
        tasks: What shells, directory and transport owe a rank: side, number of the rank, event.
        records: What the directory holds.
        channels: Messages in flight.
        connected: Number of each connection that a decode rank has, by decode rank and prefill incarnation.
        posts: Writes in flight.
        in_doubt: Those that were reported as in doubt.
        plans: Pieces that are being planned, or wait for their turn.
        landed: Tokens of the bytes that have landed in pages.
        sent: What the prefill ranks have reported last, by rank and room.
        received: What the decode ranks have reported last, by rank and generation.
        served: For each open room of a prefill rank, the generation that it sends to each decode rank.
        openings: How many times each prefill rank has opened each room.
        wanted: Tokens that each transfer wants.
        promised: Deliveries for which a prefill rank has said that it writes nothing more.
        passed: Offers that a prefill engine has seen, by decode rank and number, and how it decides.
        answered: How offers have ended for the engine that made them, by decode rank and number.
        released: Transfers whose pages an operator has released from quarantine; no promise covers them.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.now = 0.0
        self.num_faults = 0
        self.may_lack_proof = False
        self._num_tokens = setup.num_writes * setup.num_prefill
        self._make_ranks()
        self.channels: dict[Channel, list[AnyMessage]] = {}
        self.posts: list[Post] = []
        self.in_doubt: list[Post] = []
        self.plans: dict[tuple[int, ev.DeliveryId, int], ef.Piece] = {}
        self.landed: dict[PieceId, TokenRange] = {}
        self.staged: dict[Slot, PieceId] = {}
        self.scattering: dict[PieceId, Slot] = {}
        self.tasks: list[tuple[str, int, Any]] = []
        self.script: list[tuple[str, int, Any]] = []
        self.connected: dict[tuple[int, PeerId], int] = {}
        self.quiescing: dict[tuple[int, RoomId], None] = {}
        self.announced: dict[tuple[int, int], None] = {}
        self.sent: dict[tuple[int, RoomId], tuple[Outcome, Memory]] = {}
        self.received: dict[tuple[int, int], tuple[Outcome, Memory]] = {}
        self.served: dict[tuple[int, RoomId], dict[int, int]] = {}
        self.openings: dict[tuple[int, RoomId], int] = {}
        self.wanted: dict[tuple[int, int], TokenRange] = {}
        self.promised: dict[tuple[int, ev.DeliveryId], None] = {}
        self.released: dict[tuple[int, int] | tuple[int, RoomId, int], None] = {}
        self.passed: dict[tuple[PeerId, int], Failure | None] = {}
        self.answered: dict[tuple[PeerId, int], Failure | None] = {}

    def _make_ranks(self) -> None:
        """Make the cores of all ranks, and the records of the prefill ranks."""
        setup = self.setup
        num_pages = self._num_tokens * (len(setup.rooms) + MAX_TRIALS) + setup.spare_pages
        layout, other = (make_layout(setup.num_prefill, num_pages, component=name) for name in ("kv", "other"))
        limits = Bounds(
            bytes_per_post=TOKEN_BYTES * setup.num_prefill,
            posts_per_peer=setup.posts_per_peer,
            descriptors_planned_inline=setup.planned_inline,
        )
        local, windows = make_staging(setup)
        self._layout = layout
        self._prefill_settings = tuple(
            PrefillSettings(
                setup.timeouts,
                limits,
                layout if holds else other,
                "explored",
                staging=local,
                endpoint=f"tcp://127.0.0.1:{number + 1}",
                takes_offers=setup.offers,
            )
            for number, holds in enumerate(setup.holds or (True,) * setup.num_prefill)
        )
        cores = [
            PrefillCore(PeerId(RankId("P", number), number + 1), settings)
            for number, settings in enumerate(self._prefill_settings)
        ]
        self.prefill: list[PrefillCore | None] = [*cores]
        settings = DecodeSettings(
            setup.timeouts, limits, layout, "explored", b"", ends_with_process=True, staging=windows
        )
        self.decode = [
            DecodeCore(PeerId(RankId("D", number), number + 101), settings) for number in range(setup.num_decode)
        ]
        self.records = tuple(
            RankRecord(
                peer=core.me,
                num_ranks=setup.num_prefill,
                endpoint=settings.endpoint,
                backend="explored",
                layout=settings.layout,
            )
            for core, settings in zip(cores, self._prefill_settings, strict=True)
        )

    # Steps -----------------------------------------------------------------------------------------------------------

    def finish(self, number: int) -> None:
        """Complete one of the shell's pending tasks."""
        side, rank, event = self.tasks.pop(number)
        if isinstance(event, ev.ProbeFinished):
            event = ev.ProbeFinished(event.peer, self._prefill_at(event.peer) is None)
        elif isinstance(event, (ev.ConnectionLost, ev.MessageReceived)) and (rank, event.peer) not in self.connected:
            return
        elif isinstance(event, ev.Scattered):
            self._end_scatter(rank, event)
        self.tell(side, rank, event)

    def deliver(self, channel: Channel, *, at: int = 0, keep: bool = False) -> None:
        """Deliver a message."""
        queue = self.channels[channel]
        message = queue[at] if keep else queue.pop(at)
        direction, prefill, decode = channel
        peer = self.records[prefill].peer
        if (decode, peer) not in self.connected:
            return
        if direction == "up":
            self.tell("P", prefill, ev.MessageArrived(self._connection(prefill, decode), message))
        else:
            self.tell("D", decode, ev.MessageReceived(peer, message))

    def break_connection(self, decode: int, peer: PeerId) -> None:
        """Lose what is in flight over a connection; another one replaces it, and the decode rank notices later."""
        self._connect(decode, peer)
        self._add_task("D", decode, ev.ConnectionLost(peer))

    def _connect(self, decode: int, peer: PeerId) -> None:
        self.connected[decode, peer] = self.connected.get((decode, peer), 0) + 1
        for direction in ("up", "down"):
            self.channels.pop((direction, peer.rank.engine_rank, decode), None)

    def _connection(self, prefill: int, decode: int) -> bytes:
        """Return the name of the latest connection between two ranks."""
        return bytes([prefill, decode, self.connected.get((decode, self.records[prefill].peer), 0)])

    def lose(self, channel: Channel) -> None:
        """Lose a message."""
        self.may_lack_proof = True
        self.channels[channel].pop(0)

    def land(self, number: int, *, has_notice: bool = True) -> None:
        """Complete a write: its bytes land. Its notice, unless that is lost, and its completion follow in any order."""
        post = self.posts.pop(number)
        piece = _piece_of(post)
        if post.address is not None:
            self.staged[post.decode, post.address] = piece
        else:
            memory = self.received.get((post.decode, piece.generation), (None, None))[1]
            if memory is Memory.SAFE and (post.decode, piece.generation) not in self.released:
                raise PromiseBroken("a write lands in pages that were released", post=post.seq)
            self.landed[piece] = post.notice.ranges["kv"]
        if has_notice:
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

    def resolve(self, number: int) -> None:
        """Let a write in doubt go on, once its rank knows of the doubt; it ends later after all."""
        post = self.in_doubt[number]
        doubts = (
            task for task in self.tasks if task[:2] == ("P", post.prefill) and isinstance(task[2], ev.PostInDoubt)
        )
        if all((event.delivery, event.seq) != (post.delivery, post.seq) for *_, event in doubts):
            self.posts.append(self.in_doubt.pop(number))

    def fail_plan(self, number: int) -> None:
        """Fail a pending task that plans a piece."""
        _, rank, event = self.tasks.pop(number)
        del self.plans[rank, event.delivery, event.seq]
        self.tell("P", rank, ev.PlanFailed(event.delivery, event.seq, _failure(f"P/{rank}")))

    def release(self, side: str, number: int, key: RoomId) -> None:
        """Release the pages of a room, or on decode of a generation, from quarantine, as an operator would."""
        if side == "D":
            self.released[number, int(key)] = None
        else:
            self.released[number, key, self.openings[number, key]] = None
        self.tell(side, number, ev.QuarantineReleased(key))

    def kill(self, number: int, *, is_flushed: bool = False) -> None:
        """Kill a prefill process: its posts are lost, and its messages unless `is_flushed`; its connections break."""
        self.prefill[number] = None
        self.posts = [post for post in self.posts if post.prefill != number]
        self.in_doubt = [post for post in self.in_doubt if post.prefill != number]
        self.plans = {key: piece for key, piece in self.plans.items() if key[0] != number}
        self.sent = {key: facts for key, facts in self.sent.items() if key[0] != number}
        self.served = {key: served for key, served in self.served.items() if key[0] != number}
        self.promised = {key: None for key in self.promised if key[0] != number}
        self.script = [item for item in self.script if item[:2] != ("P", number)]
        self.tasks = [item for item in self.tasks if item[:2] != ("P", number)]
        for channel in list(self.channels):
            if channel[1] == number:
                queue = self.channels.pop(channel)
                if is_flushed and channel[0] == "down":
                    peer = self.records[number].peer
                    self.tasks += [("D", channel[2], ev.MessageReceived(peer, message)) for message in queue]
        for decode in range(len(self.decode)):
            self._add_task("D", decode, ev.ConnectionLost(self.records[number].peer))

    def restart(self) -> None:
        """Restart the killed prefill processes, with new incarnations."""
        for number, core in enumerate(self.prefill):
            if core is None:
                record = self.records[number]
                peer = PeerId(record.peer.rank, record.peer.incarnation + RESTARTED)
                self.prefill[number] = PrefillCore(peer, self._prefill_settings[number])
                changed = msgspec.structs.replace(record, peer=peer)
                self.records = (*self.records[:number], changed, *self.records[number + 1 :])

    def pass_time(self, seconds: float) -> None:
        """Let time pass, and fire the timers of all ranks in order."""
        end = self.now + seconds
        while self.wake(end):
            pass
        self.now = end

    def wake(self, until: float) -> bool:
        """Advance time to the next timer, and return whether one is due before `until`."""
        dues = [(core.timers.next(), side, number) for side, number, core in self._cores()]
        due, side, number = min((math.inf if due is None else due, side, number) for due, side, number in dues)
        if due >= until:
            return False
        self.now = max(self.now, due)
        self.tell(side, number, ev.TimePassed())
        return True

    def tell(self, side: str, number: int, event: Any) -> None:
        """Pass an event to a core, carry out the effects, and check the promises."""
        core = self.prefill[number] if side == "P" else self.decode[number]
        if core is None:
            return
        if isinstance(core, PrefillCore):
            if isinstance(event, ev.QuiesceAsked):
                self.quiescing[number, event.room] = None
            prefill_effects = core.handle(event, self.now)
            self._note_served(number, core, event)
            for effect in prefill_effects:
                self._carry_out_prefill(number, effect, event)
            self._check_told(number)
        else:
            effects = core.handle(event, self.now)
            if isinstance(event, ev.ReceiveOpened) and event.is_announced:
                self.announced[number, event.generation] = None
            elif isinstance(event, ev.ReceiveGranted):
                del self.announced[number, event.generation]
            if isinstance(event, (ev.ReceiveOpened, ev.ReceiveGranted)) and event.ranges:
                self.wanted[number, event.generation] = event.ranges["kv"]
            for decode_effect in effects:
                self._carry_out_decode(number, decode_effect, event)
        check_invariants(core)

    def _note_served(self, number: int, core: PrefillCore, event: Any) -> None:
        """Note which room was opened, and to which decode ranks the open rooms are sent."""
        if isinstance(event, ev.SendOpened):
            self.sent.pop((number, event.room), None)
            self.openings[number, event.room] = self.openings.get((number, event.room), 0) + 1
        for room in core.rooms.rooms.values():
            if room.state.is_pending:
                sent_to = {
                    delivery.id.peer.rank.engine_rank: delivery.id.generation for delivery in room.deliveries.values()
                }
                self.served.setdefault((number, room.room), {}).update(sent_to)

    # Effects ---------------------------------------------------------------------------------------------------------

    def _carry_out_prefill(self, number: int, effect: ef.PrefillEffect, event: Any) -> None:  # noqa: C901, PLR0912 - one arm an effect
        match effect:
            case ef.Reply(connection, message):
                self._note_promise(number, connection[1], message)
                if connection == self._connection(number, connection[1]):
                    self._send(("down", number, connection[1]), message)
            case ef.CheckHello(connection, hello):
                link = link_for(hello, self._prefill_settings[number])
                self._add_task("P", number, ev.HelloChecked(connection, hello, link))
            case ef.PostPiece(piece):
                self._post(number, piece, piece.notice)
            case ef.PlanPiece(piece):
                self.plans[number, piece.delivery, piece.seq] = piece
                self._add_task("P", number, ev.PlanFinished(piece.delivery, piece.seq))
            case ef.PostPlan(delivery, seq, notice):
                self._post(number, self.plans.pop((number, delivery, seq)), notice)
            case ef.DropPlan(delivery, seq):
                del self.plans[number, delivery, seq]
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
            case ef.ReportGranted() | ef.DisconnectTransport() | ef.AdmitChunk() | ef.CountAnomaly() | ef.LogEvent():
                pass  # no chunk waits for capacity here, and logs are not read
            case ef.PassOffer(peer, offer):
                self._decide(number, peer, offer.number)
            case ef.WithdrawOffer():
                pass  # the engine may decide all the same
            case ef.AwaitData():
                raise PromiseBroken("data is ready at once in these worlds", effect=type(effect).__name__)
            case _:
                assert_never(effect)

    def _carry_out_decode(self, number: int, effect: ef.DecodeEffect, event: Any) -> None:  # noqa: C901, PLR0912 - one arm an effect
        match effect:
            case ef.SendMessage(peer, message):
                prefill = self._prefill_at(peer)
                if prefill is not None and (number, peer) in self.connected:
                    self._send(("up", prefill, number), message)
            case ef.LookUp(instance):
                self._add_task("D", number, ev.InstanceFound(instance, self.records))
            case ef.CompileRoutes(instance, attempt, records):
                self._add_task("D", number, ev.RoutesCompiled(instance, attempt, self._routes(number, records)))
            case ef.Connect(peer):
                if (number, peer) in self.connected:
                    raise PromiseBroken("a rank is connected to twice at once", peer=peer)
                self._connect(number, peer)
            case ef.Disconnect(peer):
                del self.connected[number, peer]
            case ef.ProbePeer(peer):
                probe = ("D", number, ev.ProbeFinished(peer, is_gone=False))
                if probe in self.tasks:
                    raise PromiseBroken("a rank is probed twice at once", peer=peer)
                self.tasks.append(probe)
            case ef.ScatterStaged():
                self._begin_scatter(number, effect)
            case ef.ReportReceiver():
                before = self.received.get((number, effect.generation), BEGUN)
                self._check_change(before, (effect.outcome, effect.memory), event)
                self._check_received(number, effect)
            case ef.ReportOffer(offer, failure):
                self._answer(self.decode[number].me, offer, failure)
            case ef.WatchNotices() | ef.CountAnomaly() | ef.LogEvent():
                pass
            case ef.WaitForFence() | ef.WaitForLanding() | ef.NoteEnds() | ef.VerifyDigests() | ef.ProbeAddress():
                raise PromiseBroken(
                    "explored worlds have no digests, no fences and no tickets", effect=type(effect).__name__
                )
            case _:
                assert_never(effect)

    def _decide(self, number: int, peer: PeerId, offer: int) -> None:
        """Let an engine that has seen an offer decide about it later."""
        if (peer, offer) in self.passed:
            raise PromiseBroken("an offer is passed to the engine twice", offer=offer)
        failure = None if self.setup.accepts else _failure(f"P/{number}")
        self.passed[peer, offer] = failure
        self._add_task("P", number, ev.OfferDecided(peer, offer, failure))

    def _answer(self, peer: PeerId, offer: int, failure: Failure | None) -> None:
        """Check what an engine is told of its offer."""
        if (peer, offer) in self.answered:
            raise PromiseBroken("an offer ends twice", offer=offer)
        if failure is None and self.passed.get((peer, offer), failure) is not None:
            raise PromiseBroken("an offer is accepted that was not", offer=offer)
        if failure is None and (peer, offer) not in self.passed:
            raise PromiseBroken("an offer is accepted by nobody", offer=offer)
        self.answered[peer, offer] = failure

    # Writes ----------------------------------------------------------------------------------------------------------

    def _post(self, number: int, piece: ef.Piece, notice: Notice) -> None:
        """Start a write, out of one staging slot and into another if the piece has slots.

        Raises:
            PromiseBroken: One of these slots is in use, or the rank has said that it writes nothing more.
        """
        if (number, piece.delivery) in self.promised:
            raise PromiseBroken("a write begins after its rank has said that it writes nothing more", seq=piece.seq)
        decode = self._decode_of(piece.delivery.peer)
        local = address = None
        if piece.slots is not None and piece.link.staging is not None:
            local, address = piece.slots.local, piece.link.staging.slot_address(piece.slots.remote)
        opening = self.openings[number, piece.delivery.room]
        post = Post(number, decode, piece.delivery, piece.seq, notice, opening, local, address)
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
            self.landed[piece] = event.notice.ranges["kv"]

    def _counts(self, piece: PieceId) -> bool:
        """Return whether a transfer may still succeed; if not, anything may be scattered into the pages it holds."""
        return self.received.get((piece.decode, piece.generation), BEGUN)[0] is Outcome.PENDING

    def _check_not_written(self, slot: Slot) -> None:
        if any((post.decode, post.address) == slot for post in (*self.posts, *self.in_doubt)):
            raise PromiseBroken("a slot is used while a write may land in it", address=slot[1])

    def _note_promise(self, number: int, decode: int, message: Message) -> None:
        """Note that a rank says that it writes nothing more; no write may be under way then."""
        if (isinstance(message, Drained) and not message.in_flight) or (
            isinstance(message, Failed) and message.drained
        ):
            delivery = ev.DeliveryId(message.room, self.decode[decode].me, message.generation)
            writes = (*self.posts, *self.in_doubt)
            if any((post.prefill, post.delivery) == (number, delivery) for post in writes):
                raise PromiseBroken("a rank says that it writes nothing more while it writes", room=message.room)
            self.promised[number, delivery] = None

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
        opening = self.openings[number, room]
        writes = [(post.prefill, post.delivery.room, post.opening) for post in (*self.posts, *self.in_doubt)]
        is_covered = (number, room, opening) not in self.released
        if memory is Memory.SAFE and is_covered and (number, room, opening) in writes:
            raise PromiseBroken("source pages are released while a write may read them", room=room)
        if outcome is Outcome.PENDING:
            return
        served = self.served.pop((number, room), {})
        if outcome is not Outcome.SUCCESS or (self.setup.holds and not self.setup.holds[number]):
            return
        facts = [self.received.get((decode, served.get(decode, 0))) for decode in range(self.setup.num_decode)]
        if any(fact is None or fact[0] is not outcome for fact in facts):
            raise PromiseBroken("prefill reports success before decode does", room=room)

    def _check_received(self, number: int, report: ef.ReportReceiver) -> None:
        generation = report.generation
        self.received[number, generation] = (report.outcome, report.memory)
        if (number, generation) in self.announced and report.memory is not Memory.SAFE:
            raise PromiseBroken("a room that has no pages is not safe", generation=generation)
        if report.outcome is Outcome.SUCCESS:
            for prefill in range(self.setup.num_prefill):
                pieces = [piece for piece in self.landed if piece[:3] == (generation, prefill, number)]
                tokens = {token for piece in pieces for token in range(*self.landed[piece])}
                if self._sends(prefill, number) and tokens != set(range(*self.wanted[number, generation])):
                    raise PromiseBroken("success without every byte", generation=generation, prefill=prefill)
        is_covered = (number, generation) not in self.released
        if report.memory is Memory.SAFE and report.outcome is not Outcome.SUCCESS and is_covered:
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
        return bool(self._routes(decode, self.records)[prefill].expected)

    def _routes(self, decode: int, records: tuple[RankRecord, ...]) -> tuple[ev.RankRoute, ...]:
        layouts = {record.peer.rank.engine_rank: record.layout for record in records}
        routes = compile_routes(layouts, self._layout, decode_rank=decode)
        return tuple(
            ev.RankRoute(route, bind_route(route, record.layout, self._layout).expected)
            for record, route in zip(records, routes, strict=True)
        )

    def _send(self, channel: Channel, message: Any) -> None:
        """Queue a message, unless it is in flight already, or a ping in a world without them."""
        queue = self.channels.setdefault(channel, [])
        is_skipped = isinstance(message, (Ping, Pong)) and not self.setup.has_pings
        if not is_skipped and message not in queue:
            queue.append(message)

    def _add_task(self, side: str, number: int, event: Any) -> None:
        if (side, number, event) not in self.tasks:
            self.tasks.append((side, number, event))

    def _cores(self) -> Iterator[tuple[str, int, PrefillCore | DecodeCore]]:
        for number, core in enumerate(self.prefill):
            if core is not None:
                yield "P", number, core
        for number, decode in enumerate(self.decode):
            yield "D", number, decode

    def _chunk(self, room: RoomId, start: int) -> ev.ChunkOffered:
        """Return the last chunk of a room."""
        tokens = (start, self._num_tokens)
        table = PageTable(np.arange(*tokens, dtype="<u4"), start, 1)
        return ev.ChunkOffered(room, ev.Chunk(tokens, {"kv": tokens}, {"kv": table}, last=True, metadata=b"m"))

    def _prefill_at(self, peer: PeerId) -> int | None:
        """Return the number of a live prefill rank, or None."""
        return next((n for n, core in enumerate(self.prefill) if core is not None and core.me == peer), None)

    def _decode_of(self, peer: PeerId) -> int:
        return peer.rank.engine_rank


def _piece_of(post: Post) -> PieceId:
    return PieceId(post.delivery.generation, post.prefill, post.decode, post.seq)


def _failure(rank: str) -> Failure:
    return Failure(FailureReason.ABORTED, Stage.ENQUEUE, rank, "explored")

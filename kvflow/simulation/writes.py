"""How writes go: cut anywhere, also within a cell, late, failing, in doubt, and on after the death of their sender.

A write reads its source at the moment it lands, as a one-sided write may do at any time before its end. When the
sending process dies, what had left its memory may go on landing.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kvflow.backends.base import BackendEvent, PostEnded, PostInDoubt
from kvflow.simulation.pool import Lease
from kvflow.stages.submit import agent_name
from kvflow.state.events import DeliveryId
from kvflow.wire.codec import decode, encode
from kvflow.wire.messages import Notice

if TYPE_CHECKING:
    from kvflow.simulation.host import Host
    from kvflow.simulation.world import World

__all__ = ["DataPlane", "Segment", "Write", "cut"]

QUICK_S = 0.002
SLOW_S = 2.0
LATE_S = 1.0
STUCK_S = 3.0
"""How long a doubtful write, or one to a dead process, may take to end."""


class Segment(NamedTuple):
    """Bytes to copy from a source address to a destination address."""

    src: int
    dst: int
    length: int


class Write:
    """A post on its way: pieces that land one after another, then its end.

    Attributes:
        delivery: For which transfer it was posted.
        lease: Source pages.
        pieces: What has not landed.
        corrupts: A bit of it changes on the way.
        captured: What has left the sender's memory, in case it died or the write lingers.
        has_ended: Its end has been told, though bytes of it may go on landing.
    """

    __slots__ = (
        "captured", "corrupts", "delivery", "error", "fails_at", "has_doubt", "has_ended", "is_over", "lease", "notice",
        "number", "pace_s", "peer", "pieces", "post_id", "sender",
    )  # fmt: skip

    def __init__(self, sender: "Host", post_id: int, delivery: DeliveryId, lease: Lease) -> None:
        self.number = 0
        self.sender = sender
        self.post_id = post_id
        self.peer = agent_name(delivery.peer)
        self.delivery = delivery
        self.lease = lease
        self.pieces: list[list[Segment]] = []
        self.captured: list[list[bytes]] | None = None
        self.notice = b""
        self.error: str | None = None
        self.fails_at = -1
        self.pace_s = QUICK_S
        self.has_doubt = False
        self.has_ended = False
        self.corrupts = False
        self.is_over = False


class DataPlane:
    """Carries the writes of every endpoint.

    Args:
        world: Where time, chance and the other processes come from.

    Attributes:
        is_prompt: Writes land at once and whole, unless a fault is drawn.
        lingered: Deliveries of which bytes went on landing after the end of their writes.
    """

    def __init__(self, world: "World") -> None:
        self._world = world
        self.is_prompt = False
        self._num_writes = 0
        self._active: dict[int, Write] = {}
        self.lingered: dict[DeliveryId, None] = {}
        self.hold_write: Callable[[Write], bool] | None = None
        self.hold_notice: Callable[[Write, Host], bool] | None = None
        self.when_started: list[Callable[[Write], None]] = []

    @property
    def num_active(self) -> int:
        """Writes that have not ended."""
        return len(self._active)

    def start(self, write: Write, segments: list[Segment]) -> None:
        """Decide how a write will go, and let it go."""
        faults, rng = self._world.faults, self._world.rng
        self._num_writes += 1
        write.number = self._num_writes
        self._active[write.number] = write
        if self._world.story is not None:
            self._world.tell(
                f"  write {write.number} begins: {write.sender.me.rank} to {write.peer}, {len(segments)} rows"
            )
        write.pieces = [segments]
        if not self.is_prompt and rng.random() < 0.5:
            write.pieces = cut(segments, rng.random())
            write.pace_s = QUICK_S * 10 * rng.random()
        if faults.slow_write and rng.random() < faults.slow_write:
            self._world.count("slow write")
            write.pieces = [part for piece in write.pieces for part in cut(piece, rng.random())]
            write.pace_s = rng.random() * SLOW_S / len(write.pieces)
        if faults.failed_write and rng.random() < faults.failed_write:
            self._world.count("failed write")
            write.fails_at = rng.randint(0, len(write.pieces))
        if faults.doubtful_write and rng.random() < faults.doubtful_write:
            self._world.count("doubtful write")
            self._world.schedule.after(rng.random() * write.pace_s * 2, self.doubt, write)
        if write.notice and faults.forged_notice and rng.random() < faults.forged_notice:
            self._forge_notice(write)
        if self.when_started:
            self.when_started.pop()(write)
        self._next(write)

    def _forge_notice(self, write: Write) -> None:
        """Let somebody say that the bytes are there who does not know the token of the grant."""
        target = self._world.lives.get(write.peer)
        notice = decode(write.notice)
        if target is not None and isinstance(notice, Notice):
            self._world.count("forged notice")
            forged = encode(msgspec.structs.replace(notice, token=notice.token ^ 1))
            self._world.schedule.after(0.0, target.call, target.take_notice, forged)

    def _next(self, write: Write) -> None:
        self._world.schedule.after(write.pace_s * self._world.rng.random(), self.step, write)

    def step(self, write: Write) -> None:
        """Land the next piece, or end the write."""
        if write.is_over or (self.hold_write is not None and self.hold_write(write)):
            return
        world = self._world
        stalled = self._stalled(write)
        if stalled is not None:
            stalled.when_awake.append(lambda: self.step(write))
            return
        if write.captured is None and not write.sender.is_alive:  # it has just died; whether that ends it is said next
            self._next(write)
            return
        if write.fails_at == 0:
            self._fail(write)
            return
        target = world.lives.get(write.peer)
        if target is None:
            self._die_out(write)
            return
        if not write.pieces:
            self._complete(write, target)
            return
        write.fails_at -= 1
        self._land(write, target)
        self._next(write)

    def _stalled(self, write: Write) -> "Host | None":
        """A stopped process on whose progress the write depends."""
        if write.captured is None and write.sender.is_stalling:
            return write.sender
        target = self._world.lives.get(write.peer)
        return target if target is not None and target.is_stalling else None

    def _land(self, write: Write, target: "Host") -> None:
        piece = write.pieces.pop(0)
        world = self._world
        world.oracle.check_target(write, target, piece)
        if write.captured is not None:
            data = write.captured.pop(0)
        else:
            world.oracle.check_source(write, piece)
            data = self._read(write, piece)
        if write.corrupts and any(data):
            data = [bytes([data[0][0] ^ 1]) + data[0][1:], *data[1:]]
            write.corrupts = False
        for (_, dst, _), part in zip(piece, data, strict=True):
            target.write(dst, part)
        if world.story is not None:
            late = ", after its sender died" if write.captured is not None else ""
            world.tell(f"  write {write.number} lands {sum(s.length for s in piece)} bytes at {target.me.rank}{late}")

    def _read(self, write: Write, piece: list[Segment]) -> list[bytes]:
        return [write.sender.read(src, length) for src, _, length in piece]

    def _complete(self, write: Write, target: "Host") -> None:
        if write.has_ended:
            self.stop(write)
            return
        if write.notice and not (self.hold_notice is not None and self.hold_notice(write, target)):
            self._deliver_notice(write, target)
        self._end(write, None)

    def _deliver_notice(self, write: Write, target: "Host") -> None:
        world = self._world
        faults, rng = world.faults, world.rng
        delay_s = QUICK_S * rng.random()
        if faults.lost_notice and rng.random() < faults.lost_notice:
            world.count("lost notice")
            return
        if faults.late_notice and rng.random() < faults.late_notice:
            world.count("late notice")
            delay_s = LATE_S * rng.random()
        world.schedule.after(delay_s, target.call, target.take_notice, write.notice)

    def doubt(self, write: Write) -> None:
        """Say that nobody can tell how the write goes; it goes on all the same."""
        if write.is_over or write.captured is not None or write.has_doubt:
            return
        write.has_doubt = True
        write.pace_s = STUCK_S * self._world.rng.random() / (len(write.pieces) + 1)
        self._tell_sender(write, PostInDoubt(write.post_id, "scripted doubt"))

    def _fail(self, write: Write) -> None:
        """End a write that fails; what of it has left the sender's memory may go on landing."""
        faults, rng = self._world.faults, self._world.rng
        if not write.pieces or rng.random() >= faults.lingering_write:
            self._end(write, "scripted failure")
            return
        self._world.count("lingering write")
        self.lingered[write.delivery] = None
        self._capture(write)
        write.fails_at = -1
        write.has_ended = True
        write.sender.backend.writes.pop(write.post_id, None)
        self._tell_sender(write, PostEnded(write.post_id, "scripted failure", lingers=True))
        self._next(write)

    def _capture(self, write: Write) -> None:
        write.pace_s = SLOW_S * self._world.rng.random() / (len(write.pieces) + 1)
        for piece in write.pieces:
            self._world.oracle.check_source(write, piece)
        write.captured = [self._read(write, piece) for piece in write.pieces]

    def _die_out(self, write: Write) -> None:
        """The target is gone, so nothing can land; the transport finds out late, perhaps after a doubt."""
        write.fails_at = 0
        write.pieces.clear()
        if not write.has_doubt and self._world.rng.random() < 0.3:
            self.doubt(write)
        self._world.schedule.after(STUCK_S * self._world.rng.random(), self.step, write)

    def _end(self, write: Write, error: str | None) -> None:
        self.stop(write)
        if write.has_ended:
            return
        write.sender.backend.writes.pop(write.post_id, None)
        self._tell_sender(write, PostEnded(write.post_id, error))

    def _tell_sender(self, write: Write, event: BackendEvent) -> None:
        if self._world.story is not None:
            self._world.tell(f"  write {write.number}: {event}")
        backend, schedule = write.sender.backend, self._world.schedule
        backend.latest_event = max(backend.latest_event, schedule.now + QUICK_S * self._world.rng.random())
        schedule.at(backend.latest_event, write.sender.call, write.sender.take_backend_event, event)

    def stop(self, write: Write) -> None:
        """Land nothing of a write any more."""
        write.is_over = True
        self._active.pop(write.number, None)

    def hasten(self) -> None:
        """Let writes that are slow or stuck go on now."""
        for write in list(self._active.values()):
            write.pace_s = QUICK_S
            self._next(write)

    def sender_died(self, write: Write) -> None:
        """Lose what a dead process had under way, or let what has left it land later."""
        faults, rng = self._world.faults, self._world.rng
        if self._world.is_fenced or rng.random() >= faults.writes_of_dead:
            self.stop(write)
            return
        self._world.count("write of the dead")
        self._capture(write)

    def process_ended(self, host: "Host") -> None:
        """Stop what lingers, where nothing outlives its process."""
        if self._world.is_fenced:
            for write in [one for one in self._active.values() if one.sender is host and one.has_ended]:
                self.stop(write)


def cut(segments: list[Segment], where: float) -> list[list[Segment]]:
    """Cut a list of segments in two, anywhere; pieces without bytes are left out."""
    left = int(sum(segment.length for segment in segments) * where)
    first: list[Segment] = []
    second: list[Segment] = []
    for src, dst, length in segments:
        share = min(left, length)
        left -= share
        if share:
            first.append(Segment(src, dst, share))
        if share < length:
            second.append(Segment(src + share, dst + share, length - share))
    return [piece for piece in (first, second) if piece]

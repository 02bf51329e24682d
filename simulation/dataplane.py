"""Writes in virtual time: in pieces, late, failing, in doubt, and continuing after the death of their sender.

A write reads its source at the moment it lands, as a one-sided write may do at any time before it ends. After the
sending process dies, bytes that have left its memory may still land.
"""

import ctypes
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import anyio
import anyio.lowlevel
import msgspec
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvflow.backends.base import (
    Backend,
    BackendEvent,
    Capabilities,
    NoticeArrived,
    OnBroken,
    OnEvents,
    PostEnded,
    PostInDoubt,
)
from kvflow.backends.metadata import PeerMetadata, RegisteredMemory, check_unregistered
from kvflow.errors import BackendError
from kvflow.geometry.layout import KVLayout
from kvflow.geometry.memory import MemoryRange
from kvflow.geometry.plan import Descriptors
from kvflow.wire.codec import decode, encode
from kvflow.wire.messages import Notice
from simulation.loop import Process

if TYPE_CHECKING:
    from simulation.world import World

__all__ = ["DataPlane", "Segment", "SimulatedBackend", "Witness", "Write", "cut"]

QUICK_S: Final = 0.002
SLOW_S: Final = 2.0
LATE_S: Final = 1.0
RETRANSMIT_S: Final = 0.05
LOOK_S: Final = 0.05
STUCK_S: Final = 3.0
"""Maximum duration of a write in doubt, or of one to a dead process."""


class Segment(NamedTuple):
    """Bytes to copy from a source address to a destination address."""

    src: int
    dst: int
    length: int


class Witness(Protocol):
    """An observer of memory."""

    def posted(self, write: "Write", segments: list[Segment]) -> None:
        """Called when a write starts."""

    def reading(self, write: "Write", piece: list[Segment]) -> None:
        """Called before bytes are read from the sender."""

    def landing(self, write: "Write", target: "SimulatedBackend", piece: list[Segment]) -> None:
        """Called before bytes land."""


class Link:
    """A connection over which one endpoint writes to another.

    Attributes:
        end: The sender's end, unique.
        is_closed: The sender has closed it, but what has been sent over it may still land.
    """

    __slots__ = ("end", "is_closed", "peer", "sender")

    def __init__(self, sender: "SimulatedBackend", peer: str, number: int) -> None:
        self.sender = sender
        self.peer = peer
        self.end = number.to_bytes(18, "big")
        self.is_closed = False


class Write:
    """A post in flight: pieces that land one after another, then its completion.

    Attributes:
        sender: The endpoint that posted it.
        link: The connection that carries it.
        peer: Agent name of the endpoint that it writes to.
        pieces: What has not landed yet.
        captured: What has left the memory of a sender that died, or of a write that lingers.
        has_ended: Its completion has been reported, though more of its bytes may land.
        is_over: None of its bytes can land any more.
        mark: Data of the witness about it.
    """

    __slots__ = (
        "captured", "corrupts", "fails_at", "has_doubt", "has_ended", "is_over", "link", "mark", "notice", "number",
        "pace_s", "peer", "pieces", "post_id", "sender",
    )  # fmt: skip

    def __init__(self, link: Link, number: int, post_id: int, peer: str, notice: bytes) -> None:
        self.number = number
        self.link = link
        self.sender = link.sender
        self.post_id = post_id
        self.peer = peer
        self.pieces: list[list[Segment]] = []
        self.captured: list[list[bytes]] | None = None
        self.notice = notice
        self.fails_at = -1
        self.pace_s = QUICK_S
        self.has_doubt = False
        self.has_ended = False
        self.corrupts = False
        self.is_over = False
        self.mark: object = None


class DataPlane:
    """Carries the writes of every endpoint.

    Args:
        world: Source of time, chance and faults.
        ends_with_process: No bytes of a process land after its end.
        in_band_notices: Notices travel with the writes, and arrive after their bytes. Otherwise a notice that is sent
            with a write overtakes it.
        shows_last_bytes: An endpoint can tell when the last bytes of a dead process have landed.

    Attributes:
        shares_network: Cut links hold up writes too.
        is_prompt: Writes land at once and whole, unless a fault is drawn.
        witness: Observer of memory, if there is one.
        endpoints: Open endpoints, by agent name.
        lingered: Agent names of sender and peer of each write whose bytes continued to land after its end.
        hold_write: If set, called with each write before its next step; returns whether to hold it.
        hold_notice: The same for each in-band notice, called with its write and its target.
        when_posted: Callbacks, each called once with one of the next writes.
    """

    def __init__(
        self,
        world: "World",
        *,
        ends_with_process: bool = False,
        in_band_notices: bool = True,
        shows_last_bytes: bool = False,
    ) -> None:
        self.world = world
        self.shows_last_bytes = shows_last_bytes
        self.ends_with_process = ends_with_process
        self.in_band_notices = in_band_notices
        self.shares_network = False
        self.is_prompt = False
        self.witness: Witness | None = None
        self.endpoints: dict[str, SimulatedBackend] = {}
        self.lingered: dict[tuple[str, str], None] = {}
        self.hold_write: Callable[[Write], bool] | None = None
        self.hold_notice: Callable[[Write, SimulatedBackend], bool] | None = None
        self.when_posted: list[Callable[[Write], None]] = []
        self._num_writes = 0
        self._num_links = 0
        self._links: list[Link] = []
        self._active: dict[int, Write] = {}

    @property
    def num_active(self) -> int:
        """Writes of which some bytes may still land."""
        return len(self._active)

    @property
    def proves_ends(self) -> bool:
        """Whether the end of a process proves, at once or later, that none of its bytes can land any more."""
        return self.ends_with_process or self.shows_last_bytes

    def links_to(self, peer: str) -> list[Link]:
        """Return the connections to an endpoint over which something may still land, as their near ends show."""
        busy = [write.link for write in self._active.values()]
        self._links = [link for link in self._links if self._is_open(link) or link in busy]
        return [link for link in self._links if link.peer == peer]

    def _is_open(self, link: Link) -> bool:
        is_held = self.endpoints.get(link.sender.agent_name) is link.sender
        return is_held and link.sender.process.is_alive and not link.is_closed

    def ends_to(self, sender: "SimulatedBackend", peer: str) -> tuple[bytes, ...]:
        """Return the ends of the connections over which an endpoint writes to another now."""
        return tuple(link.end for link in self.links_to(peer) if link.sender is sender and self._is_open(link))

    def _link(self, sender: "SimulatedBackend", peer: str) -> Link:
        for link in self._links:
            if link.sender is sender and link.peer == peer and self._is_open(link):
                return link
        self._num_links += 1
        self._links.append(Link(sender, peer, self._num_links))
        return self._links[-1]

    def start(
        self, sender: "SimulatedBackend", post_id: int, peer: str, segments: list[Segment], notice: bytes
    ) -> Write:
        """Draw the course of a write, and start it."""
        world = self.world
        faults, rng = world.faults, world.rng
        self._num_writes += 1
        write = Write(self._link(sender, peer), self._num_writes, post_id, peer, notice)
        self._active[write.number] = write
        if world.story is not None:
            world.tell(f"  write {write.number} begins: {sender.process} to {peer}, {len(segments)} descriptors")
        write.pieces = [segments]
        if not self.is_prompt and rng.random() < 0.5:
            write.pieces = cut(segments, rng.random())
            write.pace_s = QUICK_S * 10 * rng.random()
        if faults.slow_write and rng.random() < faults.slow_write:
            world.count("slow write")
            write.pieces = [part for piece in write.pieces for part in cut(piece, rng.random())]
            write.pace_s = rng.random() * SLOW_S / len(write.pieces)
        if faults.failed_write and rng.random() < faults.failed_write:
            world.count("failed write")
            write.fails_at = rng.randint(0, len(write.pieces))
        if faults.write_in_doubt and rng.random() < faults.write_in_doubt:
            world.count("write in doubt")
            world.loop.call_in(rng.random() * write.pace_s * 2, self.doubt, write)
        if notice:
            self._draw_from_notice(write)
        if self.witness is not None:
            self.witness.posted(write, segments)
        if self.when_posted:
            self.when_posted.pop()(write)
        self._next(write)
        return write

    def _draw_from_notice(self, write: Write) -> None:
        """Draw a flipped bit or an early notice, which a digest can detect, and a forged notice with a wrong token."""
        faults, rng = self.world.faults, self.world.rng
        if self.in_band_notices and not (faults.corrupt_write or faults.forged_notice or faults.overtaking_notice):
            return
        notice = decode(write.notice)
        if not isinstance(notice, Notice):
            return
        if notice.digests and faults.corrupt_write and rng.random() < faults.corrupt_write:
            self.world.count("corrupt write")
            write.corrupts = True
        target = self.endpoints.get(write.peer)
        if target is not None and faults.forged_notice and rng.random() < faults.forged_notice:
            self.world.count("forged notice")
            forged = encode(msgspec.structs.replace(notice, token=notice.token ^ 1))
            self.world.loop.call_in(0.0, target.process.call, target.deliver, NoticeArrived(forged))
        is_early = notice.digests and faults.overtaking_notice and rng.random() < faults.overtaking_notice
        if target is not None and (is_early or not self.in_band_notices):
            self.world.count("overtaking notice")
            self.world.loop.call_in(0.0, target.process.call, target.deliver, NoticeArrived(write.notice))
            write.notice = b""
            write.pace_s = rng.random() * SLOW_S / len(write.pieces)

    def _next(self, write: Write) -> None:
        self.world.loop.call_in(write.pace_s * self.world.pace * self.world.rng.random(), self.step, write)

    def step(self, write: Write) -> None:
        """Land the next piece, or end the write."""
        if write.is_over or (self.hold_write is not None and self.hold_write(write)):
            return
        stalled = self._stalled(write)
        if stalled is not None:
            stalled.when_resumed(lambda: self.step(write))
            return
        if write.fails_at == 0:
            self._fail(write)
            return
        target = self.endpoints.get(write.peer)
        if target is None:
            self._die_out(write)
            return
        if self.shares_network and self.world.network.is_cut(write.sender.process.host, target.process.host):
            self.world.loop.call_in(RETRANSMIT_S, self.step, write)
            return
        if not write.pieces:
            self._complete(write, target)
            return
        write.fails_at -= 1
        self._land(write, target)
        self._next(write)

    def _stalled(self, write: Write) -> Process | None:
        """Return a stopped process that the write depends on, or None."""
        if write.captured is None and write.sender.process.is_stalling:
            return write.sender.process
        target = self.endpoints.get(write.peer)
        return target.process if target is not None and target.process.is_stalling else None

    def _land(self, write: Write, target: "SimulatedBackend") -> None:
        piece = write.pieces.pop(0)
        world = self.world
        if self.witness is not None:
            self.witness.landing(write, target, piece)
        data = write.captured.pop(0) if write.captured is not None else self._read(write, piece)
        if write.corrupts and any(data):
            data = [bytes([data[0][0] ^ 1]) + data[0][1:], *data[1:]]
            write.corrupts = False
        for (_, dst, _), part in zip(piece, data, strict=True):
            target.write(dst, part)
        if world.story is not None:
            late = "" if write.sender.process.is_alive else ", after its sender died"
            num_bytes = sum(segment.length for segment in piece)
            world.tell(f"  write {write.number} lands {num_bytes} bytes at {target.process}{late}")

    def _read(self, write: Write, piece: list[Segment]) -> list[bytes]:
        if self.witness is not None:
            self.witness.reading(write, piece)
        return [write.sender.read(src, length) for src, _, length in piece]

    def _complete(self, write: Write, target: "SimulatedBackend") -> None:
        if write.has_ended or write.captured is not None:
            self.stop(write)
            return
        if write.notice and not (self.hold_notice is not None and self.hold_notice(write, target)):
            self._deliver_notice(write, target)
        self._end(write, None)

    def _deliver_notice(self, write: Write, target: "SimulatedBackend") -> None:
        faults, rng = self.world.faults, self.world.rng
        delay_s = QUICK_S * rng.random()
        if faults.lost_notice and rng.random() < faults.lost_notice:
            self.world.count("lost notice")
            return
        if faults.late_notice and rng.random() < faults.late_notice:
            self.world.count("late notice")
            delay_s = LATE_S * rng.random()
        self.world.loop.call_in(delay_s, target.process.call, target.deliver, NoticeArrived(write.notice))

    def doubt(self, write: Write) -> None:
        """Report the write as in doubt; it continues all the same."""
        if write.is_over or write.captured is not None or write.has_doubt:
            return
        write.has_doubt = True
        write.pace_s = STUCK_S * self.world.rng.random() / (len(write.pieces) + 1)
        self._tell_sender(write, PostInDoubt(write.post_id, "scripted doubt"))

    def _fail(self, write: Write) -> None:
        """Fail a write; bytes that have left the sender's memory may still land."""
        if not write.pieces or self.world.rng.random() >= self.world.faults.lingering_write:
            self._end(write, "scripted failure")
        else:
            self.linger(write)

    def linger(self, write: Write) -> None:
        """Fail a write, but let its bytes still land. Its sender opens another connection at once."""
        self.world.count("lingering write")
        write.link.is_closed = True
        self._link(write.sender, write.peer)
        self.lingered[write.sender.agent_name, write.peer] = None
        self._capture(write)
        write.fails_at = -1
        write.has_ended = True
        write.sender.writes.pop(write.post_id, None)
        self._tell_sender(write, PostEnded(write.post_id, "scripted failure", lingers=True))
        self._next(write)

    def _capture(self, write: Write) -> None:
        write.pace_s = SLOW_S * self.world.rng.random() / (len(write.pieces) + 1)
        write.captured = [self._read(write, piece) for piece in write.pieces]

    def _die_out(self, write: Write) -> None:
        """End a write whose target is gone: nothing can land.

        The transport detects that late, perhaps after a doubt.
        """
        if write.captured is not None:
            self.stop(write)
            return
        write.fails_at = 0
        write.pieces.clear()
        if not write.has_doubt and self.world.rng.random() < 0.3:
            self.doubt(write)
        self.world.loop.call_in(STUCK_S * self.world.rng.random(), self.step, write)

    def _end(self, write: Write, error: str | None) -> None:
        self.stop(write)
        if not write.has_ended:
            write.sender.writes.pop(write.post_id, None)
            self._tell_sender(write, PostEnded(write.post_id, error))

    def _tell_sender(self, write: Write, event: BackendEvent) -> None:
        """Report an event of a write to its sender, in the order in which events occur."""
        if self.world.story is not None:
            self.world.tell(f"  write {write.number}: {event}")
        backend, loop = write.sender, self.world.loop
        backend.latest_event = max(backend.latest_event, loop.now + QUICK_S * self.world.rng.random())
        backend.untold.append(event)
        loop.call_in(backend.latest_event - loop.now, backend.process.call, backend.deliver_next)

    def stop(self, write: Write) -> None:
        """Land nothing more of a write."""
        write.is_over = True
        self._active.pop(write.number, None)

    def hasten(self) -> None:
        """Let slow or stuck writes continue now."""
        for write in list(self._active.values()):
            write.pace_s = QUICK_S
            self._next(write)

    def process_ended(self, process: Process) -> None:
        """Drop the writes of a dead process, or let what has left its memory land later."""
        faults, rng = self.world.faults, self.world.rng
        for backend in [one for one in self.endpoints.values() if one.process is process]:
            del self.endpoints[backend.agent_name]
        for write in [one for one in self._active.values() if one.sender.process is process]:
            if self.ends_with_process:
                self.stop(write)
            elif write.captured is None:
                if rng.random() < faults.writes_of_dead and write.pieces:
                    self.world.count("write after process end")
                    self._capture(write)
                    write.fails_at = -1
                else:
                    self.stop(write)


class SimulatedBackend(Backend):
    """One endpoint of the data plane. It keeps the contract of `kvflow.backends.base` and promises nothing more.

    Args:
        plane: Carries the writes.
        process: The process of the endpoint.
        mapped: Memory at made-up addresses, by address; all other memory is real.
    """

    name = "simulated"

    def __init__(self, plane: DataPlane, process: Process, mapped: Mapping[int, bytearray] | None = None) -> None:
        self.capabilities = Capabilities(
            in_band_notices=plane.in_band_notices,
            memory_kinds=frozenset({"DRAM"}),
            ends_with_process=plane.ends_with_process,
        )
        self.process = process
        self.agent_name = ""
        self.writes: dict[int, Write] = {}
        self.latest_event = 0.0
        self.is_raising = False
        self.untold: deque[BackendEvent] = deque()
        self._is_broken = False
        self._plane = plane
        self._mapped = dict(mapped or {})
        self._memories: list[tuple[int, int, memoryview]] = []
        self._peers: dict[str, PeerMetadata] = {}
        self._memory: RegisteredMemory | None = None
        self._on_events: OnEvents | None = None
        self._on_broken: OnBroken | None = None

    @override
    async def open(self, agent_name: str, on_events: OnEvents, on_broken: OnBroken) -> None:
        self.agent_name = agent_name
        self._on_events, self._on_broken = on_events, on_broken
        self._plane.endpoints[agent_name] = self
        await anyio.lowlevel.checkpoint()

    @override
    async def register(self, layout: KVLayout) -> None:
        check_unregistered(self._memory, self.name)
        self._memory = RegisteredMemory.from_layout(layout)
        self._add_memory(layout.allocations)
        await anyio.lowlevel.checkpoint()

    @override
    async def extend(self, layout: KVLayout) -> None:
        if self._memory is not None:
            added = RegisteredMemory.from_layout(layout).without(self._memory)
            self._memory = self._memory.also(added)
            self._add_memory(added)
        await anyio.lowlevel.checkpoint()

    def _add_memory(self, ranges: Iterable[MemoryRange]) -> None:
        for item in ranges:
            mapped = self._mapped.get(item.address)
            view = memoryview(_real(item.address, item.length) if mapped is None else mapped).cast("B")
            self._memories.append((item.address, item.end, view))

    @override
    def metadata(self) -> bytes:
        if self._memory is None:
            raise BackendError("no memory has been registered yet", backend=self.name)
        return PeerMetadata(self.name, self.agent_name.encode(), self._memory).pack()

    @override
    def view(self, memory: MemoryRange) -> NDArray[np.uint8]:
        start, _, view = self._find(memory.address, memory.length)
        return np.frombuffer(view, np.uint8)[memory.address - start : memory.end - start]

    @override
    async def connect(self, peer: str, metadata: bytes) -> None:
        world = self._plane.world
        if peer in self._peers:
            return
        theirs = PeerMetadata.unpack(metadata, backend=self.name)
        await anyio.sleep(QUICK_S * world.pace * world.rng.random())
        if world.faults.refused_peer and world.rng.random() < world.faults.refused_peer:
            world.count("refused peer")
            raise BackendError("scripted refusal of a peer", peer=peer)
        self._peers[peer] = theirs

    @override
    async def disconnect(self, peer: str) -> None:
        await anyio.sleep(QUICK_S * self._plane.world.pace * self._plane.world.rng.random())
        self._peers.pop(peer, None)

    @override
    def post(self, post_id: int, peer: str, descriptors: Descriptors, notice: bytes) -> None:
        world = self._plane.world
        if self.is_raising:
            raise RuntimeError("scripted exception of a transport")
        if peer not in self._peers or self._memory is None or self._on_events is None:
            raise BackendError("peer is not connected", peer=peer)
        self._memory.check(descriptors.src, side="source")
        self._peers[peer].memory.check(descriptors.dst, side="destination")
        if world.faults.refused_write and world.rng.random() < world.faults.refused_write:
            world.count("refused write")
            raise BackendError("scripted refusal")
        rows = zip(descriptors.src.tolist(), descriptors.dst.tolist(), strict=True)
        segments = [Segment(src[0], dst[0], src[1]) for src, dst in rows]
        self.writes[post_id] = self._plane.start(self, post_id, peer, segments, notice)

    @override
    def watch(self, *, active: bool) -> None:
        """Do nothing: events are delivered without being polled for."""

    @override
    def domain(self) -> bytes:
        return b"all" if self._plane.shows_last_bytes else b""

    @override
    def ends_to(self, peer: str) -> tuple[bytes, ...]:
        return self._plane.ends_to(self, peer)

    @override
    async def outlast(self, domain: bytes, ends: Collection[bytes] = (), *, is_alive: bool = False) -> bool:
        if self.capabilities.ends_with_process and not is_alive:
            return True
        if not domain or domain != self.domain():
            return False
        links = self._plane.links_to(self.agent_name)
        while links:
            await anyio.sleep(LOOK_S)  # as a transport polls the kernel
            now = self._plane.links_to(self.agent_name)
            links = [link for link in links if link in now and link.end not in ends]
        return True

    @override
    async def aclose(self) -> None:
        if self._on_events is None:
            return
        await anyio.sleep(QUICK_S * self._plane.world.pace * self._plane.world.rng.random())
        on_events, self._on_events = self._on_events, None
        self._plane.endpoints.pop(self.agent_name, None)
        writes, self.writes = list(self.writes.values()), {}
        for write in writes:
            self._plane.stop(write)
        stopped = [PostEnded(write.post_id, "stopped by closing the endpoint") for write in writes]
        events = [*self.untold, *stopped]
        self.untold.clear()
        if events and on_events is not None:
            on_events(events)

    def deliver_next(self) -> None:
        """Pass the next event of its writes to the rank, in its process."""
        if self.untold and not self._is_broken and self._on_events is not None:
            self._on_events([self.untold.popleft()])

    def deliver(self, event: BackendEvent) -> None:
        """Pass an event from elsewhere to the rank, in its process."""
        if not self._is_broken and self._on_events is not None:
            self._on_events([event])

    def break_down(self) -> None:
        """Break the endpoint, and report it; posts in flight continue."""
        if self._on_broken is not None and self._on_events is not None and not self._is_broken:
            self._is_broken = True
            self._on_broken(BackendError("scripted breakdown", backend=self.name))

    def holds(self, address: int) -> bool:
        """Return whether an address is in memory registered here."""
        return any(start <= address < end for start, end, _ in self._memories)

    def read(self, address: int, length: int) -> bytes:
        """Return bytes of registered memory."""
        start, _, view = self._find(address, length)
        return bytes(view[address - start : address - start + length])

    def write(self, address: int, data: bytes) -> None:
        """Overwrite bytes of registered memory."""
        start, _, view = self._find(address, len(data))
        view[address - start : address - start + len(data)] = data

    def _find(self, address: int, length: int) -> tuple[int, int, memoryview]:
        for memory in self._memories:
            if memory[0] <= address and address + length <= memory[1]:
                return memory
        raise BackendError("memory range is not registered", address=hex(address), length=length)


def _real(address: int, length: int) -> "ctypes.Array[ctypes.c_ubyte]":
    return (ctypes.c_ubyte * length).from_address(address)


def cut(segments: list[Segment], where: float) -> list[list[Segment]]:
    """Cut a list of segments in two at any byte; omit pieces without bytes."""
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

"""A transport that keeps the contract of `backends.base` and nothing more; `writes` says how badly its bytes land."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvflow.backends.base import Backend, BackendEvent, Capabilities, PostEnded
from kvflow.backends.metadata import PeerMetadata, RegisteredMemory
from kvflow.errors import BackendError
from kvflow.geometry.layout import KVLayout, MemoryRange
from kvflow.geometry.plan import Descriptors
from kvflow.simulation.pool import Lease
from kvflow.simulation.writes import Segment, Write
from kvflow.state.events import DeliveryId

if TYPE_CHECKING:
    from kvflow.simulation.host import Host

__all__ = ["SimBackend"]


class SimBackend(Backend):
    """One endpoint.

    Args:
        host: The life of the rank it belongs to.
        in_band: Notices travel with the writes.
        ends_with_process: What a process had under way ends with it.
    """

    name = "simulated"

    def __init__(self, host: "Host", *, in_band: bool, ends_with_process: bool) -> None:
        self.capabilities = Capabilities(
            in_band_notices=in_band, memory_kinds=frozenset({"DRAM"}), ends_with_process=ends_with_process
        )
        self._host = host
        self._peers: dict[str, PeerMetadata] = {}
        self._memory: RegisteredMemory | None = None
        self._metadata = b""
        self.writes: dict[int, Write] = {}
        self.latest_event = 0.0
        self.posting: tuple[DeliveryId, Lease] | None = None
        self.posts_digest = False

    @override
    async def open(self, agent_name: str) -> None:
        """Nothing to start."""

    def register_now(self, layout: KVLayout, agent_name: str) -> None:
        """Know what may be read and written."""
        self._memory = RegisteredMemory(layout.allocations, layout.memory_kind, layout.device_id)
        self._metadata = PeerMetadata(self.name, agent_name.encode(), self._memory).pack()

    @override
    async def register(self, layout: KVLayout) -> None:
        raise BackendError("memory is registered by the host")

    @override
    def metadata(self) -> bytes:
        return self._metadata

    @override
    def view(self, memory: MemoryRange) -> NDArray[np.uint8]:
        pool = self._host.pool
        offset = memory.address - pool.table.base
        return np.frombuffer(pool.memory, np.uint8)[offset : offset + memory.length]

    @override
    async def connect(self, peer: str, metadata: bytes) -> None:
        self.connect_now(peer, metadata)

    def connect_now(self, peer: str, metadata: bytes) -> None:
        """As `connect`, which does not wait here."""
        if peer not in self._peers:
            self._peers[peer] = PeerMetadata.unpack(metadata, backend=self.name)

    @override
    async def disconnect(self, peer: str) -> None:
        self._peers.pop(peer, None)

    @override
    def post(self, post_id: int, peer: str, descriptors: Descriptors, notice: bytes) -> None:
        if peer not in self._peers or self._memory is None:
            raise BackendError("peer is not connected", peer=peer)
        if self.posting is None:
            raise BackendError("nothing is posted now", post_id=post_id)
        host = self._host
        world = host.world
        faults, rng = world.faults, world.rng
        if faults.refused_write and rng.random() < faults.refused_write:
            world.count("refused write")
            raise BackendError("scripted refusal")
        write = Write(host, post_id, *self.posting)
        write.notice = notice
        if self.posts_digest and faults.corrupt_write and rng.random() < faults.corrupt_write:
            world.count("corrupt write")
            write.corrupts = True
        rows = np.column_stack((descriptors.src[:, 0], descriptors.dst[:, 0], descriptors.src[:, 1])).tolist()
        world.plane.start(write, [Segment(*row) for row in rows])
        self.writes[post_id] = write

    @override
    def watch(self, *, active: bool) -> None:
        """Events come by themselves."""

    @override
    async def take_events(self) -> Sequence[BackendEvent]:
        return ()

    @override
    async def aclose(self) -> Sequence[BackendEvent]:
        return self.close_now()

    def close_now(self) -> list[BackendEvent]:
        """Stop every write: some have landed by then, the others never will."""
        ended: list[BackendEvent] = []
        for write in list(self.writes.values()):
            self._host.world.plane.stop(write)
            ended.append(PostEnded(write.post_id, "stopped by closing the endpoint"))
        self.writes.clear()
        return ended

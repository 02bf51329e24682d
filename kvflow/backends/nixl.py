"""NIXL as a transport (UCX on host memory here; device memory by the same calls).

What the library really does shapes this file:

* Its own progress thread spins a whole core, so it is off. Writes and notices then only move when somebody polls: the
  sender while it has posts, the receiver while it has transfers granted (`watch`).
* A post may copy everything inline before it returns, and any call may block. Every call is made by the owner thread.
* Errors are raised, never returned, and an error does not say that the bytes have stopped: such a post is in doubt
  (`nixl_agent` says until when).
* A write costs several calls besides its bytes, so small ones that have come to wait for one peer go as one
  (`nixl_posts`). Their notices travel together (`notices`).
* Releasing a running handle does not stop it, so handles are polled to the end and only then released.
* What a process has written over TCP may land after its death, when the receiver polls again. Not so what it has
  written on one host, which it does itself.
* UCX drops its same-host lanes under peer error handling. One option brings back the copies from process to process.
  Another one would bring back shared-memory queues, and halve the latency, but a process that is killed while it writes
  to such a queue blocks it for everybody for ever: measured after 22 and 125 kills, and never in 550 without it.

Source: measurements with nixl 1.5.1 (UCX 1.23) on Linux, host memory.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import anyio
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvflow.aio.doorbell import Doorbell
from kvflow.aio.mailbox import Mailbox
from kvflow.backends.base import Backend, BackendEvent, Capabilities
from kvflow.backends.host import host_view
from kvflow.backends.metadata import PeerMetadata, RegisteredMemory, check_unregistered
from kvflow.backends.nixl_agent import NixlAgent
from kvflow.backends.nixl_posts import Outbox, Write
from kvflow.backends.owner import OwnerThread
from kvflow.errors import BackendError
from kvflow.geometry.blocks import BlockLists, Blocks, spans
from kvflow.geometry.layout import KVLayout, MemoryRange
from kvflow.geometry.plan import Descriptors

__all__ = ["NixlBackend"]

QUIET_ENVIRONMENT: Final = {
    # The wheel's EFA module needs a system library whose clean-up crashes the interpreter at exit.
    "UCX_MODULES": "^efa",
    # Without these, NIXL and UCX print, NIXL an error for each post to a peer that has died.
    "NIXL_LOG_LEVEL": "FATAL",
    "UCX_LOG_LEVEL": "fatal",
    # UCX would take SIGHUP for itself, and print everything it does from then on.
    "UCX_DEBUG_SIGNO": "0",
}

FORMAT: Final = "nixl/2"
"""The transport as peers know it; the number is that of what its notices look like, which both sides must share."""

ENGINE_CONFIG: Final = "CMA_ERROR_HANDLING=y"
"""Keeps the copies that UCX makes from process to process on one host, although peer error handling is on."""


@dataclass(eq=False)
class _Peer:
    """A connected peer.

    Attributes:
        outbox: One of its own for each time that it is connected, so that nothing goes over a later connection.
        lists: The last ones that were found to be of registered memory.
    """

    memory: RegisteredMemory
    outbox: Outbox
    lists: BlockLists | None = None


class NixlBackend(Backend):
    """Writes through a NIXL agent.

    Args:
        plugin: NIXL plugin to use.
        plugin_options: Its parameters, over kvflow's own choice for UCX.
        environment: Variables to set before the library is loaded, unless they are set already.
        busy_interval_s: Between polls while something is in flight or expected.
        quiet_interval_s: The same when nothing has happened for long.
        idle_interval_s: Between polls while nothing is.
        ends_with_process: That nothing lands any more once the process that wrote has ended, which only who runs it can
            know: it is so if every peer is on this host and UCX is not forced to TCP. It lets a decode rank take pages
            back when a prefill process that wrote to them has died.
        row_overhead_s: What each descriptor costs besides its bytes, by which kvflow decides what to pack. Measured:
            2.3e-6 on one host, 5e-6 to 7e-6 over TCP. 0 packs nothing.
        close_timeout_s: How long `aclose` waits for running posts before it destroys the agent, which stops them.
    """

    name = "nixl"
    capabilities = Capabilities(in_band_notices=True, memory_kinds=frozenset({"DRAM", "VRAM"}), prepared_lists=True)

    def __init__(  # noqa: PLR0913 - options by keyword, each with a default
        self,
        *,
        plugin: str = "UCX",
        plugin_options: Mapping[str, str] | None = None,
        environment: Mapping[str, str] = QUIET_ENVIRONMENT,
        busy_interval_s: float = 50e-6,
        quiet_interval_s: float = 500e-6,
        idle_interval_s: float = 20e-3,
        close_timeout_s: float = 5.0,
        ends_with_process: bool = False,
        row_overhead_s: float = 2.3e-6,
    ) -> None:
        self.capabilities = dataclasses.replace(
            self.capabilities, ends_with_process=ends_with_process, row_overhead_s=row_overhead_s
        )
        self._plugin = plugin
        self._plugin_options = dict({"engine_config": ENGINE_CONFIG} if plugin == "UCX" else {})
        self._plugin_options.update(plugin_options or {})
        self._environment = environment
        self._intervals = {
            "busy_interval_s": busy_interval_s,
            "quiet_interval_s": quiet_interval_s,
            "idle_interval_s": idle_interval_s,
        }
        self._close_timeout_s = close_timeout_s
        self._owner: OwnerThread | None = None
        self._agent: NixlAgent | None = None
        self._memory: RegisteredMemory | None = None
        self._blob = b""
        self._peers: dict[str, _Peer] = {}

    @override
    async def open(self, agent_name: str) -> None:
        self._doorbell = Doorbell()
        try:
            await self._start(agent_name)
        except BaseException:
            self._doorbell.close()
            raise

    async def _start(self, agent_name: str) -> None:
        self._mailbox = mailbox = Mailbox[BackendEvent](self._doorbell.call_soon)
        owner = OwnerThread(f"kvflow-nixl-{agent_name}", self._break_down, **self._intervals)
        options = (self._plugin, self._plugin_options, self._environment)
        create = functools.partial(NixlAgent, agent_name, *options, mailbox)
        try:
            self._agent = await owner.call(create)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await owner.stop()
            raise
        self._owner = owner
        owner.submit(functools.partial(owner.adopt, self._agent))

    @override
    async def register(self, layout: KVLayout) -> None:
        owner, agent = self._running()
        check_unregistered(self._memory, self.name)
        memory = RegisteredMemory(layout.allocations, layout.memory_kind, layout.device_id)
        self._blob = await owner.call(functools.partial(agent.register, memory))
        self._memory = memory

    @override
    def metadata(self) -> bytes:
        if self._memory is None:
            raise BackendError("no memory is registered yet", backend=self.name)
        return PeerMetadata(FORMAT, self._blob, self._memory).pack()

    @override
    def view(self, memory: MemoryRange) -> NDArray[np.uint8]:
        if self._memory is None:
            raise BackendError("no memory is registered yet", backend=self.name)
        return host_view(self._memory, memory, memory.address)

    @override
    async def connect(self, peer: str, metadata: bytes) -> None:
        if peer in self._peers:
            return
        owner, agent = self._running()
        theirs = PeerMetadata.unpack(metadata, backend=FORMAT)
        await owner.call(functools.partial(agent.connect, peer, theirs.agent))
        self._peers[peer] = _Peer(theirs.memory, Outbox(peer, theirs.memory.memory_kind))

    @override
    async def disconnect(self, peer: str) -> None:
        is_known = self._peers.pop(peer, None) is not None
        if is_known and self._owner is not None and self._agent is not None:
            self._owner.submit(functools.partial(self._agent.disconnect, peer))

    @override
    def post(self, post_id: int, peer: str, descriptors: Descriptors, notice: bytes) -> None:
        mine, to = self._both_sides(peer)
        mine.check(descriptors.src, side="source")
        to.memory.check(descriptors.dst, side="destination")
        self._post(to.outbox, Write(post_id, descriptors, notice))

    @override
    def post_blocks(self, post_id: int, peer: str, blocks: Blocks, notice: bytes) -> None:
        mine, to = self._both_sides(peer)
        if to.lists is not blocks.lists:
            mine.check(spans(blocks.lists.src), side="source")
            to.memory.check(spans(blocks.lists.dst), side="destination")
            to.lists = blocks.lists
        self._post(to.outbox, Write(post_id, blocks, notice))

    def _both_sides(self, peer: str) -> tuple[RegisteredMemory, _Peer]:
        """What is registered here, and a connected peer."""
        if self._memory is None or peer not in self._peers:
            raise BackendError("peer is not connected", peer=peer)
        return self._memory, self._peers[peer]

    def _post(self, outbox: Outbox, write: Write) -> None:
        owner, agent = self._running()
        outbox.put(write)
        owner.submit(functools.partial(agent.post_next, outbox))

    @override
    def watch(self, *, active: bool) -> None:
        if self._owner is not None and self._agent is not None:
            self._owner.submit(functools.partial(self._agent.watch, active))

    @override
    async def take_events(self) -> Sequence[BackendEvent]:
        return await self._mailbox.take()

    @override
    async def aclose(self) -> Sequence[BackendEvent]:
        if self._owner is None:
            return ()
        owner, self._owner = self._owner, None
        with anyio.CancelScope(shield=True):
            try:
                await self._stop(owner)
            finally:
                await owner.stop()
                self._doorbell.close()
        return self._mailbox.take_nowait()

    async def _stop(self, owner: OwnerThread) -> None:
        agent, self._agent = self._agent, None
        if agent is not None:
            owner.submit(functools.partial(owner.adopt, None))
            await owner.call(functools.partial(agent.close, self._close_timeout_s))

    def _break_down(self, error: Exception) -> None:
        detail = f"{type(error).__name__}: {error}"
        self._mailbox.fail(BackendError("NIXL broke down while it was polled", detail=detail))

    def _running(self) -> tuple[OwnerThread, NixlAgent]:
        if self._owner is None or self._agent is None:
            raise BackendError("backend is not open", backend=self.name)
        return self._owner, self._agent

"""The NIXL transport (measured with UCX and host memory; device memory uses the same calls).

Properties of the library determine the design:

* Its own progress thread spins on a whole core, so it is off. Writes and notices then move only while this process
  polls: the sender while it has posts in flight, the receiver while it has granted transfers (`watch`).
* A post may copy everything inline before it returns, and any call may block. The owner thread makes every call.
* Errors are raised, never returned, and an error does not prove that the bytes have stopped: such a post is in doubt
  (`agent` describes for how long).
* A write costs several calls besides its bytes, so small writes queued for one peer are joined. Their notices travel
  together, too (`posts`).
* Releasing a running handle does not stop it, so handles are polled to the end and only then released.
* Data that a process has written over TCP may land after its death, when the receiver next polls. Data copied on the
  same host does not, because the writer itself moves the bytes. Between processes on the same kernel, the kernel shows
  when the last bytes have landed, whichever path they took (`paths`). Between hosts, connections are seen to end
  (`kvflow.backends.library_sockets`).
* UCX drops its same-host lanes under peer error handling. One option brings back copies from process to process.
  Another would bring back shared-memory queues and halve the latency, but a process that is killed while it writes to
  such a queue blocks it for all other processes forever: measured after 22 and 125 kills, and never in 550 without it.

Source: measurements with nixl 1.5.1 (UCX 1.23) on Linux, host memory.
"""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Final

from typing_extensions import override

from kvflow.backends.base import Capabilities, OnBroken, OnEvents
from kvflow.backends.delivery import EventDelivery
from kvflow.backends.last_bytes import LastBytesBackend
from kvflow.backends.metadata import PeerMetadata
from kvflow.backends.nixl.agent import NixlAgent
from kvflow.backends.nixl.arrivals import Arrivals
from kvflow.backends.nixl.library import ENGINE_CONFIG
from kvflow.backends.nixl.paths import can_be_seen, describe_paths, may_use_rdma
from kvflow.backends.nixl.posts import PostQueue, Write
from kvflow.backends.owner import ConnectedPeer, PollIntervals
from kvflow.errors import ConfigError
from kvflow.geometry.blocks import BlockLists, Blocks, run_extents
from kvflow.geometry.memory import MemoryKind
from kvflow.geometry.plan import Descriptors

__all__ = ["FORMAT", "NixlBackend"]

FORMAT: Final = "nixl/2"
"""Format of the metadata and the packed notices; must be the same on both sides."""


@dataclass(eq=False)
class _NixlPeer(ConnectedPeer):
    """A connected peer.

    Attributes:
        outbox: Replaced each time the peer is connected, so that no write goes over a later connection.
        lists: The last lists that were found to lie in registered memory.
        kinds: Memory kinds of these lists, here and at the peer.
    """

    outbox: PostQueue
    lists: BlockLists | None = None
    kinds: tuple[MemoryKind, MemoryKind] = ("DRAM", "DRAM")


class NixlBackend(LastBytesBackend[NixlAgent, _NixlPeer]):
    """A transport that writes through a NIXL agent.

    Args:
        plugin: NIXL plugin to use.
        notices_follow_bytes: Your assurance that this plugin delivers a notice after all bytes of its write, on the
            fabric that you use: a decode rank takes the notice as proof that they are there. Known of UCX; another
            plugin is refused without it.
        plugin_options: Its parameters; they override kvflow's choice for UCX.
        environment: Variables to set before the library is loaded, unless they are set already. By default those that
            keep NIXL and UCX quiet and, on a host without an EFA device, UCX_MODULES=^efa.
        busy_interval_s: Seconds between polls while something is in flight or expected.
        quiet_interval_s: The same after a long time without events.
        idle_interval_s: Seconds between polls while nothing is in flight or expected.
        ends_with_process: The operator's assurance that nothing lands after the writing process has ended, for cases
            that the rank cannot check itself. It can check host memory if both processes share a kernel and neither has
            an RDMA device. With this proof, a decode rank can reuse the pages of a prefill process that died while
            writing to them.
        inline_bytes: Maximum size of a write that the event loop starts itself while the owner thread is idle; on one
            host, starting a write also copies its bytes. The event loop spends at most half of its time on this.
        descriptor_overhead_s: Cost of a descriptor besides its bytes, in seconds, from which kvflow decides what to
            pack. Measured: 2.3e-6 on one host, 5e-6 to 7e-6 over TCP. 0 disables packing.
        close_timeout_s: How long `aclose` waits for running posts before it destroys the agent, which stops them.

    Raises:
        ConfigError: The plugin is not UCX, and `notices_follow_bytes` is not set.
    """

    name = "nixl"
    capabilities = Capabilities(in_band_notices=True, memory_kinds=frozenset({"DRAM", "VRAM"}), prepared_lists=True)
    metadata_format = FORMAT

    def __init__(  # noqa: PLR0913 - options by keyword, each with a default
        self,
        *,
        plugin: str = "UCX",
        notices_follow_bytes: bool = False,
        plugin_options: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        busy_interval_s: float = 50e-6,
        quiet_interval_s: float = 500e-6,
        idle_interval_s: float = 20e-3,
        close_timeout_s: float = 5.0,
        ends_with_process: bool = False,
        inline_bytes: int = 2**22,
        descriptor_overhead_s: float = 2.3e-6,
    ) -> None:
        if plugin != "UCX" and not notices_follow_bytes:
            raise ConfigError(
                "NIXL plugin is not known to deliver a notice after the bytes of its write; if it does, say so",
                plugin=plugin,
                setting="backend_options",
                option="notices_follow_bytes",
            )
        intervals = PollIntervals(busy_interval_s, quiet_interval_s, idle_interval_s)
        super().__init__(intervals, close_timeout_s, of_domain=True)
        self.capabilities = dataclasses.replace(
            self.capabilities,
            ends_with_process=ends_with_process,
            descriptor_overhead_s=descriptor_overhead_s,
            queue_pairs=plugin == "UCX" and may_use_rdma(),
        )
        self._arrivals: Arrivals | None = None
        self._inline_bytes = inline_bytes
        self._inline_from = 0.0
        self._plugin = plugin
        self._plugin_options = dict({"engine_config": ENGINE_CONFIG} if plugin == "UCX" else {})
        self._plugin_options.update(plugin_options or {})
        self._environment = environment

    @override
    async def open(self, agent_name: str, on_events: OnEvents, on_broken: OnBroken) -> None:
        await super().open(agent_name, on_events, on_broken)
        _, agent = self._running()
        self._arrivals = Arrivals(agent.epolls, self._poll)

    @override
    async def aclose(self) -> None:
        if self._arrivals is not None:
            self._arrivals.close()
        await super().aclose()

    def _poll(self) -> bool:
        """Poll on the event loop, because data has arrived."""
        if self._owner is None or not self._owner.poll_now():
            return False
        self._delivery.deliver()
        return True

    @override
    def _create_agent(self, agent_name: str, delivery: EventDelivery) -> NixlAgent:
        return NixlAgent(agent_name, self._plugin, self._plugin_options, self._environment, delivery)

    @override
    async def _connect(self, peer: str, theirs: PeerMetadata, principal: str) -> _NixlPeer:
        await self._call(lambda agent: agent.connect(peer, theirs.agent))
        return _NixlPeer(peer, theirs.memory, PostQueue(peer))

    @override
    def _post(self, post_id: int, peer: _NixlPeer, descriptors: Descriptors, notice: bytes) -> None:
        kinds = (self._registered().kind_of(descriptors.src), peer.memory.kind_of(descriptors.dst))
        self._submit(peer.outbox, Write(post_id, descriptors, kinds, notice))

    @override
    def post_blocks(self, post_id: int, peer: str, blocks: Blocks, notice: bytes) -> None:
        mine, to = self._both_sides(peer)
        if to.lists is not blocks.lists:
            mine.check(run_extents(blocks.lists.src), side="source")
            to.memory.check(run_extents(blocks.lists.dst), side="destination")
            to.kinds = (mine.kind_of(blocks.lists.src), to.memory.kind_of(blocks.lists.dst))
            to.lists = blocks.lists
        self._submit(to.outbox, Write(post_id, blocks, to.kinds, notice))

    def _submit(self, outbox: PostQueue, write: Write) -> None:
        owner, agent = self._running()
        outbox.add_write(write)
        began = monotonic()
        is_short = write.num_bytes <= self._inline_bytes and began >= self._inline_from
        if is_short and agent.is_used_to(outbox.peer) and owner.run_now(partial(agent.post_now, outbox)):
            ended = monotonic()
            self._inline_from = ended + (ended - began)  # leaves at least half of the event loop's time to other work
        else:
            owner.submit(partial(agent.post_next, outbox))

    @override
    def unclosed(self) -> Collection[str]:
        return () if self._agent is None else self._agent.unclosed

    @override
    def watch(self, *, active: bool) -> None:
        if self._owner is not None and self._agent is not None:
            self._owner.submit(partial(self._agent.watch, active))

    @property
    @override
    def paths(self) -> str:
        return describe_paths(self._plugin)

    @property
    @override
    def observed_paths(self) -> Mapping[str, int]:
        return {} if self._agent is None else self._agent.observed_paths

    @override
    def _can_be_seen(self) -> bool:
        return can_be_seen(self._plugin, self._plugin_options)

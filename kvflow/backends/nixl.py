"""NIXL as a transport (UCX on host memory here; device memory by the same calls).

What the library really does shapes this file:

* Its own progress thread spins a whole core, so it is off. Writes and notices then only move when somebody polls: the
  sender while it has posts, the receiver while it has transfers granted (`watch`).
* A post may copy everything inline before it returns, and any call may block. Every call is made by the owner thread.
* Errors are raised, never returned, and an error does not say that the bytes have stopped: such a post is in doubt.
* Releasing a running handle does not stop it, so handles are polled to the end and only then released.
* The default shared-memory lanes are dropped under peer error handling; two options bring them back, which halves the
  latency on one host.

Source: measurements with nixl 1.5.1 (UCX 1.23) on Linux, host memory.
"""

import functools
import importlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import anyio
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvflow.aio.mailbox import Mailbox
from kvflow.backends.base import Backend, BackendEvent, Capabilities, NoticeArrived, PostEnded, PostInDoubt
from kvflow.backends.host import host_view
from kvflow.backends.metadata import PeerMetadata, RegisteredMemory
from kvflow.backends.owner import OwnerThread
from kvflow.errors import BackendError, BackendUnavailable, RegistrationError
from kvflow.geometry.layout import KVLayout, MemoryRange
from kvflow.geometry.plan import Descriptors
from kvflow.observe.logs import get_logger

__all__ = ["NixlBackend"]

DISTRIBUTIONS: Final = ("nixl_cu12", "nixl_cu13")
"""Import names, in order of preference. The umbrella package `nixl` imports torch to choose between them."""

QUIET_ENVIRONMENT: Final = {
    # The wheel's EFA module needs a system library whose clean-up crashes the interpreter at exit.
    "UCX_MODULES": "^efa",
    # Without these, NIXL and UCX print to standard output.
    "NIXL_LOG_LEVEL": "ERROR",
    "UCX_LOG_LEVEL": "fatal",
}

ENGINE_CONFIG: Final = "MM_ERROR_HANDLING=y,CMA_ERROR_HANDLING=y"
"""Keeps UCX's same-host lanes although peer error handling is on."""

MAX_UNTAKEN: Final = 1_000_000
"""Events kept for a rank that does not take them; notices beyond it are lost, as on a full receive queue."""


class NixlBackend(Backend):
    """Writes through a NIXL agent.

    Args:
        plugin: NIXL plugin to use.
        plugin_options: Its parameters, over kvflow's own choice for UCX.
        environment: Variables to set before the library is loaded, unless they are set already.
        busy_interval_s: Between polls while something is in flight or expected.
        idle_interval_s: Between polls while nothing is.
        close_timeout_s: How long `aclose` waits for running posts before it destroys the agent, which stops them.
    """

    name = "nixl"
    capabilities = Capabilities(in_band_notices=True, memory_kinds=frozenset({"DRAM", "VRAM"}))

    def __init__(
        self,
        *,
        plugin: str = "UCX",
        plugin_options: Mapping[str, str] | None = None,
        environment: Mapping[str, str] = QUIET_ENVIRONMENT,
        busy_interval_s: float = 50e-6,
        idle_interval_s: float = 20e-3,
        close_timeout_s: float = 5.0,
    ) -> None:
        self._plugin = plugin
        self._plugin_options = dict({"engine_config": ENGINE_CONFIG} if plugin == "UCX" else {})
        self._plugin_options.update(plugin_options or {})
        self._environment = environment
        self._intervals = {"busy_interval_s": busy_interval_s, "idle_interval_s": idle_interval_s}
        self._close_timeout_s = close_timeout_s
        self._owner: OwnerThread | None = None
        self._agent: _Agent | None = None
        self._memory: RegisteredMemory | None = None
        self._blob = b""
        self._peers: dict[str, PeerMetadata] = {}

    @override
    async def open(self, agent_name: str) -> None:
        mailbox: Mailbox[BackendEvent] = Mailbox()
        self._mailbox = mailbox
        self._owner = OwnerThread(f"kvflow-nixl-{agent_name}", self._break_down, **self._intervals)
        create = functools.partial(_Agent, agent_name, self._plugin, self._plugin_options, self._environment, mailbox)
        try:
            self._agent = await self._owner.call(create)
        except BaseException:
            owner, self._owner = self._owner, None
            with anyio.CancelScope(shield=True):
                await owner.stop()
            raise
        self._owner.submit(functools.partial(self._owner.adopt, self._agent))

    @override
    async def register(self, layout: KVLayout) -> None:
        owner, agent = self._running()
        memory = RegisteredMemory(layout.allocations, layout.memory_kind, layout.device_id)
        await owner.call(functools.partial(agent.register, memory))
        self._blob = await owner.call(agent.metadata)
        self._memory = memory

    @override
    def metadata(self) -> bytes:
        if self._memory is None:
            raise BackendError("no memory is registered yet", backend=self.name)
        return PeerMetadata(self.name, self._blob, self._memory).pack()

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
        theirs = PeerMetadata.unpack(metadata, backend=self.name)
        await owner.call(functools.partial(agent.connect, peer, theirs.agent))
        self._peers[peer] = theirs

    @override
    async def disconnect(self, peer: str) -> None:
        is_known = self._peers.pop(peer, None) is not None
        if is_known and self._owner is not None and self._agent is not None:
            self._owner.submit(functools.partial(self._agent.disconnect, peer))

    @override
    def post(self, post_id: int, peer: str, descriptors: Descriptors, notice: bytes) -> None:
        owner, agent = self._running()
        if self._memory is None or peer not in self._peers:
            raise BackendError("peer is not connected", peer=peer)
        theirs = self._peers[peer].memory
        self._memory.check(descriptors.src, side="source")
        theirs.check(descriptors.dst, side="destination")
        owner.submit(functools.partial(agent.post, post_id, peer, theirs.memory_kind, descriptors, notice))

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
        if self._agent is not None:
            owner.submit(functools.partial(owner.adopt, None))
            await owner.call(functools.partial(self._agent.close, self._close_timeout_s))
            self._agent = None
        await owner.stop()
        return self._mailbox.take_nowait()

    def _break_down(self, error: Exception) -> None:
        self._mailbox.fail(BackendError("NIXL broke down while it was polled", detail=_text(error)))

    def _running(self) -> "tuple[OwnerThread, _Agent]":
        if self._owner is None or self._agent is None:
            raise BackendError("backend is not open", backend=self.name)
        return self._owner, self._agent


class _Agent:
    """A NIXL agent. Every method runs on the owner thread."""

    def __init__(
        self,
        name: str,
        plugin: str,
        plugin_options: dict[str, str],
        environment: Mapping[str, str],
        mailbox: Mailbox[BackendEvent],
    ) -> None:
        for variable, value in environment.items():
            os.environ.setdefault(variable, value)
        api = _import_api()
        self._log = get_logger(agent=name)
        self._mailbox = mailbox
        self._emit = mailbox.put
        self._not_found = api.nixlBind.nixlNotFoundError
        self._kind = "DRAM"
        self._registered: list[Any] = []
        self._running: dict[int, tuple[str, Any]] = {}
        self._doubtful: dict[int, tuple[str, Any]] = {}
        self._connected: set[str] = set()
        self._leaving: list[str] = []
        self._is_watching = False
        try:
            self._agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
            self._agent.create_backend(plugin, plugin_options)
        except Exception as error:
            raise BackendUnavailable(
                "NIXL could not start its plugin", plugin=plugin, options=plugin_options, detail=_text(error)
            ) from error

    def register(self, memory: RegisteredMemory) -> None:
        rows = [(item.address, item.length, memory.device_id, "") for item in memory.ranges]
        try:
            registered = self._agent.register_memory(rows, memory.memory_kind)
        except Exception as error:
            raise RegistrationError(
                "NIXL refused to register memory",
                memory_kind=memory.memory_kind,
                ranges=len(rows),
                detail=_text(error),
            ) from error
        if registered is None:  # how NIXL reports arguments that it does not understand
            raise RegistrationError("NIXL did not accept the memory ranges", ranges=rows[:4])
        self._registered.append(registered)
        self._kind = memory.memory_kind

    def metadata(self) -> bytes:
        return bytes(self._agent.get_agent_metadata())

    def connect(self, peer: str, blob: bytes) -> None:
        if peer in self._leaving:  # it is back before its last post has ended
            self._leaving.remove(peer)
            return
        try:
            name = self._agent.add_remote_agent(blob)
        except Exception as error:
            raise BackendError("NIXL refused the peer's metadata", peer=peer, detail=_text(error)) from error
        if _decoded(name) == peer:
            self._connected.add(peer)
            return
        if _decoded(name) not in self._connected:
            self._clean_up(self._agent.remove_remote_agent, name)
        raise BackendError("peer's metadata belongs to another agent", peer=peer, agent=_decoded(name))

    def disconnect(self, peer: str) -> None:
        """Remove a peer when its last post has ended: removing it earlier loses sight of the post, not its bytes."""
        self._leaving.append(peer)
        self._remove_leaving()

    def post(self, post_id: int, peer: str, kind: str, descriptors: Descriptors, notice: bytes) -> None:
        try:
            handle = self._agent.initialize_xfer(
                "WRITE",
                self._agent.get_xfer_descs(descriptors.src, self._kind),
                self._agent.get_xfer_descs(descriptors.dst, kind),
                peer,
                notice,
            )
        except Exception as error:  # noqa: BLE001 - nothing was posted; the caller learns it as an event
            self._emit([PostEnded(post_id, _text(error))])
            return
        try:
            state = self._agent.transfer(handle)
        except Exception as error:  # noqa: BLE001 - as above, but some of it may be on its way
            self._doubt(post_id, peer, handle, error)
            return
        if state == "DONE":
            self._end(post_id, handle)
        else:
            self._running[post_id] = (peer, handle)

    def watch(self, active: bool) -> None:
        self._is_watching = active

    def is_busy(self) -> bool:
        return bool(self._running) or self._is_watching

    def poll(self) -> None:
        for post_id, (peer, handle) in list(self._running.items()):
            try:
                state = self._agent.check_xfer_state(handle)
            except Exception as error:  # noqa: BLE001 - the caller learns it as an event
                del self._running[post_id]
                self._doubt(post_id, peer, handle, error)
                continue
            if state == "DONE":
                del self._running[post_id]
                self._end(post_id, handle)
        notices = self._agent.get_new_notifs()
        if notices and len(self._mailbox) < MAX_UNTAKEN:
            self._emit([NoticeArrived(payload) for payloads in notices.values() for payload in payloads])
        if self._leaving:
            self._remove_leaving()

    def close(self, timeout_s: float) -> None:
        """Wait for running posts, then destroy the agent: the only thing that stops a post for certain."""
        give_up = time.monotonic() + timeout_s
        while self._running and time.monotonic() < give_up and self._clean_up(self.poll):
            time.sleep(1e-3)
        stopped = [*self._running, *self._doubtful]
        self._running.clear()
        self._doubtful.clear()
        for registered in self._registered:
            self._clean_up(self._agent.deregister_memory, registered)
        self._registered.clear()
        del self._agent
        self._emit([PostEnded(post_id, "stopped by closing the endpoint") for post_id in stopped])

    def _end(self, post_id: int, handle: Any) -> None:
        self._clean_up(self._agent.release_xfer_handle, handle)
        self._emit([PostEnded(post_id, None)])

    def _doubt(self, post_id: int, peer: str, handle: Any, error: Exception) -> None:
        self._doubtful[post_id] = (peer, handle)
        self._emit([PostInDoubt(post_id, _text(error))])

    def _remove_leaving(self) -> None:
        posting = {peer for peer, _ in self._running.values()}
        for peer in [peer for peer in self._leaving if peer not in posting]:
            self._leaving.remove(peer)
            self._connected.discard(peer)
            self._clean_up(self._agent.remove_remote_agent, peer)

    def _clean_up(self, call: Callable[..., object], *args: object) -> bool:
        """Make a call after which nothing depends on its success; say whether it succeeded."""
        try:
            call(*args)
        except self._not_found:
            return True
        except Exception as error:  # noqa: BLE001 - the library keeps what it could not release
            self._log.warning("nixl_clean_up_failed", call=call.__name__, detail=_text(error))
            return False
        return True


def _import_api() -> Any:
    """Import whichever NIXL build is installed.

    Raises:
        BackendUnavailable: None is, or it does not load.
    """
    failures = {}
    for distribution in DISTRIBUTIONS:
        try:
            return importlib.import_module(f"{distribution}._api")
        except ImportError as error:  # noqa: PERF203 - two at most
            failures[distribution] = str(error)
    raise BackendUnavailable(
        "NIXL is not installed or does not load; install kvflow[nixl-cu12] or kvflow[nixl-cu13]", **failures
    )


def _text(error: Exception) -> str:
    """NIXL's exceptions carry only a status name; the type says the rest."""
    return f"{type(error).__name__}: {error}"


def _decoded(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name

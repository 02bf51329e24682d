"""The engine interface that the agent uses, and its Mooncake implementation, which cannot crash the process.

The library crashes the process if it is used before `initialize`, if an id is 0 or is checked again after its end, or
if a name is None. Here, an engine is initialised when it is created, 0 is an error, and only `window` keeps ids.
"""

import abc
import json
import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from typing_extensions import override

from kvflow.backends.library_sockets import LibrarySockets, find_epolls
from kvflow.backends.mooncake.address import INCARNATION_BYTES, EndpointAddress, IncarnationCell, host_of
from kvflow.backends.mooncake.library import EngineSettings, Library
from kvflow.errors import BackendError, BackendUnavailable, RegistrationError
from kvflow.geometry.memory import MemoryRange
from kvflow.resources import error_text, pinning_facts

__all__ = ["MooncakeEngine", "WritingEngine", "start_native"]

OVERLAP: Final = -7
REGISTRATION_ERRORS: Final = {OVERLAP: "overlaps what is registered already", -1: "is not usable"}
PROBE_ERRORS: Final = {-101: "its name cannot be resolved", -102: "nobody answers there"}

START_ATTEMPTS: Final = 8

READ_ATTEMPTS: Final = 2
"""A connection that was closed after an error is reopened only by the second attempt."""


class WritingEngine(abc.ABC):
    """A running engine. Only `contact` and the calls inside it may be used from any thread.

    Attributes:
        session: Its name for peers.
        num_users: Connections that write through it, plus peers being connected through it.
        num_departed: Closed connections that wrote through it.
        is_worn_out: It must not be used for new peers.
        num_contacts: Calls inside `contact` that have not returned. The native engine lives at least as long.
        closed_at: When a connection was last closed here, in monotonic seconds.
        sockets: Its connections.
    """

    session: str

    def __init__(self) -> None:
        self.closed_at = float("-inf")
        self._aborted: dict[str, float] = {}
        self.sockets = LibrarySockets(())
        self.num_users = 0
        self.num_departed = 0
        self.is_worn_out = False
        self.num_contacts = 0
        self._num_opening = 0
        self._lock = threading.Lock()

    @contextmanager
    def contact(self, *, is_opening: bool = False) -> Iterator[None]:
        """Count a call to a peer from any thread. No writes begin while a session is being opened."""
        with self._lock:
            self.num_contacts += 1
            self._num_opening += is_opening
        try:
            yield
        finally:
            with self._lock:
                self.num_contacts -= 1
                self._num_opening -= is_opening

    def abort(self, session: str) -> None:
        """Abort the connections to the host of a peer, so that the peer sees the end of what is in flight over them."""
        host = host_of(session)
        self.closed_at = self._aborted[host] = time.monotonic()
        self.sockets.abort_to(host)

    def was_aborted(self, session: str, since: float) -> bool:
        """Return whether the connections to the host of a peer have been aborted since a time in monotonic seconds."""
        return since <= self._aborted.get(host_of(session), float("-inf"))

    @property
    def is_used(self) -> bool:
        """Whether it must not be closed yet."""
        return self.num_users > 0 or self.num_contacts > 0

    @property
    def is_opening(self) -> bool:
        """Whether a session is being opened, so that `submit` could block."""
        return self._num_opening > 0

    def begin_writes(self) -> bool:
        """Return whether `submit` may be called now. If so, no session is opened until `end_writes` is called."""
        self._lock.acquire()
        if self._num_opening:
            self._lock.release()
            return False
        return True

    def end_writes(self) -> None:
        """Let sessions be opened again."""
        self._lock.release()

    @abc.abstractmethod
    def register(self, ranges: Sequence[MemoryRange]) -> None:
        """Make memory readable and writable for peers; if the library refuses, register nothing."""

    @abc.abstractmethod
    def probe(self, address: EndpointAddress) -> None:
        """Raise BackendError if no process answers at a peer's address, or this is closed. May block for a minute."""

    @abc.abstractmethod
    def open_session(self, session: str) -> bool:
        """Ask a peer where its memory is, unless that is known. Return False on failure. May block for a minute.

        Meanwhile `submit` would block, too. If this engine is closed, raise BackendError.
        """

    @abc.abstractmethod
    def read_incarnation(self, address: EndpointAddress) -> bytes | None:
        """Read the incarnation of the process that now serves a peer's memory; None on failure. May block for seconds.

        Its session must be open. If this engine is closed, raise BackendError.
        """

    @abc.abstractmethod
    def submit(self, session: str, src: int, dst: int, num_bytes: int) -> int:
        """Start a write. Return its id, or 0 if it was refused."""

    @abc.abstractmethod
    def check(self, transfer_id: int) -> int:
        """Return the state of a write: 0 while it runs, 1 if it is done, -1 if it failed, -2 if unknown.

        Do not check an id again after any result but 0.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Destroy the engine. Afterwards it reads and writes nothing."""


class MooncakeEngine(WritingEngine):
    """A Mooncake TransferEngine. It keeps connections to departed peers open."""

    def __init__(self, library: Library, settings: EngineSettings, cell: IncarnationCell) -> None:
        super().__init__()
        self._library = library
        self._cell = cell
        self._addresses: list[int] = []
        self._is_tcp = settings.protocol == "tcp"
        self._opened: set[str] = set()
        name = settings.host if settings.is_peer_to_peer else f"kvflow-{secrets.token_hex(8)}"
        self._native: Any = None
        self._native, self._epolls = find_epolls(lambda: start_native(library, name, settings))
        self.sockets = LibrarySockets(self._epolls)
        self.session = settings.session(int(self._native.get_rpc_port())) if settings.is_peer_to_peer else name
        try:
            if settings.protocol == "rdma":
                _require_rdma(self._native, settings)
            self.register((MemoryRange(cell.address, cell.num_bytes),))
        except BaseException:
            self.close()
            raise

    @override
    def register(self, ranges: Sequence[MemoryRange]) -> None:
        addresses, lengths = [item.address for item in ranges], [item.length for item in ranges]
        try:
            code = self._native.batch_register_memory(addresses, lengths)
        except Exception as error:
            raise RegistrationError("Mooncake did not accept the memory ranges", detail=error_text(error)) from error
        if code != 0:
            raise RegistrationError(
                "Mooncake refused to register memory",
                code=code,
                detail=REGISTRATION_ERRORS.get(code, "unknown"),
                ranges=[(hex(item.address), item.length) for item in ranges[:4]],
                num_bytes=sum(lengths),
                **({} if self._is_tcp or code == OVERLAP else pinning_facts()),  # TCP pins nothing
            )
        self._addresses += addresses

    @override
    def probe(self, address: EndpointAddress) -> None:
        code = self._running().send_probe(address.session)
        if code != 0:
            detail = PROBE_ERRORS.get(code, "unknown")
            raise BackendError("peer cannot be reached", session=address.session, code=code, detail=detail)

    @override
    def open_session(self, session: str) -> bool:
        if not self._is_tcp or session in self._opened:  # over RDMA, the first read opens it
            return True
        if not self._running().batch_transfer_async_read(session, [], [], []):
            return False
        self._opened.add(session)
        return True

    @override
    def read_incarnation(self, address: EndpointAddress) -> bytes | None:
        for _ in range(READ_ATTEMPTS):
            slot = self._cell.take_slot()
            try:
                code = self._running().transfer_sync_read(
                    address.session, slot, address.incarnation_address, INCARNATION_BYTES
                )
            finally:
                found = self._cell.give_back(slot)
            if code == 0:
                return found
        return None

    @override
    def submit(self, session: str, src: int, dst: int, num_bytes: int) -> int:
        try:
            return int(self._native.transfer_submit_write(session, src, dst, num_bytes))
        except Exception:  # noqa: BLE001 - arguments that the binding cannot convert; nothing was started
            return 0

    @override
    def check(self, transfer_id: int) -> int:
        return int(self._native.transfer_check_status(transfer_id))

    @override
    def close(self) -> None:
        """Destroy the engine.

        The library waits up to a second for its own listener, and holds the GIL meanwhile.
        """
        native, self._native = self._native, None
        if native is None:
            return
        self.sockets = LibrarySockets(())
        for fd in self._epolls:
            os.close(fd)
        with self._library.silence():
            native.batch_unregister_memory(self._addresses)
            del native

    def _running(self) -> Any:
        native = self._native
        if native is None:
            raise BackendError("backend is not open", session=self.session)
        return native


def start_native(library: Library, name: str, settings: EngineSettings) -> Any:
    """Start a native engine, or raise BackendUnavailable. It picks random ports and fails if one is taken, so retry."""
    code: object = None
    for _ in range(START_ATTEMPTS):
        try:
            native = library.engine.TransferEngine()
            code = native.initialize(name, settings.metadata_server, settings.protocol, ",".join(settings.devices))
        except Exception as error:
            raise BackendUnavailable(
                "Mooncake failed to start an engine", detail=error_text(error), **vars(settings)
            ) from error
        if code == 0:
            return native
    facts = vars(settings) if settings.protocol == "tcp" else vars(settings) | pinning_facts()
    raise BackendUnavailable("Mooncake could not start an engine", code=code, **facts)


def _require_rdma(native: Any, settings: EngineSettings) -> None:
    """Raise BackendUnavailable if there is no RDMA device: the library would silently use TCP."""
    topology = json.loads(native.get_local_topology())
    if not any(devices for places in topology.values() for devices in places):
        raise BackendUnavailable("Mooncake found no RDMA device; use protocol tcp", devices=settings.devices)

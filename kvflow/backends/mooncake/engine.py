"""The engine interface that the agent uses, and its Mooncake implementation, which cannot crash the process.

The library crashes the process if it is used before `initialize`, if an id is 0 or is checked again after its end, or
if a name is None. Here, an engine is initialised when it is created, 0 is an error, and only `window` keeps ids.
"""

import abc
import json
import secrets
from collections.abc import Sequence
from typing import Any, Final

from typing_extensions import override

from kvflow.backends.mooncake.address import INCARNATION_BYTES, EndpointAddress, IncarnationCell
from kvflow.backends.mooncake.library import EngineSettings, Library
from kvflow.errors import BackendError, BackendUnavailable, RegistrationError
from kvflow.geometry.layout import MemoryRange

__all__ = ["Engine", "WritingEngine", "start_native"]

OVERLAP: Final = -7
REGISTRATION_ERRORS: Final = {OVERLAP: "overlaps what is registered already", -1: "is not usable"}
PROBE_ERRORS: Final = {-101: "its name cannot be resolved", -102: "nobody answers there"}

START_ATTEMPTS: Final = 8

READ_ATTEMPTS: Final = 2
"""A connection that was closed after an error is reopened only by the second attempt."""


class WritingEngine(abc.ABC):
    """A running engine. Only `probe` and `read_incarnation` may be called from any thread.

    Attributes:
        session: Its name for peers.
        num_users: Connections that write through it, plus peers being connected through it.
        num_departed: Closed connections that wrote through it.
    """

    session: str

    def __init__(self) -> None:
        self.num_users = 0
        self.num_departed = 0

    @abc.abstractmethod
    def register(self, ranges: Sequence[MemoryRange]) -> None:
        """Make memory readable and writable for peers.

        Raises:
            RegistrationError: The library refused; nothing is registered.
        """

    @abc.abstractmethod
    def probe(self, address: EndpointAddress) -> None:
        """Check that a process answers at a peer's address. May block for a minute.

        Raises:
            BackendError: None does, or this engine is closed.
        """

    @abc.abstractmethod
    def read_incarnation(self, address: EndpointAddress) -> bytes | None:
        """Read the incarnation of the process that now serves a peer's memory; None on failure. May block for seconds.

        Raises:
            BackendError: This engine is closed.
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


class Engine(WritingEngine):
    """A Mooncake TransferEngine. It keeps connections to departed peers open.

    Raises:
        BackendUnavailable: It could not be started.
    """

    def __init__(self, library: Library, settings: EngineSettings, cell: IncarnationCell) -> None:
        super().__init__()
        self._library = library
        self._cell = cell
        self._addresses: list[int] = []
        name = settings.host if settings.is_peer_to_peer else f"kvflow-{secrets.token_hex(8)}"
        self._native: Any = start_native(library, name, settings)
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
            raise RegistrationError("Mooncake did not accept the memory ranges", detail=_text(error)) from error
        if code != 0:
            raise RegistrationError(
                "Mooncake refused to register memory",
                code=code,
                detail=REGISTRATION_ERRORS.get(code, "unknown"),
                ranges=[(hex(item.address), item.length) for item in ranges[:4]],
            )
        self._addresses += addresses

    @override
    def probe(self, address: EndpointAddress) -> None:
        code = self._running().send_probe(address.session)
        if code != 0:
            detail = PROBE_ERRORS.get(code, "unknown")
            raise BackendError("peer cannot be reached", session=address.session, code=code, detail=detail)

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
        with self._library.silence():
            native.batch_unregister_memory(self._addresses)
            del native

    def _running(self) -> Any:
        native = self._native
        if native is None:
            raise BackendError("backend is not open", session=self.session)
        return native


def start_native(library: Library, name: str, settings: EngineSettings) -> Any:
    """Start a native engine. It picks random ports and fails if one is taken, so retry.

    Raises:
        BackendUnavailable: It could not be started.
    """
    code: object = None
    for _ in range(START_ATTEMPTS):
        try:
            native = library.engine.TransferEngine()
            code = native.initialize(name, settings.metadata_server, settings.protocol, ",".join(settings.devices))
        except Exception as error:
            raise BackendUnavailable(
                "Mooncake failed to start an engine", detail=_text(error), **vars(settings)
            ) from error
        if code == 0:
            return native
    raise BackendUnavailable("Mooncake could not start an engine", code=code, **vars(settings))


def _require_rdma(native: Any, settings: EngineSettings) -> None:
    """Check that there is an RDMA device; without one, the library would silently use TCP.

    Raises:
        BackendUnavailable: There is none.
    """
    topology = json.loads(native.get_local_topology())
    if not any(devices for places in topology.values() for devices in places):
        raise BackendUnavailable("Mooncake found no RDMA device; use protocol tcp", devices=settings.devices)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"

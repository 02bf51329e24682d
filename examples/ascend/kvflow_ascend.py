"""[Experimental] Ascend NPUs over memfabric-hybrid, built on the Mooncake transport.

The library has Mooncake's batch calls under the same names, and little else: no asynchronous transfers, no probe, and
no way to read a peer's memory from the host. So each engine has a thread that makes the batch calls with everything
submitted so far, and the agent polls their results. A failed batch may still be written, and nothing shows when it is
over: its posts are in doubt until the endpoint closes.

None of this has run on an NPU. Tests check the calls against the library's signatures, and the handling of their
results.

Source: memfabric-hybrid 1.3.0, and its use in SGLang 0.5.23 (srt/disaggregation/ascend/transfer_engine.py).
"""

import dataclasses
import functools
import importlib
import itertools
import os
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, Literal, get_args

from typing_extensions import override

from kvflow.backends.base import Capabilities
from kvflow.backends.delivery import EventDelivery
from kvflow.backends.mooncake.address import EndpointAddress, IncarnationCell
from kvflow.backends.mooncake.agent import Agent
from kvflow.backends.mooncake.backend import MooncakeBackend
from kvflow.backends.mooncake.engine import WritingEngine
from kvflow.backends.owner_thread import start_thread
from kvflow.errors import BackendUnavailable, ConfigError, RegistrationError
from kvflow.geometry.memory import MemoryRange
from kvflow.observe.logs import get_logger

__all__ = ["AscendBackend", "AscendSettings", "Role", "Transport"]

Role = Literal["Prefill", "Decode"]
Transport = Literal["SDMA", "HOST_RDMA", "DEVICE_RDMA", "DEVICE_URMA", "DEVICE_UBOE"]

ALIGNMENT: Final = 2 * 2**20
"""The library registers whole pages of this size, in bytes."""

JOIN_S: Final = 1.0

QUIET: Final = ("MF_LOG_LEVEL", "4")
"""Suppresses output that the library writes to standard output instead of the logger it is given."""

LOG_NAMES: Final = ("debug", "info", "warning", "error")
"""Names of the library's log levels."""

RUNNING: Final = 0
DONE: Final = 1
UNKNOWN: Final = -2

Write = tuple[int, str, int, int, int]


@dataclass(frozen=True)
class AscendSettings:
    """Settings of new engines; the names are the library's.

    Attributes:
        host: Host at which peers reach this process.
        store_url: URL of the config store through which all processes of a deployment find each other.
        role: "Prefill" or "Decode".
        npu_id: Device of this process.
        transport: Data path.
    """

    host: str
    store_url: str
    role: Role
    npu_id: int
    transport: Transport


class AscendBackend(MooncakeBackend):
    """A transport between Ascend NPUs.

    Args:
        store_url: URL of the config store, as "tcp://host:port".
        role: "Prefill" or "Decode".
        host: Name or IPv4 address at which peers reach this process. By default the host that the rank advertises, or
            127.0.0.1 if it advertises none.
        npu_id: Device of this process.
        transport: Data path, as named by the library.
        serve_store: Host the config store in this process; exactly one process of a deployment does.
        window: Maximum number of descriptors in flight to one peer, and thus the largest batch.
        close_timeout_s: How long `aclose` waits for running posts before it destroys the engine.

    Raises:
        ConfigError: An option is invalid.
    """

    name = "ascend"
    capabilities = Capabilities(in_band_notices=False, memory_kinds=frozenset({"VRAM"}))

    def __init__(  # noqa: PLR0913 - options, all by name
        self,
        *,
        store_url: str,
        role: Role,
        host: str | None = None,
        npu_id: int = 0,
        transport: Transport = "SDMA",
        serve_store: bool = False,
        window: int = 1024,
        close_timeout_s: float = 5.0,
    ) -> None:
        super().__init__(host=host, window=window, close_timeout_s=close_timeout_s)
        if not store_url.startswith("tcp://"):
            raise ConfigError("store_url must have the form tcp://HOST:PORT", store_url=store_url)
        if role not in get_args(Role) or transport not in get_args(Transport):
            raise ConfigError(
                "unknown role or transport", role=role, transport=transport, known=(get_args(Role), get_args(Transport))
            )
        self.capabilities = AscendBackend.capabilities
        self._ascend = AscendSettings(self._settings.host, store_url, role, npu_id, transport)
        self._serves_store = serve_store

    @override
    def _create_agent(self, agent_name: str, delivery: EventDelivery) -> Agent:
        library = _import_library()
        if self._serves_store and library.create_config_store(self._ascend.store_url) != 0:
            raise BackendUnavailable("the config store could not be started", store_url=self._ascend.store_url)
        settings = dataclasses.replace(self._ascend, host=self._settings.host)
        start = functools.partial(AscendEngine, library, settings)
        return Agent(agent_name, start, delivery, protocol="tcp", window=self._window, timeout_s=0.0)


class AscendEngine(WritingEngine):
    """A memfabric-hybrid engine, and the thread that makes its blocking calls."""

    def __init__(self, library: ModuleType, settings: AscendSettings, _cell: IncarnationCell) -> None:
        super().__init__()
        native = library.TransferEngine()
        name = f"{settings.host}:0"  # the port is only known after initialisation
        how = getattr(library.TransferEngine.TransDataOpType, settings.transport)
        if native.initialize(settings.store_url, name, settings.role, settings.npu_id, how) != 0:
            raise BackendUnavailable(
                "memfabric-hybrid could not start an engine; it needs an Ascend device with its driver",
                **vars(settings),
                detail=str(library.get_last_err_msg()),
            )
        self.session = f"{settings.host}:{native.get_rpc_port()}"
        self._native: Any = native
        self._registered: list[MemoryRange] = []
        self._ids = itertools.count(1)
        self._writes: queue.SimpleQueue[Write | None] = queue.SimpleQueue()
        self._states: dict[int, int] = {}
        self._thread = threading.Thread(target=self._run, name=f"kvflow-ascend-{self.session}", daemon=True)
        try:
            start_thread(self._thread)
        except BackendUnavailable:
            native.destroy()
            native.unInitialize()
            raise

    @override
    def register(self, ranges: Sequence[MemoryRange]) -> None:
        """Register memory in one call, so that the library merges ranges that share an aligned page."""
        if not ranges:
            return
        old = [_aligned(item) for item in self._registered]
        for new in map(_aligned, ranges):
            if any(new.address < other.end and other.address < new.end for other in old):
                raise RegistrationError(
                    "memory shares an aligned page with registered memory; register all of it in one call",
                    address=hex(new.address),
                    length=new.length,
                    alignment=ALIGNMENT,
                )
        code = self._native.batch_register_memory([item.address for item in ranges], [item.length for item in ranges])
        if code != 0:
            raise RegistrationError("memfabric-hybrid refused to register memory", code=code, ranges=len(ranges))
        self._registered += ranges

    @override
    def probe(self, address: EndpointAddress) -> None:
        """Do nothing: the library has no probe."""

    @override
    def open_session(self, session: str) -> bool:
        """Return True: the library opens sessions by itself, on the thread of this engine."""
        return True

    @override
    def read_incarnation(self, address: EndpointAddress) -> bytes | None:
        """Return the incarnation in the address unchecked, because the library cannot read a peer's host memory."""
        return address.incarnation

    @override
    def submit(self, session: str, src: int, dst: int, num_bytes: int) -> int:
        transfer_id = next(self._ids)
        self._states[transfer_id] = RUNNING
        self._writes.put((transfer_id, session, src, dst, num_bytes))
        return transfer_id

    @override
    def check(self, transfer_id: int) -> int:
        state = self._states[transfer_id]
        if state != RUNNING:
            del self._states[transfer_id]
        return state

    @override
    def close(self) -> None:
        native, self._native = self._native, None
        if native is None:
            return
        self._writes.put(None)
        self._thread.join(JOIN_S)  # a hanging batch is stopped by the calls below, or not at all
        for item in self._registered:
            native.unregister_memory(item.address)
        native.destroy()
        native.unInitialize()

    def _run(self) -> None:
        native = self._native
        while (writes := self._next_writes()) is not None:
            for session, batch in _by_session(writes).items():
                ids, sources, targets, lengths = (list(column) for column in zip(*batch, strict=True))
                try:
                    code = native.batch_transfer_sync_write(session, sources, targets, lengths)
                except Exception:  # noqa: BLE001 - the batch may have started before it failed
                    code = -1
                for transfer_id in ids:
                    self._states[transfer_id] = DONE if code == 0 else UNKNOWN

    def _next_writes(self) -> list[Write] | None:
        """Wait for a write, and take all that are queued; None once the engine is closed."""
        writes = []
        item = self._writes.get()
        while item is not None:
            writes.append(item)
            try:
                item = self._writes.get_nowait()
            except queue.Empty:
                return writes
        return None


def _by_session(writes: Sequence[Write]) -> dict[str, list[tuple[int, int, int, int]]]:
    found: dict[str, list[tuple[int, int, int, int]]] = {}
    for transfer_id, session, src, dst, num_bytes in writes:
        found.setdefault(session, []).append((transfer_id, src, dst, num_bytes))
    return found


def _aligned(memory: MemoryRange) -> MemoryRange:
    """Return the range of whole pages that contains some memory."""
    start = memory.address // ALIGNMENT * ALIGNMENT
    return MemoryRange(start, -(-memory.end // ALIGNMENT) * ALIGNMENT - start)


def _import_library() -> ModuleType:
    """Import memfabric-hybrid, and redirect its log to kvflow's.

    Raises:
        BackendUnavailable: The library is missing or does not load.
    """
    os.environ.setdefault(*QUIET)
    try:
        library = importlib.import_module("memfabric_hybrid")
    except (ImportError, OSError) as error:
        raise BackendUnavailable(
            "memfabric-hybrid is not installed or does not load; install memfabric-hybrid", detail=str(error)
        ) from error
    library.set_extern_logger(_log)
    return library


def _log(level: int, message: str) -> None:
    get_logger().info("memfabric_said", level=LOG_NAMES[level], message=message.strip())

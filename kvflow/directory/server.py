"""The registry as a service: hosted by any process of a deployment, or on its own by `kvflow registry`."""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

import anyio.lowlevel

from kvflow.config import check_bind
from kvflow.directory.service import DirectoryService
from kvflow.errors import LocalProtocolError, RemoteProtocolError
from kvflow.observe.logs import get_logger
from kvflow.observe.trace import AnomalyLog
from kvflow.ports import Listener, Ports
from kvflow.system import system_ports
from kvflow.wire.codec import decode_frames

__all__ = ["Registry"]


class Registry:
    """Serves lookups while it is open. Use it as an async context manager.

    Args:
        bind: "tcp://host:port"; port 0 takes a free one.
        advertise: Host to give to others, if not the one bound; needed if `bind` is a wildcard.
        ports: Sockets and clock; the real ones if None.

    Attributes:
        endpoint: Address for the `registry` setting of ranks.

    Raises:
        ConfigError: The address is malformed, or others could not use it; on entry: it cannot be bound.
        LocalProtocolError: On entry: it is open.
    """

    endpoint: str

    def __init__(
        self, bind: str = "tcp://127.0.0.1:0", advertise: str | None = None, ports: Ports | None = None
    ) -> None:
        check_bind(bind, advertise)
        self._bind = bind
        self._advertise = advertise
        self._ports = ports or system_ports()
        self._log = get_logger(stage="registry")
        self._listener: Listener | None = None

    async def __aenter__(self) -> Self:
        if self._listener is not None:
            raise LocalProtocolError("registry is open already", endpoint=self.endpoint)
        self._anomalies = AnomalyLog(self._log, self._ports.now)
        self._listener = self._ports.control.listen(self._bind, self._advertise, self._on_message)
        self._directory = DirectoryService(self._listener.send, self._ports.now, self._anomalies)
        self.endpoint = self._listener.endpoint
        self._log.info("registry_opened", endpoint=self.endpoint)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._listener is not None:
            self._directory.close()
            self._listener.close()
            self._listener = None
            self._log.info("registry_closed", endpoint=self.endpoint, ranks=self._directory.num_ranks)
        await anyio.lowlevel.cancel_shielded_checkpoint()

    def _on_message(self, connection: bytes, frames: Sequence[bytes]) -> None:
        try:
            self._directory.take(connection, decode_frames(frames))
        except RemoteProtocolError as error:
            self._anomalies.count("message_rejected", connection=connection.hex(), detail=str(error))

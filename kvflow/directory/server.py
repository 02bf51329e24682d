"""The registry as a service, hosted by any process of a deployment or run standalone by `kvflow registry`."""

from collections.abc import Sequence
from types import TracebackType
from typing import Final, NamedTuple, Self

import anyio.lowlevel

from kvflow.addresses import check_bind, check_needs_trust
from kvflow.checks import check_type
from kvflow.directory.service import DirectoryMessage, DirectoryService
from kvflow.errors import LocalProtocolError, RemoteProtocolError
from kvflow.gate.rates import ListenerGate
from kvflow.gate.verdict import ACCEPTED
from kvflow.keys import renewed_trust
from kvflow.observe.logs import get_logger
from kvflow.observe.trace import AnomalyLog
from kvflow.ports import Listener, Ports
from kvflow.system import system_ports
from kvflow.trust import PLAIN, Trust, short
from kvflow.wire.codec import Reader

__all__ = ["Registry", "RegistryStatistics"]

REQUESTS: Final[Reader[DirectoryMessage]] = Reader(DirectoryMessage)


class RegistryStatistics(NamedTuple):
    """Counters of a registry.

    Attributes:
        ranks: Number of registered ranks.
        waiting_lookups: Number of lookups that wait for an instance to be complete.
        anomalies: Number of ignored messages, by kind.
        postponed: Number of messages over a budget, by kind. Their senders repeat them.
    """

    ranks: int
    waiting_lookups: int
    anomalies: dict[str, int]
    postponed: dict[str, int]


class Registry:
    """A registry of ranks, which serves registrations and lookups while it is open. An async context manager.

    Args:
        bind: "tcp://host:port"; port 0 picks a free port, and "7000-7099" the first free one of a range.
        advertise: Host to give to others, if not the one bound; required if `bind` is a wildcard.
        ports: Sockets and clock; the real ones if None.
        trust: Own keys, and those of the instances that may register and look up; as in `kvflow.PrefillConfig`.

    Attributes:
        endpoint: Address for the `registry` setting of ranks.

    Raises:
        ConfigError: The address is malformed or unusable for others; on entry: it cannot be bound.
        LocalProtocolError: On entry: the registry is already open.
    """

    endpoint: str

    def __init__(
        self,
        bind: str = "tcp://127.0.0.1:0",
        advertise: str | None = None,
        ports: Ports | None = None,
        *,
        trust: Trust | None = None,
    ) -> None:
        check_bind(bind, advertise)
        if trust is not None:
            check_type("trust", trust, Trust)
        check_needs_trust("bind", bind, trust)
        self._warns = trust is not None and trust.is_plain
        self._trust = trust or PLAIN
        self._bind = bind
        self._advertise = advertise
        self._ports = ports or system_ports()
        self._log = get_logger(stage="registry")
        self._listener: Listener | None = None

    async def __aenter__(self) -> Self:
        if self._listener is not None:
            raise LocalProtocolError("registry is already open", endpoint=self.endpoint)
        self._anomalies = AnomalyLog(self._log, self._ports.now)
        listener = self._listener = self._ports.control.listen(
            self._bind, self._advertise, self._on_message, trust=self._trust, on_refused=self._refused
        )
        self._gate = ListenerGate(listener.names_of)
        self._directory = DirectoryService(listener, self._gate, self._ports.now, self._anomalies)
        self.endpoint = self._listener.endpoint
        self._log.info("registry_opened", endpoint=self.endpoint)
        if self._warns:
            self._log.warning("plain_transport", endpoint=self.endpoint)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._listener is not None:
            self._directory.close()
            self._listener.close()
            self._listener = None
            self._log.info("registry_closed", endpoint=self.endpoint, ranks=self._directory.table.num_ranks)
        await anyio.lowlevel.cancel_shielded_checkpoint()

    def reload_trust(self, trust: Trust | None = None) -> None:
        """Replace the keys without a restart.

        Args:
            trust: The new keys; by default the current keys' directory is read again.

        Raises:
            ConfigError: The new keys cannot be read or used. The current ones stay in use.
            LocalProtocolError: The registry is not open.
        """
        if self._listener is None:
            raise LocalProtocolError("registry is not open")
        trust = renewed_trust(self._trust, trust)
        self._listener.renew(trust)
        self._trust = trust
        self._log.info("trust_reloaded", public=short(self._trust.public), peers=len(self._trust.peers))

    def statistics(self) -> RegistryStatistics:
        """Return the current counters.

        Raises:
            LocalProtocolError: The registry is not open.
        """
        if self._listener is None:
            raise LocalProtocolError("registry is not open")
        table = self._directory.table
        return RegistryStatistics(
            table.num_ranks, table.num_waiting, dict(self._anomalies.counts), dict(self._anomalies.postponed)
        )

    def _refused(self, kind: str, detail: str) -> None:
        self._anomalies.count(kind, detail=detail)

    def _on_message(self, connection: bytes, frames: Sequence[bytes]) -> None:
        now, detail = self._ports.now(), None
        try:
            unread = REQUESTS.identify_message(frames)
            verdict = self._gate.admit(connection, unread, now, is_known=True)
            if verdict is ACCEPTED:
                self._directory.handle_message(connection, REQUESTS.read(unread))
        except RemoteProtocolError as error:
            verdict = self._gate.reject("message_rejected", connection, sum(map(len, frames)), now)
            detail = str(error)
        self._anomalies.carry_out(verdict, detail=detail)

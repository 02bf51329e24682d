"""A decode rank's lookups: by name in its registry, or at an address."""

import asyncio
import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from kvflow.control.reading import ReadingContext
from kvflow.directory.client import CONNECTED, RegistryClient
from kvflow.errors import Shortage
from kvflow.observe.logs import BoundLogger
from kvflow.state.decode.dialing import MAX_LOOKUPS
from kvflow.state.events import InstanceAddress, InstanceRef
from kvflow.trust import PLAIN, Trust
from kvflow.wire.messages import RankRecord

__all__ = ["Directories"]

MAX_CONNECTIONS: Final = 2 * MAX_LOOKUPS
"""Maximum number of connections to addresses, including lookups for connected instances. The least recently used one is
closed first."""

UNUSED_S: Final = 30.0
"""Time without a lookup after which a connection to an address is closed."""

OnFound = Callable[[InstanceRef, tuple[RankRecord, ...], int], None]
OnLookUpRefused = Callable[[InstanceRef | None, str, bool], None]


class Directories:
    """Looks instances up, in the registry or at addresses. Lookups that cannot be sent are lost, and must be repeated.

    The core looks up no more addresses at the same time than there may be connections.

    Args:
        registry: Address of the registry for names; None if there is none.
        log: Logger for the connections.
        context: Sockets, clock, and the means to parse long answers.
        on_found: Takes the instance looked up, its records by engine rank, and the number of the lookup.
        on_refused: Takes an instance, or None for all names, the reason why it cannot be looked up, and whether this
            process lacks the descriptors for a connection.
        trust: Own keys, and the keys that directories must have.

    Raises:
        Shortage: This process has no descriptors left.
    """

    def __init__(
        self,
        registry: str | None,
        log: BoundLogger,
        context: ReadingContext,
        on_found: OnFound,
        on_refused: OnLookUpRefused = lambda _instance, _detail, _is_short: None,
        trust: Trust = PLAIN,
    ) -> None:
        self._now = context.ports.now
        self._log = log
        self._context = context
        self._on_found = on_found
        self._loop = asyncio.get_running_loop()
        self._at: OrderedDict[InstanceAddress, tuple[RegistryClient, float]] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None
        self._on_refused = on_refused
        self._trust = trust
        self._registry = None
        self._endpoint = registry
        self._registry_obstacle = ""
        if registry is not None:
            self._registry = RegistryClient(
                registry,
                log,
                context,
                self._take_named,
                keys=trust.for_registry(),
                on_obstacle=self._take_registry_obstacle,
            )

    def look_up(self, instance: InstanceRef, number: int) -> None:
        """Send a Lookup for an instance, once."""
        if isinstance(instance, InstanceAddress):
            try:
                self._client_at(instance).look_up(instance.name, number)
            except Shortage as error:  # the next lookup may get a socket
                self._context.anomalies.count("descriptor_shortage", detail=str(error))
                self._on_refused(instance, str(error), True)
        elif self._registry is not None:
            self._registry.look_up(instance, number)

    def renew(self, trust: Trust) -> None:
        """Use these keys from now on."""
        self._trust = trust
        if self._registry is not None:
            self._registry.renew(trust.for_registry())
        for instance, (client, _) in self._at.items():
            client.renew(trust.for_address(instance.name))

    def close(self) -> None:
        """Close every connection. No callback is called any more. May be called twice."""
        if self._timer is not None:
            self._timer.cancel()
        while self._at:
            self._at.popitem()[1][0].close()
        if self._registry is not None:
            self._registry.close()

    def _client_at(self, instance: InstanceAddress) -> RegistryClient:
        now = self._now()
        if instance in self._at:
            client = self._at[instance][0]
        else:
            while len(self._at) >= MAX_CONNECTIONS:
                self._at.popitem(last=False)[1][0].close()

            def take(_: str | None, records: tuple[RankRecord, ...], number: int) -> None:
                self._on_found(instance, records, number)

            client = RegistryClient(
                instance.address,
                self._log,
                self._context,
                take,
                keys=self._trust.for_address(instance.name),
                on_obstacle=functools.partial(self._on_refused, instance),
            )
        self._at[instance] = (client, now)
        self._at.move_to_end(instance)
        if self._timer is None:
            self._timer = self._loop.call_later(UNUSED_S, self._close_unused)
        return client

    def _close_unused(self) -> None:
        self._timer = None
        now = self._now()
        while self._at:
            instance, (client, used_at) = next(iter(self._at.items()))
            if now < used_at + UNUSED_S:
                self._timer = self._loop.call_later(used_at + UNUSED_S - now, self._close_unused)
                return
            del self._at[instance]
            client.close()

    def _take_registry_obstacle(self, detail: str, is_short: bool) -> None:
        if detail != self._registry_obstacle:
            is_there = detail == CONNECTED
            if not is_there:
                self._log.warning("registry_unreachable", registry=self._endpoint, detail=detail)
            elif self._registry_obstacle:
                self._log.info("registry_reached", registry=self._endpoint)
            self._registry_obstacle = "" if is_there else detail
        self._on_refused(None, detail, is_short)

    def _take_named(self, name: str | None, records: tuple[RankRecord, ...], number: int) -> None:
        if name is not None:
            self._on_found(name, records, number)

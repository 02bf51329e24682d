"""A decode rank's lookups: by name in its registry or another directory, or at an address."""

import asyncio
import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

from kvflow.control.reading import ReadingContext
from kvflow.directory.client import CONNECTED, RegistryClient
from kvflow.directory.following import Subscription
from kvflow.directory.listings import Directory, Listing
from kvflow.errors import ConfigError, Shortage
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
    """Looks instances up, by name or at addresses. Lookups that cannot be sent are lost, and must be repeated.

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
        self._log = log
        self._context = context
        self._on_found = on_found
        self._on_refused = on_refused
        self._addresses = AddressLookups(log, context, on_found, on_refused, trust)
        self._registry: RegistryClient | None = None
        self._listed: ListedInstances | None = None
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

    def follow(
        self, directory: Directory, check_address: Callable[[str], object], on_doubted: Callable[[str], None]
    ) -> None:
        """Look names up in another directory, if there is no registry.

        Args:
            directory: Is watched until the rank is closed. While it is down, its last answer counts.
            check_address: Raises ConfigError if this rank may not connect to an address.
            on_doubted: Takes an instance that is not listed any more, or whose process is another one.
        """
        self._listed = ListedInstances(
            directory, self._log, self._addresses, check_address, self._on_refused, on_doubted
        )
        self._context.start_task(self._listed.follow_directory)

    def look_up(self, instance: InstanceRef, number: int) -> None:
        """Send a Lookup for an instance, once."""
        if isinstance(instance, InstanceAddress):
            self._addresses.look_up(instance, instance, number)
        elif self._registry is not None:
            self._registry.look_up(instance, number)
        elif self._listed is not None:
            self._listed.look_up(instance, number)

    def renew(self, trust: Trust) -> None:
        """Use these keys from now on."""
        if self._registry is not None:
            self._registry.renew(trust.for_registry())
        self._addresses.renew(trust)

    def close(self) -> None:
        """Close every connection. No callback is called any more. May be called twice."""
        self._addresses.close()
        if self._registry is not None:
            self._registry.close()

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


class AddressLookups:
    """Looks instances up at addresses of ranks. The arguments are as in `Directories`."""

    def __init__(
        self,
        log: BoundLogger,
        context: ReadingContext,
        on_found: OnFound,
        on_refused: OnLookUpRefused,
        trust: Trust,
    ) -> None:
        self._now = context.ports.now
        self._log = log
        self._context = context
        self._on_found = on_found
        self._on_refused = on_refused
        self._trust = trust
        self._loop = asyncio.get_running_loop()
        self._clients: OrderedDict[InstanceRef, _AddressClient] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None

    def look_up(self, instance: InstanceRef, at: InstanceAddress, number: int) -> None:
        """Send a Lookup for an instance to an address, once."""
        try:
            self._use_client(instance, at).look_up(at.name, number)
        except Shortage as error:  # the next lookup may get a socket
            self._context.anomalies.count("descriptor_shortage", detail=str(error))
            self._on_refused(instance, str(error), True)

    def renew(self, trust: Trust) -> None:
        """Use these keys from now on."""
        self._trust = trust
        for known in self._clients.values():
            known.client.renew(trust.for_address(known.at.name))

    def close(self) -> None:
        """Close every connection. No callback is called any more. May be called twice."""
        if self._timer is not None:
            self._timer.cancel()
        while self._clients:
            self._clients.popitem()[1].client.close()

    def _use_client(self, instance: InstanceRef, at: InstanceAddress) -> RegistryClient:
        now = self._now()
        known = self._clients.pop(instance, None)
        if known is not None and known.at != at:
            known.client.close()
            known = None
        while known is None and len(self._clients) >= MAX_CONNECTIONS:
            self._clients.popitem(last=False)[1].client.close()
        client = self._connect(instance, at) if known is None else known.client
        self._clients[instance] = _AddressClient(client, at, now)
        if self._timer is None:
            self._timer = self._loop.call_later(UNUSED_S, self._close_unused)
        return client

    def _connect(self, instance: InstanceRef, at: InstanceAddress) -> RegistryClient:
        def take(_: str | None, records: tuple[RankRecord, ...], number: int) -> None:
            self._on_found(instance, records, number)

        return RegistryClient(
            at.address,
            self._log,
            self._context,
            take,
            keys=self._trust.for_address(at.name),
            on_obstacle=functools.partial(self._on_refused, instance),
        )

    def _close_unused(self) -> None:
        self._timer = None
        now = self._now()
        while self._clients:
            instance, known = next(iter(self._clients.items()))
            if now < known.used_at + UNUSED_S:
                self._timer = self._loop.call_later(known.used_at + UNUSED_S - now, self._close_unused)
                return
            del self._clients[instance]
            known.client.close()


class _AddressClient(NamedTuple):
    """A connection to an address, and when it was used last."""

    client: RegistryClient
    at: InstanceAddress
    used_at: float


class ListedInstances:
    """Looks names up in a directory of another system, which says at which address to ask.

    Args:
        directory: Is watched.
        log: Reports a directory that is down.
        addresses: Asks there.
        check_address: As in `Directories.follow`.
        on_refused: As in `Directories`.
        on_doubted: As in `Directories.follow`.
    """

    def __init__(
        self,
        directory: Directory,
        log: BoundLogger,
        addresses: AddressLookups,
        check_address: Callable[[str], object],
        on_refused: OnLookUpRefused,
        on_doubted: Callable[[str], None],
    ) -> None:
        self._subscription = Subscription(directory, log, self._take_change)
        self.follow_directory = self._subscription.run
        self._addresses = addresses
        self._check_address = check_address
        self._on_refused = on_refused
        self._on_doubted = on_doubted
        self._missed: OrderedDict[str, int] = OrderedDict()

    def look_up(self, instance: str, number: int) -> None:
        """Ask the rank that is listed for an instance; if there is none, do so as soon as there is."""
        self._missed.pop(instance, None)
        listing = self._subscription.find(instance)
        if listing is None:
            self._missed[instance] = number
            if len(self._missed) > MAX_CONNECTIONS:
                self._missed.popitem(last=False)
            self._on_refused(instance, self._subscription.explain_absence(), False)
            return
        try:
            self._check_address(listing.endpoint)
        except ConfigError as error:
            self._on_refused(instance, str(error), False)
        else:
            self._addresses.look_up(instance, InstanceAddress(listing.endpoint, instance), number)

    def _take_change(self, instance: str, before: Listing | None, listing: Listing | None) -> None:
        is_same = (
            before is not None
            and listing is not None
            and (before.endpoint, before.identity) == (listing.endpoint, listing.identity)
        )
        if before is not None and not is_same:
            self._on_doubted(instance)
        if instance in self._missed:
            self.look_up(instance, self._missed[instance])

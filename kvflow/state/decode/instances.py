"""Prefill instances that a decode rank knows, and how rooms refer to them. Pure.

A room refers to an instance by its registry name, or by an address to look it up at. Several references may denote one
instance, with which there is one handshake. An address reveals the name of its instance only in its answer, and may
belong to another instance later.
"""

import itertools
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from kvflow.addresses import split_address
from kvflow.room import RoomId
from kvflow.state.decode.room import Room
from kvflow.state.events import ConnectedRank, InstanceAddress, InstanceFound, InstanceRef
from kvflow.state.tables import INSTANCE, InstanceSignal, InstanceState
from kvflow.wire.messages import Failure, Hello, PeerId, RankAddress, RankRecord

__all__ = ["MAX_REFS", "Declined", "Instance", "InstanceTable", "Probed", "Waiting", "host_of", "is_complete"]

MAX_REFS = 1_024
"""Maximum number of references that are remembered. Addresses at one host may not take more than is left."""


class Waiting(NamedTuple):
    """A room that waits for its instance, and the lookup whose answers are not older than its ticket."""

    room: Room
    number: int
    fails_at: float


class Declined(NamedTuple):
    """A declined room, and the ranks that have answered; dropped if the process that issued its ticket is gone."""

    generation: int
    failure: Failure
    issuer: PeerId | None
    answered: dict[PeerId, None]
    capability: str = ""


class Probed(NamedTuple):
    """The last probe of an address: the lookup of the newest room that waited then, and when it began."""

    number: int
    began_at: float


class Instance:
    """One prefill instance, or an address whose instance is not known yet.

    Attributes:
        number: Identifies the instance in timers.
        ref: Reference in the last request for it.
        refs: All references to it, each with the first rank of the directory's last answer.
        undialed: Those that have not been connected to yet in this handshake, in order.
        is_proved: Whether one of them has answered in this handshake, or was connected before.
        found_by: Reference whose lookup returned `records`.
        began_at: When the handshake with them began.
        waiting: Rooms that wait for the handshake, or for another directory answer, by generation.
        probed: Last probes of addresses that rooms wait on, see `kvflow.state.decode.issuers`.
        fails_at: Earliest deadline of the waiting rooms; None if none waits.
        failure: Why it is unreachable; None while rooms may wait for it.
        declined: Declined rooms that not all of its ranks have answered.
        num_declines: Retransmissions of declines since it was connected, or since all were answered.
        found: Last directory answer since the lookup began.
        refusal: Why a directory rejects the lookup, or why there is no connection; empty if unknown.
        is_short: The latter: this process lacks descriptors.
    """

    def __init__(self, number: int, ref: InstanceRef, name: str | None, now: float) -> None:
        self.number = number
        self.ref = ref
        self.refs: dict[InstanceRef, PeerId | None] = {}
        self.name = name
        self.state = InstanceState.LOOKING_UP
        self.attempt = -1
        self.records: tuple[RankRecord, ...] = ()
        self.undialed: OrderedDict[PeerId, RankRecord] = OrderedDict()
        self.is_proved = False
        self.found_by: InstanceRef = ref
        self.began_at = now
        self.hellos: dict[PeerId, Hello] = {}
        self.obstacles: dict[PeerId, str] = {}
        self.hello_pause_s: dict[PeerId, float] = {}
        self.ranks: dict[int, ConnectedRank] = {}
        self.waiting: dict[int, Waiting] = {}
        self.probed: dict[InstanceRef, Probed] = {}
        self.fails_at: float | None = None
        self.failure: Failure | None = None
        self.declined: OrderedDict[RoomId, Declined] = OrderedDict()
        self.num_declines = 0
        self.wanted_at = now
        self.refused_at = 0.0
        self.found: InstanceFound | None = None
        self.refusal = ""
        self.is_short = False

    def __str__(self) -> str:
        if isinstance(self.ref, InstanceAddress) and self.name is not None:
            return f"{self.name} at {self.ref.address}"
        return str(self.ref)

    def apply(self, signal: InstanceSignal) -> None:
        """Apply a signal to the state table."""
        self.state = INSTANCE[self.state, signal]

    @property
    def peers(self) -> list[PeerId]:
        """Incarnations of its ranks."""
        return [record.peer for record in self.records]

    @property
    def refs_waiting(self) -> list[InstanceRef]:
        """References that rooms wait on; if no room waits, the last one used, or else the newest."""
        waiting = list(dict.fromkeys(room.opened.instance for room, *_ in self.waiting.values()))
        return waiting or ([self.ref] if self.ref in self.refs else list(self.refs)[-1:])

    def is_meant_by(self, room: Room) -> bool:
        """Return whether a room refers to its ranks: to the issuer of a ticket, or to the rank found last."""
        meant = room.opened.issuer or self.refs.get(room.opened.instance)
        return meant in self.peers


class InstanceTable:
    """Instances by number, by reference, and by name."""

    def __init__(self) -> None:
        self._instances: dict[int, Instance] = {}
        self._by_ref: dict[InstanceRef, Instance] = {}
        self._by_name: dict[str, Instance] = {}
        self._numbers = itertools.count(1)
        self._at_host: dict[str, int] = {}

    def __iter__(self) -> Iterator[Instance]:
        return iter(self._instances.values())

    def make_room(self, new: InstanceRef) -> bool:
        """Drop the oldest reference that no room waits on if there are too many; return whether one can be added."""
        if self._has_place(new):
            return True
        for ref, instance in list(self._by_ref.items()):
            if all(room.opened.instance != ref for room, *_ in instance.waiting.values()):
                self._forget(ref)
                if self._has_place(new):
                    return True
        return False

    def _has_place(self, new: InstanceRef) -> bool:
        free = MAX_REFS - len(self._by_ref)
        return self._at_host.get(host_of(new), 0) < free if isinstance(new, InstanceAddress) else free > 0

    def _forget(self, ref: InstanceRef) -> None:
        del self._by_ref.pop(ref).refs[ref]
        self._count(ref, -1)

    def _count(self, ref: InstanceRef, change: int) -> None:
        if isinstance(ref, InstanceAddress):
            number = self._at_host.pop(host_of(ref), 0) + change
            if number:
                self._at_host[host_of(ref)] = number

    def numbered(self, number: int) -> Instance:
        """Return an instance by its number."""
        return self._instances[number]

    def at(self, ref: InstanceRef) -> Instance | None:
        """Find an instance by reference; None if the reference was not added."""
        return self._by_ref.get(ref)

    def named(self, name: str) -> Instance | None:
        """Find an instance by its name."""
        return self._by_name.get(name)

    def find_by_peer(self, peer: PeerId) -> Instance | None:
        """Find the instance of a rank."""
        return self._by_name.get(peer.rank.instance)

    def add(self, ref: InstanceRef, now: float) -> Instance:
        """Add a reference, and create its instance unless an instance of that name exists."""
        name = ref.name if isinstance(ref, InstanceAddress) else ref
        instance = self._by_name.get(name) if name is not None else None
        return self._point(ref, instance or self._make(ref, name, now))

    def name(self, ref: InstanceRef, name: str, now: float) -> Instance:
        """Set the instance name of a reference. Return the instance, which may differ from the one before."""
        before, instance = self._by_ref[ref], self._by_name.get(name)
        if instance is None and before.name is None:
            before.name = name
            self._by_name[name] = before
            return before
        instance = instance or self._make(ref, name, now)
        if instance is before:
            return instance
        del before.refs[ref]
        instance.ref, instance.wanted_at = ref, now
        return self._point(ref, instance)

    def remove(self, instance: Instance) -> None:
        """Remove an instance and all references to it."""
        del self._instances[instance.number]
        for ref in list(instance.refs):
            self._forget(ref)
        if instance.name is not None:
            del self._by_name[instance.name]

    def _make(self, ref: InstanceRef, name: str | None, now: float) -> Instance:
        number = next(self._numbers)
        instance = self._instances[number] = Instance(number, ref, name, now)
        if name is not None:
            self._by_name[name] = instance
        return instance

    def _point(self, ref: InstanceRef, instance: Instance) -> Instance:
        if ref not in self._by_ref:
            self._count(ref, 1)
        instance.refs[ref] = None
        self._by_ref[ref] = instance
        return instance


def host_of(ref: InstanceAddress) -> str:
    """Return the host of an address."""
    return split_address("address", ref.address)[0]


def is_complete(records: tuple[RankAddress, ...]) -> bool:
    """Return whether all ranks of an instance are present, in order; `num_ranks`, not trusted, sizes nothing."""
    is_whole = bool(records) and len(records) == records[0].num_ranks
    return is_whole and all(
        record.peer.rank == (records[0].peer.rank.instance, rank) for rank, record in enumerate(records)
    )

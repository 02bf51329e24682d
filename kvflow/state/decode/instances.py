"""Prefill instances that a decode rank knows, and how rooms refer to them. Pure.

A room refers to an instance by its name in the registry, or by an address at which it is looked up. Several references
may be to one instance: its ranks are the same, and there is one handshake with them. An address tells the name of its
instance only by its answer, and may be that of another instance later.
"""

import itertools
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from kvflow.room import RoomId
from kvflow.state.decode.room import Room
from kvflow.state.events import ConnectedRank, InstanceAt, InstanceFound, InstanceRef
from kvflow.state.tables import INSTANCE, InstanceSignal, InstanceState
from kvflow.wire.messages import Failure, Hello, PeerId, RankRecord

__all__ = ["MAX_LOOKUPS", "MAX_REFS", "Declined", "Instance", "InstanceTable", "Waiting"]

MAX_REFS = 1_024
"""References that are remembered."""

MAX_LOOKUPS = 64
"""Addresses that have not said which instance is there, or whose instance is not connected: each takes a socket, and
whoever sends a request may name another one."""


class Waiting(NamedTuple):
    """A room that waits for its instance.

    Attributes:
        number: An answer of the directory with a lower number may be older than the room's ticket.
        fails_at: When it has waited long enough.
    """

    room: Room
    number: int
    fails_at: float


class Declined(NamedTuple):
    """A room that was declined, and the ranks that know it.

    Attributes:
        issuer: Of its ticket: no other incarnation is told.
        capability: That it was asked for with.
    """

    generation: int
    failure: Failure
    issuer: PeerId | None
    answered: dict[PeerId, None]
    capability: str = ""


class Instance:
    """One prefill instance, or an address that has not said yet which one it is.

    Attributes:
        number: Names it, in timers.
        ref: How the last room that wanted it referred to it.
        refs: References to it; with the first rank of the directory's last answer to each.
        name: None if it is not known.
        records: Its ranks, as the directory knows them.
        found_by: The reference that they were found by.
        began_at: When they were.
        hellos: Those that are not answered.
        ranks: Those that have answered, by engine rank.
        waiting: Rooms that wait for the handshake, or for another answer of the directory, by generation.
        fails_at: When rooms have waited long enough; None if none waits.
        failure: Why it cannot be reached; None while rooms may wait for it.
        declined: Rooms that it has yet to be told of, or to answer.
        num_declines: How often they were retransmitted since it was connected, or since all was answered.
        wanted_at: When it was asked for last.
        found: The directory's last answer since the handshake began.
        refusal: Why a directory will not be asked, or does not answer; empty if nothing is known.
    """

    def __init__(self, number: int, ref: InstanceRef, name: str | None, now: float) -> None:
        self.number = number
        self.ref = ref
        self.refs: dict[InstanceRef, PeerId | None] = {}
        self.name = name
        self.state = InstanceState.LOOKING_UP
        self.attempt = -1
        self.records: tuple[RankRecord, ...] = ()
        self.found_by: InstanceRef = ref
        self.began_at = now
        self.hellos: dict[PeerId, Hello] = {}
        self.hello_pause_s: dict[PeerId, float] = {}
        self.ranks: dict[int, ConnectedRank] = {}
        self.waiting: dict[int, Waiting] = {}
        self.fails_at: float | None = None
        self.failure: Failure | None = None
        self.declined: OrderedDict[RoomId, Declined] = OrderedDict()
        self.num_declines = 0
        self.wanted_at = now
        self.refused_at = 0.0
        self.found: InstanceFound | None = None
        self.refusal = ""

    def __str__(self) -> str:
        if isinstance(self.ref, InstanceAt) and self.name is not None:
            return f"{self.name} at {self.ref.address}"
        return str(self.ref)

    def apply(self, signal: InstanceSignal) -> None:
        """Change the state as the tables say."""
        self.state = INSTANCE[self.state, signal]

    @property
    def peers(self) -> list[PeerId]:
        """Its ranks."""
        return [record.peer for record in self.records]

    @property
    def refs_waiting(self) -> list[InstanceRef]:
        """References by which rooms wait; if none does, the last one that was used, or that is left."""
        waiting = list(dict.fromkeys(room.opened.instance for room, *_ in self.waiting.values()))
        return waiting or ([self.ref] if self.ref in self.refs else list(self.refs)[-1:])

    def is_meant_by(self, room: Room) -> bool:
        """Return whether its ranks are those that a room refers to: the issuer of its ticket, or who was found last."""
        meant = room.opened.issuer or self.refs.get(room.opened.instance)
        return meant in self.peers


class InstanceTable:
    """Instances by number, by reference, and by name."""

    def __init__(self) -> None:
        self._instances: dict[int, Instance] = {}
        self._by_ref: dict[InstanceRef, Instance] = {}
        self._by_name: dict[str, Instance] = {}
        self._numbers = itertools.count(1)

    def __iter__(self) -> Iterator[Instance]:
        return iter(self._instances.values())

    def make_room(self, new: InstanceRef) -> bool:
        """Forget the oldest reference by which no room waits, if there are many; say whether another can be added."""
        if isinstance(new, InstanceAt):
            lookups = [ref for ref, instance in self._by_ref.items() if _is_lookup(ref, instance)]
            if len(lookups) >= MAX_LOOKUPS:
                return self._forget_one_of(lookups)
        return len(self._by_ref) < MAX_REFS or self._forget_one_of(list(self._by_ref))

    def _forget_one_of(self, refs: list[InstanceRef]) -> bool:
        for ref in refs:
            instance = self._by_ref[ref]
            if all(room.opened.instance != ref for room, *_ in instance.waiting.values()):
                del self._by_ref[ref]
                del instance.refs[ref]
                return True
        return False

    def numbered(self, number: int) -> Instance:
        """Return an instance that is known."""
        return self._instances[number]

    def at(self, ref: InstanceRef) -> Instance | None:
        """Find an instance by a reference that was added; None if it was not."""
        return self._by_ref.get(ref)

    def named(self, name: str) -> Instance | None:
        """Find an instance by its name."""
        return self._by_name.get(name)

    def of(self, peer: PeerId) -> Instance | None:
        """Find the instance of a rank."""
        return self._by_name.get(peer.rank.instance)

    def add(self, ref: InstanceRef, now: float) -> Instance:
        """Add a reference, and an instance for it unless the one of that name is known."""
        name = ref.name if isinstance(ref, InstanceAt) else ref
        instance = self._by_name.get(name) if name is not None else None
        return self._point(ref, instance or self._make(ref, name, now))

    def name(self, ref: InstanceRef, name: str, now: float) -> Instance:
        """Note which instance a reference is to, and give it; it may be another one than before."""
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
        """Forget an instance, and how it was referred to."""
        del self._instances[instance.number]
        for ref in instance.refs:
            del self._by_ref[ref]
        if instance.name is not None:
            del self._by_name[instance.name]

    def _make(self, ref: InstanceRef, name: str | None, now: float) -> Instance:
        number = next(self._numbers)
        instance = self._instances[number] = Instance(number, ref, name, now)
        if name is not None:
            self._by_name[name] = instance
        return instance

    def _point(self, ref: InstanceRef, instance: Instance) -> Instance:
        instance.refs[ref] = None
        self._by_ref[ref] = instance
        return instance


def _is_lookup(ref: InstanceRef, instance: Instance) -> bool:
    is_over = instance.state is InstanceState.CONNECTED and instance.refs[ref] is not None
    return isinstance(ref, InstanceAt) and not is_over

"""The registry's table: registered ranks with their leases, and waiting lookups. Pure.

Two processes with the same rank name have different incarnations. A new incarnation replaces the previous one, as after
a restart. If the previous one then registers two more times, it has not ended, and the name is in conflict: it gets its
place back, and the new one is refused for as long as the other renews its lease.

The last Register of a killed process may arrive after the first one of its successor. It does not prove that its sender
is alive, so a Register is recorded only if the reply could be sent, which fails when the connection is gone. The
registry may learn that only later, so registering once more is not enough to get a place back.
"""

import itertools
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec
from msgspec import structs

from kvflow.gate.shares import DirectoryShares
from kvflow.state.decode.instances import is_complete
from kvflow.state.timers import Timers
from kvflow.wire.messages import (
    MAX_LISTED,
    MAX_RANKS_TOLD,
    Message,
    PeerId,
    Registered,
    RegistrationConflict,
    SealedRecord,
    SealedRecords,
)

__all__ = ["Answer", "Change", "RegistryTable", "is_complete"]

NO_LAYOUT: Final = msgspec.Raw(b"\xc0")
"""Stands for the layout of a record in a list of all; only a person reads it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A message to send over a connection; `then` is sent only if this one could be sent."""

    connection: bytes
    message: Message
    then: "Answer | None" = None


class Change(NamedTuple):
    """A rank has registered, has left, or has been replaced: who held its place, and who does now.

    `endpoint` is the address of the latter, or else of the former.
    """

    before: PeerId | None
    after: PeerId | None
    endpoint: str


@dataclass(frozen=True, slots=True)
class _Lease:
    peer: PeerId


@dataclass(frozen=True, slots=True)
class _LookupTimeout:
    instance: str
    connection: bytes


@dataclass(slots=True)
class _Claim:
    """An incarnation that registers a rank: its latest record, and the connection of its latest Register."""

    record: SealedRecord
    connection: bytes

    @property
    def peer(self) -> PeerId:
        return self.record.peer


@dataclass(slots=True)
class _RankClaims:
    """The incarnations that claim to be one rank.

    Attributes:
        holder: The incarnation that lookups return.
        replaced: The previous holder, while its lease lasts. It counts as ended unless it registers two more times.
        was_heard_again: Whether `replaced` has registered once more.
        refused: A conflicting incarnation that is refused while the holder lives. `replaced` is then None.
    """

    holder: _Claim
    replaced: _Claim | None = None
    was_heard_again: bool = False
    refused: _Claim | None = None


@dataclass(slots=True)
class _Instance:
    """The ranks of an instance, and the lookups that wait for it, by connection, with the highest number of each."""

    places: dict[int, _RankClaims] = field(default_factory=dict)
    waiting: dict[bytes, int] = field(default_factory=dict)


class RegistryTable:
    """Leased ranks by instance, and lookups that wait until their instance is complete or they time out.

    Its owner calls `expire` when `timers` say, and clears `changes`.
    """

    def __init__(self) -> None:
        self.timers: Timers[_Lease | _LookupTimeout] = Timers()
        self.changes: list[Change] = []
        self.shares = DirectoryShares.new()
        self._instances: dict[str, _Instance] = {}

    @property
    def num_ranks(self) -> int:
        """Number of registered ranks."""
        return self.shares.ranks.total

    @property
    def num_waiting(self) -> int:
        """Number of waiting lookups."""
        return self.shares.lookups.total

    def has_place(self, record: SealedRecord, principal: str | None = None) -> bool:
        """Return whether a rank has a place, or the shares of its sender's principal leave room for one.

        Without keys there is no principal, and the share is that of the instance.
        """
        rank = record.peer.rank
        taker = principal or rank.instance
        instance = self._instances.get(rank.instance)
        place = None if instance is None else instance.places.get(rank.engine_rank)
        if place is None and instance is not None and len(instance.places) >= MAX_RANKS_TOLD:
            return False
        has_bytes = self.shares.record_bytes.has_place(taker, record.num_bytes, record.peer)
        return has_bytes and self.shares.ranks.has_place(taker, 1, rank)

    def answer_to(self, record: SealedRecord, connection: bytes) -> Answer:
        """Return the reply to a Register, without recording it. Call `register` if the reply could be sent."""
        peer = record.peer
        instance = self._instances.get(peer.rank.instance)
        place = None if instance is None else instance.places.get(peer.rank.engine_rank)
        if place is None or place.refused is None or peer == place.holder.peer:
            return Answer(connection, Registered(peer=peer))
        return _conflict(place.holder, _Claim(record, connection))

    def register(
        self, record: SealedRecord, lease_s: float, connection: bytes, now: float, principal: str | None = None
    ) -> list[Answer]:
        """Record a rank, or renew its lease. Call it after the reply from `answer_to` was sent.

        The principal is as in `has_place`. Return the answers to lookups of its instance, and to both incarnations if
        another one is refused.
        """
        peer = record.peer
        instance = self._instances.setdefault(peer.rank.instance, _Instance())
        place = instance.places.get(peer.rank.engine_rank)
        claim, taker = _Claim(record, connection), principal or peer.rank.instance
        self.timers.set(_Lease(peer), now + lease_s)
        answers = []
        if place is None:
            self._add(instance, claim, taker)
        else:
            self.shares.record_bytes.hold(peer, taker, record.num_bytes)
            holder = place.holder.peer
            self._claim(place, claim)
            self._note_holder(holder, place)
            if place.refused is not None and place.refused is not claim:
                answers.append(_conflict(place.holder, place.refused))
        records = _complete_records(instance) if instance.waiting else None
        if records is not None:
            answers += [self._answer(peer.rank.instance, waiting, records) for waiting in list(instance.waiting)]
        return answers

    def unregister(self, peer: PeerId) -> None:
        """Remove one incarnation of a rank. Others stay."""
        if self.timers.clear(_Lease(peer)):
            self._forget(peer)

    def hold(self, record: SealedRecord) -> None:
        """Record the rank that hosts this table, without a lease. No other process may register as this rank."""
        instance = record.peer.rank.instance
        self._add(self._instances.setdefault(instance, _Instance()), _Claim(record, b""), instance)

    def let_go(self, peer: PeerId) -> None:
        """Remove the rank recorded by `hold`, if there is one."""
        instance = self._instances.get(peer.rank.instance)
        if instance is not None and peer.rank.engine_rank in instance.places:
            self._forget(peer)

    def list_ranks(self) -> tuple[SealedRecord, ...]:
        """Return `MAX_LISTED` records of all instances at most, without their layouts."""
        places = (place for entry in self._instances.values() for place in entry.places.values())
        told = itertools.islice(places, MAX_LISTED)
        return tuple(structs.replace(place.holder.record, layout=NO_LAYOUT) for place in told)

    def may_wait(self, instance: str, connection: bytes, taker: str = "") -> bool:
        """Return whether a lookup is already waiting, or its sender's share permits it to wait.

        The taker is the sender's principal, or without keys its host; empty if only the connection is known.
        """
        entry = self._instances.get(instance)
        is_waiting = entry is not None and connection in entry.waiting
        return is_waiting or self.shares.lookups.has_place(taker or connection.hex(), 1)

    def lookup(
        self,
        instance: str,
        timeout_s: float,
        connection: bytes,
        now: float,
        number: int = 0,
        taker: str = "",
    ) -> list[Answer]:
        """Answer a lookup, or let it wait until the instance is complete or the lookup times out.

        A lookup that may not wait is answered immediately, with the ranks known. The answer repeats the number.
        """
        entry = self._instances.get(instance) or _Instance()
        if not self.may_wait(instance, connection, taker):
            return [Answer(connection, SealedRecords(instance=instance, records=_records(entry), number=number))]
        if connection not in entry.waiting:
            self.shares.lookups.hold((instance, connection), taker or connection.hex(), 1)
        self._instances[instance] = entry
        entry.waiting[connection] = max(number, entry.waiting.get(connection, 0))
        timeout = _LookupTimeout(instance, connection)
        self.timers.set_once(timeout, now + timeout_s)  # a repeated lookup keeps its deadline
        records = _complete_records(entry)
        return [] if records is None else [self._answer(instance, connection, records)]

    def expire(self, now: float) -> list[Answer]:
        """Remove ranks whose lease has expired, and answer lookups that have timed out with the ranks known."""
        answers = []
        while (key := self.timers.pop_due(now)) is not None:
            match key:
                case _Lease(peer):
                    self._forget(peer)
                case _LookupTimeout(instance, connection):
                    answers.append(self._answer(instance, connection, _records(self._instances[instance])))
        return answers

    def _add(self, instance: _Instance, claim: _Claim, taker: str) -> None:
        """Create a place for its first claim, which counts towards a share."""
        instance.places[claim.peer.rank.engine_rank] = _RankClaims(claim)
        self.changes.append(Change(None, claim.peer, claim.record.endpoint))
        self.shares.ranks.hold(claim.peer.rank, taker, 1)
        self.shares.record_bytes.hold(claim.peer, taker, claim.record.num_bytes)

    def _claim(self, place: _RankClaims, claim: _Claim) -> None:
        """Treat a claim to an occupied place as a renewal, a restart or a conflict."""
        peer = claim.peer
        if peer == place.holder.peer:
            place.holder = claim
        elif place.replaced is not None and peer == place.replaced.peer and not place.was_heard_again:
            place.replaced, place.was_heard_again = claim, True
        elif place.replaced is not None and peer == place.replaced.peer:
            place.holder, place.replaced, place.refused = claim, None, place.holder
        elif place.refused is not None:
            if peer != place.refused.peer:
                self._drop_lease(place.refused)
            place.refused = claim
        else:
            self._drop_lease(place.replaced)
            place.holder, place.replaced, place.was_heard_again = claim, place.holder, False

    def _note_holder(self, before: PeerId, place: _RankClaims) -> None:
        if place.holder.peer != before:
            self.changes.append(Change(before, place.holder.peer, place.holder.record.endpoint))

    def _drop_lease(self, claim: _Claim | None) -> None:
        if claim is not None:
            self.timers.clear(_Lease(claim.peer))
            self.shares.record_bytes.release(claim.peer)

    def _forget(self, peer: PeerId) -> None:
        """Remove an incarnation from its place. If it was the holder, the refused incarnation takes the place."""
        instance = self._instances[peer.rank.instance]
        place = instance.places[peer.rank.engine_rank]
        self.shares.record_bytes.release(peer)
        if place.replaced is not None and place.replaced.peer == peer:
            place.replaced = None
        elif place.refused is not None and place.refused.peer == peer:
            place.refused = None
        elif place.refused is not None:
            place.holder, place.refused = place.refused, None
            self._note_holder(peer, place)
        else:
            self.changes.append(Change(peer, None, place.holder.record.endpoint))
            self._drop_lease(place.replaced)
            del instance.places[peer.rank.engine_rank]
            self.shares.ranks.release(peer.rank)
            self._tidy(peer.rank.instance)

    def _tidy(self, instance: str) -> None:
        entry = self._instances[instance]
        if not entry.places and not entry.waiting:
            del self._instances[instance]

    def _answer(self, instance: str, connection: bytes, records: tuple[SealedRecord, ...]) -> Answer:
        entry = self._instances[instance]
        self.timers.clear(_LookupTimeout(instance, connection))
        number = entry.waiting.pop(connection)
        self.shares.lookups.release((instance, connection))
        self._tidy(instance)
        return Answer(connection, SealedRecords(instance=instance, records=records, number=number))


def _conflict(holder: _Claim, refused: _Claim) -> Answer:
    """Return a RegistrationConflict for both incarnations; the holder's is sent only if the refused one's could be."""
    told = RegistrationConflict(
        peer=holder.peer, other=refused.peer, other_endpoint=refused.record.endpoint, refused=False
    )
    return Answer(
        refused.connection,
        RegistrationConflict(peer=refused.peer, other=holder.peer, other_endpoint=holder.record.endpoint, refused=True),
        then=Answer(holder.connection, told),
    )


def _records(entry: _Instance) -> tuple[SealedRecord, ...]:
    return tuple(entry.places[rank].holder.record for rank in sorted(entry.places))


def _complete_records(entry: _Instance) -> tuple[SealedRecord, ...] | None:
    """Return the ranks of an instance; None if it is incomplete. Checks each rank only if their number matches."""
    first = entry.places.get(0)
    if first is None or len(entry.places) != first.holder.record.num_ranks:
        return None
    records = _records(entry)
    return records if is_complete(records) else None

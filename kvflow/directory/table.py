"""Who is registered, for how long, and who waits for whom. Pure.

Two processes with the same rank name are told apart by their incarnations. A new one replaces the one before it, which
is what a restart looks like. If the one before it then registers twice again, it has not ended: the name is in
conflict. It gets its place back, and the newcomer is refused for as long as the other one renews its lease.

The last registration of a process that was killed may arrive after the first of its successor. It says nothing about
who is alive, so a process that cannot be answered is not noted: its connection is gone. The registry may not know that
yet, which is why registering once is not enough.
"""

from dataclasses import dataclass, field

from kvflow.state.shares import Shares
from kvflow.state.timers import Timers
from kvflow.wire.messages import (
    MAX_RANKS_TOLD,
    Message,
    PeerId,
    Registered,
    RegistrationConflict,
    SealedRecord,
    SealedRecords,
)

__all__ = ["Answer", "RegistryTable", "is_complete"]

MAX_RANKS = 65_536
"""Ranks in a table. An instance has at most as many as an answer can name, a principal as are left for all others."""

MAX_BYTES = 256 * 2**20
"""Bytes of their records. One principal has at most as many as are left for all others."""

MAX_WAITING = 65_536
"""Lookups that wait. One principal has at most as many as are left for all others; more are answered at once."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Send `message` over `connection`.

    Attributes:
        then: To be sent as well, if this could be sent.
    """

    connection: bytes
    message: Message
    then: "Answer | None" = None


@dataclass(frozen=True, slots=True)
class _Lease:
    peer: PeerId


@dataclass(frozen=True, slots=True)
class _Wait:
    instance: str
    connection: bytes


@dataclass(slots=True)
class _Claim:
    """One incarnation that registers a rank.

    Attributes:
        connection: Over which it last did.
        taker: To whose share it counts.
    """

    record: SealedRecord
    connection: bytes
    taker: str

    @property
    def peer(self) -> PeerId:
        return self.record.peer


@dataclass(slots=True)
class _Place:
    """Who claims to be one rank.

    Attributes:
        holder: To whom decode ranks are sent.
        replaced: Had the place before the holder, and its lease goes on; it has ended unless it registers again, twice.
        was_heard_again: `replaced` has registered once more.
        refused: Registers as well, while the holder lives. There is no `replaced` then.
        taker: To whose share the place counts: of whoever was the first to claim it.
    """

    holder: _Claim
    taker: str
    replaced: _Claim | None = None
    was_heard_again: bool = False
    refused: _Claim | None = None

    @property
    def claims(self) -> list[_Claim]:
        return [claim for claim in (self.holder, self.replaced, self.refused) if claim is not None]


@dataclass(slots=True)
class _Waiting:
    """A lookup that waits.

    Attributes:
        number: The highest that it was asked with.
        taker: To whose share it counts.
    """

    number: int
    taker: str


@dataclass(slots=True)
class _Instance:
    places: dict[int, _Place] = field(default_factory=dict)
    waiting: dict[bytes, _Waiting] = field(default_factory=dict)


class RegistryTable:
    """Ranks by instance, each under a lease; lookups wait until their instance is complete or their time is up.

    Attributes:
        timers: When `expire` is to be called.
        num_ranks: Ranks that are registered.
        num_waiting: Lookups that wait.
    """

    def __init__(self) -> None:
        self.timers: Timers[_Lease | _Wait] = Timers()
        self.num_ranks = 0
        self.num_waiting = 0
        self._instances: dict[str, _Instance] = {}
        self._ranks = Shares(MAX_RANKS)
        self._bytes = Shares(MAX_BYTES)
        self._waits = Shares(MAX_WAITING)

    def has_place(self, record: SealedRecord, principal: str | None = None) -> bool:
        """Return whether a rank that registers has a place, or can be given one.

        Args:
            record: Of the rank.
            principal: Of who registers it; its instance stands for it if None.
        """
        rank = record.peer.rank
        taker = principal or rank.instance
        instance = self._instances.get(rank.instance)
        place = None if instance is None else instance.places.get(rank.engine_rank)
        kept = 0
        if place is not None:
            kept = sum(claim.record.num_bytes for claim in place.claims if claim.peer == record.peer)
        elif instance is not None and len(instance.places) >= MAX_RANKS_TOLD:
            return False
        has_bytes = self._bytes.has_place(taker, max(record.num_bytes - kept, 0))
        return has_bytes and self._ranks.has_place(taker, int(place is None))

    def answer_to(self, record: SealedRecord, connection: bytes) -> Answer:
        """Return what a rank that registers is to be told. Nothing is noted yet: `register` it if it could be told."""
        peer = record.peer
        instance = self._instances.get(peer.rank.instance)
        place = None if instance is None else instance.places.get(peer.rank.engine_rank)
        if place is None or place.refused is None or peer == place.holder.peer:
            return Answer(connection, Registered(peer=peer))
        return _conflict(place.holder, _Claim(record, connection, ""))

    def register(
        self, record: SealedRecord, lease_s: float, connection: bytes, now: float, principal: str | None = None
    ) -> list[Answer]:
        """Note a rank, or renew its lease, after it was told what `answer_to` says.

        Args:
            record: Of the rank.
            lease_s: Until it is forgotten.
            connection: Over which it registers.
            now: The time.
            principal: As in `has_place`.

        Returns:
            What to say to those who waited for its instance, and to both sides if another one is refused its place.
        """
        peer = record.peer
        instance = self._instances.setdefault(peer.rank.instance, _Instance())
        place = instance.places.get(peer.rank.engine_rank)
        claim = _Claim(record, connection, principal or peer.rank.instance)
        self.timers.set(_Lease(peer), now + lease_s)
        answers = []
        if place is None:
            self._add(instance, claim)
        else:
            self._weigh(place, -1)
            self._claim(place, claim)
            self._weigh(place, 1)
            if place.refused is not None and place.refused is not claim:
                answers.append(_conflict(place.holder, place.refused))
        return answers + self._answer_if_complete(peer.rank.instance, instance)

    def unregister(self, peer: PeerId) -> None:
        """Forget an incarnation of a rank; any other one stays."""
        if self.timers.clear(_Lease(peer)):
            self._forget(peer)

    def hold(self, record: SealedRecord) -> None:
        """Note a rank without a lease: the one that answers. Nobody else may be registered as that rank."""
        instance = record.peer.rank.instance
        self._add(self._instances.setdefault(instance, _Instance()), _Claim(record, b"", instance))

    def let_go(self, peer: PeerId) -> None:
        """Forget the rank that was held, if there is one."""
        instance = self._instances.get(peer.rank.instance)
        if instance is not None and peer.rank.engine_rank in instance.places:
            self._forget(peer)

    def may_wait(self, instance: str, connection: bytes, principal: str | None = None) -> bool:
        """Return whether a lookup waits, or can: who asks has not used up its share.

        Args:
            instance: That is looked up.
            connection: Over which it is.
            principal: Of who asks; the connection stands for it if None.
        """
        entry = self._instances.get(instance)
        is_waiting = entry is not None and connection in entry.waiting
        return is_waiting or self._waits.has_place(principal or connection.hex(), 1)

    def lookup(
        self,
        instance: str,
        timeout_s: float,
        connection: bytes,
        now: float,
        number: int = 0,
        principal: str | None = None,
    ) -> list[Answer]:
        """Answer now if the instance is complete, or it may not wait; else when it is, or when the time is up.

        Args:
            instance: That is looked up.
            timeout_s: How long it may wait.
            connection: Over which it is.
            now: The time.
            number: To be repeated.
            principal: As in `may_wait`.
        """
        entry = self._instances.get(instance) or _Instance()
        if not self.may_wait(instance, connection, principal):
            return [Answer(connection, SealedRecords(instance=instance, records=_records(entry), number=number))]
        if connection not in entry.waiting:
            entry.waiting[connection] = _Waiting(number, principal or connection.hex())
            self._waits.add(entry.waiting[connection].taker, 1)
            self.num_waiting += 1
        self._instances[instance] = entry
        waiting = entry.waiting[connection]
        waiting.number = max(number, waiting.number)
        self.timers.set_once(_Wait(instance, connection), now + timeout_s)  # a repeated question waits no longer
        records = _complete_records(entry)
        return [] if records is None else [self._answer(instance, connection, records)]

    def expire(self, now: float) -> list[Answer]:
        """Forget ranks whose lease is over, and answer lookups whose time is up with what there is."""
        answers = []
        while (key := self.timers.pop_due(now)) is not None:
            match key:
                case _Lease(peer):
                    self._forget(peer)
                case _Wait(instance, connection):
                    answers.append(self._answer(instance, connection, _records(self._instances[instance])))
        return answers

    def _add(self, instance: _Instance, claim: _Claim) -> None:
        """Give a place to the first who claims it."""
        place = instance.places[claim.peer.rank.engine_rank] = _Place(claim, claim.taker)
        self.num_ranks += 1
        self._ranks.add(place.taker, 1)
        self._weigh(place, 1)

    def _weigh(self, place: _Place, sign: int) -> None:
        """Count the bytes of a place, or take them back."""
        for claim in place.claims:
            self._bytes.add(claim.taker, sign * claim.record.num_bytes)

    def _claim(self, place: _Place, claim: _Claim) -> None:
        """Decide whether a claim to a taken place is a renewal, a restart or a conflict."""
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

    def _drop_lease(self, claim: _Claim | None) -> None:
        if claim is not None:
            self.timers.clear(_Lease(claim.peer))

    def _forget(self, peer: PeerId) -> None:
        """Take an incarnation whose lease has ended out of its place, which goes to whoever was refused it."""
        instance = self._instances[peer.rank.instance]
        place = instance.places[peer.rank.engine_rank]
        self._weigh(place, -1)
        if place.replaced is not None and place.replaced.peer == peer:
            place.replaced = None
        elif place.refused is not None and place.refused.peer == peer:
            place.refused = None
        elif place.refused is not None:
            place.holder, place.refused = place.refused, None
        else:
            self._drop_lease(place.replaced)
            del instance.places[peer.rank.engine_rank]
            self.num_ranks -= 1
            self._ranks.add(place.taker, -1)
            self._tidy(peer.rank.instance)
            return
        self._weigh(place, 1)

    def _tidy(self, instance: str) -> None:
        entry = self._instances[instance]
        if not entry.places and not entry.waiting:
            del self._instances[instance]

    def _answer_if_complete(self, instance: str, entry: _Instance) -> list[Answer]:
        records = _complete_records(entry) if entry.waiting else None
        if records is None:
            return []
        return [self._answer(instance, connection, records) for connection in list(entry.waiting)]

    def _answer(self, instance: str, connection: bytes, records: tuple[SealedRecord, ...]) -> Answer:
        entry = self._instances[instance]
        self.timers.clear(_Wait(instance, connection))
        waiting = entry.waiting.pop(connection)
        self.num_waiting -= 1
        self._waits.add(waiting.taker, -1)
        self._tidy(instance)
        return Answer(connection, SealedRecords(instance=instance, records=records, number=waiting.number))


def _conflict(holder: _Claim, refused: _Claim) -> Answer:
    """Tell both sides that they claim to be the same rank; the holder only if the other one is there to be refused."""
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
    """Return the ranks of a complete instance. Looks at all of them only if their number is right."""
    first = entry.places.get(0)
    if first is None or len(entry.places) != first.holder.record.num_ranks:
        return None
    records = _records(entry)
    return records if is_complete(records) else None


def is_complete(records: tuple[SealedRecord, ...]) -> bool:
    """Every rank of an instance is there, in order; `num_ranks` is a claim, so nothing of that size is made."""
    is_whole = bool(records) and len(records) == records[0].num_ranks
    return is_whole and all(record.peer.rank.engine_rank == rank for rank, record in enumerate(records))

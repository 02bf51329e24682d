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
from kvflow.wire.messages import MAX_RANKS_TOLD, Message, PeerId, RankRecord, Records, Registered, RegistrationConflict

__all__ = ["Answer", "RegistryTable", "is_complete"]

MAX_RANKS = 65_536
"""Ranks in a table. One instance has at most as many as an answer can name, and as are left for all others."""

MAX_WAITING = 65_536
"""Lookups that wait. One connection has at most as many as are left for all others; more are answered at once."""


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
    """

    record: RankRecord
    connection: bytes

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
    """

    holder: _Claim
    replaced: _Claim | None = None
    was_heard_again: bool = False
    refused: _Claim | None = None


@dataclass(slots=True)
class _Instance:
    places: dict[int, _Place] = field(default_factory=dict)
    waiting: dict[bytes, int] = field(default_factory=dict)


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
        self._waits = Shares(MAX_WAITING)

    def has_place(self, peer: PeerId) -> bool:
        """Say whether a rank has a place, or can be given one."""
        instance = self._instances.get(peer.rank.instance)
        if instance is not None and peer.rank.engine_rank in instance.places:
            return True
        num_places = 0 if instance is None else len(instance.places)
        return num_places < MAX_RANKS_TOLD and self._ranks.has_place(peer.rank.instance, 1)

    def answer_to(self, record: RankRecord, connection: bytes) -> Answer:
        """Say what a rank that registers is to be told. Nothing is noted yet: `register` it if it could be told."""
        peer = record.peer
        instance = self._instances.get(peer.rank.instance)
        place = None if instance is None else instance.places.get(peer.rank.engine_rank)
        if place is None or place.refused is None or peer == place.holder.peer:
            return Answer(connection, Registered(peer=peer))
        return _conflict(place.holder, _Claim(record, connection))

    def register(self, record: RankRecord, lease_s: float, connection: bytes, now: float) -> list[Answer]:
        """Note a rank, or renew its lease, after it was told what `answer_to` says.

        Returns:
            What to say to those who waited for its instance, and to both sides if another one is refused its place.
        """
        peer = record.peer
        instance = self._instances.setdefault(peer.rank.instance, _Instance())
        place = instance.places.get(peer.rank.engine_rank)
        claim = _Claim(record, connection)
        self.timers.set(_Lease(peer), now + lease_s)
        answers = []
        if place is None:
            instance.places[peer.rank.engine_rank] = _Place(claim)
            self.num_ranks += 1
            self._ranks.add(peer.rank.instance, 1)
        else:
            self._claim(place, claim)
            if place.refused is not None and place.refused is not claim:
                answers.append(_conflict(place.holder, place.refused))
        return answers + self._answer_if_complete(peer.rank.instance, instance)

    def unregister(self, peer: PeerId) -> None:
        """Forget an incarnation of a rank; any other one stays."""
        if self.timers.clear(_Lease(peer)):
            self._forget(peer)

    def hold(self, record: RankRecord) -> None:
        """Note a rank without a lease: the one that answers. Nobody else may be registered as that rank."""
        rank = record.peer.rank
        self._instances.setdefault(rank.instance, _Instance()).places[rank.engine_rank] = _Place(_Claim(record, b""))
        self.num_ranks += 1
        self._ranks.add(rank.instance, 1)

    def let_go(self, peer: PeerId) -> None:
        """Forget the rank that was held, if there is one."""
        instance = self._instances.get(peer.rank.instance)
        if instance is not None and peer.rank.engine_rank in instance.places:
            self._forget(peer)

    def lookup(self, instance: str, timeout_s: float, connection: bytes, now: float, number: int = 0) -> list[Answer]:
        """Answer now if the instance is complete, else when it is, or when the time is up."""
        entry = self._instances.get(instance) or _Instance()
        taker = connection.hex()
        if connection not in entry.waiting:
            if not self._waits.has_place(taker, 1):
                return [Answer(connection, Records(instance=instance, records=_records(entry), number=number))]
            self._waits.add(taker, 1)
            self.num_waiting += 1
        self._instances[instance] = entry
        entry.waiting[connection] = max(number, entry.waiting.get(connection, 0))
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
            self._ranks.add(peer.rank.instance, -1)
            self._tidy(peer.rank.instance)

    def _tidy(self, instance: str) -> None:
        entry = self._instances[instance]
        if not entry.places and not entry.waiting:
            del self._instances[instance]

    def _answer_if_complete(self, instance: str, entry: _Instance) -> list[Answer]:
        records = _complete_records(entry) if entry.waiting else None
        if records is None:
            return []
        return [self._answer(instance, connection, records) for connection in list(entry.waiting)]

    def _answer(self, instance: str, connection: bytes, records: tuple[RankRecord, ...]) -> Answer:
        entry = self._instances[instance]
        self.timers.clear(_Wait(instance, connection))
        number = entry.waiting.pop(connection)
        self.num_waiting -= 1
        self._waits.add(connection.hex(), -1)
        self._tidy(instance)
        return Answer(connection, Records(instance=instance, records=records, number=number))


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


def _records(entry: _Instance) -> tuple[RankRecord, ...]:
    return tuple(entry.places[rank].holder.record for rank in sorted(entry.places))


def _complete_records(entry: _Instance) -> tuple[RankRecord, ...] | None:
    """Give the ranks of a complete instance. Looks at all of them only if their number is right."""
    first = entry.places.get(0)
    if first is None or len(entry.places) != first.holder.record.num_ranks:
        return None
    records = _records(entry)
    return records if is_complete(records) else None


def is_complete(records: tuple[RankRecord, ...]) -> bool:
    """Every rank of an instance is there, in order; `num_ranks` is a claim, so nothing of that size is made."""
    is_whole = bool(records) and len(records) == records[0].num_ranks
    return is_whole and all(record.peer.rank.engine_rank == rank for rank, record in enumerate(records))

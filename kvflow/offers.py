"""Offers: an instance that has pages of a room tells another one, which has not asked for them. See docs/offers.md."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvflow.addresses import Endpoint
from kvflow.aio.flag import Flag
from kvflow.errors import FailureReason, OfferDeclined, PlanError, TicketError
from kvflow.geometry.ranges import TokenRange, check_range
from kvflow.receive_checks import ReceiveChecks
from kvflow.room import RoomId
from kvflow.state.events import OfferDecided, OfferMade, OfferWithdrawn
from kvflow.wire.messages import MAX_OFFER_METADATA_BYTES, MAX_TICKET_BYTES, Failure, Offer, PeerId
from kvflow.wire.ticket import Ticket

__all__ = ["MadeOffer", "OfferBook", "OfferQueue", "ReceivedOffer"]


class MadeOffer:
    """An offer that this rank has made, from `OfferBook.make_offer`. Its state can be read from any thread.

    Attributes:
        room: The room that is offered.
        failure: Why it was not accepted; None until then, and if it is accepted.
    """

    def __init__(self, room: RoomId, withdraw: Callable[[], None]) -> None:
        self.room = room
        self.failure: Failure | None = None
        self._withdraw = withdraw
        self._answered = Flag()

    @property
    def is_answered(self) -> bool:
        """Whether the other instance has decided, or cannot any more."""
        return self._answered.is_set

    @property
    def is_accepted(self) -> bool:
        """Whether the other instance will receive the room."""
        return self.is_answered and self.failure is None

    async def accepted(self) -> None:
        """Wait until the other instance accepts. If this is cancelled, the offer is withdrawn.

        Raises:
            OfferDeclined: It declines, cannot be reached, or does not answer in time.
        """
        try:
            await self._answered.wait()
        finally:
            if not self.is_answered:
                self._withdraw()
        if self.failure is not None:
            raise OfferDeclined(
                "offer is declined",
                room=self.room,
                reason=self.failure.reason.value,
                detected_by=self.failure.detected_by,
                detail=self.failure.detail,
            )

    def _answer(self, failure: Failure | None) -> None:
        if not self.is_answered:
            self.failure = failure
            self._answered.set()


class OfferBook:
    """The offers that a decode rank has made, until they are answered: `DecodeRank.offers`."""

    def __init__(
        self,
        checks: ReceiveChecks,
        check_open: Callable[[], None],
        request: Callable[[OfferMade], None],
        dispatch: Callable[[OfferWithdrawn], None],
    ) -> None:
        self._checks = checks
        self._check_open = check_open
        self._request = request
        self._dispatch = dispatch
        self._open: dict[int, MadeOffer] = {}
        self._last_number = 0

    def make_offer(
        self,
        ticket: Mapping[str, object],
        *,
        to: str | Endpoint,
        tokens: TokenRange,
        metadata: bytes = b"",
        timeout_s: float | None = None,
    ) -> MadeOffer:
        """Offer a room that a prefill rank of this instance sends to another instance. Does not wait.

        Args:
            ticket: Its ticket, from `PrefillRank.ticket`.
            to: The other instance: its name in the registry, or an address, as in `DecodeRank.receive`.
            tokens: Positions `[start, stop)` whose pages are sent.
            metadata: For the other engine, at most 1,024 bytes: what it needs to decide.
            timeout_s: How long the other instance may take to decide, by default `Timeouts.grant_s`.

        Raises:
            LocalProtocolError: `to` is invalid, or the rank is not open.
            TicketError: The ticket is malformed, or too long.
            ConfigError: `timeout_s` is invalid, or `to` needs a registry or trust, or is not in `allowed_hosts`.
            PlanError: `tokens` or `metadata` is invalid.
            CapacityExceeded: Too many offers are not answered.
            RankBroken: The rank is broken.
        """
        self._check_open()
        parsed = Ticket.parse(ticket)
        encoded = parsed.to_json()
        if len(encoded) > MAX_TICKET_BYTES:
            raise TicketError("ticket is too long to be offered", num_bytes=len(encoded), maximum=MAX_TICKET_BYTES)
        number = self._last_number + 1
        offer = Offer(
            number=number,
            ticket=encoded,
            tokens=check_range(tokens),
            timeout_s=self._checks.offer_timeout_of(timeout_s),
            metadata=_check_metadata(metadata),
        )
        made = MadeOffer(parsed.room, lambda: self._dispatch(OfferWithdrawn(number)))
        event = OfferMade(self._checks.check_instance(to), offer)
        self._last_number = number
        self._open[number] = made
        try:
            self._request(event)
        except BaseException:
            del self._open[number]
            raise
        return made

    def note_answer(self, number: int, failure: Failure | None) -> None:
        """Pass an answer to the engine."""
        if (made := self._open.pop(number, None)) is not None:
            made._answer(failure)

    def end_offers(self, failure: Failure) -> None:
        """Fail all offers: the rank is closed or broken."""
        for number in list(self._open):
            self.note_answer(number, failure)


@dataclass(frozen=True, eq=False)
class ReceivedOffer:
    """A room whose pages another instance offers, from `OfferQueue.wait_for_offer`.

    To take it, `accept` it, and receive the room with its ticket, as from any prefill rank.

    Attributes:
        room: The room.
        ticket: Ticket of the room; pass it to `DecodeRank.receive` or `announce`.
        tokens: Positions `[start, stop)` of which the other instance has pages.
        metadata: What the other engine says about it, up to 1,024 bytes. Not more trusted than its sender.
        holder: The rank that offers it, as "instance/engine_rank".
    """

    room: RoomId
    ticket: dict[str, object]
    tokens: TokenRange
    metadata: bytes
    holder: str
    _decide: Callable[[FailureReason | None, str], bool]

    def accept(self) -> bool:
        """Tell the other instance that the room will be received; return False if it has given up meanwhile."""
        return self._decide(None, "")

    def decline(self, detail: str = "") -> bool:
        """Tell the other instance that the room will not be received, and why; return False if it has given up."""
        return self._decide(FailureReason.ABORTED, detail)


class OfferQueue:
    """The offers that a prefill rank has received, until the engine has decided: `PrefillRank.offers`."""

    def __init__(
        self,
        check_open: Callable[[], None],
        dispatch: Callable[[OfferDecided], None],
        failure: Callable[[FailureReason, str], Failure],
    ) -> None:
        self._check_open = check_open
        self._dispatch = dispatch
        self._failure = failure
        self._waiting: deque[ReceivedOffer] = deque()
        self._open: dict[tuple[PeerId, int], ReceivedOffer] = {}
        self._arrived = Flag()

    @property
    def is_empty(self) -> bool:
        """Whether no offer waits for the engine. Can be read from any thread."""
        return not self._waiting

    async def wait_for_offer(self) -> ReceivedOffer:
        """Wait until another instance offers a room.

        Raises:
            LocalProtocolError: The rank is not open, or is closed meanwhile.
            RankBroken: The rank is broken.
        """
        self._check_open()
        while not self._waiting:
            if self._arrived.is_set:
                self._arrived = Flag()
            await self._arrived.wait()
            self._check_open()
        return self._waiting.popleft()

    def take_offers(self) -> list[ReceivedOffer]:
        """Return the offers that have come since the last call, without those that were withdrawn.

        Raises as `wait_for_offer`, and does not wait.
        """
        self._check_open()
        taken = list(self._waiting)
        self._waiting.clear()
        return taken

    def add_offer(self, peer: PeerId, offer: Offer) -> None:
        """Queue an offer for the engine."""
        ticket = Ticket.from_json(offer.ticket)
        key = (peer, offer.number)

        def decide(reason: FailureReason | None, detail: str) -> bool:
            if self._open.pop(key, None) is None:
                return False
            self._dispatch(OfferDecided(*key, None if reason is None else self._failure(reason, detail)))
            return True

        received = ReceivedOffer(ticket.room, ticket.as_dict(), offer.tokens, offer.metadata, str(peer.rank), decide)
        self._open[key] = received
        self._waiting.append(received)
        self._arrived.set()

    def withdraw_offer(self, peer: PeerId, number: int) -> None:
        """Drop an offer that nobody waits for any more."""
        received = self._open.pop((peer, number), None)
        if received is not None and received in self._waiting:
            self._waiting.remove(received)

    def end_offers(self, _: Failure) -> None:
        """Drop all offers, and wake whoever waits for one: the rank is closed or broken."""
        self._open.clear()
        self._waiting.clear()
        self._arrived.set()


def _check_metadata(metadata: object) -> bytes:
    if not isinstance(metadata, bytes) or len(metadata) > MAX_OFFER_METADATA_BYTES:
        raise PlanError("metadata must be bytes of at most the maximum length", maximum=MAX_OFFER_METADATA_BYTES)
    return metadata

"""Requests whose pages are offered to decode, instead of being asked for: kvflow delivers their tickets.

The instance that computes such a request needs a decode rank beside its prefill rank, and the one that receives it a
prefill rank; see `Deployment`.
"""

import dataclasses
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvflow.errors import KvflowError, OfferDeclined
from kvflow.offers import ReceivedOffer
from kvflow.wire.messages import RankId
from simulation.loop import Violation
from simulation.requests import Request

if TYPE_CHECKING:
    from simulation.deployment import Deployment
    from simulation.engines import DecodeWorker, PrefillWorker

__all__ = ["Offers"]

PATIENCE_S = 1.0
"""How long an offer waits for an answer."""


@dataclasses.dataclass(eq=False)
class _Offered:
    """A request that is offered.

    Attributes:
        receive: Starts it on the decode ranks.
        fail: Reports that it will not start.
        is_taken: The engine of the other side has accepted it.
        is_over: It was started, or has failed.
    """

    request: Request
    receive: Callable[[Request], object]
    fail: Callable[[], object]
    is_taken: bool = False
    is_over: bool = False

    def give_up(self) -> None:
        """Report that it will not start, unless that is decided."""
        if not self.is_over:
            self.is_over = True
            self.fail()

    def start(self, ticket: dict[str, object]) -> None:
        """Start it on the decode ranks with a ticket."""
        if not self.is_over:
            self.is_over = True
            self.receive(dataclasses.replace(self.request, reference=ticket))


class Offers:
    """Delivers some requests by offers.

    Args:
        deployment: The deployment.
        rng: Separate source of draws.
        share: Share of the requests that are offered.
        declines: Share of the offers that engines decline while faults are injected.
    """

    def __init__(self, deployment: "Deployment", rng: random.Random, share: float, declines: float) -> None:
        self._deployment = deployment
        self._world = deployment.world
        self._rng = rng
        self._share = share
        self._declines = declines
        self._offered: dict[int, _Offered] = {}

    def draw(self, request: Request) -> bool:
        """Draw whether a request is offered."""
        deployment = self._deployment
        is_possible = request.decode in deployment.hosts and request.prefill in deployment.hosts.values()
        return is_possible and self._rng.random() < self._share

    def deliver(self, request: Request, receive: Callable[[Request], object], fail: Callable[[], object]) -> None:
        """Offer a request to its decode instance, which then receives it; or report that it failed."""
        one = self._offered[request.content] = _Offered(request, receive, fail)
        self._world.count("offer")
        holder, owner = self._workers(request)
        holder.process.when_dead(one.give_up)
        if holder.is_ready and owner.is_ready:
            holder.process.spawn(self._offer(one, holder, owner))
        else:
            one.give_up()

    def _workers(self, request: Request) -> "tuple[DecodeWorker, PrefillWorker]":
        """Return the worker whose rank offers a request, and the one whose rank is offered it."""
        deployment: Any = self._deployment
        guest = next(guest for guest, host in deployment.hosts.items() if host == request.prefill)
        host = deployment.hosts[request.decode]
        return deployment.workers[RankId(guest, 0)], deployment.workers[RankId(host, 0)]

    async def _offer(self, one: _Offered, holder: "DecodeWorker", owner: "PrefillWorker") -> None:
        request = one.request
        try:
            if holder.partner is None:
                raise Violation(f"{holder.rank_id} has no prefill rank beside it")
            made = holder.rank.offers.make_offer(
                holder.partner.rank.ticket(request.room),  # type: ignore[union-attr] # a prefill worker
                to=owner.rank.endpoint if owner.rank.config.registry is None else owner.rank_id.instance,
                tokens=(0, request.num_tokens),
                metadata=b"%d" % request.content,
                timeout_s=PATIENCE_S,
            )
            await made.accepted()
        except (KvflowError, OfferDeclined) as error:
            self._world.tell(f"{request} is not taken: {error}")
            one.give_up()
        else:
            if not one.is_taken:
                raise Violation(f"{request} is said to be accepted, but was not")
            self._world.tell(f"{request} is accepted")

    def decide(self, offer: ReceivedOffer) -> None:
        """Accept an offer or decline it, as the engine that was offered it."""
        one = self._offered[int(offer.metadata)]
        if (offer.room, offer.tokens) != (one.request.room, (0, one.request.num_tokens)):
            raise Violation(f"{one.request} arrives as {offer}")
        if one.is_taken:
            raise Violation(f"{one.request} is offered again, although it was accepted")
        if self._deployment.is_disturbed and self._rng.random() < self._declines:
            offer.decline("the engine does not want it")
        elif offer.accept():
            one.is_taken = True
            one.start(offer.ticket)

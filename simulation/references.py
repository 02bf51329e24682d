"""How requests refer to prefill instances, some of which answer for themselves."""

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from kvflow.addresses import Endpoint
from kvflow.wire.messages import RankId
from simulation.engines import PrefillWorker
from simulation.requests import Request

__all__ = ["References"]


class References:
    """Decides which instances answer for themselves, and draws how each request refers to its own.

    Args:
        rng: Source of the draws.
        answering: Instances whose first rank answers for the others.
        names: Decode ranks know the registry.
    """

    def __init__(self, rng: random.Random, answering: Sequence[str], *, names: bool) -> None:
        self._rng = rng
        self._known: dict[RankId, dict[str, None]] = {}
        self.answering = answering
        self.names = names

    @classmethod
    def draw(cls, rng: random.Random, prefill: Sequence[str]) -> "References":
        """Draw which of some prefill instances answer for themselves."""
        answering = [name for name in prefill if rng.random() < 0.7]
        return cls(rng, answering, names=len(answering) < len(prefill) or rng.random() < 0.5)

    def of(
        self, request: Request, endpoint: Endpoint, workers: Sequence[PrefillWorker], *, may_be_stale: bool
    ) -> "str | Endpoint | Mapping[str, object]":
        """Draw what the decode engine gets to locate the prefill instance of a request.

        Args:
            request: The request.
            endpoint: Address of the rank that answers, if the instance answers for itself.
            workers: Workers of the instance.
            may_be_stale: A ticket may name the first incarnation that gave one.
        """
        rng = self._rng
        by_ticket, is_late, worker = rng.random() < 0.6, rng.random() < 0.5, rng.choice(workers)
        if by_ticket and worker.gives_tickets:
            ticket: dict[str, Any] = json.loads(json.dumps(worker.rank.ticket(request.room)))
            former = self._known.get(worker.rank_id, {})
            self._known[worker.rank_id] = former | {ticket["incarnation"]: None}
            if may_be_stale and is_late:
                ticket["incarnation"] = next(iter(former), ticket["incarnation"])
            return ticket
        return endpoint if request.prefill in self.answering else request.prefill

"""How requests refer to their prefill instances where some of those answer for themselves."""

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from kvflow.config import Endpoint
from kvflow.testing.simulation.engines import PrefillWorker
from kvflow.testing.simulation.requests import Request

__all__ = ["References"]


class References:
    """Draws which instances answer for themselves, and how each request finds its own.

    Args:
        rng: Draws it.
        prefill: Names of the prefill instances.

    Attributes:
        answering: Instances whose first rank answers for the others.
        names: Decode ranks know the registry.
    """

    def __init__(self, rng: random.Random, prefill: Sequence[str]) -> None:
        self._rng = rng
        self.answering = [name for name in prefill if rng.random() < 0.7]
        self.names = len(self.answering) < len(prefill) or rng.random() < 0.5

    def draw(
        self, request: Request, endpoint: Endpoint, workers: Sequence[PrefillWorker], former: Request | None
    ) -> "str | Endpoint | Mapping[str, object]":
        """Draw how the decode engine is told where a request is computed.

        Args:
            request: Which.
            endpoint: Of the rank that answers, if the instance answers for itself.
            workers: Of its instance.
            former: An earlier try with the same room whose ticket may still be around.
        """
        rng = self._rng
        by_ticket, is_kept, worker = rng.random() < 0.6, rng.random() < 0.5, rng.choice(workers)
        if former is not None and is_kept and isinstance(former.reference, Mapping):
            return former.reference
        if by_ticket and worker.gives_tickets:
            ticket: dict[str, Any] = json.loads(json.dumps(worker.rank.ticket(request.room)))
            return ticket
        return endpoint if request.prefill in self.answering else request.prefill

"""What this server answers routers with: tickets of the requests that it keeps for other servers. Pure."""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from kvflow import KvflowError, Trust
from kvflow.engines.vllm.dialect import NOTHING_KEPT, own_part, reply

__all__ = ["Answers"]


class Answers:
    """Makes the parameters of answers from the ticket of the first worker.

    Args:
        trust: Keys of this server, which sign tickets.

    Attributes:
        ticket: The latest ticket of the first worker; None until workers have reported theirs, also after `forget`.
        has_had_ticket: They have done so before.
        is_shared: Another connector keeps the same requests, and vLLM lets only one of them answer with a key.
    """

    def __init__(self, trust: Trust | None = None) -> None:
        self.ticket: Mapping[str, object] | None = None
        self.has_had_ticket = False
        self.is_shared = False
        self._trust = trust

    def take_tickets(self, tickets: Sequence[Mapping[str, object]]) -> None:
        """Keep the ticket of the first of the workers that have reported theirs."""
        if tickets:
            self.ticket = min(tickets, key=itemgetter("engine_rank"))
            self.has_had_ticket = True

    def forget(self) -> None:
        """Forget the ticket: workers may open new ranks."""
        self.ticket = None

    def kept(self, room: str, *, request_id: str, num_tokens: int, prompt: str) -> dict[str, Any] | None:
        """Return the parameters for a request that is kept in a room, as in `reply`.

        Raises:
            KvflowError: There is no ticket, or it cannot be signed.
        """
        if self.ticket is None:
            raise KvflowError("workers have not reported a ticket", room=room)
        params = reply(
            self.ticket, room, request_id=request_id, num_tokens=num_tokens, prompt=prompt, trust=self._trust
        )
        return own_part(params) if self.is_shared else params

    def not_kept(self) -> dict[str, Any] | None:
        """Return the parameters for a request that is not kept."""
        return None if self.is_shared else dict(NOTHING_KEPT)

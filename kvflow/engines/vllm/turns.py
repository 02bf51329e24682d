"""Finished turns of conversations, whose blocks decode keeps for the prefill server that computes the next one. Pure.

vLLM is not told of them, because it would step as long as one is kept. They are the first blocks to be given up.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, Final

from kvflow.engines.containment import contained
from kvflow.engines.logs import adapter_logger
from kvflow.engines.vllm.answers import Answers
from kvflow.engines.vllm.dialect import OF_TURN, digest_of, has_ticket, is_for_turns, is_one_of_several, room_of
from kvflow.engines.vllm.groups import Group
from kvflow.engines.vllm.held import HeldBlocks
from kvflow.engines.vllm.metadata import ChunkOrder, StepOrders, TurnOrder

__all__ = ["KeptTurns"]

LOGGER: Final = adapter_logger("vllm.kvflow")

SHARE: Final = 0.5
"""Share of the pool that turns may take."""


class KeptTurns:
    """Keeps the blocks of finished turns until prefill has them, others need them, or the next turn is overdue.

    Args:
        groups: Groups of vLLM's caches.
        orders: Orders of the next step.
        answers: Makes the parameters of answers.
        held: Keeps the blocks.
        keep_s: How long a turn is kept; 0 for not at all.
        num_workers: Workers of this server, all of which must have let go of a turn.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        orders: StepOrders,
        answers: Answers,
        held: HeldBlocks,
        *,
        keep_s: float,
        num_workers: int,
    ) -> None:
        self._groups = groups
        self._orders = orders
        self._answers = answers
        self._held = held
        self._keep_s = keep_s
        self._num_workers = num_workers
        self._until: dict[str, float] = {}  # in this order
        self._given_up: set[str] = set()
        self._num_released: Counter[str] = Counter()
        if keep_s and any(group.state is not None for group in groups):
            LOGGER.warning("kvflow: turns are not kept: this model has recurrent states, which move on with each token")
            self._keep_s = 0.0

    def keep(self, request: Any, blocks: Sequence[Sequence[int]], now: float) -> dict[str, Any] | None:
        """Keep what a complete request has computed, if its router may pass it on; return the parameters for it.

        The answer to a batch has one ticket, as does that to `n` > 1.
        """
        request_id = request.request_id
        can_answer = self._answers.ticket is not None and not self._answers.is_shared
        is_whole = has_ticket(request_id) and not is_one_of_several(request_id)
        answer = None
        if self._keep_s and can_answer and is_whole and is_for_turns(request.kv_transfer_params):
            with contained(partial(LOGGER.warning, "kvflow: the turn of %s is not kept: %s", request_id)):
                answer = self._keep(request, blocks, now)
        return answer

    def _keep(self, request: Any, blocks: Sequence[Sequence[int]], now: float) -> dict[str, Any] | None:
        request_id = request.request_id
        stop = min(request.num_computed_tokens, len(request.all_token_ids) - 1)  # the last one was only sampled
        given = [
            group.blocks_of(table, group.first_seen(stop), stop)
            for group, table in zip(self._groups, blocks, strict=True)
        ]
        kept = [block for one in given if one is not None for block in one.blocks]
        if not request.prompt_token_ids or not self._make_place(len(kept)):
            return None
        room, digest = room_of({}, request_id), digest_of(request, request.all_token_ids[:stop])
        params = self._answers.kept(room, request_id=request_id, num_tokens=stop, prompt=digest) or {}
        self._held.keep(request_id, kept)
        self._until[request_id] = now + self._keep_s
        chunk = ChunkOrder(0, stop, given, is_last=True, metadata=digest.encode())
        self._orders.turns[request_id] = TurnOrder(room, chunk)
        return {**params, **OF_TURN}

    def _make_place(self, num_blocks: int) -> bool:
        """Give up the oldest turns if a new one would exceed the share of all; return False if it does by itself."""
        limit = SHARE * len(self._held.pool.blocks)
        excess = num_blocks - limit + sum(map(self._held.num_kept, self._until))
        for request_id in list(self._until) if num_blocks <= limit else ():
            if excess > 0:
                excess -= self._held.num_kept(request_id)
                self._give_up([request_id])
        return num_blocks <= limit

    def order_step(self, *, is_short: bool, now: float) -> None:
        """Give up turns that are overdue and, if other requests lack blocks, the older half of the rest."""
        self._give_up([*takewhile(lambda it: now >= self._until[it], self._until)])
        if is_short and not self._given_up:  # else blocks are about to come back
            self._give_up([*self._until][: -(-len(self._until) // 2)])

    def give_up_all(self) -> None:
        """Give up all turns: what they were computed with is about to change."""
        self._give_up([*self._until])

    def _give_up(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            del self._until[request_id]
            self._given_up.add(request_id)
            self._orders.reclaimed[request_id] = True

    def take_released(self, request_ids: Iterable[str]) -> None:
        """Let go of the blocks of turns that workers have released, once for each worker."""
        self._num_released.update(request_ids)
        for request_id in [it for it, count in self._num_released.items() if count == self._num_workers]:
            del self._num_released[request_id]
            self._until.pop(request_id, None)
            self._given_up.discard(request_id)
            self._held.let_go(request_id)

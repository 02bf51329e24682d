"""Finished turns of conversations, whose blocks decode keeps for the prefill server that computes the next one. Pure.

vLLM is not told of them, because it would step as long as one is kept. They are the first blocks to be given up.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

from kvflow.engines.containment import contained
from kvflow.engines.logs import adapter_logger
from kvflow.engines.vllm.answers import Answers
from kvflow.engines.vllm.dialect import (
    OF_TURN,
    digest_of,
    has_ticket,
    is_for_turns,
    is_one_of_several,
    kept_room,
    room_of,
    transfer_room,
)
from kvflow.engines.vllm.groups import Group
from kvflow.engines.vllm.held import HeldBlocks
from kvflow.engines.vllm.metadata import ChunkOrder, StepOrders, TurnOrder

__all__ = ["KeptTurns"]

LOGGER: Final = adapter_logger("vllm.kvflow")

SHARE: Final = 0.5
"""Share of the pool that turns may take."""

MOVE_S: Final = 30.0
"""How long a request that moves is kept for the server that goes on, even if others lack blocks."""


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
        self._until: dict[str, float] = {}  # the oldest first
        self._moved: dict[str, str] = {}
        self._named: dict[str, tuple[str | None, dict[str, Any]]] = {}
        self._given_up: set[str] = set()
        self._num_released: Counter[str] = Counter()
        if keep_s and any(group.state is not None for group in groups):
            LOGGER.warning("kvflow: turns are not kept: this model has recurrent states, which move on with each token")
            self._keep_s = 0.0

    @property
    def is_enabled(self) -> bool:
        """Whether turns are kept at all."""
        return self._keep_s > 0

    def keep(
        self, request: Any, blocks: Sequence[Sequence[int]], now: float, room: str | None = None
    ) -> dict[str, Any] | None:
        """Keep what a complete request has computed, if its router may pass it on; return the parameters for it.

        The answer to a batch has one ticket, as does that to `n` > 1. A request that moves has a `room` already.
        """
        request_id = request.request_id
        can_answer = self._answers.ticket is not None and not self._answers.is_shared
        is_whole = has_ticket(request_id) and not is_one_of_several(request_id)
        answer = None
        if self._keep_s and can_answer and is_whole and is_for_turns(request.kv_transfer_params):
            with contained(partial(LOGGER.warning, "kvflow: the turn of %s is not kept: %s", request_id)):
                answer = self._keep(request, blocks, now, room)
        return answer

    def _keep(
        self, request: Any, blocks: Sequence[Sequence[int]], now: float, given_room: str | None
    ) -> dict[str, Any] | None:
        request_id = request.request_id
        stop = min(request.num_computed_tokens, len(request.all_token_ids) - 1)  # the last one was only sampled
        given = [
            group.blocks_of(table, group.first_seen(stop), stop)
            for group, table in zip(self._groups, blocks, strict=True)
        ]
        kept = [block for one in given if one is not None for block in one.blocks]
        if not request.prompt_token_ids or not self._make_place(len(kept)):
            return None
        room, digest = given_room or room_of({}, request_id), digest_of(request, request.all_token_ids[:stop])
        params = self._answers.kept(room, request_id=request_id, num_tokens=stop, prompt=digest) or {}
        self._held.keep(request_id, kept)
        self._until[request_id] = now + (self._keep_s if given_room is None else min(MOVE_S, self._keep_s))
        answer = {**params, **OF_TURN}
        if given_room is None:
            self._named[request_id] = transfer_room(request.kv_transfer_params), answer
        else:
            self._moved[request_id] = room
        chunk = ChunkOrder(0, stop, given, is_last=True, metadata=digest.encode())
        self._orders.turns[request_id] = TurnOrder(room, chunk)
        return answer

    def _make_place(self, num_blocks: int) -> bool:
        """Give up the oldest turns if a new one would exceed the share of all; return False if it does by itself."""
        limit = SHARE * len(self._held.pool.blocks)
        excess = num_blocks - limit + sum(map(self._held.num_kept, self._until))
        for request_id in self._turns if num_blocks <= limit else ():
            if excess > 0:
                excess -= self._held.num_kept(request_id)
                self._give_up([request_id])
        return num_blocks <= limit

    def order_step(self, *, is_short: bool, now: float) -> None:
        """Give up turns that are overdue and, if other requests lack blocks, the older half of the rest."""
        self._give_up([it for it, until in self._until.items() if now >= until])
        if is_short and not self._given_up:  # else blocks are about to come back
            self._give_up(self._turns[: -(-len(self._turns) // 2)])

    @property
    def _turns(self) -> list[str]:
        """What is kept as a cache, and may be given up."""
        return [it for it in self._until if it not in self._moved]

    def find_turn(self, question: Any) -> dict[str, Any] | None:
        """Return the parameters of the turn that a router asks for with a request; its stream has told it none."""
        room = kept_room(question.kv_transfer_params)
        found = (self._named.get(it, (None, {})) for it in self._until if room is not None)
        return next((answer for transfer, answer in found if transfer == room), None)

    def withdraw(self, room: str) -> None:
        """Give up the request that was to move from a room: nobody will ask for it."""
        self._give_up([it for it in self._until if self._moved.get(it) == room])

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
            self._moved.pop(request_id, None)
            self._named.pop(request_id, None)
            self._given_up.discard(request_id)
            self._held.let_go(request_id)

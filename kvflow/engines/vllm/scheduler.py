"""The scheduler side: decides which tokens of which request to move. It never waits, and does not handle transfers.

A request is tracked from when vLLM accepts it until vLLM has forgotten it. Decisions are kept until vLLM builds the
orders of its next step.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from kvflow import Trust
from kvflow.engines.containment import contained
from kvflow.engines.logs import adapter_logger
from kvflow.engines.vllm.answers import Answers
from kvflow.engines.vllm.dialect import is_for_decode, is_question, withdrawn_room
from kvflow.engines.vllm.first_token import FirstTokens
from kvflow.engines.vllm.groups import Group
from kvflow.engines.vllm.metadata import StepOrders, WorkerReport
from kvflow.engines.vllm.moves import MovingRequests
from kvflow.engines.vllm.receiving import ReceivingRequests
from kvflow.engines.vllm.sending import SendingRequests
from kvflow.engines.vllm.turns import KeptTurns

__all__ = ["ConnectorScheduler"]

LOGGER: Final = adapter_logger("vllm.kvflow")


class ConnectorScheduler:
    """Passes vLLM's calls on to the requests that are sent and to those that are received.

    Args:
        groups: Groups of vLLM's caches, each with its own block table.
        is_prefill: It may be asked to keep requests for other servers.
        is_decode: It may be asked to take over requests from other servers.
        is_by_priority: vLLM schedules requests by priority.
        num_left_out: Tokens at the end of a prompt that only decode may compute. With recurrent states, at least one.
        trust: Keys of this server, which sign tickets.
        first_tokens: Keeps first tokens; None if vLLM cannot begin with the second one.
        keep_turns_s: How long decode keeps a finished turn for the next one; prefill receives turns unless it is 0.
        num_workers: Workers of this server.
        max_running: How many requests vLLM runs at the same time.
        on_recomputed: Called with a reason and a number of tokens, when a prompt of a decode server is computed here.

    Attributes:
        answers: Makes the parameters of answers.
        sending: Requests that are computed here for others.
        receiving: Requests that others have computed.
        turns: Finished requests that are kept for the next turn.
        moves: Running requests that may be moved to another server.
        held: Blocks that vLLM must not use for anything else.
        is_empty: The last step has computed nothing.
    """

    def __init__(  # noqa: PLR0913 - most by keyword
        self,
        groups: Sequence[Group],
        *,
        is_prefill: bool,
        is_decode: bool,
        is_by_priority: bool = False,
        num_left_out: int = 0,
        trust: Trust | None = None,
        first_tokens: FirstTokens | None = None,
        keep_turns_s: float = 0.0,
        num_workers: int = 1,
        max_running: int = 1,
        on_recomputed: Callable[[str, int], object] = lambda *_: None,
    ) -> None:
        self._is_prefill = is_prefill
        self._is_decode = is_decode
        self._takes_turns = is_decode and keep_turns_s > 0
        self._orders = StepOrders()
        self.answers = Answers(trust)
        self.is_empty = False
        num_left_out = max(num_left_out, int(any(group.state is not None for group in groups)))
        first_tokens = None if num_left_out else first_tokens
        self.sending = SendingRequests(
            groups, self._orders, self.answers, num_left_out=num_left_out, first_tokens=first_tokens
        )
        self.held = self.sending.held
        self.turns = KeptTurns(
            groups, self._orders, self.answers, self.held, keep_s=keep_turns_s, num_workers=num_workers
        )
        self.moves = MovingRequests(self.answers, self.held, is_enabled=self.turns.is_enabled, max_running=max_running)
        self.receiving = ReceivingRequests(
            groups,
            self._orders,
            is_by_priority=is_by_priority,
            num_left_out=num_left_out,
            # If no first token comes, vLLM computes the prompt's last token, which sees one token more of a window.
            takes_last=first_tokens is not None and all(group.keeps_all for group in groups),
            on_recomputed=on_recomputed,
        )

    def add(self, request: Any) -> None:
        """Accept a request: both sides start before there are blocks for it."""
        with contained(partial(self._compute_alone, request)):
            params = request.kv_transfer_params
            self.moves.note(request)
            if self._is_prefill and (withdrawn := withdrawn_room(params)) is not None:
                self.sending.withdraw(withdrawn)
                self.turns.withdraw(withdrawn)
            elif self._is_prefill and is_for_decode(params):
                self.sending.open(request)
                if self._takes_turns:
                    self.receiving.announce_prefix(request)
            elif self._is_decode and not is_question(params):
                self.receiving.announce(request)

    def _compute_alone(self, request: Any, reason: str) -> None:
        LOGGER.warning("kvflow: %s is computed here alone: %s", request.request_id, reason)
        if self._is_decode and not is_for_decode(request.kv_transfer_params):
            self.receiving.recompute("unusable_ticket", request)

    def num_elsewhere(self, request: Any, num_computed: int) -> int | None:
        """Return how many tokens can be received beyond those already here; None while that is unknown."""
        request_id = request.request_id
        if self.receiving.is_follower(request_id):
            return None
        self.sending.shortage.wants_blocks(request_id)
        self.sending.note_local(request_id, num_computed)
        return self.receiving.num_elsewhere(request, num_computed)

    def allocated(self, request: Any, blocks: Sequence[Sequence[int]], num_elsewhere: int) -> None:
        """Receive into the blocks that vLLM has allocated, or decline if it wants nothing that others have computed."""
        self.sending.shortage.has_blocks(request.request_id)
        self.moves.note_running(request.request_id)
        self.receiving.allocate(request, blocks, num_elsewhere)

    def step(self, output: Any) -> StepOrders:
        """Return the orders of a step: decisions since the last one, and the tokens that the step computes."""
        is_short = self.sending.shortage.is_short or bool(output.preempted_req_ids)
        self.turns.order_step(is_short=is_short, now=time.monotonic())
        self.sending.order_step(output)
        orders = self._orders.take_orders()
        orders.is_empty = self.is_empty = not output.total_num_scheduled_tokens
        return orders

    def finished(
        self, request: Any, blocks: Sequence[Sequence[int]], *, is_complete: bool, status: str = ""
    ) -> tuple[bool, dict[str, Any] | None]:
        """Handle the end of a request in vLLM.

        Args:
            request: The request.
            blocks: Its blocks, of each group.
            is_complete: Everything that it asked for was computed.
            status: vLLM's name for how it ended, for the other side if it was not handed over.

        Returns:
            Whether its blocks are still needed, until the workers report otherwise; and the parameters for the router
            to pass on, to decode or with the next turn to prefill.
        """
        self.receiving.finish(request.request_id, status)
        is_needed, params = self.sending.finish(request, blocks, is_complete=is_complete, status=status)
        room = self.moves.take_room(request)
        if is_complete and params is None:
            params = self.moves.stop(request) or self.turns.find_turn(request)
            params = params or self.turns.keep(request, blocks, time.monotonic(), room)
        return is_needed, params

    def reset(self) -> None:
        """Give up turns, and ask workers for another ticket with the next step: they may open new ranks before it."""
        self.turns.give_up_all()
        self.answers.forget()
        self._orders.wants_ticket = True

    def take_report(self, report: WorkerReport) -> None:
        """Handle a report; vLLM calls this before it frees the blocks of the requests that end with it."""
        self.answers.take_tickets(report.tickets)
        self.sending.take_report(report)
        self.turns.take_released(report.released)
        self.receiving.take_report(report)

    @property
    def awaits_report(self) -> bool:
        """Whether vLLM must step even without requests, because it would otherwise not learn what workers know.

        That is the ticket of the first one, and that blocks are safe.
        """
        return self.held.awaits_proof or (self._is_prefill and not self.answers.has_had_ticket)

"""Requests that this server computes, and sends to others. Pure."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from kvflow import KvflowError
from kvflow.engines.containment import contained
from kvflow.engines.logs import adapter_logger
from kvflow.engines.vllm.answers import Answers
from kvflow.engines.vllm.dialect import digest_of, has_ticket, room_of
from kvflow.engines.vllm.first_token import FirstTokens
from kvflow.engines.vllm.groups import Group
from kvflow.engines.vllm.held import HeldBlocks
from kvflow.engines.vllm.metadata import ChunkOrder, GroupBlocks, StepOrders, WorkerReport
from kvflow.engines.vllm.shortage import BlockShortage

__all__ = ["SendingRequests"]

LOGGER: Final = adapter_logger("vllm.kvflow")


@dataclass(eq=False)
class _Sending:
    """A prompt that is computed here.

    Attributes:
        room: Room in which it is sent.
        request_id: The request that sends it. With `n` > 1, vLLM has other requests for the same prompt.
        prompt: `digest_of` the prompt.
        num_tokens: Tokens of the prompt.
        stop: Number of these tokens that are computed here.
        awaits_token: Its last chunk waits for the token that is sampled after the prompt.
        sent: Tokens that the workers were ordered to send.
        num_open: Requests for the prompt that have not ended. The router has its answer when all have.
        num_local: Tokens that were here before its first step.
        is_kept: A request has ended that vLLM answers with a ticket, so decode may come.
        is_lost: It can no longer be handed over.
    """

    room: str
    request_id: str
    prompt: str
    num_tokens: int
    stop: int
    awaits_token: bool = False
    sent: int = 0
    num_open: int = 1
    num_local: int = 0
    is_kept: bool = False
    is_lost: bool = False

    @property
    def is_sent(self) -> bool:
        """Nothing is left to send."""
        return self.sent == self.stop

    def chunk(self, groups: Sequence[Group], tables: Sequence[Sequence[int]], start: int) -> ChunkOrder:
        """Return the order to send the tokens from `start`."""
        is_last = self.is_sent and not self.awaits_token
        given = self.offered(groups, tables, start)
        return ChunkOrder(start, self.sent, given, is_last=is_last, metadata=self.prompt.encode())

    def last_chunk(self, groups: Sequence[Group], metadata: bytes) -> ChunkOrder:
        """Return the order to end what was sent."""
        return ChunkOrder(self.stop, self.stop, [None] * len(groups), is_last=True, metadata=metadata)

    def offered(self, groups: Sequence[Group], tables: Sequence[Sequence[int]], start: int) -> list[GroupBlocks | None]:
        """Return the blocks of tokens from `start`; of windows and states, only what exists after the last token."""
        last = self.stop - 1
        return [
            group.blocks_of(table, start, self.sent)
            if group.keeps_all
            else group.blocks_of(table, group.first_seen(last), self.sent)
            if self.is_sent
            else None
            for group, table in zip(groups, tables, strict=True)
        ]


class SendingRequests:
    """Orders the tokens that each step computes to be sent. Arguments as in `ConnectorScheduler`.

    Args:
        orders: Orders of the next step.
        answers: Makes the parameters of answers.

    Attributes:
        held: Blocks that vLLM must not use for anything else.
        shortage: Which of the finished requests must give up their blocks.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        orders: StepOrders,
        answers: Answers,
        *,
        num_left_out: int,
        first_tokens: FirstTokens | None,
    ) -> None:
        self._groups = groups
        self._orders = orders
        self._answers = answers
        self._num_left_out = num_left_out
        self._first_tokens = first_tokens
        self.held = HeldBlocks()
        self.shortage = BlockShortage()
        self._rooms: dict[str, _Sending] = {}
        self._requests: dict[str, _Sending] = {}
        self._others: dict[str, _Sending] = {}
        self._ended: dict[str, _Sending] = {}

    def open(self, request: Any) -> None:
        """Let decode ranks ask for a request; a prompt that is not given as tokens is not handed over.

        With `n` > 1, all requests for one prompt have one room; in a batch of prompts, only the first has a ticket.
        """
        request_id, params = request.request_id, request.kv_transfer_params
        if not request.prompt_token_ids:
            LOGGER.warning("kvflow: %s is not handed over: its prompt has no tokens", request_id)
            return
        if not has_ticket(request_id):
            return
        room, prompt, num_tokens = room_of(params, request_id), digest_of(request), len(request.prompt_token_ids)
        known = self._rooms.get(room)
        if known is not None and known.prompt == prompt and not known.is_lost:
            known.num_open += 1
            self._others[request_id] = known
            return
        _leave_out(request, self._num_left_out)
        awaits_token = self._first_tokens is not None and request.max_tokens == 1
        sending = _Sending(room, request_id, prompt, num_tokens, len(request.prompt_token_ids), awaits_token)
        self._rooms[room] = self._requests[request_id] = sending
        self._orders.opened[request_id] = room

    def withdraw(self, room: str) -> None:
        """Give up a room for which nobody will ask. A request that is not computed yet is aborted by its client."""
        if (sending := self._rooms.get(room)) is not None:
            sending.is_lost = True
            if sending.request_id not in self._requests:
                self._orders.reclaimed[sending.request_id] = True

    def note_local(self, request_id: str, num_computed: int) -> None:
        """Note how many tokens of a request were here before its first step."""
        if request_id in self._requests:
            self._requests[request_id].num_local = num_computed

    def order_step(self, output: Any) -> None:
        """Order the tokens that a step computes to be sent, and pages that it needs to be given up."""
        for request_id in output.preempted_req_ids or ():
            sending = self._requests.get(request_id)
            if sending is not None and not sending.is_sent:  # else its blocks stay until they were sent
                sending.sent = 0  # it gets new blocks, and its tokens are sent again
                self._orders.preempted.append(request_id)
        if self._requests:
            self._order_chunks(output)
        if self.held.pool is not None:
            self._orders.reclaimed |= self.shortage.reclaim(len(self.held.pool.blocks), time.monotonic())

    def _order_chunks(self, output: Any) -> None:
        cached = output.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, count in output.num_scheduled_tokens.items():
            sending = self._requests.get(request_id)
            if sending is None or sending.is_sent or sending.is_lost:
                continue
            start, stop = sending.sent, min(computed[request_id] + count, sending.stop)
            is_loaded_now = output.has_sync_kv_loads and computed[request_id] > sending.num_local
            sending.num_local = sending.stop
            if stop > start and not is_loaded_now:  # else it is sent once vLLM has not found the load to have failed
                with contained(partial(self._lose, sending)):
                    blocks = output.kv_connector_block_state.get_block_ids(request_id)
                    self._order_chunk(sending, start, stop, blocks)

    def _order_chunk(self, sending: _Sending, start: int, stop: int, blocks: Sequence[Sequence[int]]) -> None:
        sending.sent = stop
        self._orders.chunks[sending.request_id] = sending.chunk(self._groups, blocks, start)
        if sending.is_sent:
            all_given = sending.offered(self._groups, blocks, 0)
            self.held.keep(sending.request_id, [block for one in all_given if one is not None for block in one.blocks])

    def _lose(self, sending: _Sending, reason: str) -> None:
        LOGGER.warning("kvflow: %s is not handed over: %s", sending.request_id, reason)
        sending.is_lost = True
        self._orders.abandoned[sending.request_id] = reason

    def finish(
        self, request: Any, blocks: Sequence[Sequence[int]], *, is_complete: bool, status: str
    ) -> tuple[bool, dict[str, Any] | None]:
        """Handle the end of a request in vLLM, as `ConnectorScheduler.finished`."""
        request_id = request.request_id
        if (other := self._others.pop(request_id, None)) is not None:
            return False, self._answer(other, request_id, is_complete=is_complete)
        if (sending := self._requests.pop(request_id, None)) is None:
            return False, None
        if is_complete and sending.awaits_token and sending.is_sent and self._first_tokens is not None:
            metadata = self._first_tokens.metadata(sending.prompt, request)
            self._orders.completed[request_id] = sending.last_chunk(self._groups, metadata)
        sending.awaits_token = False
        if is_complete and not sending.sent and not sending.is_lost:  # all of it was computed in the step of its load
            with contained(partial(self._lose, sending)):
                self._order_chunk(sending, 0, sending.stop, blocks)
        if not is_complete or not sending.is_sent:
            sending.is_lost = True
            self._orders.abandoned[request_id] = status  # at once, although other answers may not have ended
        params = self._answer(sending, request_id, is_complete=is_complete)
        if sending.sent == 0:
            self._forget(sending)
            return False, None
        self._ended[request_id] = sending
        self._orders.awaited.append(request_id)
        self.shortage.pin(request_id, self.held.num_kept(request_id), time.monotonic())
        return True, params

    def _answer(self, sending: _Sending, request_id: str, *, is_complete: bool) -> dict[str, Any] | None:
        """Return the parameters of an answer, and start the lease of the room with the last one."""
        sending.num_open -= 1
        params = None
        if is_complete and self._answers.ticket is not None and not sending.is_lost:
            try:
                params = self._answers.kept(
                    sending.room, request_id=request_id, num_tokens=sending.num_tokens, prompt=sending.prompt
                )
                sending.is_kept = True
            except KvflowError as error:
                LOGGER.warning("kvflow: %s is not handed over: %s", request_id, error)
        elif is_complete:
            params = self._answers.not_kept()
        if not sending.num_open:
            if sending.is_kept and not sending.is_lost:
                self._orders.leased.append(sending.request_id)
            else:
                self._orders.abandoned.setdefault(sending.request_id, "vLLM has given no ticket for it")
        return params

    def _forget(self, sending: _Sending) -> None:
        self.shortage.forget([sending.request_id])
        if self._rooms.get(sending.room) is sending:
            del self._rooms[sending.room]

    def take_sent(self, request_ids: Iterable[str]) -> None:
        """Handle requests whose blocks are no longer needed for sending."""
        for request_id in request_ids:
            self.held.let_go(request_id)
            if (sending := self._ended.pop(request_id, None)) is not None:
                self._forget(sending)

    def take_report(self, report: WorkerReport) -> None:
        """Handle a report; vLLM calls this before it frees the blocks of the requests that end with it."""
        self.held.take_report(report)
        self.shortage.note_asked(it for it in report.asked if it in self._requests or it in self._ended)
        for sending in (self._requests[it] for it in report.lost if it in self._requests):
            sending.is_lost = True


def _leave_out(request: Any, count: int) -> None:
    """Leave out the last tokens of a prompt: decode computes them, which requires the recurrent state before them.

    A prompt that has no others is computed, but decode does not take it over.
    """
    if count and len(request.prompt_token_ids) > count:
        del request.prompt_token_ids[-count:]
        del request._all_token_ids[-count:]
        request.num_prompt_tokens -= count
        request.max_tokens = 1

"""The scheduler side: decides which tokens of which request to move. It never waits, and does not handle transfers.

A request is tracked from when vLLM accepts it until vLLM has forgotten it. Decisions are kept until vLLM builds the
orders of its next step.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, Final

from kvflow import KvflowError, Trust
from kvflow.engines.containment import contained
from kvflow.engines.logs import adapter_logger
from kvflow.engines.priority import priority_class
from kvflow.engines.vllm.dialect import (
    NOTHING_KEPT,
    digest_of,
    has_ticket,
    is_for_decode,
    own_part,
    reply,
    room_of,
    take_reference,
    withdrawn_room,
)
from kvflow.engines.vllm.first_token import FirstTokens
from kvflow.engines.vllm.groups import Group
from kvflow.engines.vllm.held import HeldBlocks
from kvflow.engines.vllm.metadata import ChunkOrder, GrantOrder, GroupBlocks, StepOrders, WorkerReport
from kvflow.engines.vllm.shortage import BlockShortage

__all__ = ["ConnectorScheduler"]

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


class ConnectorScheduler:
    """Tracks requests and decides what to move.

    Args:
        groups: Groups of vLLM's caches, each with its own block table.
        is_prefill: It may be asked to keep requests for other servers.
        is_decode: It may be asked to take over requests from other servers.
        is_by_priority: vLLM schedules requests by priority.
        num_left_out: Tokens at the end of a prompt that only decode may compute. With recurrent states, at least one.
        trust: Keys of this server, which sign tickets.
        first_tokens: Keeps first tokens; None if vLLM cannot begin with the second one.
        on_recomputed: Called with a reason and a number of tokens, when a prompt of a decode server is computed here.

    Attributes:
        ticket: The latest ticket of the first worker; None until workers have reported theirs, also after
            `forget_ticket`.
        shares_answers: Another connector keeps the same requests, and vLLM lets only one of them answer with a key.
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
        on_recomputed: Callable[[str, int], object] = lambda *_: None,
    ) -> None:
        self._groups = groups
        self._on_recomputed = on_recomputed
        self._is_prefill = is_prefill
        self._is_decode = is_decode
        self._is_by_priority = is_by_priority
        self._num_left_out = max(num_left_out, int(any(group.state is not None for group in groups)))
        self._trust = trust
        self._first_tokens = None if self._num_left_out else first_tokens
        # If no first token comes, vLLM computes the prompt's last token, which sees one token more of a window.
        self._takes_last = self._first_tokens is not None and all(group.keeps_all for group in groups)
        self.ticket: Mapping[str, object] | None = None
        self._has_had_ticket = False
        self.shares_answers = False
        self.held = HeldBlocks()
        self.is_empty = False
        self._rooms: dict[str, _Sending] = {}
        self._sending: dict[str, _Sending] = {}
        self._others: dict[str, _Sending] = {}
        self._ended: dict[str, _Sending] = {}
        self._announced: dict[str, int] = {}
        self._taken_over: dict[str, str] = {}
        self._granted: dict[str, int] = {}
        self._leaders: dict[str, str] = {}
        self._followers: dict[str, str] = {}
        self._orders = StepOrders()
        self._shortage = BlockShortage()

    def add(self, request: Any) -> None:
        """Accept a request: both sides start before there are blocks for it."""
        with contained(partial(self._compute_alone, request)):
            params = request.kv_transfer_params
            if self._is_prefill and (withdrawn := withdrawn_room(params)) is not None:
                self._withdraw(withdrawn)
            elif self._is_prefill and is_for_decode(params):
                self._open(request)
            elif self._is_decode:
                self._announce(request)

    def _compute_alone(self, request: Any, reason: str) -> None:
        LOGGER.warning("kvflow: %s is computed here alone: %s", request.request_id, reason)
        if self._is_decode and not is_for_decode(request.kv_transfer_params):
            self._recompute("unusable_ticket", request)

    def _recompute(self, reason: str, request: Any) -> None:
        """Count the tokens of a prompt that is computed here, although this server takes prompts over."""
        tokens = getattr(request, "prompt_token_ids", None)
        if tokens and not _is_only_to_be_told(request):
            self._on_recomputed(reason, len(tokens))

    def _open(self, request: Any) -> None:
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
        self._rooms[room] = self._sending[request_id] = sending
        self._orders.opened[request_id] = room

    def _num_received(self, request: Any) -> int:
        """Return how many tokens of a prompt decode takes over: the last one only together with the first token."""
        return max(len(request.prompt_token_ids) - max(self._num_left_out, 0 if self._takes_last else 1), 0)

    def _withdraw(self, room: str) -> None:
        """Give up a room for which nobody will ask. A request that is not computed yet is aborted by its client."""
        if (sending := self._rooms.get(room)) is not None:
            sending.is_lost = True
            if sending.request_id not in self._sending:
                self._orders.reclaimed[sending.request_id] = True

    def _announce(self, request: Any) -> None:
        """Announce a request to prefill; compute it here if it cannot be taken over, or if this raises KvflowError."""
        request_id = request.request_id
        reference = take_reference(request.kv_transfer_params)
        if reference is None:
            self._recompute("not_kept" if request.kv_transfer_params else "no_ticket", request)
            return
        if not request.prompt_token_ids:
            LOGGER.warning("kvflow: %s is computed here: its prompt has no tokens", request_id)
            self._orders.refused.append(reference)
            return
        prompt = digest_of(request)
        if reference.prompt not in (None, prompt) and not _is_only_to_be_told(request):
            LOGGER.warning("kvflow: %s is computed here: its ticket is of another prompt", request_id)
            self._recompute("another_prompt", request)
            return
        if reference.key in self._leaders:
            self._followers[request_id] = reference.key
            return
        self._leaders[reference.key] = request_id
        self._taken_over[request_id] = reference.key
        self._announced[request_id] = len(request.prompt_token_ids)
        priority = priority_class(request.priority) if self._is_by_priority else 0
        self._orders.announced[request_id] = reference._replace(prompt=prompt, priority=priority)

    def num_elsewhere(self, request: Any, num_computed: int) -> int | None:
        """Return how many tokens can be received beyond those already here; None while that is unknown.

        Windows must reach back from the first token that is not received. A request that follows another one with the
        same reference (as with `n` > 1) waits for that one, and finds its blocks here.
        """
        request_id = request.request_id
        if self._followers.get(request_id) in self._leaders:
            return None
        self._followers.pop(request_id, None)
        self._shortage.wants_blocks(request_id)
        if request_id in self._sending:
            self._sending[request_id].num_local = num_computed
        if request_id in self._announced:
            with contained(partial(LOGGER.warning, "kvflow: %s is computed here: %s", request_id)):
                count = self._num_received(request) - num_computed
                return count if count > self._takes_last else 0  # the last one alone is computed sooner than received
        return 0

    def allocated(self, request: Any, blocks: Sequence[Sequence[int]], num_elsewhere: int) -> None:
        """Order workers to receive into blocks, or to decline if vLLM wants nothing of what was computed elsewhere."""
        request_id = request.request_id
        self._shortage.has_blocks(request_id)
        if request_id not in self._announced:
            return
        del self._announced[request_id]
        if not num_elsewhere:
            self._is_here(request_id)
            self._orders.declined.append(request_id)
            return
        self._granted[request_id] = num_elsewhere
        # Without blocks, workers refuse it: vLLM waits until it is told that the request was not received.
        self._orders.granted[request_id] = GrantOrder(0, num_elsewhere, ())
        with contained(partial(LOGGER.warning, "kvflow: %s has no usable blocks: %s", request_id)):
            stop = self._num_received(request)
            start = stop - num_elsewhere
            wanted = [
                group.blocks_of(table, max(start, group.first_seen(stop)), stop)
                for group, table in zip(self._groups, blocks, strict=True)
            ]
            self._orders.granted[request_id] = GrantOrder(start, stop, wanted)

    def step(self, output: Any) -> StepOrders:
        """Return the orders of a step: decisions since the last one, and the tokens that the step computes."""
        for request_id in output.preempted_req_ids or ():
            sending = self._sending.get(request_id)
            if sending is not None and not sending.is_sent:  # else its blocks stay until they were sent
                sending.sent = 0  # it gets new blocks, and its tokens are sent again
                self._orders.preempted.append(request_id)
        if self._sending:
            self._order_chunks(output)
        if self.held.pool is not None:
            self._orders.reclaimed |= self._shortage.reclaim(len(self.held.pool.blocks), time.monotonic())
        orders, self._orders = self._orders, StepOrders()
        orders.is_empty = self.is_empty = not output.total_num_scheduled_tokens
        return orders

    def _order_chunks(self, output: Any) -> None:
        cached = output.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, count in output.num_scheduled_tokens.items():
            sending = self._sending.get(request_id)
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
            to pass to decode.
        """
        request_id = request.request_id
        self._announced.pop(request_id, None)
        self._granted.pop(request_id, None)
        self._followers.pop(request_id, None)
        if request_id in self._taken_over:
            self._orders.given_up[request_id] = status
        self._is_here(request_id)
        if (other := self._others.pop(request_id, None)) is not None:
            return False, self._answered(other, request_id, is_complete=is_complete)
        if (sending := self._sending.pop(request_id, None)) is None:
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
        params = self._answered(sending, request_id, is_complete=is_complete)
        if sending.sent == 0:
            self._forget(sending)
            return False, None
        self._ended[request_id] = sending
        self._orders.awaited.append(request_id)
        self._shortage.pin(request_id, self.held.num_kept(request_id), time.monotonic())
        return True, params

    def _answered(self, sending: _Sending, request_id: str, *, is_complete: bool) -> dict[str, Any] | None:
        """Return the parameters of an answer, and start the lease of the room with the last one."""
        sending.num_open -= 1
        params = None
        if is_complete and self.ticket is not None and not sending.is_lost:
            try:
                params = reply(
                    self.ticket,
                    sending.room,
                    request_id=request_id,
                    num_tokens=sending.num_tokens,
                    prompt=sending.prompt,
                    trust=self._trust,
                )
                sending.is_kept = True
            except KvflowError as error:
                LOGGER.warning("kvflow: %s is not handed over: %s", request_id, error)
        elif is_complete:
            params = dict(NOTHING_KEPT)
        if not sending.num_open:
            if sending.is_kept and not sending.is_lost:
                self._orders.leased.append(sending.request_id)
            else:
                self._orders.abandoned.setdefault(sending.request_id, "vLLM has given no ticket for it")
        return own_part(params) if self.shares_answers else params

    def _forget(self, sending: _Sending) -> None:
        self._shortage.forget([sending.request_id])
        if self._rooms.get(sending.room) is sending:
            del self._rooms[sending.room]

    def take_sent(self, request_ids: Iterable[str]) -> None:
        """Handle requests whose blocks are no longer needed for sending."""
        for request_id in request_ids:
            self.held.let_go(request_id)
            if (sending := self._ended.pop(request_id, None)) is not None:
                self._forget(sending)

    def take_received(self, request_ids: Iterable[str]) -> None:
        """Handle requests that have their blocks, or have failed."""
        for request_id in request_ids:
            self._is_here(request_id)

    def _is_here(self, request_id: str) -> None:
        """Let requests continue that waited for this one to be received."""
        if (key := self._taken_over.pop(request_id, None)) is not None:
            del self._leaders[key]

    def forget_ticket(self) -> None:
        """Ask workers for another ticket with the next step: they may open new ranks before it."""
        self.ticket = None
        self._orders.wants_ticket = True

    def take_report(self, report: WorkerReport) -> None:
        """Handle a report; vLLM calls this before it frees the blocks of the requests that end with it."""
        if report.tickets:
            self.ticket = min(report.tickets, key=itemgetter("engine_rank"))
            self._has_had_ticket = True
        self.held.take_report(report)
        self._shortage.note_asked(it for it in report.asked if it in self._sending or it in self._ended)
        for sending in (self._sending[it] for it in report.lost if it in self._sending):
            sending.is_lost = True
        for request_id, reason in report.failed:  # once for each worker
            if num_tokens := self._granted.pop(request_id, 0):
                self._on_recomputed(reason, num_tokens)
        for request_id in report.returned:
            if num_tokens := self._announced.pop(request_id, 0):
                LOGGER.warning("kvflow: %s is computed here: prefill needed its blocks for others", request_id)
                self._on_recomputed("given_back", num_tokens)
                self._is_here(request_id)
                self._orders.declined.append(request_id)

    @property
    def awaits_report(self) -> bool:
        """Whether vLLM must step even without requests, because it would otherwise not learn what workers know.

        That is the ticket of the first one, and that blocks are safe.
        """
        return self.held.awaits_proof or (self._is_prefill and not self._has_had_ticket)


def _leave_out(request: Any, count: int) -> None:
    """Leave out the last tokens of a prompt: decode computes them, which requires the recurrent state before them.

    A prompt that has no others is computed, but decode does not take it over.
    """
    if count and len(request.prompt_token_ids) > count:
        del request.prompt_token_ids[-count:]
        del request._all_token_ids[-count:]
        request.num_prompt_tokens -= count
        request.max_tokens = 1


def _is_only_to_be_told(request: Any) -> bool:
    """Return whether vLLM has refused a request, and passes on a stand-in only so that prefill is told."""
    return bool(getattr(request, "abort_immediately", False))

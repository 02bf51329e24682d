"""The prefill end: computes prompts, and sends their cache while later chunks are computed."""

import operator
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from typing import Any, Final, NamedTuple

from transformers.generation.continuous_batching.requests import RequestStatus
from typing_extensions import override

import kvflow
from kvflow import KvflowError, LocalProtocolError, Memory, Outcome
from kvflow.blocking import BlockingSender, PrefillRank
from kvflow.engines.containment import contained
from kvflow.engines.transformers.engine import LOGGER, End
from kvflow.engines.transformers.metadata import FirstToken

__all__ = ["Moved", "PrefillManager", "Sent"]


OWN_SETTINGS: Final = frozenset({"max_new_tokens", "streaming", "record_timestamps", "eos_token_id"})
"""Settings of `manager.add_request` that are not for the logits processors."""


class Sent(NamedTuple):
    """A request that is being handed over.

    Attributes:
        ticket: Ticket for the decode end, which can be passed on at once.
        sender: The transfer, with `outcome`, `failure` and `memory`.
    """

    ticket: dict[str, object]
    sender: BlockingSender


class Moved(NamedTuple):
    """A request that was taken out of its manager while it was running.

    Attributes:
        ticket: Ticket for the decode end.
        sender: The transfer, with `outcome`, `failure` and `memory`.
        tokens: The prompt, and what was generated. The cache of all but the last one moves.
    """

    ticket: dict[str, object]
    sender: BlockingSender
    tokens: list[int]


class PrefillManager(End[PrefillRank]):
    """A manager that hands its requests over. Use it as a context manager, around `start` and `stop` of the manager.

    The prompt and one token are computed; the manager delivers that token as the output of the request. Other requests
    of the manager run as before. `manager.cancel_request` withdraws a request.

    Its arguments and what it raises are those of `End`.
    """

    _kind = PrefillRank

    def __init__(self, manager: Any, config: kvflow.PrefillConfig, *, fingerprint: str) -> None:
        super().__init__(manager, config, fingerprint=fingerprint)
        self._senders: dict[str, BlockingSender] = {}
        self._offered: dict[str, int] = {}
        self._leaving: dict[str, Future[Moved]] = {}
        self._moving: dict[str, Any] = {}
        self._handed_back: set[str] = set()

    def add_request(self, input_ids: Sequence[int], room: str, **settings: Any) -> Sent:
        """Compute a prompt and hand it over. Callable from any thread; does not wait.

        Args:
            input_ids: The prompt.
            room: Id of the request, the same on both sides.
            settings: Settings of `manager.add_request`, except `max_new_tokens`.

        Raises:
            LocalProtocolError: The room is not valid or in use, or the rank or the manager accepts no requests.
            ConfigError: A setting of the request is unknown or has the wrong type.
        """
        tokens = list(map(operator.index, input_ids))  # whatever they raise concerns this caller alone
        if not tokens:
            raise LocalProtocolError("prompt is empty", room=room)
        if self.has(room) or self.engine.has(room):
            raise LocalProtocolError("room is in use", room=room)
        self.engine.check_accepts({name: value for name, value in settings.items() if name not in OWN_SETTINGS})
        ticket = self.rank.ticket(room)
        sender = self.rank.send(room)
        self._senders[room], self._offered[room] = sender, 0
        with ExitStack() as stack:
            stack.callback(lambda: self._senders.pop(room).abort())
            stack.callback(self._offered.pop, room, None)
            if self.engine.add_request(tokens, request_id=room, max_new_tokens=1, **settings) is None:
                raise LocalProtocolError("manager takes no requests", room=room)
            stack.pop_all()
        return Sent(ticket, sender)

    def move_request(self, request_id: str) -> "Future[Moved]":
        """Take a request of the manager out while it is running, and hand it over with its cache.

        It stops after the token that is being generated. Another manager goes on with
        `DecodeManager.add_request(moved.tokens[:-1], moved.ticket)`: the first token that it delivers is the last one
        here. It also needs the request's settings; the state of a random generator does not move. If the transfer
        fails, the request goes on here once its blocks are safe. Callable from any thread; does not wait.

        Raises:
            LocalProtocolError: In the result: it is not running, or its id is not a valid room; it goes on. Or the end
                is closed.
        """
        future = self._leaving.setdefault(request_id, Future())
        try:
            self.rank.ticket(request_id)
        except KvflowError as error:  # of a closed end, nobody looks at requests that leave
            if self._leaving.pop(request_id, None) is not None:
                future.set_exception(error)
        self.engine.wake()
        return future

    def hand_back(self, request_id: str) -> dict[str, object]:
        """Send the cache of a request of this manager once it has ended; return its ticket.

        So the manager that computes prompts has it for the next turn of the conversation: with the end's output,
        `DecodeManager.add_request(tokens[:-1], ticket, max_new_tokens=1)` takes over what its cache of prefixes lacks,
        where `tokens` are those of the prompt and the output. Callable from any thread, before the request has ended.

        Raises:
            LocalProtocolError: The id is not a valid room, or the manager has no such request.
        """
        ticket = self.rank.ticket(request_id)
        self._handed_back.add(request_id)
        if not self.engine.has(request_id):
            self._handed_back.discard(request_id)
            raise LocalProtocolError("request is not running", request_id=request_id)
        return ticket

    @override
    def has(self, request_id: str) -> bool:
        return request_id in self._senders

    # On the thread of the generation loop

    @property
    def is_busy(self) -> bool:
        """Requests are not handed over yet."""
        return bool(self._senders)

    def step(self) -> None:
        """Offer what the last batch has computed, and drop ended transfers."""
        for update in self.rank.completed():
            room = str(update.room)
            if self._senders.get(room) is not update.transfer or update.outcome is Outcome.PENDING:
                continue  # another request may have the room
            if room in self._offered:  # the rest is not needed
                self.engine.manager.cancel_request(room)
            elif room in self._moving:
                self._end_move(room)
            else:
                self._senders.pop(room, None)
        for room in list(self._offered):
            self._offer(room)
        for request_id in list(self._leaving):
            self._try_to_move(request_id)

    def _try_to_move(self, request_id: str) -> None:
        """Hand a request over that is running; wait for one whose prompt is not computed yet."""
        state = self.engine.scheduler.active_requests.get(request_id)
        is_own = request_id not in self._senders
        if is_own and self.engine.has(request_id) and (state is None or state.status != RequestStatus.DECODING):
            return
        future = self._leaving.pop(request_id)
        try:
            future.set_result(self._move(state if is_own else None, request_id))
        except KvflowError as error:
            future.set_exception(error)

    def _move(self, state: Any, room: str) -> Moved:
        """Hand over a running request; raise LocalProtocolError if it is none, or has no valid room."""
        if state is None:
            raise LocalProtocolError("request is not running", request_id=room)
        ticket, sender = self.rank.ticket(room), self.rank.send(room)
        tokens = [*state.initial_tokens, *state.generated_tokens]
        self._finish(sender, state, 0)
        self._moving[room] = self.engine.scheduler.active_requests.pop(room)
        self._senders[room] = sender
        return Moved(ticket, sender, tokens)

    def _end_move(self, room: str) -> None:
        """Give up the blocks of a request that has moved; one that has not goes on, once nothing reads its blocks."""
        sender = self._senders[room]
        if sender.outcome is Outcome.SUCCESS:
            self.lose(room)
        elif sender.memory is Memory.SAFE:
            LOGGER.warning("kvflow: request %s stays here: %s", room, sender.failure)
            del self._senders[room]
            self.engine.scheduler.active_requests[room] = self._moving.pop(room)

    def _offer(self, room: str) -> None:
        """Offer complete blocks only: an incomplete one may still be replaced by an equal block of another request."""
        state, start, sender = self.engine.scheduler.active_requests.get(room), self._offered[room], self._senders[room]
        with contained(partial(_abort, sender)):
            stop = self._map.whole(state.current_len()) if state is not None else 0
            if stop > start and sender.outcome is Outcome.PENDING:
                sender.chunk((start, stop), self._map.chunk(self.engine.blocks(room), start, stop))
                self._offered[room] = stop

    @override
    def fail_all(self, error: Exception) -> None:
        self._offered.clear()
        self._handed_back.clear()
        for sender in self._senders.values():
            sender.abort(str(error))
        for room, state in list(self._moving.items()):
            self.lose(room)
            self.engine.fail(state, error)
        self._senders.clear()
        for future in self._leaving.values():
            future.set_exception(LocalProtocolError("manager has failed", detail=str(error)))
        self._leaving.clear()

    def lose(self, request_id: str) -> bool:
        """Send the last tokens of a request that has finished, and abort one that was cancelled or failed."""
        if self._moving.pop(request_id, None) is not None:
            sender = self._senders.pop(request_id)
            sender.abort()
            self.engine.hold(request_id, sender)
            return True
        if request_id not in self._offered:
            return request_id in self._handed_back and self._send_back(request_id)
        sender, state = self._senders[request_id], self.engine.scheduler.active_requests.get(request_id)
        has_finished = _has_finished(state)
        is_computed_again = state is not None and not has_finished and state.status != RequestStatus.FAILED
        if has_finished:
            self._finish(sender, state, self._offered.pop(request_id))
        elif is_computed_again:
            if not self._offered[request_id]:  # nothing reads its blocks
                return False
        else:
            del self._offered[request_id]
            sender.abort()
        self.engine.hold(request_id, sender)
        if sender.outcome is not Outcome.PENDING and request_id not in self._offered:
            self._senders.pop(request_id, None)
        return True

    def _send_back(self, request_id: str) -> bool:
        """Send the whole cache of a request that has finished; return whether it is held."""
        state = self.engine.scheduler.active_requests.get(request_id)
        if state is None or state.status >= RequestStatus.FINISHED:
            self._handed_back.remove(request_id)
        if not _has_finished(state):
            return False
        try:
            sender = self._senders[request_id] = self.rank.send(request_id)
        except KvflowError as error:
            LOGGER.warning("kvflow: request %s is not handed back: %s", request_id, error)
            return False
        self._finish(sender, state, 0)
        self.engine.hold(request_id, sender)
        return True

    def _finish(self, sender: BlockingSender, state: Any, start: int) -> None:
        with contained(partial(_abort, sender)):
            num_tokens = state.current_len()
            first = FirstToken(state.generated_tokens[-1], state.logprobs[-1] if state.logprobs else None)
            tables = self._map.last(self.engine.blocks(state.request_id), start, num_tokens)
            sender.finish((start, num_tokens), tables, metadata=first.to_bytes())


def _has_finished(state: Any) -> bool:
    return state is not None and state.status == RequestStatus.FINISHED and bool(state.generated_tokens)


def _abort(sender: BlockingSender, reason: str) -> None:
    """Abort a transfer, unless it has failed meanwhile, which `completed` reports."""
    if sender.outcome is Outcome.PENDING:
        LOGGER.warning("kvflow: request %s is not handed over: %s", sender.room, reason)
        sender.abort(reason)

"""The decode end: receives prompts that another manager has computed, and continues from them."""

import operator
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
from typing_extensions import override

import kvflow
from kvflow import KvflowError, LocalProtocolError, Outcome, PlanError
from kvflow.blocking import BlockingReceiver, DecodeRank
from kvflow.engines.containment import contained
from kvflow.engines.transformers.engine import End
from kvflow.engines.transformers.metadata import read_first_token

__all__ = ["DecodeManager", "OnFailure"]

OnFailure = Literal["fail", "recompute"]
"""What to do with a request whose transfer fails."""


@dataclass
class _Arriving:
    """A request that has not arrived yet; `prefix` is the number of its tokens that were cached here already."""

    state: Any
    receiver: BlockingReceiver
    on_failure: OnFailure
    has_blocks: bool = False
    prefix: int = 0


class DecodeManager(End[DecodeRank]):
    """A manager that takes requests over. Use it as a context manager, around `start` and `stop` of the manager.

    The manager delivers their outputs like those of its own requests, which run beside them. `manager.cancel_request`
    cancels such a request at any time.

    Its arguments and what it raises are those of `End`.
    """

    _kind = DecodeRank

    def __init__(self, manager: Any, config: kvflow.DecodeConfig, *, fingerprint: str) -> None:
        super().__init__(manager, config, fingerprint=fingerprint)
        self._arriving: dict[str, _Arriving] = {}

    def add_request(  # noqa: PLR0913 - choices of the engine, by keyword
        self,
        input_ids: Sequence[int],
        ticket: Mapping[str, object],
        *,
        max_new_tokens: int | None = None,
        eos_token_id: int | list[int] | None = None,
        streaming: bool = False,
        on_failure: OnFailure = "fail",
        timeout_s: float | None = None,
        **logit_processor_kwargs: Any,
    ) -> BlockingReceiver:
        """Take a request over. This notifies prefill at once. Callable from any thread; does not wait.

        Args:
            input_ids: The prompt.
            ticket: Ticket from the prefill end.
            max_new_tokens: Tokens to generate, including the first; the manager's setting by default.
            eos_token_id: Tokens that end the output; the manager's setting by default.
            streaming: Deliver each token.
            on_failure: Whether to deliver a failed output, or to compute the prompt here.
            timeout_s: Timeout of the transfer.
            logit_processor_kwargs: Settings of the logits processors for this request.

        Returns:
            The transfer, whose `room` is the id of the request. `abort` fails the request.

        Raises:
            TicketError: As `announce` of the rank.
            ConfigError: As `announce`, or a setting of the request is unknown or has the wrong type.
            PlanError: The prompt is empty, or does not fit into an empty cache.
            LocalProtocolError: The room is in use or not a string, or the rank or the manager accepts no requests.
        """
        self.engine.check_accepts(logit_processor_kwargs)
        tokens = list(map(operator.index, input_ids))  # whatever they raise concerns this caller alone
        self._check_fits(tokens)
        settings = self.engine.manager.generation_config
        eos = settings.eos_token_id if eos_token_id is None else eos_token_id
        receiver = self.rank.announce(prefill=ticket, timeout_s=timeout_s)
        room = receiver.room
        with ExitStack() as stack:
            stack.callback(receiver.abort)
            if not isinstance(room, str) or self.has(room) or self.engine.has(room):
                raise LocalProtocolError("room is in use or no string", room=room)
            state = RequestState(
                request_id=room,
                initial_tokens=tokens,
                max_new_tokens=settings.max_new_tokens if max_new_tokens is None else operator.index(max_new_tokens),
                eos_token_id=eos if eos is None or isinstance(eos, int) else list(map(operator.index, eos)),
                streaming=streaming,
                logit_processor_kwargs=logit_processor_kwargs,
            )
            stack.pop_all()
        self._arriving[room] = _Arriving(state, receiver, on_failure)
        self.engine.wake()
        return receiver

    def _check_fits(self, input_ids: Sequence[int]) -> None:
        cache, needed = self.engine.cache, 0
        for allocator in cache.cache_allocators.values():
            needed += -(-allocator.needs_new_blocks("", 0, len(input_ids) + 1) // allocator.blocks_per_sector)
        if not input_ids or needed > cache.num_sectors:
            raise PlanError("prompt is empty or does not fit into the cache", num_tokens=len(input_ids))

    @override
    def has(self, request_id: str) -> bool:
        return request_id in self._arriving

    # On the thread of the generation loop

    @property
    def is_busy(self) -> bool:
        """Requests have not arrived yet."""
        return bool(self._arriving)

    def step(self) -> None:
        """Process updates, and grant blocks to waiting requests, first come, first served."""
        for update in self.rank.completed():
            one = self._arriving.get(str(update.room))
            if one is None or one.receiver is not update.transfer:
                continue
            if update.outcome is Outcome.SUCCESS:
                self._arrive(one)
            elif update.outcome is not Outcome.PENDING:
                self._fail(one)
        for one in list(self._arriving.values()):
            if not one.has_blocks and not self._grant(one):
                break

    def _grant(self, one: _Arriving) -> bool:
        """Allocate blocks after the cached prefix, and grant them. Return False if there are not enough."""
        state, engine = one.state, self.engine
        if one.receiver.outcome is not Outcome.PENDING:  # `completed` reports it
            return True
        num_tokens = len(state.initial_tokens)
        one.prefix = engine.cache.search_prefix_match(state.request_id, state.initial_tokens)
        if not engine.allocate(state, one.prefix):
            engine.free(state.request_id)
            return False
        one.has_blocks = True
        with contained(one.receiver.abort):  # `completed` reports it
            tables = self._map.last(engine.blocks(state.request_id), one.prefix, num_tokens)
            one.receiver.grant(tokens=(one.prefix, num_tokens), pages=tables)
        return True

    def _arrive(self, one: _Arriving) -> None:
        """Turn it into a request that decodes, as if its prompt had been computed here."""
        state, engine = one.state, self.engine
        metadata = one.receiver.result().metadata
        try:
            first = read_first_token(metadata, engine.processor.config.vocab_size)
        except (KvflowError, ValueError) as error:
            self._give_up(one, error)
            return
        del self._arriving[state.request_id]
        state.position_offset = len(state.initial_tokens)
        state.remaining_prefill_tokens = []
        state.status = RequestStatus.DECODING
        self._share(one)
        has_finished = state.update_and_check_completion(first.token, first.logprob)
        engine.scheduler.active_requests[state.request_id] = state
        if has_finished:
            engine.scheduler.finish_request(state.request_id)
        if has_finished or state.streaming:
            engine.deliver(state)

    def _share(self, one: _Arriving) -> None:
        """Let later requests reuse its blocks, if the cache shares prefixes."""
        cache = self.engine.cache
        if cache.use_prefix_sharing:
            sizes = {name: allocator.tokens_per_page for name, allocator in cache.cache_allocators.items()}
            num_tokens = len(one.state.initial_tokens)
            new = {name: num_tokens // size - one.prefix // size for name, size in sizes.items()}
            cache.mark_complete_blocks(one.state, new)

    def _fail(self, one: _Arriving) -> None:
        try:
            one.receiver.result()
        except KvflowError as error:
            self._give_up(one, error)

    def _give_up(self, one: _Arriving, error: Exception) -> None:
        """Fail a request, or compute it here; its blocks are held until they are safe."""
        state = one.state
        del self._arriving[state.request_id]
        self.engine.hold(state.request_id, one.receiver)
        state.position_offset = 0
        if one.on_failure == "recompute":
            self.engine.scheduler.add_waiting_request(state)
        else:
            self.engine.fail(state, error)

    @override
    def fail_all(self, error: Exception) -> None:
        for one in list(self._arriving.values()):
            one.receiver.abort(str(error))
            one.on_failure = "fail"
            self._give_up(one, error)

    def lose(self, request_id: str) -> bool:
        """End the transfer of a cancelled request."""
        one = self._arriving.pop(request_id, None)
        if one is None:
            return False
        one.receiver.abort()
        self.engine.hold(request_id, one.receiver)
        return True

"""Managers of transformers in one process, each with both ends, so that requests and turns go both ways."""

import queue
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from transformers.generation.continuous_batching.requests import RequestState
from typing_extensions import override

import kvflow
from kvflow import Memory
from kvflow.engines.transformers.decode import DecodeManager
from kvflow.engines.transformers.prefill import Moved, PrefillManager
from kvflow.geometry.ranges import TokenRange
from kvflow.testing.offers import OfferingAdapter, ServerName
from tests.engines.transformers.models import make_manager

__all__ = ["Server", "Servers"]

TAKEN = "taken"
"""A request that has nearly all blocks of the owner."""

NUM_TOKENS = 64
"""Tokens of a text that moves."""

NUM_WRITTEN = 3
"""Tokens after which it is offered."""


class Server:
    """A manager with both ends.

    Attributes:
        computed: Tokens that the manager has computed.
    """

    def __init__(self, name: str, stack: ExitStack, *, page_size: int, num_blocks: int = 64) -> None:
        self.manager = manager = make_manager(page_size=page_size, num_blocks=num_blocks, allow_block_sharing=True)
        sending = kvflow.PrefillConfig(instance=name, backend="memory", takes_offers=True)
        self.prefill = stack.enter_context(PrefillManager(manager, sending, fingerprint="tests"))
        receiving = kvflow.DecodeConfig(instance=name, backend="memory")
        self.decode = stack.enter_context(DecodeManager(manager, receiving, fingerprint="tests"))
        self.outputs: dict[str, Any] = {}
        self.computed = 0
        schedule = self.decode.engine.scheduler.schedule_batch

        def count(*budgets: int) -> Any:
            found = schedule(*budgets)
            self.computed += sum(len(one.state.tokens_to_process) for one in found[0] or [])
            return found

        stack.callback(setattr, self.decode.engine.scheduler, "schedule_batch", schedule)
        self.decode.engine.scheduler.schedule_batch = count
        manager.start()
        stack.callback(manager.stop, hard_stop=True)

    def output(self, room: str, num_tokens: int = 0, timeout_s: float = 20) -> Any:
        """Wait until a request has ended, or has that many tokens."""
        while True:
            last = self.outputs.get(room)
            if last is not None and (last.is_finished() or 0 < num_tokens <= len(last.generated_tokens)):
                return last
            output = self.manager.output_router.output_queue.get(timeout=timeout_s)
            self.outputs[output.request_id] = output

    @property
    def used_blocks(self) -> int:
        """Number of tables of requests and of transfers that hold blocks."""
        tables: list[dict[str, Any]] = [one.block_table for one in self.decode.engine.cache.cache_allocators.values()]
        held = len(self.prefill.engine._held) + len(self.decode.engine._held)
        return held + sum(room != TAKEN for table in tables for room in table)

    def is_short(self, num_tokens: int) -> bool:
        """Whether a request of that length does not fit into the blocks that are free or only cached."""
        cache = self.decode.engine.cache
        needed = num_tokens / self.manager.continuous_batching_config.page_size + 1
        with self.decode.engine.paused():
            cache.pool.try_to_free_sectors()
            if cache.compute_free_capacity() * cache.num_sectors < needed:
                cache.evict_cached_blocks()
                cache.pool.try_to_free_sectors()
            return bool(cache.compute_free_capacity() * cache.num_sectors < needed)

    def forget(self, room: str) -> None:
        """Forget the outputs of an earlier request of that name."""
        outputs = self.manager.output_router.output_queue
        while not outputs.empty():
            outputs.get()
        self.outputs.pop(room, None)


class Servers(OfferingAdapter):
    """A holder and an owner with pages of other sizes, and a manager for references; a context manager."""

    def __enter__(self) -> "Servers":
        with ExitStack() as stack:
            self.holder = Server("holder", stack, page_size=16)
            self.owner = Server("owner", stack, page_size=8)
            self._moved: dict[str, Moved] = {}
            self._writers: dict[str, ServerName] = {}
            self._alone = make_manager()
            self._alone.start()
            stack.callback(self._alone.stop, hard_stop=True)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @override
    def reference(self, prompt: Sequence[int]) -> list[int]:
        self._alone.add_request(list(prompt), max_new_tokens=NUM_TOKENS)
        tokens: list[int] = self._alone.get_result(timeout=20).generated_tokens
        return tokens

    @override
    def offer(self, prompt: Sequence[int], room: str) -> None:
        holder = self.holder
        for server in (holder, self.owner):
            server.forget(room)
        holder.manager.add_request(list(prompt), request_id=room, max_new_tokens=NUM_TOKENS, streaming=True)
        holder.output(room, NUM_WRITTEN)
        moved = self._moved[room] = holder.prefill.move_request(room).result(20)
        tokens, to = (0, len(moved.tokens) - 1), self.owner.prefill.rank.endpoint
        made = holder.decode.rank.ask(lambda rank: rank.offers.make_offer(moved.ticket, to=to, tokens=tokens)).result()
        self.decide(moved)
        while not made.is_answered:
            moved.sender.wait(0.001)
        self._writers[room] = "owner" if made.is_accepted else "holder"
        if not made.is_accepted:
            self.stay(moved)

    def stay(self, moved: Moved) -> None:
        """Let a request go on where it is."""
        moved.sender.abort("declined")

    def decide(self, moved: Moved) -> None:
        """Accept the next offer or decline it, as the owner."""
        offers: list[kvflow.ReceivedOffer] = []
        while not offers:
            offers = self.owner.prefill.rank.ask(lambda rank: rank.offers.take_offers()).result()
        (offer,) = offers
        if self.owner.is_short(offer.tokens[1]):
            self.owner.prefill.rank.ask(lambda _: offer.decline("no free pages")).result()
        elif self.owner.prefill.rank.ask(lambda _: offer.accept()).result():
            prompt = self.holder.outputs[str(offer.room)].prompt_ids
            left = NUM_TOKENS + 1 - (len(moved.tokens) - len(prompt))
            self.owner.decode.add_request(moved.tokens[:-1], offer.ticket, max_new_tokens=left)

    @override
    def result(self, room: str, timeout_s: float) -> list[int]:
        try:
            if self.writer(room) == "holder":
                tokens: list[int] = self.holder.output(room, timeout_s=timeout_s).generated_tokens
                return tokens
            rest: list[int] = self.owner.output(room, timeout_s=timeout_s).generated_tokens
        except queue.Empty as error:
            raise TimeoutError(room) from error
        moved = self._moved[room]
        return [*moved.tokens[len(self.holder.outputs[room].prompt_ids) : -1], *rest]

    @override
    def writer(self, room: str) -> ServerName:
        return self._writers[room]

    @override
    def granted(self, room: str) -> TokenRange | None:
        wanted = self._moved[room].sender.wanted
        return None if wanted is None else wanted["kv"]

    @override
    def memory(self, room: str) -> Memory:
        return self._moved[room].sender.memory

    @override
    def cancel(self, room: str) -> None:
        self.holder.manager.cancel_request(room)

    @override
    def cache_prefix(self, prompt: Sequence[int]) -> int:
        self.owner.manager.add_request(list(prompt), request_id="prefix", max_new_tokens=1)
        self.owner.output("prefix")
        return len(prompt) // 8 * 8

    @override
    @contextmanager
    def short_owner(self) -> Iterator[None]:
        engine = self.owner.decode.engine
        with engine.paused():
            state = RequestState(request_id=TAKEN, initial_tokens=[0] * 8 * 60)
            assert engine.allocate(state, 0)
        yield
        with engine.paused():
            engine.free(TAKEN)

    @override
    def used_pages(self, server: ServerName) -> int:
        return (self.holder if server == "holder" else self.owner).used_blocks

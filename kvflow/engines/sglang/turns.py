"""Finished turns of conversations go back to the prefill servers that computed their prompts, as offers.

The next turn then starts from them in SGLang's radix cache. Decode offers the pages of a prompt and its answer, and
keeps them until nothing reads them any more. Prefill receives the pages that its radix cache lacks, and inserts them
once they have arrived together with the tokens that they belong to. A turn that does not go back is computed. All
methods are called on the scheduler's thread; only `give_up_turns` waits.
"""

import hashlib
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Generic, NamedTuple, TypeVar

from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.common import evict_from_tree_cache, kv_to_page_indices
from sglang.srt.mem_cache.radix_cache import RadixKey
from typing_extensions import override

from kvflow import Endpoint, Memory, Outcome
from kvflow.blocking import BlockingReceiver, BlockingSender, DecodeRank, PrefillRank, TransferUpdate
from kvflow.engines.containment import contained
from kvflow.engines.logs import adapter_logger
from kvflow.engines.sglang.memory import PoolMap
from kvflow.engines.sglang.quarantine import QuarantineWatch
from kvflow.offers import MadeOffer, ReceivedOffer

__all__ = ["TURN_S", "PromptBook", "TurnHolder", "TurnOwner"]

AnyTurn = TypeVar("AnyTurn")

LOGGER: Final = adapter_logger(__name__)

OFFER_S: Final = 5.0
"""How long prefill may take to decide. Decode keeps the pages meanwhile."""

TURN_S: Final = 30.0
"""Timeouts of the transfer of a turn: computing it again takes no longer."""

RESERVE: Final = 0.1
"""Share of pages, and of rows on decode, that turns leave to requests."""

MAX_REMEMBERED: Final = 4 * 1024 * 1024
"""Tokens of prompts that prefill remembers, 8 bytes each."""

GIVE_UP_S: Final = 1.0
"""How long SGLang's scheduler waits for the pages of turns that it gives up."""


def _name_of(room: int) -> str:
    return f"turn-{room}"


def _digest_of(token_ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("Q", token_ids).tobytes(), digest_size=32).digest()


def _is_text(request: Any) -> bool:
    """Return whether the cache of a request depends on nothing but its tokens and the names in its `RadixKey`."""
    others = ("multimodal_inputs", "positional_embed_overrides", "input_embeds", "session", "beam_group")
    return all(getattr(request, name) is None for name in others) and not request.skip_radix_cache_insert


def _has_space(tree: Any, num_tokens: int = 0) -> bool:
    """Return whether enough is free or evictable once so many tokens more are taken."""
    pool = tree.token_to_kv_pool_allocator
    return bool(pool.available_size() + tree.evictable_size() - num_tokens >= RESERVE * pool.size)


class MovingTurns(Generic[AnyTurn]):
    """Base class of both sides.

    Args:
        rank: The rank that moves turns; its requests have a rank of the other role.
        pools: Pools of this scheduler.
    """

    def __init__(self, rank: Any, pools: PoolMap) -> None:
        self._rank = rank
        self._pools = pools
        self._turns: dict[Any, AnyTurn] = {}

    @property
    def is_idle(self) -> bool:
        """Whether no pages are kept for turns."""
        return not self._turns

    def give_up_turns(self, tree: Any) -> None:
        """Abort all turns, and wait for their pages for a moment: SGLang is about to flush its cache."""
        for transfer in self._turns:
            transfer.abort("the cache is flushed")
        deadline = time.monotonic() + GIVE_UP_S
        while self._turns and (left := deadline - time.monotonic()) > 0:
            self._apply(self._rank.wait_any(left), tree)

    def close(self) -> None:
        """Close the rank, and forget all turns: SGLang frees the pools."""
        self._rank.close()
        self._turns.clear()

    def _apply(self, updates: Iterable["TransferUpdate[Any]"], tree: Any) -> None:
        """Settle the turns whose transfer has ended, and whose pages nothing can access any more."""
        for update in updates:
            is_over = update.outcome is not Outcome.PENDING and update.memory is Memory.SAFE
            if is_over and (turn := self._turns.pop(update.transfer, None)) is not None:
                self._settle(update.transfer, turn, tree)

    def _settle(self, transfer: Any, turn: AnyTurn, tree: Any) -> None:
        raise NotImplementedError


@dataclass(eq=False)
class HeldTurn:
    """A turn that decode has offered.

    Attributes:
        release: Gives its pages back to SGLang.
        offer: The offer, once it is made; None after it was answered.
    """

    release: Callable[[], object]
    offer: "Future[MadeOffer] | None" = None


class TurnHolder(MovingTurns[HeldTurn]):
    """Decode's side: keeps the pages of finished turns while they go back.

    Args:
        receives: The rank of the scheduler's requests, which makes the offers.
        sends: A prefill rank of the same instance, which sends the pages.
        pools: Pools of this scheduler.
    """

    def __init__(self, receives: DecodeRank, sends: PrefillRank, pools: PoolMap) -> None:
        super().__init__(sends, pools)
        self._receives = receives

    def hold_turn(self, request: Any, tree: Any, prefill: Endpoint, release: Callable[[], object]) -> bool:
        """Offer a finished request to the server that computed its prompt.

        Args:
            request: SGLang's request, which still has its pages.
            tree: SGLang's cache.
            prefill: Address of the prefill rank.
            release: Gives the pages back to SGLang; called in a later step if this returns True.

        Returns:
            Whether its pages are kept. They are not if there is no new page, or not enough space.
        """
        token_ids, prompt = request.origin_input_ids + request.output_ids, len(request.origin_input_ids)
        page = self._pools.index_tokens
        stop = min(request.owned_kv_len(), len(token_ids) - 1) // page * page  # the last one was only sampled
        rows = tree.req_to_token_pool
        is_short = not _has_space(tree) or rows.available_size() < RESERVE * rows.size
        if stop <= prompt or is_short or not _is_text(request):
            return False
        room, held = _name_of(request.bootstrap_room), HeldTurn(release)
        with contained(partial(LOGGER.warning, "kvflow: %s does not go back to prefill: %s", room)):
            indices = rows.req_to_token[request.kv.req_pool_idx, :stop]
            pages = self._pools.pages((0, stop), kv_to_page_indices(indices, page))
            sender = self._rank.send(room, defer_lease=True)
            self._turns[sender] = held
            with contained(partial(self._give_up, sender)):
                sender.finish((0, stop), pages, metadata=array("I", token_ids[prompt:stop]).tobytes())
                ticket, digest = self._rank.ticket(room), _digest_of(token_ids[:prompt])
                offer: dict[str, Any] = {"to": prefill, "tokens": (0, stop), "metadata": digest, "timeout_s": OFFER_S}
                held.offer = self._receives.ask(lambda rank: rank.offers.make_offer(ticket, **offer))
        return held in self._turns.values()

    def _give_up(self, sender: BlockingSender, reason: str) -> None:
        LOGGER.debug("%s does not go back to prefill: %s", sender.room, reason)
        sender.abort(reason)

    def advance_turns(self, tree: Any) -> None:
        """Process what has happened since the last step, and give up turns that nobody wants yet if space is short."""
        self._apply(self._rank.completed(), tree)
        is_short = bool(self._turns) and not _has_space(tree)
        for sender, turn in self._turns.items():
            if is_short:
                sender.reclaim()
            if turn.offer is not None and turn.offer.done():
                with contained(partial(self._give_up, sender)):
                    self._note_answer(sender, turn, turn.offer.result())

    def _note_answer(self, sender: BlockingSender, turn: HeldTurn, made: MadeOffer) -> None:
        if not made.is_answered:
            return
        turn.offer = None
        if made.failure is None:
            sender.start_lease()
        else:
            self._give_up(sender, made.failure.detail)

    @override
    def _settle(self, transfer: BlockingSender, turn: HeldTurn, tree: Any) -> None:
        turn.release()


class Prompt(NamedTuple):
    """A prompt that was computed here, with what separates it from others in the radix cache."""

    token_ids: "array[int]"
    extra_key: str | None
    cache_salt: str | None
    priority: int

    def make_key(self, token_ids: "array[int]") -> Any:
        """Return the key of tokens that begin with this prompt, or that it begins with."""
        return RadixKey(token_ids, self.extra_key, cache_salt=self.cache_salt)


class PromptBook:
    """The latest prompts that were computed here, by room.

    Args:
        maximum: How many tokens to remember.
    """

    def __init__(self, maximum: int = MAX_REMEMBERED) -> None:
        self._maximum = maximum
        self._num_tokens = 0
        self._prompts: OrderedDict[str, Prompt] = OrderedDict()

    def note_request(self, request: Any) -> None:
        """Remember the prompt of a request, in place of older ones."""
        if not _is_text(request):
            return
        room = _name_of(request.bootstrap_room)
        self.take_prompt(room)
        ids = request.origin_input_ids
        self._prompts[room] = Prompt(ids, request.extra_key, request.cache_salt, request.priority or 0)
        self._num_tokens += len(ids)
        while self._num_tokens > self._maximum:
            self.take_prompt(next(iter(self._prompts)))

    def take_prompt(self, room: object) -> Prompt | None:
        """Remove the prompt of a room and return it; None if it is not known."""
        prompt = self._prompts.pop(str(room), None)
        self._num_tokens -= 0 if prompt is None else len(prompt.token_ids)
        return prompt

    def clear(self) -> None:
        """Forget all prompts: what they were computed with has changed."""
        self._prompts.clear()
        self._num_tokens = 0


@dataclass(frozen=True)
class ReturningTurn:
    """A turn whose pages arrive.

    Attributes:
        prompt: Its prompt.
        have: Tokens that were in the radix cache before.
        stop: Tokens of the turn.
        slots: SGLang's indices of the tokens from `have` on.
        lock: Keeps the tokens before from eviction.
    """

    prompt: Prompt
    have: int
    stop: int
    slots: Any = field(repr=False)
    lock: Any = field(repr=False)


class TurnOwner(MovingTurns[ReturningTurn]):
    """Prefill's side: takes turns back whose prompts were computed here.

    Args:
        sends: The rank of the scheduler's requests, which gets the offers.
        receives: A decode rank of the same instance, which receives the pages.
        pools: Pools of this scheduler.
        quarantine: Watches pages without a proof.

    Attributes:
        prompts: The prompts that were computed here.
    """

    def __init__(self, sends: PrefillRank, receives: DecodeRank, pools: PoolMap, quarantine: QuarantineWatch) -> None:
        super().__init__(receives, pools)
        self.prompts = PromptBook()
        self._sends = sends
        self._quarantine = quarantine
        self._asked: Future[list[ReceivedOffer]] | None = None

    def advance_turns(self, tree: Any) -> None:
        """Process what has happened since the last step. This is cheap if nothing has."""
        self._apply(self._rank.completed(), tree)
        if self._turns:
            self._quarantine.check_pages(self._rank, self._turns, time.monotonic())
        if self._asked is not None and self._asked.done():
            offers, self._asked = self._asked.result(), None
            for offer in offers:
                with contained(partial(self._decline, offer)):
                    self._consider(offer, tree)
        if self._asked is None and self._sends.has_offers:
            self._asked = self._sends.ask(lambda rank: rank.offers.take_offers())

    def _decline(self, offer: ReceivedOffer, reason: str) -> None:
        LOGGER.debug("%s is not taken back: %s", offer.room, reason)
        offer.decline(reason)

    def _consider(self, offer: ReceivedOffer, tree: Any) -> None:
        prompt, (start, stop) = self.prompts.take_prompt(offer.room), offer.tokens
        page = self._pools.index_tokens
        if prompt is None or _digest_of(prompt.token_ids) != offer.metadata:
            self._decline(offer, "its prompt was not computed here, or is forgotten")
            return
        if start or stop % page or stop <= len(prompt.token_ids):
            self._decline(offer, f"tokens {offer.tokens} are not a prompt and an answer in whole pages")
            return
        match = tree.match_prefix(MatchPrefixParams(key=prompt.make_key(prompt.token_ids)))
        have, lock = match.device_prefix_len, tree.lock(match.last_device_node)
        pool, slots = tree.token_to_kv_pool_allocator, None
        if _has_space(tree, stop - have):
            evict_from_tree_cache(tree, stop - have)
            slots = pool.alloc(stop - have)
        if slots is None:
            tree.unlock(lock)
            self._decline(offer, "no free pages")
            return
        receiver = None
        with contained(partial(self._decline, offer)):
            if offer.accept():
                pages = self._pools.pages((have, stop), kv_to_page_indices(slots, page))
                receiver = self._rank.receive(prefill=offer.ticket, tokens=(have, stop), pages=pages)
                self._turns[receiver] = ReturningTurn(prompt, have, stop, slots, lock)
        if receiver is None:
            pool.free(slots)
            tree.unlock(lock)

    @override
    def _settle(self, transfer: BlockingReceiver, turn: ReturningTurn, tree: Any) -> None:
        """Insert a turn that has arrived, and give its pages back otherwise. Nothing can write to them any more."""
        key = None
        with contained(partial(LOGGER.debug, "%s is not taken back: %s", transfer.room)):
            answer = array("I")
            answer.frombytes(transfer.result().metadata)
            token_ids = turn.prompt.token_ids + array("q", answer)
            if len(token_ids) != turn.stop:
                raise ValueError(f"{turn.stop} tokens were offered, and {len(token_ids)} named")
            key = turn.prompt.make_key(token_ids)
        if key is None:
            tree.token_to_kv_pool_allocator.free(turn.slots)
        else:  # SGLang frees the slots of tokens that it has computed meanwhile
            slots, priority = turn.slots.new_empty(turn.stop), turn.prompt.priority
            slots[: turn.have] = tree.path_device_indices(turn.lock.node)[: turn.have]
            slots[turn.have :] = turn.slots
            tree.insert(InsertParams(key=key, value=slots, prev_prefix_len=turn.have, priority=priority))
        tree.unlock(turn.lock)

    @override
    def close(self) -> None:
        super().close()
        self.prompts.clear()

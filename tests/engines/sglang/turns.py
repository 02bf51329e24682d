"""Servers of conversations: SGLang's own queues, allocators and radix cache, with a small model.

The cache of a token is determined by it and all tokens before it, and the next token by the cache of all tokens, as it
is in the pool. So a wrong page, or one of other tokens, changes the text.
"""

import zlib
from array import array
from functools import partial
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import MagicMock

import numpy as np
import sglang.srt.disaggregation.decode as decode_module
import sglang.srt.disaggregation.prefill as prefill_module
import torch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components import batch_result_processor
from sglang.srt.mem_cache import common
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from kvflow.engines.sglang import turns
from tests.engines.sglang.engines import DecodeEngine, PrefillEngine
from tests.engines.sglang.schedulers import slow_link

__all__ = ["SERVERS"]

DIGEST_OF: Final = turns._digest_of
MODULUS: Final = (1 << 31) - 1


def cells_of(token_ids: list[int], number: int, *shape: int) -> torch.Tensor:
    """Return what one buffer holds of tokens, with the shape of a token's cell."""
    states, state = [], 1
    for token in token_ids:
        state = (state * 48_271 + token + 1) % MODULUS
        states.append(state)
    mixed = np.array(states, np.int64)[:, None] * (2 * number + 1) + 40_503 * np.arange(np.prod(shape))
    return torch.from_numpy((mixed >> 3 & 0x3FFF).astype(np.int16)).view(torch.bfloat16).view(-1, *shape)


def next_token(buffers: list[torch.Tensor]) -> int:
    """Return the token that follows those whose cache is in the buffers."""
    total = 0
    for buffer in buffers:
        total = zlib.crc32(buffer.contiguous().view(torch.uint8).numpy().tobytes(), total)
    return total % 900 + 1


class Conversations:
    """What both roles have in common; mixed into an engine."""

    side: Any
    tree: Any

    def make_tree(self, rows: Any, *, is_off: bool) -> Any:
        """Create SGLang's cache of prefixes."""
        return UnifiedRadixCache(
            CacheInitParams(
                disable=is_off,
                req_to_token_pool=rows,
                token_to_kv_pool_allocator=self.side.allocator,
                page_size=self.side.model.page,
                tree_components=(ComponentType.FULL,),
            )
        )

    def buffers(self) -> list[torch.Tensor]:
        """Return the buffers of the pool."""
        return [*self.side.pool.k_buffer, *self.side.pool.v_buffer]

    def write(self, token_ids: list[int], start: int, slots: torch.Tensor) -> None:
        """Compute the cache of tokens from `start` on."""
        for number, buffer in enumerate(self.buffers()):
            buffer[slots.long()] = cells_of(token_ids, number, *buffer.shape[1:])[start:]

    def read(self, slots: torch.Tensor) -> int:
        """Return the token that follows those in some slots."""
        return next_token([buffer[slots.long()] for buffer in self.buffers()])

    def text_after(self, prompt: list[int], count: int) -> list[int]:
        """Return the text that follows a prompt, computed without a pool."""
        token_ids = list(prompt)
        for _ in range(count):
            token_ids.append(
                next_token([cells_of(token_ids, number, *one.shape[1:]) for number, one in enumerate(self.buffers())])
            )
        return token_ids[len(prompt) :]

    def has_settled(self) -> bool:
        """Return whether no pages are kept for turns."""
        turns = self.side.manager.turns
        return turns is None or turns.is_idle

    def num_moved(self) -> int:
        """Return how many bytes this server has taken back."""
        return int(self.side.manager.turns._rank.statistics().transfers.received_bytes.total)

    def num_free(self) -> int:
        """Return how many tokens fit into pages that nobody uses, or that only the cache has."""
        return int(self.side.allocator.available_size() + self.tree.evictable_size())

    def num_protected(self) -> int:
        """Return how many tokens of the cache are locked."""
        return int(self.tree.protected_size())

    def occupy(self, num_tokens: int) -> None:
        """Take pages, and keep them."""
        assert self.side.allocator.alloc(num_tokens) is not None

    def slow_down(self) -> None:
        """Hold back the writes of this server until `speed_up`."""
        slow_link().is_slow = True

    def speed_up(self) -> None:
        """Let the held-back writes start."""
        slow_link().is_slow = False

    def _scheduler_of_sglang(self, **queues: Any) -> Any:
        empty = SimpleNamespace(is_empty=lambda: True, reqs=[])
        off = ("enable_overlap", "enable_hisparse", "enable_hierarchical_cache", "enable_lmcache", "_engine_paused")
        made = SimpleNamespace(
            **queues,
            **dict.fromkeys(("chunked_req", "last_batch", "draft_worker", "decode_offload_manager")),
            **dict.fromkeys(off, False),
            running_batch=empty,
            waiting_queue=[],
            dllm_manager=SimpleNamespace(any_staging_reqs=lambda: False),
            _pp_microbatches_drained=lambda: True,
            grammar_manager=MagicMock(grammar_queue=[]),
            metrics_reporter=MagicMock(is_stats_logging_rank=False),
            tree_cache=self.tree,
            req_to_token_pool=self.tree.req_to_token_pool,
            token_to_kv_pool_allocator=self.side.allocator,
        )
        made.is_fully_idle = partial(Scheduler.is_fully_idle, made)
        return made

    def sglang(self) -> Any:
        """Return what SGLang's scheduler asks in its own checks."""
        raise NotImplementedError

    def is_idle(self) -> bool:
        """Return whether SGLang would look for lost pages now."""
        return bool(self.sglang().is_fully_idle())

    def is_healthy_when_idle(self) -> bool:
        """Return what SGLang asks before it answers a health check by itself."""
        return bool(self.sglang().is_fully_idle(for_health_check=True))

    def flush(self) -> bool:
        """Flush the cache, as SGLang does before its weights change; return whether it was."""
        return bool(Scheduler.flush_cache(self.sglang(), empty_cache=False))


class PrefillTurns(Conversations, PrefillEngine):
    """Computes what the radix cache lacks of each prompt.

    Attributes:
        num_computed: Tokens that were computed.
    """

    def __init__(self, *arguments: Any) -> None:
        self.side: Any = self
        self.num_computed = 0
        super().__init__(*arguments)
        prefill_module.release_kv_cache = common.release_kv_cache
        self.tree = self.mixed.tree_cache = self.make_tree(self.mixed.req_to_token_pool, is_off=False)

    def request(self, room: int, tokens: int, *arguments: Any, **options: Any) -> Any:
        return _with_prompt(super().request(room, tokens, *arguments, **options), self.prompts[room])

    def _go_on(self, room: int, start: int) -> None:
        request, page = self.requests[room], self.model.page
        token_ids = list(request.origin_input_ids)
        request.init_next_round_input(self.tree)
        have, stop = request.prefix_len, len(token_ids)
        common.evict_from_tree_cache(self.tree, stop + page - have)
        if self.allocator.available_size() < stop + page - have:
            return
        request.lock = self.tree.lock(request.last_node)
        (request.kv.req_pool_idx,) = self.mixed.req_to_token_pool.alloc([request])
        row = self.table()[request.kv.req_pool_idx]
        row[:have] = self.tree.prefix_device_indices(request).to(row.dtype)
        row[have:stop] = self.allocator.alloc(-(-stop // page) * page - have)[: stop - have].to(row.dtype)
        self.write(token_ids, have, row[have:stop])
        self.num_computed += stop - have
        request.kv.kv_committed_len = request.kv.kv_allocated_len = request.extend_end = stop
        request.output_ids.append(self.read(row[:stop]))
        common.checkpoint_kv_cache(request, self.tree)
        self.send(room, stop, last=True)
        del self.waiting[room]

    def ignore_offers(self) -> None:
        """Look at no offers any more."""
        self.manager.turns.advance_turns = lambda tree: None

    def fail_to_receive(self) -> None:
        """Fail after an offer is accepted, without telling decode."""
        self.manager.turns._rank.receive = None

    def has_noticed_quarantine(self) -> bool:
        return bool(self.manager.turns._quarantine._touched)

    def num_remembered(self) -> int:
        """Return how many tokens of prompts are remembered."""
        return int(self.manager.turns.prompts._num_tokens)

    def computed(self) -> int:
        """Return how many tokens were computed since the last call."""
        found, self.num_computed = self.num_computed, 0
        return found

    def num_cached(self, prompt: list[int]) -> int:
        """Return how many tokens of a prompt are in the radix cache."""
        request = _with_prompt(super().request(0, len(prompt)), prompt)
        request.init_next_round_input(self.tree)
        return int(request.prefix_len)

    def sglang(self) -> Any:
        return self._scheduler_of_sglang(
            disaggregation_mode=prefill_module.DisaggregationMode.PREFILL,
            disagg_prefill_bootstrap_queue=self.queue,
            disagg_prefill_inflight_queue=self.mixed.disagg_prefill_inflight_queue,
        )


class DecodeTurns(Conversations, DecodeEngine):
    """Generates the whole answer to each request that arrives, and ends it as SGLang does."""

    def __init__(self, *arguments: Any) -> None:
        self.side: Any = self
        super().__init__(*arguments)
        decode_module.release_kv_cache = common.release_kv_cache
        vars(turns).update(array=array, _digest_of=DIGEST_OF)

    def _make_tree(self, rows: Any) -> Any:
        self.tree = self.make_tree(rows, is_off=True)
        return self.tree

    def request(self, room: int, tokens: int, *arguments: Any, **options: Any) -> Any:
        made = _with_prompt(super().request(room, tokens, *arguments, **options), self.prompts[room])
        made.sampling_params.max_new_tokens = self.waiting[room]
        made.sampling_params.normalize(None)
        return made

    def has_arrived(self, room: int) -> bool:
        return self.requests[room] in self.arrived

    def _read(self, room: int) -> list[int]:
        request, page = self.requests[room], self.model.page
        row = self.table()[request.kv.req_pool_idx]
        while not request.finished():
            token_ids = [*request.origin_input_ids, *request.output_ids]
            last = len(token_ids) - 1
            row[last] = self.allocator.alloc(page)[0] if last % page == 0 else row[last - 1] + 1
            self.write(token_ids, last, row[last : last + 1])
            request.kv.kv_committed_len = request.kv.kv_allocated_len = last + 1
            request.output_ids.append(self.read(row[: last + 1]))
            request.update_finish_state()
        return list(request.output_ids)

    def finish(self, room: int) -> None:
        release: Any = vars(batch_result_processor)["release_kv_cache"]
        release(self.requests[room], self.tree, checkpoint=True)

    def forge(self, part: str) -> None:
        """Name other tokens than those of the pages (another prompt, or a part of the answer), or fail to offer."""
        parts: dict[str, dict[str, Any]] = {
            "digest": {"_digest_of": lambda ids: DIGEST_OF([0, *ids])},
            "answer": {"array": lambda kind, ids: array(kind, ids[: -1 if kind == "I" else None])},
            "offer": {"_digest_of": lambda ids: bytes(5_000)},
        }
        vars(turns).update(parts.get(part, {}))
        if part == "ticket":
            self.manager.turns._rank.ticket = None

    def has_free_rows(self) -> bool:
        """Return whether no request has a row."""
        rows = self.tree.req_to_token_pool
        return bool(len(rows.free_slots) == rows.size + rows.pre_alloc_size)

    def sglang(self) -> Any:
        return self._scheduler_of_sglang(
            disaggregation_mode=prefill_module.DisaggregationMode.DECODE,
            disagg_decode_prealloc_queue=self.queue,
            disagg_decode_transfer_queue=self.transfers,
        )


def _with_prompt(request: Any, prompt: list[int]) -> Any:
    for number, token in enumerate(prompt):
        request.origin_input_ids[number] = token
    return request


SERVERS: Final = {"prefill": PrefillTurns, "decode": DecodeTurns}

"""Small models whose states are items of unknown content: one row of a request, or one item per page."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import sglang.srt.mem_cache.memory_pool as pools
import torch
from sglang.srt.disaggregation.utils import get_dsa_tail_state_indices
from sglang.srt.mem_cache.qsa_kv_pool import QSATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from tests.engines.sglang.models import PAGES, Held, Latent, Model, Rank, Recurrent, Window, content

__all__ = ["OPAQUE"]

Cells = Iterator[tuple[torch.Tensor, Any, torch.Tensor]]


def items(tensors: Sequence[torch.Tensor], count: int, held: Sequence[int], seed: int, skip: int = 0) -> Cells:
    """Return the items that a request holds, each tensor as `count` rows; those of its first `skip` pages stay."""
    places = torch.as_tensor(list(held)[skip:], dtype=torch.int64)
    for number, tensor in enumerate(tensors):
        rows = tensor.view(torch.uint8).view(count, -1)
        yield rows, places, content(seed + number, len(held), rows.shape[1], dtype=torch.uint8)[skip:]


class Tail(Latent):
    """DSA with compressed keys: the keys since the last complete group are in a ring of the request.

    Args:
        extra: Further entries of the ring.
    """

    def __init__(self, extra: int = 0) -> None:
        super().__init__(index=True)
        self.page, self.extra = 256, extra

    def pool(self, rank: Rank) -> Any:
        return pools.DSATokenToKVPool(
            **self.sizes(rank),
            index_head_dim=128,
            kv_cache_dim=576,
            index_kpool=4,
            index_kpool_compress=True,
            tail_extra_slots=self.extra,
            max_running_requests=8,
            skip_topk_layers=[number == 1 for number in self.span(rank)],
        )

    def state_indices(self, held: Held, tokens: int, dcp_size: int = 1) -> Any:
        class View:
            kpool_use_compress, index_kpool, tail_extra_slots = True, 4, self.extra

        return [held.pages, get_dsa_tail_state_indices(View, held.slot, tokens)]

    def cells(self, pool: Any, draft: Any, rank: Rank, held: Held, tokens: int, prefix: int) -> Cells:
        for cell in super().cells(pool, draft, rank, held, tokens, prefix):
            if len(cell[0]):  # a layer that shares the keys of another has none
                yield cell
        if tokens % 4:
            for layer, number in enumerate(self.span(rank)):
                if number != 1:
                    both = (pool._compress_tail_k[layer], pool._compress_tail_score[layer])
                    yield from items(both, 9, [held.slot], 200 + 2 * number)


class Scaled(Window):
    """MXFP8: block scales beside K and V, and beside those of a sliding window if there is one."""

    dtype = "mxfp8"

    def __init__(self, page: int, *, has_window: bool) -> None:
        Model.__init__(self, heads=8, dim=64, layers=2, page=page)
        self.has_window = has_window

    def pool(self, rank: Rank) -> Any:
        sizes: dict[str, Any] = {
            "size": self.page * PAGES,
            "page_size": self.page,
            "dtype": torch.float8_e4m3fn,
            "head_num": self.heads // rank.tp_size,
            "head_dim": self.dim,
            "device": "cpu",
            "enable_memory_saver": False,
            "enable_alt_stream": False,
        }
        if not self.has_window:
            return pools.MHATokenToKVPoolMXFP8(**sizes, layer_num=2)
        return SWAKVPool(
            **sizes,
            size_swa=self.page * PAGES,
            swa_attention_layer_ids=[0, 2],
            full_attention_layer_ids=[1, 3],
            token_to_kv_pool_class=pools.MHATokenToKVPoolMXFP8,
        )

    def state_indices(self, held: Held, tokens: int, dcp_size: int = 1) -> Any:
        return [held.window, held.whole, held.window] if self.has_window else [held.whole]

    def cells(self, pool: Any, draft: Any, rank: Rank, held: Held, tokens: int, prefix: int) -> Cells:
        seed = 1000 * rank.tp_rank
        full = pool.full_kv_pool if self.has_window else pool
        yield from self._items(full, held.whole, seed, held.behind)
        if self.has_window:
            yield from self._items(pool.swa_kv_pool, held.window, seed + 100)

    def _items(self, pool: Any, pages: Any, seed: int, skip: int = 0) -> Cells:
        for number, tensors in enumerate((pool.k_buffer, pool.v_buffer, pool.k_scale_buffer, pool.v_scale_buffer)):
            yield from items(tensors, PAGES + 1, pages, seed + 10 * number, skip)


class MiniMax(Model):
    """Sparse layers with an index of keys, and dense layers."""

    def pool(self, rank: Rank) -> Any:
        return pools.MiniMaxSparseKVPool(
            size=self.page * PAGES,
            page_size=self.page,
            dtype=torch.bfloat16,
            head_num=self.heads // rank.tp_size,
            head_dim=self.dim,
            idx_head_dim=64,
            dense_layer_ids=[0, 2],
            sparse_layer_ids=[1, 3],
            disable_value_sparse_layer_ids=[1, 3],
            device="cpu",
            start_layer=0,
            end_layer=4,
        )

    def state_indices(self, held: Held, tokens: int, dcp_size: int = 1) -> Any:
        return [held.pages, held.whole]

    def cells(self, pool: Any, draft: Any, rank: Rank, held: Held, tokens: int, prefix: int) -> Cells:
        buffers = [get(layer) for layer in range(4) for get in (pool.get_key_buffer, pool.get_value_buffer)]
        yield from items(buffers, PAGES + 1, held.whole, 1000 * rank.tp_rank, held.behind)
        yield from items(pool.index_k_pool.k_buffer, PAGES + 1, held.whole, 500, held.behind)


class Grouped(Recurrent):
    """QSA: keys compressed in groups of four, and those of a request's incomplete group."""

    def pool(self, rank: Rank) -> Any:
        return QSATokenToKVPool(
            **self.sizes(rank),
            qsa_index_kv_heads=1,
            qsa_index_head_dim=64,
            qsa_compress_ratio=4,
            qsa_token_topk=64,
            num_request_slots=9,
        )

    def state_indices(self, held: Held, tokens: int, dcp_size: int = 1) -> Any:
        return [*super().state_indices(held, tokens), [held.slot], held.whole]

    def cells(self, pool: Any, draft: Any, rank: Rank, held: Held, tokens: int, prefix: int) -> Cells:
        yield from super().cells(pool, draft, rank, held, tokens, prefix)
        yield from items([*pool.qsa_key_state_buffer_pool, pool.qsa_rope_position_buffer], 9, [held.slot], 600)
        yield from items(pool.qsa_compressed_k_buffer_pool, PAGES + 1, held.whole, 700, held.behind)


OPAQUE: Final[dict[str, Callable[[], Model]]] = {
    "dsa tail": Tail,
    "dsa tail with extra entries": lambda: Tail(extra=2),
    "mxfp8": lambda: Scaled(128, has_window=False),
    "mxfp8 with a window": lambda: Scaled(64, has_window=True),
    "minimax": MiniMax,
    "qsa": Grouped,
}

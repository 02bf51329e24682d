"""What digests cost: reading the pages of a request once more, and the same as a part of a transfer."""

import statistics
import time
from collections.abc import Iterator
from itertools import product

import anyio
import msgspec
import numpy as np
import torch

import kvflow
from kvflow.geometry import Component, Part, Region, RoutePiece, Written, check_part, digest
from kvflow.geometry.debts import Debt
from kvflow.geometry.tokens import WHOLE

__all__ = ["DigestRow", "TransferRow", "measure_digests", "measure_transfers"]

HEADS, HEAD_DIM, ELEMENT_BYTES = 8, 128, 2
HEAD_BYTES = HEAD_DIM * ELEMENT_BYTES
LAYERS = 8
PAGE_SIZE = 16
PAGE_SIZES = (1, 16, 64)
REPEATS = 5


class DigestRow(msgspec.Struct, kw_only=True):
    """One digest of a component on one side: 8 layers of 8 heads of 256 bytes.

    Attributes:
        order: "NHD" (token, head) or "HND" (head, token) within a page.
        heads: How many of the heads belong to the digest.
        table: "contiguous" or "random" page table.
        gb_per_s: 10**9 bytes of cells each second, median.
    """

    case: str = "digest"
    order: str
    page_size: int
    heads: int
    table: str
    gb_per_s: float


class TransferRow(msgspec.Struct, kw_only=True):
    """Transfers between two ranks of one process, token-major pages of 16 in random order, one chunk.

    Attributes:
        megabytes: 2**20 bytes of each transfer.
        rounds: Transfers of each kind, in turn.
        plain_ms: Median time from offering the pages to the end of `done()`.
        digest_ms: The same with digests.
    """

    case: str = "transfer"
    backend: str
    megabytes: int
    rounds: int
    plain_ms: float
    digest_ms: float


def measure_digests(megabytes: int) -> Iterator[DigestRow]:
    """Work digests out in every combination, over that much memory if all heads belong to them."""
    memory = np.random.default_rng(0).integers(0, 256, 2 * megabytes * 2**20, np.uint8)
    for order, page_size, heads, table in product(("NHD", "HND"), PAGE_SIZES, (HEADS, 1), ("contiguous", "random")):
        component = _component(order, page_size, memory.size)
        count = component.slots // 2
        tokens = (0, count * page_size)
        order_of_pages = (
            np.random.default_rng(0).permutation(component.slots) if table == "random" else np.arange(count)
        )
        pages = check_part(component, Part(tokens, order_of_pages[:count]))
        pieces = [RoutePiece("kv", "k", layer, (0, heads)) for layer in range(LAYERS)]
        written = Written(pieces, Debt(WHOLE, WHOLE, {}), tokens, closing=True)
        times = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            digest(written, component, pages, lambda part: memory[part.address : part.end])
            times.append(time.perf_counter() - began)
        num_bytes = LAYERS * tokens[1] * heads * HEAD_BYTES
        rate = round(num_bytes / statistics.median(times) / 1e9, 2)
        yield DigestRow(order=order, page_size=page_size, heads=heads, table=table, gb_per_s=rate)


def _component(order: str, page_size: int, num_bytes: int) -> Component:
    """Layers one after the other, from address 0."""
    page_bytes = page_size * HEADS * HEAD_BYTES
    strides = (HEADS * HEAD_BYTES, HEAD_BYTES) if order == "NHD" else (HEAD_BYTES, page_size * HEAD_BYTES)
    regions = tuple(
        Region(
            tensor="k",
            layer=layer,
            address=layer * (num_bytes // LAYERS),
            slots=num_bytes // LAYERS // page_bytes,
            slot_stride=page_bytes,
            tokens_per_slot=page_size,
            token_stride=strides[0],
            heads=(0, HEADS),
            head_stride=strides[1],
            head_bytes=HEAD_BYTES,
            dtype="bfloat16",
        )
        for layer in range(LAYERS)
    )
    return Component("kv", regions)


async def measure_transfers(backend: str, megabytes: int, rounds: int) -> TransferRow:
    """Transfer the same pages again and again, with and without digests in turn."""
    page_bytes = 2 * LAYERS * PAGE_SIZE * HEADS * HEAD_BYTES
    num_pages = max(1, megabytes * 2**20 // page_bytes)
    pools = [_pool(num_pages) for _ in range(2)]
    async with kvflow.Registry() as registry:
        prefill_config = kvflow.PrefillConfig(instance="prefill", registry=registry.endpoint, backend=backend)
        decode_config = kvflow.DecodeConfig(instance="decode", registry=registry.endpoint, backend=backend)
        async with (
            kvflow.PrefillRank(prefill_config, _layout(pools[0])) as prefill,
            kvflow.DecodeRank(decode_config, _layout(pools[1])) as decode,
        ):
            times: dict[bool, list[float]] = {False: [], True: []}
            for room in range(2 + 2 * rounds):
                has_digest = bool(room % 2)
                taken = await _transfer(prefill, decode, room, num_pages, digest=has_digest)
                if room >= 2:  # the first ones shake hands and touch every page
                    times[has_digest].append(taken)
    plain_s, digest_s = (statistics.median(times[has_digest]) for has_digest in (False, True))
    return TransferRow(
        backend=backend,
        megabytes=megabytes,
        rounds=rounds,
        plain_ms=round(plain_s * 1e3, 2),
        digest_ms=round(digest_s * 1e3, 2),
    )


def _pool(num_pages: int) -> dict[str, list[torch.Tensor]]:
    shape = (num_pages, PAGE_SIZE, HEADS, HEAD_DIM)
    return {name: [torch.rand(shape).bfloat16() for _ in range(LAYERS)] for name in ("k", "v")}


def _layout(pool: dict[str, list[torch.Tensor]]) -> kvflow.KVLayout:
    return kvflow.layout_from_tensors(pool, axes="page token head dim", heads=(0, HEADS), fingerprint="bench")


async def _transfer(
    prefill: kvflow.PrefillRank, decode: kvflow.DecodeRank, room: int, num_pages: int, *, digest: bool
) -> float:
    """Do one transfer; give the seconds that it took once both sides had begun."""
    rng = np.random.default_rng(room)
    tokens = (0, num_pages * PAGE_SIZE)
    source, target = {"kv": rng.permutation(num_pages)}, {"kv": rng.permutation(num_pages)}
    async with (
        prefill.send(room) as sender,
        decode.receive(room, prefill="prefill", tokens=tokens, pages=target, digest=digest) as receiver,
    ):
        began = anyio.current_time()
        await sender.finish(tokens, source)
        await receiver.done()
        return anyio.current_time() - began

"""What the adapters describe, on a fake device: all bytes arrive, and the host touches none of them."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any, Final

import anyio
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import kvflow
from kvflow.backends import Backend
from kvflow.backends.memory import MemoryBackend
from kvflow.backends.nixl import NixlBackend
from kvflow.engines.sglang.buffers import Shard
from kvflow.engines.sglang.memory import PoolMap, describe_pools
from kvflow.engines.sglang.metadata import MetadataRows
from kvflow.engines.transformers.memory import CacheMap
from kvflow.engines.vllm.groups import describe_groups
from kvflow.engines.vllm.layout import Caches, describe_caches
from kvflow.errors import ConfigError
from kvflow.geometry import KVLayout
from kvflow.packing import device as kernels
from kvflow.testing.device import FakeDevice, alias_of, on_fake_device
from tests.engines.sglang.kv_args import PAGE, kv_args, with_state
from tests.support.device_tensors import device_tensor
from tests.support.instances import decode_config, prefill_config

pytestmark = pytest.mark.anyio

TRANSPORTS: Final[Mapping[str, Callable[[], Backend]]] = {
    "memory": on_fake_device(MemoryBackend),
    "nixl": on_fake_device(NixlBackend),
}
STAGING: Final = {"staging_bytes": 2**20, "staging_slot_bytes": 2**12}

Pages = Mapping[str, Any]
Bytes = NDArray[np.uint8]


@pytest.fixture(params=[False, True], ids=["low", "high"])
def device(request: pytest.FixtureRequest) -> FakeDevice:
    return FakeDevice(1, is_high=request.param)


@pytest.fixture(params=["memory", "nixl", "packed"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the transport, or "packed" if torch packs every piece: on the device, which is to say at the alias."""
    bytes_at = kernels.bytes_at

    def bytes_at_alias(address: int, num_bytes: int, place: torch.device) -> torch.Tensor:
        return bytes_at(int(alias_of(np.array([address], np.uint64))[0]), num_bytes, place)

    monkeypatch.setattr(kernels, "bytes_at", bytes_at_alias)
    monkeypatch.setattr(kernels, "find_device", lambda _: torch.device("cpu"))
    return str(request.param)


async def hand_over(
    way: str,
    sources: Sequence[tuple[KVLayout, Pages]],
    target: tuple[KVLayout, Pages],
    tokens: tuple[int, int],
) -> None:
    """Send a request from some prefill ranks to one decode rank."""
    packs = way == "packed"
    name = "memory" if packs else way
    common: dict[str, Any] = {"backend": name, **(STAGING if packs else {})}
    transport = TRANSPORTS[name]
    async with kvflow.Registry() as registry, AsyncExitStack() as stack:
        ranks = []
        for number, (layout, _) in enumerate(sources):
            config = prefill_config(
                registry.endpoint, number, len(sources), packing="always" if packs else "never", **common
            )
            ranks.append(await stack.enter_async_context(kvflow.PrefillRank(config, layout, transport())))
        decode = kvflow.DecodeRank(decode_config(registry.endpoint, **common), target[0], transport())
        await stack.enter_async_context(decode)

        async def send(rank: kvflow.PrefillRank, pages: Pages) -> None:
            async with rank.send(1) as sender:
                await sender.finish(tokens, pages)

        async with anyio.create_task_group() as tasks:
            for rank, (_, pages) in zip(ranks, sources, strict=True):
                tasks.start_soon(send, rank, pages)
            async with decode.receive(1, prefill="prefill", tokens=tokens, pages=target[1]) as receiver:
                await receiver.done()
        assert all(bool(rank.statistics().staging.packed_posts) is packs for rank in ranks)


def filled(device: FakeDevice, *shape: int, dtype: torch.dtype = torch.uint8) -> tuple[Any, Bytes]:
    """Allocate random memory; return the tensor that an engine has there, and its bytes, with the same shape."""
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    memory = device.allocate(num_bytes)
    memory.write(0, np.frombuffer(np.random.default_rng(memory.address % 2**32).bytes(num_bytes), np.uint8))
    return device_tensor(memory, shape, dtype), memory.array.reshape(*shape[:-1], shape[-1] * dtype.itemsize)


# vLLM ------------------------------------------------------------------------------------------------------------

BLOCKS, BLOCK, HEADS, CONTENT, WINDOW = 12, 4, 4, 16, 6
SOURCE, TARGET = [7, 3, 10], [2, 9, 5]
NUM_TOKENS = BLOCK * len(SOURCE)
NAMES: Final = ("full", "window", "latent", "state0", "state1")


class VllmWorker:
    """A worker whose layers have all kinds of caches.

    Attributes:
        bytes: Of each layer, [blocks, heads, tokens, content].
    """

    def __init__(self, device: FakeDevice, tp_size: int, tp_rank: int, *, is_nhd: bool) -> None:
        heads, states, channels = HEADS // tp_size, 4 // tp_size, 12 // tp_size
        shapes = ((3, channels), (states, 2, 3))
        tensors, self.bytes = {}, {}
        for name in NAMES:
            if name.startswith("state"):
                row = 4 * (3 * channels + states * 6)
                tensors[name], self.bytes[name] = filled(device, BLOCKS, 1, 1, row)
                continue
            held = 1 if name == "latent" else heads
            shape = (BLOCKS, BLOCK, held, CONTENT) if is_nhd else (BLOCKS, held, BLOCK, CONTENT)
            tensor, cells = filled(device, *shape)
            tensors[name] = tensor.transpose(1, 2) if is_nhd else tensor
            self.bytes[name] = cells.swapaxes(1, 2) if is_nhd else cells
        common = {"block_size": BLOCK, "num_kv_heads": heads}
        mamba = {
            "mamba_type": SimpleNamespace(name="MAMBA2"),
            "mamba_cache_mode": "none",
            "num_speculative_blocks": 0,
            "tp_replicated": False,
            "shapes": shapes,
            "dtypes": (torch.float32, torch.float32),
        }
        specs: list[tuple[str, Mapping[str, Any], Sequence[str]]] = [
            ("FullAttentionSpec", common, NAMES[:1]),
            ("SlidingWindowSpec", {**common, "sliding_window": WINDOW}, NAMES[1:2]),
            ("MLAAttentionSpec", common, NAMES[2:3]),
            ("MambaSpec", {**common, **mamba}, NAMES[3:]),
        ]
        self.groups = describe_groups(
            [
                SimpleNamespace(kv_cache_spec=type(kind, (), dict(values))(), layer_names=list(names))
                for kind, values, names in specs
            ]
        )
        self.caches: Caches = describe_caches(
            tensors,
            self.groups,
            backend="FLASH_ATTN",
            layers={name: number for number, name in enumerate(NAMES)},
            total_kv_heads=dict.fromkeys(NAMES, HEADS),
            tp_size=tp_size,
            tp_rank=tp_rank,
            fingerprint="model",
        )

    def pages(self, table: Sequence[int]) -> Pages:
        """Return what the adapter gives kvflow for a request with this block table in all groups."""
        blocks = [group.blocks_of(table, group.first_seen(NUM_TOKENS), NUM_TOKENS) for group in self.groups]
        return self.caches.pages(blocks, NUM_TOKENS)

    def state(self, name: str, block: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the convolution [inputs, channels] and the state [heads, 6] of a block."""
        values = self.bytes[name][block, 0, 0].view(np.float32)
        num_channels = len(values) // 5  # three inputs, and two values of the state for each channel
        return values[: 3 * num_channels].reshape(3, -1), values[3 * num_channels :].reshape(-1, 6)


@pytest.mark.parametrize("is_nhd", [False, True], ids=["HND", "NHD"])
async def test_caches_of_vllm(device: FakeDevice, way: str, *, is_nhd: bool) -> None:
    """Two workers send to one, which has all their heads."""
    sources = [VllmWorker(device, 2, rank, is_nhd=is_nhd) for rank in range(2)]
    target = VllmWorker(device, 1, 0, is_nhd=False)
    assert {layout.memory_kind for layout in (target.caches.layout, sources[0].caches.layout)} == {"VRAM"}
    before = {name: cells.copy() for name, cells in target.bytes.items()}
    given = [(one.caches.layout, one.pages(SOURCE)) for one in sources]
    await hand_over(way, given, (target.caches.layout, target.pages(TARGET)), (0, NUM_TOKENS))
    for name in NAMES[:3]:
        held = sources[:1] if name == "latent" else sources
        expected, sent = before[name].copy(), np.concatenate([one.bytes[name] for one in held], axis=1)
        expected[TARGET] = sent[SOURCE]
        if name == "window":  # the last tokens, of which the first is in the second block
            outside = NUM_TOKENS + 1 - WINDOW - BLOCK
            expected[TARGET[0]] = before[name][TARGET[0]]
            expected[TARGET[1], :, :outside] = before[name][TARGET[1], :, :outside]
        np.testing.assert_array_equal(target.bytes[name], expected, name)
    for name in NAMES[3:]:
        (convolution, state), parts = target.state(name, TARGET[0]), [one.state(name, SOURCE[0]) for one in sources]
        np.testing.assert_array_equal(state, np.concatenate([part for _, part in parts]))
        kinds = ((0, 4), (4, 5), (5, 6))  # channels of a kind in each half
        whole = [part[:, start:stop] for start, stop in kinds for part, _ in parts]
        np.testing.assert_array_equal(convolution, np.concatenate(whole, axis=1))
        others = [block for block in range(BLOCKS) if block != TARGET[0]]
        np.testing.assert_array_equal(target.bytes[name][others], before[name][others])


# SGLang ----------------------------------------------------------------------------------------------------------

SOURCE_PAGES, TARGET_PAGES, SLOT = np.array([6, 1, 4]), np.array([0, 7, 2]), 5
TOKENS = (0, PAGE * len(SOURCE_PAGES))

Slots = tuple[list[int], list[Bytes]]
"""Addresses and bytes of buffers, each [items, bytes]."""


class SglangRank:
    """A rank whose pools are on a device.

    Attributes:
        main: Buffers of the main pool and the draft, [items, bytes] each.
        states: The same for each state.
    """

    def __init__(self, device: FakeDevice, args: Any, shard: Shard) -> None:
        def allocate(lengths: Sequence[int], items: Sequence[int]) -> Slots:
            made = [filled(device, length // item, item) for length, item in zip(lengths, items, strict=True)]
            self.held += [tensor for tensor, _ in made]
            return [tensor.data_ptr() for tensor, _ in made], [cells for _, cells in made]

        self.held: list[Any] = []
        args.kv_data_ptrs, self.main = allocate(args.kv_data_lens, args.kv_item_lens)
        states = [allocate(*lists) for lists in zip(args.state_data_lens, args.state_item_lens, strict=True)]
        args.state_data_ptrs, self.states = [one[0] for one in states], [one[1] for one in states]
        self.pools: PoolMap = describe_pools(args, shard, fingerprint="model", location=device.location)

    @property
    def buffers(self) -> list[Bytes]:
        return [*self.main, *itertools.chain.from_iterable(self.states)]

    def pages(self, indices: NDArray[Any], states: Sequence[Any]) -> tuple[KVLayout, Pages]:
        """Return the layout, and what the adapter gives kvflow."""
        return self.pools.layout, self.pools.pages(TOKENS, indices) | self.pools.state_pages(TOKENS, states)


def with_heads(tp_size: int) -> Any:
    """Return K and V with a draft model, a sliding window, and a recurrent state of 12 channels and 4 heads."""
    args = kv_args(2, 8 // tp_size, draft=1, swa_kv_cache_layout="nhd")
    with_state(args, "swa", [PAGE * 8 // tp_size * 64] * 4)
    return with_state(
        args,
        "mamba",
        [3 * 12 // tp_size * 2, 4 // tp_size * 32],
        layer_ids=[0, 0],
        dim_per_tensor=[12 // tp_size, 4 // tp_size],
        conv_shard_groups=[[2, 2, 8], None],
        slice_outer_counts=[3, 1],
    )


async def test_pools_of_sglang_with_heads(device: FakeDevice, way: str) -> None:
    """Two ranks send to one, which has all their heads."""
    sources = [SglangRank(device, with_heads(2), Shard(8, 2, rank)) for rank in range(2)]
    target = SglangRank(device, with_heads(1), Shard(8))
    before = [cells.copy() for cells in target.main + target.states[0]]
    window, last = SOURCE_PAGES[1:], TARGET_PAGES[1:]
    given = [one.pages(SOURCE_PAGES, [window, [SLOT]]) for one in sources]
    await hand_over(way, given, target.pages(TARGET_PAGES, [last, [SLOT - 1]]), TOKENS)

    def joined(parts: Sequence[Bytes], rows: int) -> Bytes:
        """Join the heads of two ranks, which are within a row of an item."""
        split = [part.reshape(len(part), rows, -1) for part in parts]
        return np.concatenate(split, axis=2).reshape(len(parts[0]), -1)

    for place, cells in enumerate(target.main + target.states[0]):
        is_window = place >= len(target.main)
        held = [(one.main + one.states[0])[place] for one in sources]
        before[place][last if is_window else TARGET_PAGES] = joined(held, PAGE)[window if is_window else SOURCE_PAGES]
        np.testing.assert_array_equal(cells, before[place], str(place))
    convolution, state = ([one.states[1][place][SLOT] for one in sources] for place in range(2))
    np.testing.assert_array_equal(target.states[1][1][SLOT - 1], np.concatenate(state))
    kinds = ((0, 1), (1, 2), (2, 6))  # channels of a kind in each half
    whole = [part.view(np.uint16).reshape(3, 6)[:, start:stop] for start, stop in kinds for part in convolution]
    np.testing.assert_array_equal(target.states[1][0][SLOT - 1].view(np.uint16).reshape(3, 12), np.hstack(whole))


async def test_pools_of_sglang_with_latents(device: FakeDevice, way: str) -> None:
    """Every rank holds all of them. Index, scales and tails are items that are not understood."""

    def pools() -> Any:
        args = with_state(kv_args(2, groups=1), "dsa", [40, 40])
        return with_state(with_state(args, "dsa_tail", [64] * 2), "block_scale", [96] * 2)

    source, target = (SglangRank(device, pools(), Shard(1, is_mla=True)) for _ in range(2))
    states = [[pages, [slot, 0, 0, 0, 0, 0], pages] for pages, slot in ((SOURCE_PAGES, SLOT), (TARGET_PAGES, SLOT - 1))]
    before = [cells.copy() for cells in target.buffers]
    given = source.pages(SOURCE_PAGES, states[0])
    await hand_over(way, [given], target.pages(TARGET_PAGES, states[1]), TOKENS)
    for place, (cells, sent) in enumerate(zip(target.buffers, source.buffers, strict=True)):
        is_tail = 4 <= place < 6
        before[place][[SLOT - 1] if is_tail else TARGET_PAGES] = sent[[SLOT] if is_tail else SOURCE_PAGES]
        np.testing.assert_array_equal(cells, before[place], str(place))


def test_metadata_of_sglang_on_a_device_is_refused(device: FakeDevice) -> None:
    """The host writes and reads it."""
    memory = device.allocate(4096)
    with pytest.raises(ConfigError):
        MetadataRows([memory.address], [4096], [64])


# transformers and any engine -------------------------------------------------------------------------------------


async def test_cache_of_transformers(device: FakeDevice, way: str) -> None:
    """Full attention and sliding windows share one tensor."""
    size, heads, head_dim, num_blocks = 4, 2, 8, 10
    row = heads * head_dim * 2

    def cache(tensor: Any) -> Any:
        common = {"tokens_per_page": size, "num_key_value_heads": heads, "head_dim": head_dim, "layer_indices": [0, 1]}
        full = SimpleNamespace(cache_dtype=torch.bfloat16, bytes_per_block=4 * size * row, **common)
        return SimpleNamespace(cache_allocators={"full_attention": full}, cache_tensor=tensor)

    (source, sent), (target, found) = (filled(device, num_blocks * 4 * size * row) for _ in range(2))
    layouts = [CacheMap(cache(tensor), "model") for tensor in (source, target)]
    before, sent = found.copy().reshape(num_blocks, -1), sent.reshape(num_blocks, -1)
    given = [
        (one.layout, one.last({"full_attention": blocks}, 0, 8))
        for one, blocks in zip(layouts, ([3, 8], [6, 0]), strict=True)
    ]
    await hand_over(way, given[:1], given[1], (0, 8))
    before[[6, 0]] = sent[[3, 8]]
    np.testing.assert_array_equal(found.reshape(num_blocks, -1), before)


async def test_tensors_whose_axes_are_in_another_order(device: FakeDevice, way: str) -> None:
    (source, sent), (target, found) = filled(device, 2, 8, 4, 3 * 16), filled(device, 8, 2, 3, 4, 16)
    describe: Callable[..., KVLayout] = kvflow.layout_from_tensors
    layouts = [
        describe({"kv": [source]}, axes="layer page token head*dim", heads=(0, 3), fingerprint="model"),
        describe({"kv": [target]}, axes="page layer head token dim", heads=(0, 3), fingerprint="model"),
    ]
    before = found.copy()
    await hand_over(way, [(layouts[0], {"kv": [5, 1]})], (layouts[1], {"kv": [2, 7]}), (0, 8))
    cells = sent.reshape(2, 8, 4, 3, 16)[:, [5, 1]]
    before[[2, 7]] = cells.transpose(1, 0, 3, 2, 4)
    np.testing.assert_array_equal(found, before)

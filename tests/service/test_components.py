"""Components besides the main one: windows, states, and unwanted components (requirements S4)."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import numpy as np
import pytest

import kvflow
from kvflow.errors import FailureReason, PlanError
from kvflow.geometry import Location, TokenPages, TokenShard, window_tokens
from tests.support.failures import catch
from tests.support.instances import decode_config, prefill_config
from tests.support.worlds import ComponentSpec, Rank, RankBuilder, Split, TensorSpec, World

pytestmark = pytest.mark.anyio

NUM_TOKENS, PAGE_SIZE, WINDOW, ROWS = 22, 4, 7, 3
HEADS = (TensorSpec("k", 2, 4), TensorSpec("v", 2, 4))
SPECS = [
    ComponentSpec("kv", "paged", HEADS, (0, 1), 0, NUM_TOKENS),
    ComponentSpec("swa", "paged", HEADS, (0, 1), 0, NUM_TOKENS),
    ComponentSpec("mamba", "slot", (TensorSpec("conv.q", 2, 2), TensorSpec("ssm", 2, 6)), (0, 1), 0, ROWS),
]
WINDOW_TOKENS = window_tokens(NUM_TOKENS, WINDOW, PAGE_SIZE)
WANTED = {"kv": (0, NUM_TOKENS), "swa": WINDOW_TOKENS, "mamba": (0, ROWS)}
EVERYTHING = {"kv": (0, NUM_TOKENS), "swa": (0, NUM_TOKENS), "mamba": (0, ROWS)}


def make_rank(seed: int, *, is_decode: bool) -> Rank:
    builder = RankBuilder(seed, Split(1, 1, 1, 1, PAGE_SIZE), is_decode=is_decode, high=False)
    for spec in SPECS:
        builder.add(spec, list(spec.layers), 0, TokenShard())
    rank = builder.build()
    assert rank is not None
    rank.move(rank.memory.ctypes.data)
    return rank


class Bench:
    """One prefill rank and one decode rank, with the memory of both."""

    def __init__(self, prefill: kvflow.PrefillRank, decode: kvflow.DecodeRank, source: Rank, target: Rank) -> None:
        self.prefill, self.decode, self.source, self.target = prefill, decode, source, target

    def part(self, rank: Rank, name: str, tokens: tuple[int, int]) -> TokenPages:
        return TokenPages(tokens, rank.pages(name, tokens))

    def receiver(self, wanted: dict[str, tuple[int, int]]) -> kvflow.RoomReceiver:
        """Receive some components, and declare the others as unwanted."""
        pages = {name: self.part(self.target, name, wanted[name]) if name in wanted else None for name in EVERYTHING}
        return self.decode.receive(1, prefill="prefill", tokens=(0, NUM_TOKENS), pages=pages)

    async def receive(self, wanted: dict[str, tuple[int, int]]) -> kvflow.Handover:
        async with self.receiver(wanted) as receiver:
            return await receiver.done()

    async def send(self, last: dict[str, tuple[int, int]]) -> None:
        """Send the main component in two chunks, and the others with the last one."""
        async with self.prefill.send(1) as sender:
            await sender.chunk((0, 10), {"kv": self.source.pages("kv", (0, 10))})
            parts = {name: self.part(self.source, name, tokens) for name, tokens in last.items() if name != "kv"}
            await sender.finish((10, NUM_TOKENS), {"kv": self.source.pages("kv", (10, NUM_TOKENS)), **parts})

    def assert_arrived(self, wanted: dict[str, tuple[int, int]]) -> None:
        ranges = {name: wanted.get(name, (0, 0)) for name in EVERYTHING}
        world = make_world(self.source, self.target, ranges)
        np.testing.assert_array_equal(self.target.memory, world.expected(self.target, world.held()))


def make_world(source: Rank, target: Rank, wanted: dict[str, tuple[int, int]]) -> World:
    sizes = {(spec.name, tensor.name): tensor.head_bytes for spec in SPECS for tensor in spec.tensors}
    return World({0: source}, {0: target}, wanted, {}, {spec.name: spec.num_tokens for spec in SPECS}, sizes)


@asynccontextmanager
async def bench(
    backend: str, source_locations: Sequence[Location] = (), target_locations: Sequence[Location] = ()
) -> AsyncIterator[Bench]:
    source, target = make_rank(1, is_decode=False), make_rank(2, is_decode=True)
    for rank, locations in ((source, source_locations), (target, target_locations)):
        if locations:
            rank.scatter(locations)
    make_world(source, target, EVERYTHING).compute()
    async with kvflow.Registry() as registry:
        prefill = kvflow.PrefillRank(prefill_config(registry.endpoint, backend=backend), source.layout)
        decode = kvflow.DecodeRank(decode_config(registry.endpoint, backend=backend), target.layout)
        async with prefill, decode:
            yield Bench(prefill, decode, source, target)


@pytest.mark.parametrize("backend", ["memory", "nixl", "mooncake"])
@pytest.mark.parametrize("sent", [WANTED, EVERYTHING], ids=["only the window", "all there is"])
async def test_window_and_state_come_with_the_last_chunk(backend: str, sent: dict[str, tuple[int, int]]) -> None:
    async with bench(backend) as ranks, anyio.create_task_group() as tasks:
        tasks.start_soon(ranks.send, sent)
        await ranks.receive(WANTED)
        ranks.assert_arrived(WANTED)


@pytest.mark.parametrize("wanted", [{"kv": (0, NUM_TOKENS)}, {"mamba": (0, ROWS)}, {"swa": WINDOW_TOKENS}])
async def test_what_is_not_wanted_is_not_sent(wanted: dict[str, tuple[int, int]]) -> None:
    async with bench("memory") as ranks, anyio.create_task_group() as tasks:
        tasks.start_soon(ranks.send, EVERYTHING)
        handover = await ranks.receive(wanted)
        ranks.assert_arrived(wanted)
        assert handover.num_bytes == int((ranks.target.memory != 0xEE).sum())


async def test_full_prefix_hit_still_brings_the_state() -> None:
    wanted = {"kv": (NUM_TOKENS, NUM_TOKENS), "mamba": (0, ROWS)}
    async with bench("memory") as ranks, anyio.create_task_group() as tasks:
        tasks.start_soon(ranks.send, EVERYTHING)
        await ranks.receive(wanted)
        ranks.assert_arrived(wanted)


@pytest.mark.parametrize(
    ("sent", "lacking"),
    [
        ({"kv": (0, NUM_TOKENS), "swa": WINDOW_TOKENS}, "component mamba, but prefill does not serve 0:3"),
        ({"kv": (0, NUM_TOKENS), "mamba": (0, ROWS)}, "component swa, but prefill does not serve 12:22"),
        (
            {"kv": (0, NUM_TOKENS), "mamba": (0, ROWS), "swa": (16, 22)},
            "component swa, but prefill does not serve 12:16",
        ),
    ],
)
async def test_what_prefill_cannot_send_in_full_fails_on_both_sides(
    sent: dict[str, tuple[int, int]], lacking: str
) -> None:
    async with bench("memory") as ranks, anyio.create_task_group() as tasks:

        async def send() -> None:
            failure = await catch(lambda: ranks.send(sent))
            assert lacking in failure.detail

        tasks.start_soon(send)
        failure = await catch(lambda: ranks.receive(WANTED))
        assert failure.reason is FailureReason.TOKENS_NOT_SERVED
        assert lacking in failure.detail
        assert not failure.quarantined


async def test_a_component_must_be_mentioned() -> None:
    async with bench("memory") as ranks:
        with pytest.raises(PlanError, match="must list every component") as caught:
            ranks.decode.receive(1, prefill="prefill", tokens=(0, 4), pages={"kv": [0], "mamba": None})
        assert caught.value.values == {"missing": ["swa"], "given": ["kv", "mamba"]}


async def test_a_slot_moves_whole() -> None:
    async with bench("memory") as ranks:
        with pytest.raises(PlanError, match="slot must be transferred as a whole") as caught:
            ranks.receiver({"mamba": (0, 2)})
        assert caught.value.values == {"component": "mamba", "rows": (0, 2), "whole": (0, ROWS)}


async def test_bare_indices_stand_for_a_whole_slot() -> None:
    async with bench("memory") as ranks, anyio.create_task_group() as tasks:
        tasks.start_soon(ranks.send, EVERYTHING)
        pages = {"kv": None, "swa": None, "mamba": ranks.target.tables["mamba"]}
        async with ranks.decode.receive(1, prefill="prefill", tokens=(0, NUM_TOKENS), pages=pages) as receiver:
            await receiver.done()
        ranks.assert_arrived({"mamba": (0, ROWS)})


async def test_a_wish_for_nothing_is_refused() -> None:
    async with bench("memory") as ranks:
        with pytest.raises(PlanError, match="all components are None: there is nothing to receive"):
            ranks.receiver({})


async def test_a_room_may_end_with_an_empty_chunk() -> None:
    async with bench("memory") as ranks, anyio.create_task_group() as tasks:
        tasks.start_soon(send_and_finish_apart, ranks)
        await ranks.receive({"kv": (0, NUM_TOKENS)})


async def send_and_finish_apart(ranks: Bench) -> None:
    async with ranks.prefill.send(1) as sender:
        await sender.chunk((0, NUM_TOKENS), {"kv": ranks.source.pages("kv", (0, NUM_TOKENS))})
        await sender.finish((NUM_TOKENS, NUM_TOKENS), {})

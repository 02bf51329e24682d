"""Digests are equal on both sides of any pair of layouts, and differ as soon as one wanted byte does."""

import zlib
from collections.abc import Iterator
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvflow.geometry import (
    BoundRoute,
    Component,
    ComponentSlice,
    DigestScope,
    MemoryRange,
    Region,
    RegionSlice,
    Route,
    TokenPages,
    build_page_table,
    digest,
    plan,
)
from kvflow.geometry.digest import BLOCK_BYTES
from kvflow.geometry.expected import ExpectedBytes
from kvflow.geometry.ranges import WHOLE
from tests.support.examples import examples
from tests.support.links import bytes_of, links
from tests.support.worlds import CellName, Rank, World, execute, worlds

Chunk = tuple[str, tuple[int, int], bool]
"""Component, tokens, and whether these are its last tokens."""


def chunks(world: World, bound: BoundRoute) -> Iterator[Chunk]:
    for name in bound.expected:
        start, stop = world.wanted[name]
        for tokens in pairwise([start, *world.cuts[name], stop]):
            yield name, tokens, tokens[1] == stop


def view(rank: Rank, memory: MemoryRange) -> NDArray[np.uint8]:
    start = memory.address - rank.base
    assert 0 <= start <= start + memory.length <= len(rank.memory)
    return rank.memory[start : start + memory.length]


def table(rank: Rank, name: str, tokens: tuple[int, int]) -> TokenPages:
    return TokenPages(tokens, rank.pages(name, tokens))


def digest_of(rank: Rank, written: DigestScope, name: str, table_tokens: tuple[int, int]) -> int:
    """Return the digest as one side computes it, with a page table of only `table_tokens`."""
    component = rank.layout.component(name)
    pages = build_page_table(component, table(rank, name, table_tokens))
    return digest(written, component, pages, lambda memory: view(rank, memory))


def move(world: World, bound: BoundRoute, source: Rank, target: Rank) -> None:
    for name, tokens, final in chunks(world, bound):
        src = build_page_table(source.layout.component(name), table(source, name, tokens))
        dst = build_page_table(target.layout.component(name), table(target, name, world.wanted[name]))
        execute(plan(bound, {name: ComponentSlice(tokens, src, dst, final)}), source, target)


def wanted_cells(route: Route, world: World, target: Rank, chunk: Chunk) -> list[tuple[CellName, int]]:
    """Return the cells of one chunk that one route brings, found cell by cell."""
    name, (start, stop), final = chunk
    component = target.layout.component(name)
    grains = {region.tensor: region.tokens_per_cell for region in component.regions}
    pieces = [piece for piece in route.slices if piece.component == name]
    heads = {(piece.tensor, piece.layer, head) for piece in pieces for head in range(*piece.heads)}
    source = world.prefill[route.engine_rank]
    held = dict(source.cells(source.layout.component(name), world.num_tokens[name]))
    found = []
    for cell, offset in target.cells(component, world.num_tokens[name]):
        grain = grains[cell[1]]
        last = -(-stop // grain) if final else stop // grain
        is_inside = start < stop and start // grain <= cell[4] < last
        if is_inside and (cell[1], cell[2], cell[3]) in heads and cell in held:
            found.append((cell, offset))
    return found


@pytest.mark.timeout(0)
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(worlds(), st.randoms(use_true_random=False))
def test_digests_agree_after_a_transfer_and_tell_any_changed_byte(world: World, random: Random) -> None:
    world.compute()
    for route, bound, source, target in links(world):
        move(world, bound, source, target)
        for chunk in chunks(world, bound):
            name, tokens, final = chunk
            written = DigestScope(route.slices, bound.expected[name], tokens, final)
            sent = digest_of(source, written, name, tokens)
            assert digest_of(target, written, name, world.wanted[name]) == sent
            cells = wanted_cells(route, world, target, chunk)
            assert bool(cells) == bool(bytes_of(bound, name, tokens, final=final))
            for cell, offset in random.sample(cells, min(len(cells), 3)):
                at = offset + random.randrange(world.size(cell))
                target.memory[at] ^= 1 << random.randrange(8)
                assert digest_of(target, written, name, world.wanted[name]) != sent
                target.memory[at] = world.value(cell)[at - offset]
            assert digest_of(target, written, name, world.wanted[name]) == sent


@pytest.mark.timeout(0)
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], max_examples=examples(40))
@given(worlds())
def test_what_is_not_wanted_does_not_matter(world: World) -> None:
    world.compute()
    for route, bound, source, target in links(world):
        move(world, bound, source, target)
        everything = list(chunks(world, bound))
        works = [
            (DigestScope(route.slices, bound.expected[name], tokens, final), name) for name, tokens, final in everything
        ]
        before = [digest_of(target, written, name, world.wanted[name]) for written, name in works]
        mine = np.zeros(len(target.memory), bool)
        for chunk in everything:
            for cell, offset in wanted_cells(route, world, target, chunk):
                mine[offset : offset + world.size(cell)] = True
        kept = target.memory.copy()
        target.memory[~mine] ^= 0xFF
        assert [digest_of(target, written, name, world.wanted[name]) for written, name in works] == before
        target.memory[:] = kept


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("heads", [(0, 4), (1, 3), (2, 3)])
@pytest.mark.parametrize("page_bytes", [64, 4 * BLOCK_BYTES])
def test_digest_is_that_of_the_cells_in_logical_order(order: str, heads: tuple[int, int], page_bytes: int) -> None:
    """The expected digest is computed by hand, for pieces read in place and pieces gathered, over several blocks."""
    slots, page_size, num_heads = 5, 4, 4
    head_bytes = page_bytes // (page_size * num_heads)
    shape = (slots, page_size, num_heads) if order == "NHD" else (slots, num_heads, page_size)
    memory = np.random.default_rng(1).integers(0, 256, (*shape, head_bytes), np.uint8)
    cells = memory if order == "NHD" else memory.swapaxes(1, 2)
    row, head = cells.strides[1:3]
    region = Region("k", 3, 0, slots, page_bytes, page_size, row, (0, num_heads), head, head_bytes, "uint8")
    component = Component("kv", (region,))
    written = DigestScope((RegionSlice("kv", "k", 3, heads),), ExpectedBytes(WHOLE, WHOLE, {}), (2, 11), final=True)
    pages = build_page_table(component, TokenPages((2, 11), [4, 0, 1]))
    in_order = np.concatenate([cells[4, 2:], cells[0], cells[1, :3]])[:, heads[0] : heads[1]]
    expected = zlib.crc32(in_order.tobytes())
    assert digest(written, component, pages, lambda _: memory.reshape(-1)) == expected

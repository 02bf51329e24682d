"""The tokens that a rank holds, compared with counting them one by one."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.errors import LayoutError, PlanError
from kvflow.geometry import TokenShard
from kvflow.geometry.ranges import cell_range, check_range, count_shared, held_range, overlap_pattern, shared_runs


@st.composite
def shards(draw: st.DrawFn) -> TokenShard:
    size = draw(st.integers(1, 5))
    return TokenShard(size, draw(st.integers(0, size - 1)), draw(st.integers(1, 6)))


def holds(shard: TokenShard, token: int) -> bool:
    return token // shard.interleave % shard.size == shard.rank


run_extents = st.tuples(st.integers(0, 80), st.integers(0, 80)).map(lambda pair: (min(pair), max(pair)))


@given(shards(), run_extents)
def test_places_are_those_of_counting(shard: TokenShard, tokens: tuple[int, int]) -> None:
    before = [sum(holds(shard, token) for token in range(end)) for end in tokens]
    assert held_range(tokens, shard) == tuple(before)


@given(shards(), shards(), run_extents)
def test_shared_tokens_are_counted(src: TokenShard, dst: TokenShard, tokens: tuple[int, int]) -> None:
    assert count_shared(tokens, src, dst) == sum(holds(src, token) and holds(dst, token) for token in range(*tokens))


@given(shards(), shards(), run_extents, st.integers(1, 5), st.integers(1, 5))
def test_runs_hold_each_shared_token_once_and_stay_in_one_page(
    src: TokenShard, dst: TokenShard, tokens: tuple[int, int], src_size: int, dst_size: int
) -> None:
    starts, lengths = shared_runs(tokens, src, dst, src_size, dst_size)
    found: list[int] = []
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        run = range(start, start + length)
        found += run
        for shard, size in ((src, src_size), (dst, dst_size)):
            assert len({held_range((0, token), shard)[1] // size for token in run}) == 1
    assert found == [token for token in range(*tokens) if holds(src, token) and holds(dst, token)]


@given(run_extents, st.lists(st.integers(0, 80), max_size=4), st.integers(1, 5))
def test_chunks_share_the_cells_out(tokens: tuple[int, int], cuts: list[int], grain: int) -> None:
    """Each cell is sent once, with the chunk that brings its last token."""
    start, stop = tokens
    edges = [start, *sorted(cut for cut in cuts if start < cut < stop), stop]
    cells: list[int] = []
    for first, last in pairwise(edges):
        cells += range(*cell_range((first, last), grain, final=last == stop))
    assert cells == (list(range(start // grain, -(-stop // grain))) if start < stop else [])


@pytest.mark.parametrize("shard", [(0, 0, 1), (2, 2, 1), (2, -1, 1), (2, 0, 0), (257, 0, 1), (2, 0, 2**17)])
def test_impossible_shards_are_refused(shard: tuple[int, int, int]) -> None:
    with pytest.raises(LayoutError, match="token shard is invalid") as caught:
        TokenShard(*shard)
    assert caught.value.values == {"size": shard[0], "rank": shard[1], "interleave": shard[2]}


def test_shards_whose_overlap_never_repeats_are_refused() -> None:
    with pytest.raises(LayoutError, match="incompatible"):
        overlap_pattern(TokenShard(251, 0, 65_521), TokenShard(241, 0, 65_519))


@pytest.mark.parametrize("tokens", [(3, 2), (-1, 2), (0, 2**41), (0.5, 2), ("0", "2"), (1,), 5])
def test_what_is_no_range_is_refused(tokens: object) -> None:
    with pytest.raises(PlanError):
        check_range(tokens)  # type: ignore[arg-type]

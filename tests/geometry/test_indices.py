"""Index helpers for engines, compared with slow and obvious ones."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.errors import PlanError
from kvflow.geometry import group_concurrent_contiguous, prompt_tokens, window_tokens

Groups = list[list[int]]


@pytest.mark.parametrize(
    ("src", "dst", "expected"),
    [
        ([10, 11, 12], [5, 6, 7], ([[10, 11, 12]], [[5, 6, 7]])),
        ([10, 11, 20], [5, 6, 7], ([[10, 11], [20]], [[5, 6], [7]])),
        ([10, 11, 12], [5, 7, 8], ([[10], [11, 12]], [[5], [7, 8]])),
        ([], [], ([], [])),
        ([], [1, 2], ([], [])),
        ([1, 2], [], ([], [])),
    ],
)
@pytest.mark.parametrize("dtype", [None, np.int32, np.int64, np.uint32, np.uint64])
def test_groups_end_where_either_side_does(
    src: list[int], dst: list[int], expected: tuple[Groups, Groups], dtype: type[np.generic] | None
) -> None:
    assert group_concurrent_contiguous(np.array(src, dtype), np.array(dst, dtype)) == expected
    assert group_concurrent_contiguous(src, dst) == expected


def test_unequal_lists_are_refused_with_both_lengths() -> None:
    with pytest.raises(ValueError, match=r"3 in src, 2 in dst"):
        group_concurrent_contiguous([1, 2, 3], [1, 2])


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint32, np.int64, np.uint64])
def test_a_step_over_the_end_of_the_type_is_no_step(dtype: type[np.integer]) -> None:
    limits = np.iinfo(dtype)
    wrapping = np.array([limits.max, limits.min], dtype)
    assert group_concurrent_contiguous(wrapping, [0, 1])[1] == [[0], [1]]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1))
def test_groups_are_the_longest_runs_of_both(pairs: list[tuple[int, int]]) -> None:
    src, dst = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    expected: tuple[Groups, Groups] = ([[src[0]]], [[dst[0]]])
    for (before_src, before_dst), (after_src, after_dst) in itertools.pairwise(pairs):
        if (after_src, after_dst) != (before_src + 1, before_dst + 1):
            expected[0].append([])
            expected[1].append([])
        expected[0][-1].append(after_src)
        expected[1][-1].append(after_dst)
    assert group_concurrent_contiguous(src, dst) == expected


@pytest.mark.parametrize("indices", [[1.0, 2.0], [[1, 2]], [True]])
def test_what_is_no_list_of_indices_is_refused(indices: list[int]) -> None:
    with pytest.raises(PlanError, match="flat list of integers"):
        group_concurrent_contiguous(indices, indices)


@pytest.mark.parametrize("page_size", [0, -16])
def test_impossible_page_sizes_are_refused(page_size: int) -> None:
    with pytest.raises(PlanError):
        window_tokens(8, 4, page_size)


@pytest.mark.parametrize(
    ("num_with_sampled", "num_prompt", "expected"),
    [(17, 16, (0, 16)), (16, 16, (0, 16)), (8, 16, (0, 8)), (0, 0, (0, 0))],
)
def test_state_ends_with_the_prompt(num_with_sampled: int, num_prompt: int, expected: tuple[int, int]) -> None:
    assert prompt_tokens(num_with_sampled, num_prompt) == expected


@pytest.mark.parametrize(
    ("num_tokens", "window", "page_size", "expected"),
    [
        (100, 128, 16, (0, 100)),
        (128, 128, 16, (0, 128)),
        (129, 128, 16, (0, 129)),
        (144, 128, 16, (16, 144)),
        (200, 128, 1, (72, 200)),
        (200, 128, 64, (64, 200)),
        (0, 128, 16, (0, 0)),
    ],
)
def test_window_begins_at_a_page(num_tokens: int, window: int, page_size: int, expected: tuple[int, int]) -> None:
    assert window_tokens(num_tokens, window, page_size) == expected


@given(st.integers(0, 1000), st.integers(1, 300), st.integers(1, 64))
def test_window_holds_all_it_should_and_less_than_a_page_more(num_tokens: int, window: int, page_size: int) -> None:
    start, stop = window_tokens(num_tokens, window, page_size)
    seen = range(num_tokens)[-window:]
    assert stop == num_tokens
    assert start % page_size == 0
    assert set(seen) <= set(range(start, stop))
    assert stop - start - len(seen) < page_size


@pytest.mark.parametrize(("num_with_sampled", "num_prompt"), [(-1, 4), (4, -1), (2**41, 4)])
def test_impossible_lengths_are_refused(num_with_sampled: int, num_prompt: int) -> None:
    with pytest.raises(PlanError):
        prompt_tokens(num_with_sampled, num_prompt)


@pytest.mark.parametrize(("num_tokens", "window"), [(-1, 4), (4, 0), (4, -1)])
def test_impossible_windows_are_refused(num_tokens: int, window: int) -> None:
    with pytest.raises(PlanError):
        window_tokens(num_tokens, window, 1)

"""Page tables against token ranges."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.errors import PlanError
from kvflow.geometry import Component, Region
from kvflow.geometry.pages import PageTable, TokenPages, build_page_table, pages_spanned, pair_pages


def check(
    pages: object, tokens: tuple[int, int], *, page_size: int = 4, slots: int = 10, distinct: bool = False
) -> PageTable:
    region = Region("k", 0, 0, slots, page_size, page_size, 1, (0, 1), 1, 1, "uint8")
    return build_page_table(Component("kv", (region,)), TokenPages(tokens, pages), distinct=distinct)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tokens", "expected"), [((0, 0), 0), ((0, 1), 1), ((3, 5), 2), ((4, 8), 1), ((5, 5), 0), ((1, 13), 4)]
)
def test_pages_spanned_counts_touched_pages(tokens: tuple[int, int], expected: int) -> None:
    assert pages_spanned(tokens, 4) == expected


@pytest.mark.parametrize("tokens", [(-1, 3), (5, 4), (0, 2**41)])
def test_impossible_token_ranges_are_refused(tokens: tuple[int, int]) -> None:
    with pytest.raises(PlanError) as error:
        pages_spanned(tokens, 4)
    assert error.value.values["tokens"] == tokens


@pytest.mark.parametrize(
    "pages", [[7, 2], (7, 2), np.array([7, 2]), np.array([7, 2], np.int32), np.array([7, 2], np.uint64)]
)
def test_any_integers_are_taken(pages: object) -> None:
    table = check(pages, (3, 6))
    assert table.pages.tolist() == [7, 2]
    assert table.pages.dtype == np.uint32
    assert (table.first_token, table.page_size) == (0, 4)


def test_table_does_not_follow_later_changes_of_the_array() -> None:
    pages = np.array([7, 2], np.uint32)
    table = check(pages, (3, 6))
    pages[0] = 9
    assert table.pages.tolist() == [7, 2]
    with pytest.raises(ValueError, match="read-only"):
        table.pages[0] = 1


@pytest.mark.parametrize(
    ("pages", "values"),
    [
        ([7], {"pages": 1, "needed": 2}),
        ([7, 2, 3], {"pages": 3, "needed": 2}),
        ([7, 10], {"position": 1, "page": 10, "num_pages": 10}),
        ([-1, 3], {"position": 0, "page": -1}),
        (np.array([2**63, 3], np.uint64), {"page": 2**63}),
        ([7.0, 2.0], {"dtype": "float64"}),
        ([True, False], {"dtype": "bool"}),
        ([[7, 2]], {"ndim": 2}),
        ("72", {"ndim": 0}),
    ],
)
def test_bad_tables_are_refused_with_their_values(pages: object, values: dict[str, object]) -> None:
    with pytest.raises(PlanError) as error:
        check(pages, (3, 6))
    assert error.value.values["component"] == "kv"
    assert error.value.values.items() >= values.items()


def test_a_page_listed_twice_is_refused_as_a_destination_only() -> None:
    assert check([5, 6, 5], (0, 12)).pages.tolist() == [5, 6, 5]
    with pytest.raises(PlanError) as error:
        check([5, 6, 5], (0, 12), distinct=True)
    assert error.value.values == {"component": "kv", "page": 5, "positions": [0, 2]}


def test_range_outside_a_table_names_the_side() -> None:
    table, short = check([1, 2, 3], (0, 12)), check([1, 2], (0, 8))
    with pytest.raises(PlanError) as error:
        pair_pages((0, 12), table, short)
    assert error.value.values == {"side": "dst", "tokens": (0, 12), "covered": (0, 8)}


@given(
    start=st.integers(0, 60),
    length=st.integers(0, 60),
    src_size=st.sampled_from([1, 2, 3, 4, 16]),
    dst_size=st.sampled_from([1, 2, 3, 4, 16]),
)
def test_runs_cover_the_range_once_and_stay_inside_pages(start: int, length: int, src_size: int, dst_size: int) -> None:
    tokens = (start, start + length)
    tables = [
        check(range(pages_spanned(tokens, size)), tokens, page_size=size, slots=200) for size in (src_size, dst_size)
    ]
    runs = pair_pages(tokens, *tables)
    expected = [
        (t // src_size - start // src_size, t % src_size, t // dst_size - start // dst_size, t % dst_size)
        for t in range(*tokens)
    ]
    walked = []
    for src_slot, src_token, dst_slot, dst_token, run in zip(*(column.tolist() for column in runs), strict=True):
        assert src_token + run <= src_size
        assert dst_token + run <= dst_size
        walked += [(src_slot, src_token + i, dst_slot, dst_token + i) for i in range(run)]
    assert walked == expected

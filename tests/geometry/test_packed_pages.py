"""Page tables on the wire: small, and strict about what is not trusted."""

from typing import Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.errors import PlanError
from kvflow.geometry.packed_pages import SHORT, pack_pages, unpack_pages

RANDOM: Final = np.random.default_rng(1)
LIMIT: Final = 3_000

runs: Final = st.tuples(st.integers(0, 2**32 - 1), st.integers(1, 40), st.sampled_from([-1, 0, 1, 1, 1, 7]))
tables: Final = st.lists(runs, max_size=30).map(
    lambda parts: [(first + step * place) % 2**32 for first, count, step in parts for place in range(count)]
)

first_pages: Final = st.sampled_from([range(0), *(range(0, step * SHORT, step) for step in (1, 3, 5_000))])
"""Whether a table is long enough to be analysed, and whether runs or deltas suit it."""


def encoded(pages: object) -> bytes:
    return np.array(pages, "<u4").tobytes()


@given(first_pages, tables)
def test_what_is_packed_comes_back(first: range, last: list[int]) -> None:
    pages = [*first, *last]
    assert unpack_pages(pack_pages(encoded(pages)), len(pages)) == encoded(pages)


@pytest.mark.parametrize(
    ("pages", "num_bytes"),
    [
        (RANDOM.choice(2**23, 65_536, replace=False, shuffle=False), 3 * 65_536),
        (np.arange(65_536) + 2**31, 16),
        (np.sort(RANDOM.permutation(100_000)[:50_000]), 50_000),
        ((RANDOM.permutation(8_192)[:, None] * 8 + np.arange(8)).ravel(), 3 * 8_192),
    ],
    ids=["random", "consecutive", "ascending with gaps", "runs of eight"],
)
def test_size(pages: object, num_bytes: int) -> None:
    assert len(pack_pages(encoded(pages))) < num_bytes + 16


def test_the_tables_of_most_requests_are_not_analysed() -> None:
    """32,768 tokens in pages of 16: packing and unpacking takes longer than to send the pages as they are."""
    pages = encoded(np.arange(32_768 // 16))
    assert pack_pages(pages)[2:] == pages


@given(
    st.binary(max_size=60)
    | st.tuples(st.sampled_from([0, 1]), st.binary(max_size=60)).map(lambda it: bytes((it[0],)) + it[1])
)
def test_any_bytes_are_a_table_within_the_limit_or_an_error(data: bytes) -> None:
    try:
        pages = unpack_pages(data, LIMIT)
    except PlanError:
        return
    assert len(pages) <= 4 * LIMIT
    assert len(pages) % 4 == 0


@pytest.mark.parametrize("count", [SHORT, SHORT + 1, LIMIT])
@pytest.mark.parametrize("step", [1, 3])
def test_the_limit_is_exact(count: int, step: int) -> None:
    data = pack_pages(encoded(np.arange(count) * step))
    assert unpack_pages(data, count)
    with pytest.raises(PlanError, match="longer than allowed"):
        unpack_pages(data, count - 1)


@pytest.mark.parametrize("cut", [-1, 1])
def test_truncated_and_padded_tables_are_refused(cut: int) -> None:
    for pages in (np.arange(LIMIT), RANDOM.permutation(LIMIT), np.arange(SHORT)):
        data = pack_pages(encoded(pages))
        with pytest.raises(PlanError):
            unpack_pages(data[:cut] if cut < 0 else data + b"\1", LIMIT)

"""Page tables in a grant come from a peer, and are not trusted."""

from collections.abc import Mapping
from typing import Final

import numpy as np
import pytest

from kvflow.errors import PlanError
from kvflow.geometry import Component, KVLayout
from kvflow.geometry.pages import PageTable, TokenPages, build_page_table, read_page_tables
from tests.support.pools import PagedShape, Pool

SLOTS, PAGE_SIZE = 16, 4
LAYOUT: Final = Pool(PagedShape(SLOTS, PAGE_SIZE, (0, 1), 8, 1), 0).layout
REGIONS: Final = LAYOUT.components[0].regions
TWO: Final = KVLayout((Component("kv", REGIONS), Component("swa", REGIONS)), "two")


def table(*pages: int) -> bytes:
    return np.array(pages, "<u4").tobytes()


def read(pages: Mapping[str, bytes], tokens: tuple[int, int] = (0, 8)) -> dict[str, PageTable]:
    return read_page_tables({"kv": tokens}, pages, LAYOUT)


@pytest.mark.parametrize(
    ("tokens", "pages"),
    [((0, 8), [3, 1]), ((2, 7), [15, 0]), ((4, 5), [9]), ((0, 0), []), ((7, 7), [])],
)
def test_good_table(tokens: tuple[int, int], pages: list[int]) -> None:
    found = read({"kv": table(*pages)}, tokens)["kv"]
    assert found.pages.tolist() == pages
    assert (found.first_token, found.page_size) == (tokens[0] - tokens[0] % PAGE_SIZE, PAGE_SIZE)
    assert not found.pages.flags.writeable


def test_page_indices_are_little_endian() -> None:
    assert read({"kv": b"\x02\0\0\0\x0f\0\0\0"})["kv"].pages.tolist() == [2, 15]


@pytest.mark.parametrize(
    ("pages", "message", "values"),
    [
        ({"kv": table(1, 2)[:-1]}, "truncated", {"components": ["kv"]}),
        ({"kv": b"\0", "x": table(1), "y": b"\0\0"}, "truncated", {"components": ["kv", "y"]}),
        ({}, "page table for each token range", {"pages": [], "wanted": ["kv"]}),
        (
            {"other": table(1, 2)},
            "page table for each token range",
            {"pages": ["other"], "wanted": ["kv"]},
        ),
        (
            {"kv": table(1, 2), "x": table(1, 2)},
            "page table for each token range",
            {"pages": ["kv", "x"]},
        ),
        (
            {"kv": b""},
            "wrong number of pages",
            {"component": "kv", "pages": 0, "needed": 2},
        ),
        (
            {"kv": table(1)},
            "wrong number of pages",
            {"pages": 1, "needed": 2, "page_size": PAGE_SIZE},
        ),
        (
            {"kv": table(1, 2, 3)},
            "wrong number of pages",
            {"pages": 3, "needed": 2},
        ),
        ({"kv": table(1, SLOTS)}, "page index is out of range", {"position": 1, "page": SLOTS, "num_pages": SLOTS}),
        ({"kv": table(2**32 - 1, 1)}, "page index is out of range", {"position": 0, "page": 2**32 - 1}),
        ({"kv": table(5, 5)}, "appears twice", {"component": "kv", "page": 5, "positions": [0, 1]}),
    ],
)
def test_malformed_table_is_refused_with_its_values(
    pages: dict[str, bytes], message: str, values: dict[str, object]
) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        read(pages)
    assert caught.value.values.items() >= values.items()


@pytest.mark.parametrize("tokens", [(8, 0), (-4, 4), (0, 2**63), (2**63, 2**64 - 1), (-(2**63), 8)])
def test_impossible_token_range_is_refused(tokens: tuple[int, int]) -> None:
    with pytest.raises(PlanError, match="start <= stop") as caught:
        read({"kv": table(1, 2)}, tokens)
    assert caught.value.values["tokens"] == tokens


def test_every_component_is_checked() -> None:
    ranges = {"kv": (0, 8), "swa": (0, 8)}
    with pytest.raises(PlanError, match="page index is out of range") as caught:
        read_page_tables(ranges, {"kv": table(1, 2), "swa": table(1, 99)}, TWO)
    assert caught.value.values["component"] == "swa"


@pytest.mark.parametrize("wrong", [-1, 64])
@pytest.mark.parametrize("count", [3, 40])
def test_pages_outside_the_pool_are_found_in_short_and_long_tables(count: int, wrong: int) -> None:
    pages = list(range(count))
    pages[1] = wrong
    component = Pool(PagedShape(64, PAGE_SIZE, (0, 1), 8, 1), 0).layout.component("kv")
    with pytest.raises(PlanError, match="out of range") as caught:
        build_page_table(component, TokenPages((0, count * PAGE_SIZE), pages))
    assert (caught.value.values["position"], caught.value.values["page"]) == (1, wrong)

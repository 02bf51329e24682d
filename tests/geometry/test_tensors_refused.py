"""Tensors that contradict their description are refused, with the place and both values."""

from typing import Any

import numpy as np
import pytest
import torch

from kvflow import layout_from_tensors
from kvflow.errors import LayoutError
from kvflow.geometry import Axes
from kvflow.geometry.tensors import regions_from_tensors, split_tensors

NHD = Axes("page token head dim", (0, 2))

REFUSALS = {
    "another number of dimensions": (torch.zeros(4, 4, 16), NHD, "order", "page token head dim", (4, 4, 16)),
    "another number of heads": (torch.zeros(4, 4, 3, 8), NHD, "head", 2, 3),
    "heads without an axis": (torch.zeros(4, 4, 8), Axes("page token dim", (0, 2)), "head", 2, 1),
    "another page size": (torch.zeros(4, 1, 2, 8), Axes("page token head dim", (0, 2), page_size=16), "token", 16, 1),
    "no token axis": (torch.zeros(4, 8), Axes("page dim", page_size=16), "token", 16, 1),
    "an axis that is not 1": (torch.zeros(4, 4, 2, 8), Axes("page token 1 dim"), "1", 1, 2),
    "not a whole number of pages": (
        torch.zeros(30, 1, 2, 8),
        Axes("page*token 1 head dim", (0, 2), page_size=16),
        "page*token",
        16,
        30,
    ),
    "heads that do not divide": (torch.zeros(4, 4, 15), Axes("page token head*dim", (0, 2)), "head*dim", 2, 15),
    "fused axes of known size": (
        torch.zeros(4, 7, 8),
        Axes("page token*head dim", (0, 2), page_size=4),
        "token*head",
        8,
        7,
    ),
    "several unknown fused sizes": (
        torch.zeros(8, 8),
        Axes("layer*page dim", page_size=1),
        "layer*page",
        1,
        ["layer", "page"],
    ),
    "cells with gaps": (torch.zeros(4, 4, 2, 8)[..., ::2], NHD, "stride", 4, 8),
    "dims in another order": (torch.zeros(4, 8, 3).transpose(1, 2), Axes("slot dim dim"), "stride", 4, 12),
    "no kv axis": (torch.zeros(4, 2, 4, 2, 8), Axes("page kv token head dim", (0, 2)), "kv", 1, 2),
}


@pytest.mark.parametrize(("pool", "axes", "field", "expected", "found"), REFUSALS.values(), ids=REFUSALS.keys())
def test_tensors_that_do_not_fit_are_refused(
    pool: torch.Tensor, axes: Axes, field: str, expected: object, found: object
) -> None:
    with pytest.raises(LayoutError) as error:
        regions_from_tensors("k", [pool], axes, layers=7)
    assert error.value.values == {"tensor": "k", "layer": 7, "field": field, "expected": expected, "found": found}


@pytest.mark.parametrize(("layers", "found"), [([3], 2), ([3, 4, 5], 2), ([], 2)])
def test_other_numbers_of_layers_are_refused(layers: list[int], found: int) -> None:
    with pytest.raises(LayoutError, match="different numbers of layers") as error:
        regions_from_tensors("k", [torch.zeros(2, 4, 4, 8)], Axes("layer page token dim"), layers=layers)
    assert (error.value.values["expected"], error.value.values["found"]) == (len(layers), found)


def test_overlapping_cells_and_missing_memory_are_refused() -> None:
    with pytest.raises(LayoutError, match="overlap"):
        regions_from_tensors("k", [torch.zeros(4, 1, 2, 8).expand(4, 4, 2, 8)], NHD)
    with pytest.raises(LayoutError, match="no memory"):
        regions_from_tensors("k", [torch.zeros(4, 4, 2, 8, device="meta")], NHD)


@pytest.mark.parametrize(
    ("order", "heads", "page_size", "tokens_per_cell", "message"),
    [
        ("page token heads dim", (0, 1), None, 1, "unknown axis name"),
        ("page token page dim", (0, 1), None, 1, "name appears twice"),
        ("page token slot dim", (0, 1), None, 1, "name appears twice"),
        ("token dim", (0, 1), None, 1, "must include `page`"),
        ("page token dim", (2, 2), None, 1, "at least one head"),
        ("page*token dim", (0, 1), None, 1, "needs `page_size`"),
        ("page token dim", (0, 1), 0, 1, "must be positive"),
        ("page token dim", (0, 1), 16, 3, "multiple of `tokens_per_cell`"),
        ("page token dim", (0, 1), None, 0, "multiple of `tokens_per_cell`"),
        ("page head dim dim", (0, 2), None, 1, "axes without `token`"),
        ("page head dim", (0, 2), None, 1, "axes without `token`"),
        ("layer*page dim", (0, 1), None, 1, "axes without `token`"),
    ],
)
def test_impossible_axes_are_refused(
    order: str, heads: tuple[int, int], page_size: int | None, tokens_per_cell: int, message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        Axes(order, heads, page_size, tokens_per_cell)


def test_unknown_axes_list_the_known_ones() -> None:
    with pytest.raises(LayoutError, match="unknown axis name") as error:
        Axes("page token heads dim")
    assert error.value.values["name"] == "heads"
    assert error.value.values["did_you_mean"] == "head"
    assert set(error.value.values["known"]) == {  # type: ignore[call-overload]
        *("layer", "kv", "page", "token", "head", "dim", "1"),
        *("slot", "row", "block"),
    }


@pytest.mark.parametrize("order", ["page head dim dim", "slot head dim dim", "slot head*dim"])
def test_pages_of_a_paged_pool_are_never_taken_for_tokens(order: str) -> None:
    """A pool of opaque blocks described by its shape alone would make each page one token."""
    shape = (5, 2, 16, 8) if order.endswith("dim dim") else (5, 32)
    with pytest.raises(LayoutError, match="axes without `token` need `page_size`") as error:
        layout_from_tensors({"kv": [torch.zeros(shape)]}, axes=order, heads=(0, 2), fingerprint="m")
    assert error.value.values == {"field": "page_size", "order": order}


def test_pages_that_are_one_cell_need_the_tokens_that_share_it() -> None:
    with pytest.raises(LayoutError, match="`tokens_per_cell` must equal the page size") as error:
        layout_from_tensors(
            {"kv": [torch.zeros(5, 2, 16, 8)]}, axes="page head dim dim", heads=(0, 2), fingerprint="m", page_size=16
        )
    assert error.value.values["tensor"] == "kv"


WRONG_TYPES: dict[str, dict[str, Any]] = {
    "tensors": {"tensors": [torch.zeros(4, 4, 2, 8)]},
    "order": {"axes": ["page", "token", "head", "dim"]},
    "heads": {"heads": 2},
    "fingerprint": {"fingerprint": None},
    "page_size": {"page_size": "16"},
    "tokens_per_cell": {"tokens_per_cell": 1.0},
    "layers": {"layers": "first"},
}


@pytest.mark.parametrize(("field", "wrong"), WRONG_TYPES.items(), ids=WRONG_TYPES.keys())
def test_arguments_of_wrong_types_are_named(field: str, wrong: dict[str, Any]) -> None:
    right = {"tensors": {"k": [torch.zeros(4, 4, 2, 8)]}, "axes": NHD.order, "heads": (0, 2), "fingerprint": "m"}
    arguments: dict[str, Any] = {**right, **wrong}
    with pytest.raises(LayoutError) as error:
        layout_from_tensors(arguments.pop("tensors"), **arguments)
    assert error.value.values["field"] == field


@pytest.mark.parametrize(("sizes", "dimension"), [((2, 2), 1), ((8, 0), 1), ((), 1), ((4,), 3), ((4,), -1)])
def test_parts_that_are_not_the_whole_are_refused(sizes: tuple[int, ...], dimension: int) -> None:
    with pytest.raises(LayoutError):
        split_tensors([torch.zeros(4, 8, 2)], sizes, dimension=dimension)


def test_tensors_of_two_devices_are_refused() -> None:
    pools = [torch.zeros(4, 4, 2, 8), torch.zeros(4, 4, 2, 8, device="meta")]
    with pytest.raises(LayoutError, match="same device"):
        layout_from_tensors({"k": pools}, axes="page token head dim", heads=(0, 2), fingerprint="m")


def refuse(tensors: Any, message: str) -> LayoutError:
    with pytest.raises(LayoutError, match=message) as error:
        layout_from_tensors(tensors, axes=NHD.order, heads=(0, 2), fingerprint="m")
    return error.value


@pytest.mark.parametrize("tensors", [{}, {"k": []}, {"k": [], "v": []}])
def test_no_tensors_are_refused(tensors: dict[str, list[torch.Tensor]]) -> None:
    assert refuse(tensors, "must not be empty").values == {"field": "tensors", "found": list(tensors)}


@pytest.mark.parametrize("pool", [torch.zeros(4, 4, 2, 8), np.zeros((4, 4, 2, 8), np.float32), 3])
def test_a_tensor_in_place_of_a_list_is_refused(pool: object) -> None:
    found = refuse({"k": pool}, "a list for each name").values
    assert found == {"field": "tensors", "tensor": "k", "found": type(pool).__name__}


def test_other_numbers_of_layers_for_other_names_are_refused() -> None:
    tensors = {name: [torch.zeros(4, 4, 2, 8) for _ in range(count)] for name, count in (("k", 3), ("v", 2))}
    found = refuse(tensors, "same number of layers for each name").values
    assert found == {"field": "layers", "found": {"k": 3, "v": 2}}

"""Layouts from torch tensors: strides are read, never guessed."""

import pytest
import torch

from kvflow import layout_from_tensors
from kvflow.errors import LayoutError
from kvflow.geometry import Region


def cell(region: Region, page: int, token: int, head: int) -> int:
    return (
        region.address
        + page * region.slot_stride
        + token * region.token_stride
        + (head - region.heads[0]) * region.head_stride
    )


@pytest.mark.parametrize("axes", ["page token head dim", "page head token dim"])
def test_cells_lie_where_the_tensor_says(axes: str) -> None:
    order = axes.split()
    sizes = {"page": 5, "token": 4, "head": 3, "dim": 8}
    pools = [torch.zeros([sizes[axis] for axis in order], dtype=torch.bfloat16) for _ in range(2)]
    layout = layout_from_tensors({"k": pools}, axes=axes, heads=(6, 9), fingerprint="m", first_layer=10)
    assert (layout.memory_kind, layout.device_id) == ("DRAM", 0)
    for layer, region in enumerate(layout.components[0].regions):
        assert (region.layer, region.dtype, region.head_bytes) == (10 + layer, "bfloat16", 16)
        index = {"page": 3, "token": 2, "head": 1, "dim": 0}
        element = pools[layer][tuple(index[axis] for axis in order)]
        assert cell(region, 3, 2, 7) == element.data_ptr()


def test_views_of_one_allocation_are_registered_once() -> None:
    storage = torch.zeros(4, 2, 6, 16, 2, 8)  # layer, k or v, page, token, head, dim
    layout = layout_from_tensors(
        {"k": [layer[0] for layer in storage], "v": [layer[1] for layer in storage]},
        axes="page token head dim",
        heads=(0, 2),
        fingerprint="m",
    )
    assert [(item.address, item.length) for item in layout.allocations] == [(storage.data_ptr(), storage.nbytes)]


def test_interleaved_and_transposed_views_keep_their_strides() -> None:
    storage = torch.zeros(6, 2, 16, 2, 8)  # page, k or v, token, head, dim
    layout = layout_from_tensors(
        {"k": [storage[:, 0]], "v": [storage[:, 1]]}, axes="page token head dim", heads=(0, 2), fingerprint="m"
    )
    k, v = layout.components[0].regions
    assert k.slot_stride == v.slot_stride == 2 * 16 * 2 * 8 * 4
    assert v.address - k.address == 16 * 2 * 8 * 4


@pytest.mark.parametrize(
    ("pool", "axes", "named"),
    [
        (torch.zeros(4, 4, 2, 8), "page token head", "axes"),
        (torch.zeros(4, 4, 2, 8), "page page head dim", "axes"),
        (torch.zeros(4, 4, 3, 8), "page token head dim", "heads"),
        (torch.zeros(4, 4, 16), "page token head dim", "four dimensions"),
        (torch.zeros(4, 4, 2, 8)[..., ::2], "page token head dim", "contiguous"),
        (torch.zeros(4, 1, 2, 8).expand(4, 4, 2, 8), "page token head dim", "overlap"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(pool: torch.Tensor, axes: str, named: str) -> None:
    with pytest.raises(LayoutError, match=named):
        layout_from_tensors({"k": [pool]}, axes=axes, heads=(0, 2), fingerprint="m")


def test_tensors_of_two_devices_are_refused() -> None:
    pools = [torch.zeros(4, 4, 2, 8), torch.zeros(4, 4, 2, 8, device="meta")]
    with pytest.raises(LayoutError, match="one device"):
        layout_from_tensors({"k": pools}, axes="page token head dim", heads=(0, 2), fingerprint="m")

"""Layouts from torch tensors. The only module of kvflow that imports torch.

Strides and addresses are read from the tensors, never computed from shapes, so views, transposed pools and one
allocation for all layers need no special case.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch

from kvflow.errors import LayoutError
from kvflow.geometry.layout import Component, KVLayout, MemoryRange, Region, merge_ranges

__all__ = ["layout_from_tensors"]

AXES = ("page", "token", "head", "dim")


def layout_from_tensors(
    tensors: Mapping[str, Sequence[torch.Tensor]],
    *,
    axes: str,
    heads: tuple[int, int],
    fingerprint: str,
    first_layer: int = 0,
    component: str = "kv",
) -> KVLayout:
    """Describe a paged KV pool that is held in torch tensors.

    Args:
        tensors: For each tensor name ("k", "v"), one 4-D pool tensor for each layer, in layer order. The tensors
            stay the caller's; they must live as long as any rank that was given the layout.
        axes: What each dimension means, e.g. "page token head dim" (NHD) or "page head token dim" (HND).
        heads: Global KV heads `(start, stop)` in these tensors, see `head_range`.
        fingerprint: Names the content (model and revision).
        first_layer: Global number of the first layer, for pipeline-parallel stages.
        component: Name of the component.

    Returns:
        A layout whose allocations are the touched parts of the tensors' storages.

    Raises:
        LayoutError: Axes are not the four names, a tensor has another shape than its heads, `dim` is not contiguous,
            or tensors differ in device.
    """
    order = axes.split()
    if sorted(order) != sorted(AXES):
        raise LayoutError("axes must name each of the four axes once", axes=axes, known=AXES)
    flat = [tensor for layers in tensors.values() for tensor in layers]
    devices = {tensor.device for tensor in flat}
    if len(devices) != 1:
        raise LayoutError("tensors must be on one device", devices=sorted(map(str, devices)))
    regions = tuple(
        _region(name, first_layer + index, tensor, order, heads)
        for name, layers in tensors.items()
        for index, tensor in enumerate(layers)
    )
    device = devices.pop()
    return KVLayout(
        components=(Component(component, regions),),
        fingerprint=fingerprint,
        allocations=_allocations(zip(flat, regions, strict=True)),
        memory_kind="DRAM" if device.type == "cpu" else "VRAM",
        device_id=device.index or 0,
    )


def _region(name: str, layer: int, tensor: torch.Tensor, order: list[str], heads: tuple[int, int]) -> Region:
    if tensor.ndim != len(AXES):
        raise LayoutError("pool tensor must have four dimensions", tensor=name, layer=layer, shape=tuple(tensor.shape))
    size = dict(zip(order, tensor.shape, strict=True))
    stride = {axis: step * tensor.element_size() for axis, step in zip(order, tensor.stride(), strict=True)}
    if size["dim"] > 1 and stride["dim"] != tensor.element_size():
        raise LayoutError("the dim axis must be contiguous", tensor=name, layer=layer, stride=stride["dim"])
    if size["head"] != heads[1] - heads[0]:
        raise LayoutError(
            "pool tensor has another number of heads", tensor=name, layer=layer, heads=heads, in_tensor=size["head"]
        )
    return Region(
        tensor=name,
        layer=layer,
        address=tensor.data_ptr(),
        slots=size["page"],
        slot_stride=stride["page"],
        tokens_per_slot=size["token"],
        token_stride=stride["token"],
        heads=heads,
        head_stride=stride["head"],
        head_bytes=size["dim"] * tensor.element_size(),
        dtype=str(tensor.dtype).removeprefix("torch."),
    )


def _allocations(pairs: Iterable[tuple[torch.Tensor, Region]]) -> tuple[MemoryRange, ...]:
    """From the first to the last touched byte of each storage, so that one pool is one registration."""
    touched: dict[int, tuple[int, int]] = {}
    for tensor, region in pairs:
        storage = tensor.untyped_storage().data_ptr()
        start, end = touched.get(storage, (region.address, region.end))
        touched[storage] = (min(start, region.address), max(end, region.end))
    return merge_ranges(MemoryRange(start, end - start) for start, end in touched.values())

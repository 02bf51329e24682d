"""Layouts from torch tensors and numpy arrays ("tensor" means either).

Strides and addresses are read from the tensors, never computed from shapes, so views, transposed pools and a single
allocation for all layers need no special case. The meaning of an axis cannot be read from a tensor, so you declare it:
`Axes` names each dimension in order. The steps from tensors to a layout:

1. `split_tensors` splits an axis whose parts are sharded separately (q, k and v of a convolution state) into views.
2. `regions_from_tensors` turns the pools of one tensor name into regions.
3. `Component` combines regions that share a page table.
4. `layout_from_components` adds the memory to register.

`layout_from_tensors` does steps 2 to 4 for an ordinary pool.
"""

from __future__ import annotations

import itertools
import math
import operator
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from numpy.typing import NDArray

from kvflow.errors import LayoutError
from kvflow.geometry.axes import Axes
from kvflow.geometry.layout import Component, KVLayout, Region
from kvflow.geometry.memory import Location, MemoryRange, merge_ranges
from kvflow.geometry.strided import Strided, strided

if TYPE_CHECKING:
    import torch

    from kvflow.geometry.strided import Pool

AnyPool = TypeVar("AnyPool", "torch.Tensor", NDArray[Any])

__all__ = ["layout_from_components", "layout_from_tensors", "regions_from_tensors", "split_tensors"]


class _View(NamedTuple):
    """A tensor with named dimensions; the tensor name and layer are used in error messages."""

    tensor: Strided
    names: tuple[str, ...]
    name: str
    layer: int | None

    def error(self, message: str, field: str, *, expected: object, found: object) -> LayoutError:
        return LayoutError(message, tensor=self.name, layer=self.layer, field=field, expected=expected, found=found)

    def size(self, name: str) -> int:
        """Size of an axis; 1 if there is no axis with this name."""
        return self.tensor.shape[self.names.index(name)] if name in self.names else 1

    def stride(self, name: str, absent: int) -> int:
        """Bytes from one entry to the next along an axis."""
        return self.tensor.strides[self.names.index(name)] if name in self.names else absent

    def unbind(self, name: str) -> list[_View]:
        """One view for each index of an axis, or just this view if there is no axis with this name."""
        if name not in self.names:
            return [self]
        position = self.names.index(name)
        names = self.names[:position] + self.names[position + 1 :]
        return [self._replace(tensor=part, names=names) for part in self.tensor.unbind(position)]


def regions_from_tensors(
    tensor: str | Sequence[str],
    tensors: Sequence[Pool],
    axes: Axes,
    *,
    layers: int | Sequence[int] = 0,
    optional: bool = False,
) -> tuple[Region, ...]:
    """Describe the pools of one named tensor (or of several, along a `kv` axis).

    Args:
        tensor: Name of the tensor ("k", "latent", "conv.q"); with a `kv` axis, one name for each index.
        tensors: One pool for each layer, in layer order; with a `layer` axis each of them holds several layers. Torch
            tensors of any device, or writable numpy arrays; any strides. Regions do not keep them alive, but the layout
            of `layout_from_components` does.
        axes: What the dimensions mean, the same for all pools.
        layers: Global number of each layer, or of the first if they are consecutive; the same for all pools of a name.
        optional: Whether decode can run without them (draft layers).

    Returns:
        One region for each layer and name, layer by layer.

    Raises:
        LayoutError: The number of dimensions, layers, names, heads or tokens differs from what is declared, a buffer is
            not a whole number of pages, cells are not contiguous or overlap, or a tensor has no memory. The error names
            the tensor, layer, field and both values. Also raised if a pool is not a tensor, or is an array that is
            read-only or not numeric.
    """
    names = (tensor,) if isinstance(tensor, str) else tuple(tensor)
    layers = _whole_layers(layers)
    views: list[_View] = []
    for pool in tensors:
        whole = _View(strided(pool), axes.names, names[0], _layer_number(layers, len(views)))
        views += _split_fused(whole, axes).unbind("layer")
    if not isinstance(layers, int) and len(views) != len(layers):
        raise LayoutError(
            "`tensors` and `layers` have different numbers of layers",
            tensor=names[0],
            layer=layers[0] if layers else None,
            field="layers",
            expected=len(layers),
            found=len(views),
        )
    regions: list[Region] = []
    for index, view in enumerate(views):
        parts = view._replace(layer=_layer_number(layers, index)).unbind("kv")
        if len(parts) != len(names):
            raise parts[0].error(
                "kv axis must have one entry for each tensor name", "kv", expected=len(names), found=len(parts)
            )
        regions += [_region(part._replace(name=name), axes, optional) for name, part in zip(names, parts, strict=True)]
    return tuple(regions)


def split_tensors(tensors: Sequence[AnyPool], sizes: Sequence[int], *, dimension: int) -> tuple[list[AnyPool], ...]:
    """Split one dimension of each pool into parts that are described and sharded separately.

    Tensor parallelism shards q, k and v of a convolution state separately, so a rank's `q + k + v` dimension covers
    three ranges of the model's channels instead of one; each must be a separate tensor.

    Args:
        tensors: Pools, all split the same way.
        sizes: Entries of each part; they add up to the dimension.
        dimension: Index of the dimension, from 0.

    Returns:
        For each part, a view of each tensor.

    Raises:
        LayoutError: There is no such dimension, or the sizes do not add up to it.
    """
    for tensor in tensors:
        if not 0 <= dimension < tensor.ndim:
            raise LayoutError("tensor has no such dimension", field="dimension", expected=dimension, found=tensor.ndim)
        if min(sizes, default=0) < 1 or sum(sizes) != tensor.shape[dimension]:
            raise LayoutError(
                "sizes must be positive and add up to the dimension",
                field="sizes",
                expected=tensor.shape[dimension],
                found=tuple(sizes),
            )
    starts = itertools.accumulate(sizes, initial=0)
    return tuple(
        [tensor[(*[slice(None)] * dimension, slice(start, start + size))] for tensor in tensors]
        for start, size in zip(starts, sizes, strict=False)
    )


def layout_from_components(components: Sequence[Component], fingerprint: str, *, tensors: Iterable[Pool]) -> KVLayout:
    """Build a layout from components, and determine the memory to register.

    Args:
        components: All pools of the rank, each with its own page table.
        fingerprint: Identifies the content (model and revision).
        tensors: The tensors whose memory the components describe. All tensors of a component must be on the same
            device.

    Returns:
        A layout with one allocation per storage, from its first to its last used byte, so that each pool is registered
        once, at the location of its tensors. It keeps the memory of the tensors alive.

    Raises:
        LayoutError: There are no tensors, tensors of one component are on different devices, a region lies outside all
            tensors, or a pool is invalid as in `regions_from_tensors`.
    """
    pools = [strided(tensor) for tensor in tensors]
    if not pools:
        raise LayoutError("tensors must not be empty", field="tensors", found=0)
    for pool in pools:
        if pool.storage.length and not pool.storage.address:
            raise LayoutError("tensor has no memory", field="tensors", expected="an address", found=pool.device[0])
    usual = pools[0].location
    layout = KVLayout(
        components=tuple(components),
        fingerprint=fingerprint,
        allocations=_allocations(components, pools, usual),
        memory_kind=usual.memory_kind,
        device_id=usual.device_id,
    )
    layout.keep(pool.owner for pool in pools)
    return layout


def layout_from_tensors(  # noqa: PLR0913 - what a pool is like, by keyword, each with a default
    tensors: Mapping[str, Sequence[torch.Tensor | NDArray[Any]]],
    *,
    axes: str,
    heads: tuple[int, int],
    fingerprint: str,
    page_size: int | None = None,
    tokens_per_cell: int = 1,
    layers: int | Sequence[int] = 0,
    component: str = "kv",
) -> KVLayout:
    """Describe a paged KV pool in torch tensors or numpy arrays.

    Args:
        tensors: For each tensor name ("k", "v"), one pool for each layer, in layer order: torch tensors of one device,
            or writable numpy arrays. The layout keeps their memory alive; do not resize or unmap it.
        axes: What each dimension means, e.g. "page token head dim" (NHD) or "page head token dim" (HND); see `Axes`.
        heads: Global KV heads `(start, stop)` in these tensors, see `head_range`.
        fingerprint: Identifies the content (model and revision).
        page_size: Tokens per page. Required if the axes have no `token` axis or fuse it; otherwise it is read from the
            tensors and, if given, checked.
        tokens_per_cell: Tokens that share one cell. If the order within a page is unknown, each head of a page is one
            cell: axes "page head dim dim", `page_size=16`, `tokens_per_cell=16`.
        layers: Layer number (in the whole model) of each layer, or of the first one if they are consecutive. For
            pipeline-parallel stages and for models where only some layers have a cache.
        component: Name of the component.

    Returns:
        A layout whose allocations cover the used parts of the tensors' storages.

    Raises:
        LayoutError: An argument has the wrong type, an axis has no known name, the page size is missing, a tensor's
            shape contradicts its axes, heads, page size or layers, names differ in their number of layers, `dim` is not
            contiguous, tensors differ in device or share memory, or an array is read-only or holds no plain numbers.
    """
    _check_lists(tensors)
    meaning = Axes(axes, heads, page_size, tokens_per_cell)
    meaning.check_page_size_is_known()  # even for `slot` axes: pages of this component hold tokens
    flat = [tensor for pools in tensors.values() for tensor in pools]
    devices = sorted({strided(tensor).device for tensor in flat})
    if len(devices) != 1:
        raise LayoutError("tensors must be on the same device", field="device", expected=1, found=devices)
    regions = {name: regions_from_tensors(name, pools, meaning, layers=layers) for name, pools in tensors.items()}
    counts = {name: len(own) for name, own in regions.items()}
    if len(set(counts.values())) > 1:
        raise LayoutError("tensors must have the same number of layers for each name", field="layers", found=counts)
    pool = Component(component, tuple(itertools.chain.from_iterable(regions.values())))
    pool.check_cells_are_disjoint()
    return layout_from_components([pool], fingerprint, tensors=flat)


def _check_lists(tensors: object) -> None:
    """Refuse anything but a mapping from names to lists of tensors."""
    if not isinstance(tensors, Mapping):
        raise LayoutError(
            "tensors must be a mapping from names to lists of tensors", field="tensors", found=type(tensors).__name__
        )
    for name, pools in tensors.items():
        if hasattr(pools, "ndim") or not isinstance(pools, Sized):
            raise LayoutError(
                "tensors must be given as a list for each name, one for each layer",
                field="tensors",
                tensor=name,
                found=type(pools).__name__,
            )
    if not any(map(len, tensors.values())):
        raise LayoutError("tensors must not be empty", field="tensors", found=list(tensors))


def _whole_layers(layers: object) -> int | tuple[int, ...]:
    """Convert to Python integers (engines may pass numpy integers)."""
    try:
        return operator.index(layers)  # type: ignore[arg-type]
    except TypeError:
        pass
    try:
        return tuple(operator.index(layer) for layer in layers)  # type: ignore[attr-defined]
    except TypeError:
        raise LayoutError("`layers` must be an integer or a list of integers", field="layers", found=layers) from None


def _layer_number(layers: int | Sequence[int], index: int) -> int | None:
    if isinstance(layers, int):
        return layers + index
    return layers[index] if index < len(layers) else None


def _split_fused(view: _View, axes: Axes) -> _View:
    """Give each axis a dimension of its own."""
    tensor, names = view.tensor, list[str]()
    if len(tensor.shape) != len(axes.names):
        message = "tensor does not have as many dimensions as `axes` names"
        raise view.error(message, "order", expected=axes.order, found=tensor.shape)
    known = axes.known_sizes
    for name in axes.names:
        factors = name.split("*")
        if len(factors) > 1:
            sizes = _factor_sizes(view, name, tensor.shape[len(names)], known)
            tensor = tensor.split(len(names), sizes)
        names += factors
    return view._replace(tensor=tensor, names=tuple(names))


def _factor_sizes(view: _View, name: str, size: int, known: Mapping[str, int]) -> list[int]:
    """Return the sizes of the axes that are fused into one dimension; one of them may be unknown."""
    factors = name.split("*")
    unknown = [factor for factor in factors if factor not in known]
    if len(unknown) > 1:
        raise view.error("fused axis has more than one unknown size", name, expected=1, found=unknown)
    multiple = math.prod(known[factor] for factor in factors if factor in known)
    whole = size % multiple == 0 if unknown else size == multiple
    if not whole:
        message = (
            "buffer does not hold a whole number of pages" if "page" in factors else "fused axis has the wrong size"
        )
        raise view.error(message, name, expected=multiple, found=size)
    return [known.get(factor, size // multiple) for factor in factors]


def _region(view: _View, axes: Axes, optional: bool) -> Region:
    for name, expected in axes.known_sizes.items():
        _check_size(view, name, expected)
    if view.tensor.address == 0:
        raise view.error("tensor has no memory", "address", expected="an address", found=view.tensor.device[0])
    cell_bytes = _cell_bytes(view)
    return Region(
        tensor=view.name,
        layer=view.layer or 0,
        address=view.tensor.address,
        slots=view.size("page"),
        slot_stride=view.stride("page", 0),
        tokens_per_slot=view.size("token") * axes.tokens_per_cell,
        token_stride=view.stride("token", axes.num_heads * cell_bytes),
        heads=axes.heads,
        head_stride=view.stride("head", cell_bytes),
        head_bytes=cell_bytes,
        dtype=view.tensor.dtype,
        optional=optional,
        tokens_per_cell=axes.tokens_per_cell,
    )


def _check_size(view: _View, name: str, expected: int) -> None:
    sizes = [size for size, axis in zip(view.tensor.shape, view.names, strict=True) if axis == name] or [1]
    if any(size != expected for size in sizes):
        message = {
            "head": "head axis does not have as many entries as `heads`; check `axes` and `heads`",
            "token": "tensor does not have `page_size` tokens per page",
        }.get(name, "axis `1` must have size 1")
        if name == "token" and name not in view.names:
            message = "page without a token axis is one cell, so `tokens_per_cell` must equal the page size"
        raise view.error(message, name, expected=expected, found=sizes[0] if len(sizes) == 1 else sizes)


def _cell_bytes(view: _View) -> int:
    """Return the size of a cell: all `dim` axes, which must be contiguous."""
    shape, strides, size = view.tensor.shape, view.tensor.strides, view.tensor.item_bytes
    for count, stride, name in reversed(list(zip(shape, strides, view.names, strict=True))):
        if name != "dim":
            continue
        if count > 1 and stride != size:
            raise view.error("`dim` axis must be contiguous", "stride", expected=size, found=stride)
        size *= count
    return size


def _allocations(
    components: Iterable[Component], tensors: Iterable[Strided], usual: Location
) -> tuple[MemoryRange, ...]:
    """Return the range from the first to the last used byte of each storage, with unusual locations stated."""
    storages = merge_ranges(
        MemoryRange(tensor.storage.address, tensor.storage.length, tensor.location) for tensor in tensors
    )
    starts = [storage.address for storage in storages]
    touched: dict[int, tuple[int, int]] = {}
    for component in components:
        for region in component.regions:
            index = bisect_right(starts, region.address) - 1
            if index < 0 or region.end > storages[index].end:
                raise LayoutError(
                    "region lies outside every tensor",
                    component=component.name,
                    tensor=region.tensor,
                    layer=region.layer,
                    field="address",
                    expected=[(storage.address, storage.end) for storage in storages[max(index, 0) : index + 1]],
                    found=(region.address, region.end),
                )
            start, end = touched.get(index, (region.address, region.end))
            touched[index] = (min(start, region.address), max(end, region.end))
    locations = [None if storage.location == usual else storage.location for storage in storages]
    return tuple(MemoryRange(start, end - start, locations[index]) for index, (start, end) in sorted(touched.items()))

"""Memory layout of one rank: regions, components, layouts.

A *cell* is the smallest unit that kvflow moves: one head of one token, in one tensor of one layer. A `Region` locates
its cells by strides alone. Page order (NHD), head order (HND), interleaved K and V and one allocation for all layers
differ only in strides, so the planner treats them alike. It does not distinguish kinds of models either: an MLA latent
is a tensor with one head; a block scale is a tensor whose cells are shared by several tokens; a recurrent state is a
tensor in a component addressed by request instead of by token; and the head axis is whichever axis tensor parallelism
shards.

All addresses are unsigned 64-bit. Device addresses with bit 63 set are valid (Intel XPU has them).
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Annotated, NamedTuple

import msgspec

from kvflow.errors import LayoutError
from kvflow.geometry.memory import ADDRESS_LIMIT, MEMORY_KINDS, Location, MemoryKind, MemoryRange, merge_ranges
from kvflow.geometry.overlap import SpacedRuns, find_overlap
from kvflow.geometry.ranges import WHOLE, TokenRange, TokenShard

__all__ = ["Component", "HeldRegion", "KVLayout", "Region", "RegionKey"]

MAX_SLOTS = 2**31
"""Exclusive limit for the pages of a pool: indices are uint32 on the wire and int32 in NIXL."""

MAX_COMPONENTS = 16

MAX_REGIONS = 4_096
"""Maximum number of regions of a component and of a layout. A model of 1,000 layers with K, V
and their scales has this many. Regions from a peer are checked one by one, in about 50 ms, so they need a bound."""

MAX_ALLOCATIONS = MAX_REGIONS + 1
"""Maximum number of allocations of a layout: one for each region, and a rank's own staging memory."""

MAX_NAME = 256
MAX_FINGERPRINT = 1_024

Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
"""Name of a component, tensor, type or transport. The limit is in characters."""


class RegionKey(NamedTuple):
    """Identifies a region across ranks: regions with equal keys hold the same data."""

    component: str
    tensor: str
    layer: int


class Region(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of one layer in one paged pool.

    The cell of token `t` of slot (page) `s` and global head `h` starts at `address + s * slot_stride + (t //
    tokens_per_cell) * token_stride + (h - heads[0]) * head_stride` and is `head_bytes` long. All sizes and strides are
    in bytes.

    Attributes:
        tensor: Name of the tensor: "k", "v", "latent", ...
        layer: Global layer number of the model.
        address: Address of the first cell, uint64.
        slots: Number of pages in the pool.
        slot_stride: Distance from one page to the next.
        tokens_per_slot: Page size in tokens.
        token_stride: Distance from one cell to the next along the tokens of a page.
        heads: KV heads `(start, stop)` that this rank holds, numbered over the whole model. An MLA latent has one head.
        head_stride: Distance from one head to the next within a token.
        head_bytes: Size of one cell.
        dtype: Name of the element type as in torch ("bfloat16").
        optional: Whether decode can run without it (draft layers).
        tokens_per_cell: Tokens that share one cell (block scales); divides `tokens_per_slot`.

    Raises:
        LayoutError: A size is not positive, cells overlap, or an address exceeds 64 bits.
    """

    tensor: Name
    layer: int
    address: int
    slots: int
    slot_stride: int
    tokens_per_slot: int
    token_stride: int
    heads: tuple[int, int]
    head_stride: int
    head_bytes: int
    dtype: Name
    optional: bool = False
    tokens_per_cell: int = 1

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_cells_are_disjoint()
        if self.address < 0 or self.end > ADDRESS_LIMIT:
            raise self._error("region exceeds the 64-bit address space", address=self.address, end=self.end)

    @property
    def num_heads(self) -> int:
        """Number of heads held here."""
        return self.heads[1] - self.heads[0]

    @property
    def cells_per_slot(self) -> int:
        """Number of cells along the tokens of a page, for one head."""
        return self.tokens_per_slot // self.tokens_per_cell

    @property
    def span(self) -> int:
        """Bytes from the first byte of the first cell to the last byte of the last cell."""
        return (
            (self.slots - 1) * self.slot_stride
            + (self.cells_per_slot - 1) * self.token_stride
            + (self.num_heads - 1) * self.head_stride
            + self.head_bytes
        )

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.address + self.span

    def spaced_runs(self, owner: int, page: int | None = None) -> SpacedRuns:
        """Describe where the cells of one page are, or those of all pages."""
        axes = [(self.token_stride, self.cells_per_slot), (self.head_stride, self.num_heads)]
        if page is None:
            return SpacedRuns.from_axes(self.address, [(self.slot_stride, self.slots), *axes], self.head_bytes, owner)
        return SpacedRuns.from_axes(self.address + page * self.slot_stride, axes, self.head_bytes, owner)

    def _check_sizes(self) -> None:
        for name in ("slots", "tokens_per_slot", "head_bytes", "tokens_per_cell"):
            if getattr(self, name) <= 0:
                raise self._error("region size must be positive", field=name, value=getattr(self, name))
        for name in ("slot_stride", "token_stride", "head_stride"):
            if getattr(self, name) < 0:
                raise self._error("region stride must not be negative", field=name, value=getattr(self, name))
        if self.tokens_per_slot % self.tokens_per_cell:
            raise self._error(
                "cells must not cross page boundaries",
                tokens_per_cell=self.tokens_per_cell,
                tokens_per_slot=self.tokens_per_slot,
            )
        if self.slots >= MAX_SLOTS:
            raise self._error("region has too many slots", slots=self.slots, limit=MAX_SLOTS)
        if not 0 <= self.heads[0] < self.heads[1]:
            raise self._error("region must hold at least one head", heads=self.heads)
        if self.layer < 0:
            raise self._error("layer must not be negative")

    def _check_cells_are_disjoint(self) -> None:
        """Check that each stride is large enough to skip all axes with smaller strides."""
        axes = [
            (self.head_stride, self.num_heads, "head_stride"),
            (self.token_stride, self.cells_per_slot, "token_stride"),
            (self.slot_stride, self.slots, "slot_stride"),
        ]
        below = self.head_bytes
        for stride, count, name in sorted(axis for axis in axes if axis[1] > 1):
            if stride < below:
                raise self._error("cells of the region overlap", field=name, stride=stride, needed=below)
            below += stride * (count - 1)

    def _error(self, message: str, **values: object) -> LayoutError:
        return LayoutError(message, tensor=self.tensor, layer=self.layer, **values)


COMPONENT_KINDS = ("paged", "slot")


class Component(msgspec.Struct, frozen=True, dict=True):
    """Regions that share one page table.

    Attributes:
        name: "kv", "swa", "mamba", ...
        regions: Its tensors.
        kind: "paged" if its pages hold tokens; "slot" if each request has one slot, which is always moved as a whole
            (recurrent states, auxiliary rows).
        shard: The tokens of a request that this rank holds (context parallelism); all by default.

    Raises:
        LayoutError: There is no region, two regions have one key, regions differ in slots or page size, or two cells of
            a page share memory.
    """

    name: Name
    regions: Annotated[tuple[Region, ...], msgspec.Meta(max_length=MAX_REGIONS)]
    kind: Name = "paged"
    shard: TokenShard = WHOLE

    def __post_init__(self) -> None:
        if self.kind not in COMPONENT_KINDS:
            raise LayoutError("unknown component kind", component=self.name, kind=self.kind, known=COMPONENT_KINDS)
        if self.kind == "slot" and self.shard != WHOLE:
            raise LayoutError(
                'component of kind "slot" cannot have a token shard', component=self.name, shard=self.shard
            )
        if not self.regions:
            raise LayoutError("component has no regions", component=self.name)
        first = self.regions[0]
        seen: set[tuple[str, int]] = set()
        for region in self.regions:
            if (region.tensor, region.layer) in seen:
                raise LayoutError(
                    "two regions of a component have the same tensor name and layer",
                    component=self.name,
                    tensor=region.tensor,
                    layer=region.layer,
                )
            seen.add((region.tensor, region.layer))
            if self.shard.size > 1 and self.shard.interleave % region.tokens_per_cell:
                raise LayoutError(
                    "token shard splits cells; `interleave` must be a multiple of `tokens_per_cell`",
                    component=self.name,
                    tensor=region.tensor,
                    layer=region.layer,
                    interleave=self.shard.interleave,
                    tokens_per_cell=region.tokens_per_cell,
                )
            if (region.slots, region.tokens_per_slot) != (first.slots, first.tokens_per_slot):
                raise LayoutError(
                    "regions of a component must have the same number of pages and page size",
                    component=self.name,
                    tensor=region.tensor,
                    layer=region.layer,
                    slots=(region.slots, first.slots),
                    tokens_per_slot=(region.tokens_per_slot, first.tokens_per_slot),
                )
        # Different pages may share memory: if pages are rows of a ring (`kvflow.engines.transformers`), the engine uses
        # only some of them. Different components may share memory too, because each has its own page table.
        strides = {region.slot_stride for region in self.regions}
        for page in (0, self.slots - 1) if len(strides) > 1 else (0,):
            self.check_cells_are_disjoint(page)

    def check_cells_are_disjoint(self, page: int | None = None) -> None:
        """Raise LayoutError if cells of one page share memory, or cells of the same or of different pages."""
        overlap = find_overlap([region.spaced_runs(place, page) for place, region in enumerate(self.regions)])
        if overlap is not None:
            found = [self.regions[place] for place in overlap]
            raise LayoutError(
                "regions share memory; each layer of each tensor needs memory of its own",
                component=self.name,
                tensors=tuple(region.tensor for region in found),
                layers=tuple(region.layer for region in found),
            )

    @cached_property
    def slots(self) -> int:
        """Number of pages in the pool."""
        return self.regions[0].slots

    @cached_property
    def tokens_per_slot(self) -> int:
        """Page size in tokens."""
        return self.regions[0].tokens_per_slot

    @property
    def summary(self) -> str:
        """What the component holds, in one line for the log."""
        tensors = dict.fromkeys(f"{region.tensor} {region.dtype}" for region in self.regions)
        layers = [region.layer for region in self.regions]
        heads = dict.fromkeys(f"{first}-{stop - 1}" for first, stop in (region.heads for region in self.regions))
        return (
            f"{self.name}: {', '.join(tensors)}, layers {min(layers)}-{max(layers)}, heads {', '.join(heads)}, "
            f"{self.slots} pages of {self.tokens_per_slot} tokens and {self.page_bytes} bytes"
            f"{', ' * (self.shard.size > 1)}{self.shard.summary}"
        )

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of the cells that one page holds, over all regions."""
        return sum(region.cells_per_slot * region.num_heads * region.head_bytes for region in self.regions)


class HeldRegion(NamedTuple):
    """A region together with its component's kind and token shard."""

    region: Region
    kind: str
    shard: TokenShard


class KVLayout(msgspec.Struct, frozen=True, dict=True):
    """The KV memory of one rank.

    Attributes:
        components: Pools, each with its own page table; the main one is usually named "kv".
        fingerprint: Identifies the content: model, revision, and everything else that must match for two caches to be
            interchangeable. Ranks with different fingerprints exchange no data.
        allocations: Memory to register with the transport, sorted and disjoint; every region lies inside one, and all
            regions of a component are in the same location. An allocation may have its own location (for example states
            in host memory while the pages are on a GPU).
        memory_kind: "DRAM" or "VRAM"; default for allocations without their own location.
        device_id: Device ordinal, likewise a default; 0 for host memory.

    Raises:
        LayoutError: Two components have the same name, the fingerprint is not a string, a region lies outside every
            allocation, or a component spans several locations.
    """

    components: Annotated[tuple[Component, ...], msgspec.Meta(max_length=MAX_COMPONENTS)]
    fingerprint: Annotated[str, msgspec.Meta(max_length=MAX_FINGERPRINT)]
    allocations: Annotated[tuple[MemoryRange, ...], msgspec.Meta(max_length=MAX_ALLOCATIONS)] = ()
    memory_kind: MemoryKind = "DRAM"
    device_id: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.fingerprint, str):
            raise LayoutError("fingerprint must be a string", field="fingerprint", fingerprint=self.fingerprint)
        self._check_bounds()
        names = [component.name for component in self.components]
        if not names or len(set(names)) != len(names):
            raise LayoutError("layout needs at least one component, and distinct component names", components=names)
        for memory_kind, device_id in {self.location, *(one.location or self.location for one in self.allocations)}:
            if memory_kind not in MEMORY_KINDS:
                raise LayoutError("unknown memory kind", memory_kind=memory_kind, known=MEMORY_KINDS)
            if device_id < 0:
                raise LayoutError("device id must not be negative", device_id=device_id)
        if not self.allocations:
            extents = [MemoryRange(region.address, region.span) for region in self.regions().values()]
            msgspec.structs.force_setattr(self, "allocations", merge_ranges(extents))
        self._check_allocations()

    def _check_bounds(self) -> None:
        """Reject layouts that no peer would accept."""
        num_regions = sum(len(component.regions) for component in self.components)
        for field, found, maximum in (
            ("components", len(self.components), MAX_COMPONENTS),
            ("regions", num_regions, MAX_REGIONS),
            ("allocations", len(self.allocations), MAX_ALLOCATIONS),
            ("fingerprint", len(self.fingerprint), MAX_FINGERPRINT),
        ):
            if found > maximum:
                raise LayoutError(
                    "layout exceeds the limits of the protocol", field=field, found=found, maximum=maximum
                )
        for component in self.components:
            names = {component.name, *(name for region in component.regions for name in (region.tensor, region.dtype))}
            if max(map(len, names)) > MAX_NAME:
                raise LayoutError("name is too long", component=component.name[:MAX_NAME], maximum=MAX_NAME)

    def keep(self, owners: Iterable[object]) -> None:
        """Keep objects alive as long as this layout, which every rank holds: the owners of its memory.

        They are not part of the layout's value: they are neither compared nor sent, and copies do not hold them.
        """
        self.__dict__["_owners"] = (*self.__dict__.get("_owners", ()), *owners)

    @property
    def location(self) -> Location:
        """Default location of the allocations."""
        return Location(self.memory_kind, self.device_id)

    @cached_property
    def registered_locations(self) -> frozenset[Location]:
        """Locations of all allocations."""
        return frozenset(allocation.location or self.location for allocation in self.allocations)

    @property
    def is_on_host(self) -> bool:
        """Whether all memory is host memory."""
        return all(location.memory_kind == "DRAM" for location in self.registered_locations)

    @cached_property
    def by_name(self) -> Mapping[str, Component]:
        """Components by name."""
        return {component.name: component for component in self.components}

    @cached_property
    def whole_slots(self) -> Mapping[str, TokenRange]:
        """The full row range of a slot, for each component of kind "slot"."""
        return {name: (0, part.tokens_per_slot) for name, part in self.by_name.items() if part.kind == "slot"}

    def component(self, name: str) -> Component:
        """Return a component by name; raise LayoutError if there is none."""
        component = self.by_name.get(name)
        if component is None:
            raise LayoutError("layout has no such component", component=name, known=list(self.by_name))
        return component

    def regions(self) -> dict[RegionKey, Region]:
        """Return every region by its key, in declaration order."""
        return {key: held.region for key, held in self.held_regions().items()}

    @property
    def summary(self) -> str:
        """What the layout holds, in one line for the log."""
        return "; ".join(component.summary for component in self.components)

    @property
    def num_draft_layers(self) -> int:
        """How many layers there are without which decode can run."""
        optional = {key.layer for key, region in self.regions().items() if region.optional}
        return len(optional)

    def held_regions(self) -> dict[RegionKey, HeldRegion]:
        """Return every region by its key, together with its component's kind and shard."""
        return {
            RegionKey(component.name, region.tensor, region.layer): HeldRegion(region, component.kind, component.shard)
            for component in self.components
            for region in component.regions
        }

    def _check_allocations(self) -> None:
        if self.allocations != merge_ranges(self.allocations):
            raise LayoutError("allocations must be sorted and disjoint", allocations=self.allocations)
        for allocation in self.allocations:
            if allocation.address < 0 or allocation.length <= 0 or allocation.end > ADDRESS_LIMIT:
                raise LayoutError("allocation is empty or exceeds the 64-bit address space", allocation=allocation)
        for key, region in self.regions().items():
            if self._allocation_of(region) is None:
                raise LayoutError("region lies outside every allocation", **key._asdict())
        for component in self.components if len(self.registered_locations) > 1 else ():
            found = {self._location_of(region) for region in component.regions}
            if len(found) > 1:
                raise LayoutError(
                    "regions of a component must be in the same kind of memory and on the same device",
                    component=component.name,
                    found=sorted(found),
                )

    @cached_property
    def locations(self) -> Mapping[str, Location]:
        """Location of each component, by name."""
        return {component.name: self._location_of(component.regions[0]) for component in self.components}

    def _location_of(self, region: Region) -> Location:
        allocation = self._allocation_of(region)
        return self.location if allocation is None or allocation.location is None else allocation.location

    def _allocation_of(self, region: Region) -> MemoryRange | None:
        """Return the allocation that holds a region; None if there is none."""
        index = bisect_right(self.allocations, region.address, key=lambda allocation: allocation.address) - 1
        if index < 0 or region.end > self.allocations[index].end:
            return None
        return self.allocations[index]

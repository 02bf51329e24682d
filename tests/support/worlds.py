"""Random pairs of instances with any layouts, and a slow model of a transfer between them.

Nothing here uses kvflow's arithmetic: the model finds each cell by the formula that `Region` documents, and the tokens
of a rank by counting.
"""

import ctypes
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st
from msgspec.structs import replace

from kvflow.geometry import Component, Descriptors, KVLayout, Location, MemoryRange, Region, TokenShard, head_range

__all__ = [
    "ComponentSpec",
    "Rank",
    "RankBuilder",
    "Split",
    "TensorSpec",
    "World",
    "build_ranks",
    "execute",
    "worlds",
]

UNTOUCHED = 0xEE
TP_SIZES = (1, 2, 3, 4, 6, 8)

CellName = tuple[str, str, int, int, int]
"""Component, tensor, layer, head, cell along the tokens of the request."""


@dataclass
class Rank:
    """One rank's memory, and the request's pages in it.

    Attributes:
        memory: Real bytes.
        base: Address of the first byte in the layout.
        tables: Page table of each component, for those tokens of the request that the rank holds.
    """

    memory: np.ndarray[tuple[int], np.dtype[np.uint8]]
    base: int
    layout: KVLayout
    tables: dict[str, list[int]] = field(default_factory=dict)

    def cells(self, component: Component, num_tokens: int) -> Iterator[tuple[CellName, int]]:
        """Yield every cell of the request that this rank holds, with its offset in `memory`."""
        table = self.tables[component.name]
        for region in component.regions:
            place = 0
            for token in range(num_tokens):
                if not _holds(component.shard, token):
                    continue
                if place % region.tokens_per_cell == 0:
                    slot, within = table[place // region.tokens_per_slot], place % region.tokens_per_slot
                    for head in range(*region.heads):
                        address = (
                            region.address
                            + slot * region.slot_stride
                            + within // region.tokens_per_cell * region.token_stride
                            + (head - region.heads[0]) * region.head_stride
                        )
                        name = (component.name, region.tensor, region.layer, head, token // region.tokens_per_cell)
                        yield name, address - self.base
                place += 1

    def move(self, base: int) -> None:
        """Shift the addresses of the layout to another base."""
        shift, self.base = base - self.base, base
        components = tuple(
            replace(item, regions=tuple(replace(region, address=region.address + shift) for region in item.regions))
            for item in self.layout.components
        )
        allocations = tuple(replace(item, address=item.address + shift) for item in self.layout.allocations)
        self.layout = replace(self.layout, components=components, allocations=allocations)

    def scatter(self, locations: Sequence[Location]) -> None:
        """Declare each component an allocation of its own, in successive locations; the bytes do not change."""
        allocations = []
        for component, location in zip(self.layout.components, locations, strict=False):
            start = min(region.address for region in component.regions)
            end = max(region.end for region in component.regions)
            allocations.append(MemoryRange(start, end - start, location))
        self.layout = replace(self.layout, allocations=tuple(allocations))

    def pages(self, name: str, tokens: tuple[int, int]) -> list[int]:
        """Return the pages with those of some tokens that this rank holds."""
        component = self.layout.component(name)
        before = [sum(_holds(component.shard, token) for token in range(end)) for end in tokens]
        size = component.tokens_per_slot
        return [] if before[0] == before[1] else self.tables[name][before[0] // size : -(-before[1] // size)]


@dataclass
class World:
    """Two instances and a request.

    Attributes:
        wanted: Tokens of each component that decode wants.
        cuts: Tokens of each component at which prefill starts a new chunk.
        num_tokens: Tokens of the request in each component (rows, for a slot).
        head_bytes: Cell size of each tensor.
    """

    prefill: dict[int, Rank]
    decode: dict[int, Rank]
    wanted: dict[str, tuple[int, int]]
    cuts: dict[str, list[int]]
    num_tokens: dict[str, int]
    head_bytes: dict[tuple[str, str], int]

    def compute(self) -> None:
        """Fill every cell of the request with its own value on every prefill rank."""
        for rank in self.prefill.values():
            for component in rank.layout.components:
                for name, offset in rank.cells(component, self.num_tokens[component.name]):
                    rank.memory[offset : offset + self.size(name)] = self.value(name)

    def expected(self, rank: Rank, held: set[tuple[str, str, int]]) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
        """Return the expected memory of a decode rank after the transfer; `held` are the regions that prefill has."""
        memory = np.full_like(rank.memory, UNTOUCHED)
        for component in rank.layout.components:
            start, stop = self.wanted[component.name]
            for name, offset in rank.cells(component, self.num_tokens[component.name]):
                grain = next(r.tokens_per_cell for r in component.regions if r.tensor == name[1])
                is_wanted = start < stop and start // grain <= name[4] < -(-stop // grain)
                if is_wanted and name[:3] in held:
                    memory[offset : offset + self.size(name)] = self.value(name)
        return memory

    def held(self) -> set[tuple[str, str, int]]:
        """Return the regions that some prefill rank has."""
        layouts = [rank.layout for rank in self.prefill.values()]
        return {
            (component.name, region.tensor, region.layer)
            for layout in layouts
            for component in layout.components
            for region in component.regions
        }

    def assert_arrived(self) -> None:
        """Check that every wanted cell is on every decode rank, and that no other byte has changed."""
        for rank in self.decode.values():
            np.testing.assert_array_equal(rank.memory, self.expected(rank, self.held()))

    def size(self, name: CellName) -> int:
        return self.head_bytes[name[0], name[1]]

    def value(self, name: CellName) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
        """Return the bytes of a cell, unlike those of other cells and without the fill byte."""
        text = repr(name).encode()
        digits = np.frombuffer(text, np.uint8).astype(np.uint64)
        mixed = int((digits * np.arange(1, len(digits) + 1, dtype=np.uint64) ** np.uint64(3)).sum())
        return np.array([(mixed >> (5 * index)) % 200 + 1 for index in range(self.size(name))], np.uint8)


def execute(descriptors: Descriptors, source: Rank, target: Rank) -> None:
    """Execute descriptors on real memory."""
    for (src, length, _), (dst, other, _) in zip(descriptors.src.tolist(), descriptors.dst.tolist(), strict=True):
        assert length == other > 0
        assert 0 <= src - source.base <= len(source.memory) - length
        assert 0 <= dst - target.base <= len(target.memory) - length
        ctypes.memmove(
            target.memory.ctypes.data + dst - target.base, source.memory.ctypes.data + src - source.base, length
        )


def _holds(shard: TokenShard, token: int) -> bool:
    return token // shard.interleave % shard.size == shard.rank


@dataclass(frozen=True)
class TensorSpec:
    name: str
    total_heads: int
    head_bytes: int
    tokens_per_cell: int = 1


@dataclass(frozen=True)
class ComponentSpec:
    name: str
    kind: str
    tensors: tuple[TensorSpec, ...]
    layers: tuple[int, ...]
    draft: int
    num_tokens: int

    @property
    def grain(self) -> int:
        return int(np.lcm.reduce([tensor.tokens_per_cell for tensor in self.tensors]))


@st.composite
def component_specs(draw: st.DrawFn) -> list[ComponentSpec]:
    num_layers = draw(st.integers(1, 4))
    heads = draw(st.sampled_from([1, 2, 3, 4, 8]))
    cell = draw(st.sampled_from([1, 2, 6]))
    kinds = {
        "gqa": (TensorSpec("k", heads, cell), TensorSpec("v", heads, cell)),
        "mla": (TensorSpec("latent", 1, cell), TensorSpec("rope", 1, 2)),
        "scaled": (TensorSpec("k", heads, cell), TensorSpec("k_scale", heads, 4, draw(st.sampled_from([2, 4])))),
        "indexed": (TensorSpec("k", 1, cell), TensorSpec("index_k", 1, 3)),
        "opaque": (TensorSpec("page", heads, 11, draw(st.sampled_from([2, 4]))),),
    }
    tensors = kinds[draw(st.sampled_from(sorted(kinds)))]
    layers = tuple(range(num_layers))
    num_tokens = draw(st.integers(0, 24))
    specs = [ComponentSpec("kv", "paged", tensors, layers, draw(st.integers(0, 1)), num_tokens)]
    if draw(st.booleans()):
        specs.append(ComponentSpec("swa", "paged", (TensorSpec("k", heads, 2),), layers, 0, num_tokens))
    if draw(st.booleans()):
        rows = draw(st.integers(1, 3))
        state = (TensorSpec("conv.q", heads, 2), TensorSpec("ssm", heads, 5, draw(st.sampled_from([1, rows]))))
        specs.append(ComponentSpec("mamba", "slot", state, layers, 0, rows))
    return specs


@st.composite
def ranges(draw: st.DrawFn, spec: ComponentSpec) -> tuple[tuple[int, int], list[int]]:
    """Draw the wanted tokens, and where to cut them into chunks."""
    if spec.kind == "slot":
        return (0, spec.num_tokens), []
    start = draw(st.integers(0, spec.num_tokens))
    stop = draw(st.integers(start, spec.num_tokens))
    return (start, stop), sorted(draw(st.sets(st.integers(start, stop), max_size=3)))


@dataclass(frozen=True)
class Split:
    """How one side splits the model; groups of `context` ranks split the tokens of the `sharded` components."""

    tp: int
    pp: int
    context: int
    interleave: int
    page_size: int
    sharded: frozenset[str] = frozenset()

    def shard(self, spec: ComponentSpec, rank: int) -> TokenShard:
        return TokenShard(self.context, rank, self.interleave) if spec.name in self.sharded else TokenShard()


@st.composite
def splits(draw: st.DrawFn, specs: list[ComponentSpec]) -> Split:
    totals = {tensor.total_heads for spec in specs for tensor in spec.tensors}
    fitting = [tp for tp in TP_SIZES if all(not (total % tp and tp % total) for total in totals)]
    grain = max(spec.grain for spec in specs if spec.kind == "paged")
    page_size = grain * draw(st.sampled_from([1, 2, 3, 4]))
    context = draw(st.sampled_from([1, 1, 1, 2, 3, 4]))
    interleave = grain * draw(st.sampled_from([1, 2, page_size // grain]))
    paged = [spec.name for spec in specs if spec.kind == "paged"]
    sharded = draw(st.sampled_from([frozenset(paged), frozenset(paged), frozenset(paged[:1]), frozenset(paged[1:])]))
    return Split(draw(st.sampled_from(fitting)), draw(st.integers(1, 3)), context, interleave, page_size, sharded)


@st.composite
def ranks(draw: st.DrawFn, specs: list[ComponentSpec], *, is_decode: bool, high: bool) -> dict[int, Rank]:
    split, has_draft = draw(splits(specs)), draw(st.booleans())
    seeds = iter(lambda: draw(st.integers(0, 2**32 - 1)), None)
    return build_ranks(specs, split, seeds, is_decode=is_decode, has_draft=has_draft, high=high)


def build_ranks(
    specs: Sequence[ComponentSpec],
    split: Split,
    seeds: Iterable[int],
    *,
    is_decode: bool,
    has_draft: bool = False,
    high: bool = False,
) -> dict[int, Rank]:
    """Build the ranks of one side; each seed decides how the memory of a rank is laid out."""
    found: dict[int, Rank] = {}
    places = itertools.product(range(split.pp), range(split.context), range(split.tp))
    for (stage, context, tp_rank), seed in zip(places, seeds, strict=False):
        builder = RankBuilder(seed, split, is_decode=is_decode, high=high)
        for spec in specs:
            layers = list(np.array_split(np.array(spec.layers), split.pp)[stage].tolist())
            if layers and stage == split.pp - 1 and (has_draft or is_decode):
                layers += [max(spec.layers) + 1 + index for index in range(spec.draft)]
            builder.add(spec, layers, tp_rank, split.shard(spec, context))
        rank = builder.build()
        if rank is not None:
            found[len(found)] = rank
    return found


class RankBuilder:
    """A builder that lays out the components of one rank in memory, with gaps and random axis order."""

    def __init__(self, seed: int, split: Split, *, is_decode: bool, high: bool) -> None:
        self._rng = np.random.default_rng(seed)
        self._split = split
        self._is_decode = is_decode
        self._base = 0xFFFF81AB54E01000 if high else 4096
        self._used = 0
        self._components: list[Component] = []
        self._tables: dict[str, list[int]] = {}

    def add(self, spec: ComponentSpec, layers: list[int], tp_rank: int, shard: TokenShard) -> None:
        if not layers:
            return
        is_slot = spec.kind == "slot"
        size = spec.num_tokens if is_slot else self._split.page_size
        needed = 1 if is_slot else -(-spec.num_tokens // size)
        slots = needed + int(self._rng.integers(1, 4))
        regions = [
            self._region(tensor, layer, spec, slots, size, tp_rank) for layer in layers for tensor in spec.tensors
        ]
        self._components.append(Component(spec.name, tuple(regions), spec.kind, shard))
        self._tables[spec.name] = self._rng.permutation(slots)[:needed].tolist()

    def build(self) -> Rank | None:
        if not self._components:
            return None
        memory = np.full(self._used, UNTOUCHED, np.uint8)
        allocations = (MemoryRange(self._base, self._used),)
        layout = KVLayout(tuple(self._components), "model", allocations)
        return Rank(memory, self._base, layout, self._tables)

    def _region(
        self, tensor: TensorSpec, layer: int, spec: ComponentSpec, slots: int, size: int, tp_rank: int
    ) -> Region:
        heads = head_range(tensor.total_heads, self._split.tp, tp_rank)
        counts = {"slot": slots, "token": size // tensor.tokens_per_cell, "head": heads[1] - heads[0]}
        strides, below = {}, tensor.head_bytes
        for axis in [*self._rng.permutation(["token", "head"]).tolist(), "slot"]:
            below += int(self._rng.choice([0, 0, 3])) if axis != "head" else 0
            strides[axis] = below
            below *= counts[axis]
        address = self._base + self._used + int(self._rng.integers(0, 5))
        self._used = address - self._base + below
        is_draft = layer > max(spec.layers)
        return Region(
            tensor=tensor.name,
            layer=layer,
            address=address,
            slots=slots,
            slot_stride=strides["slot"],
            tokens_per_slot=size,
            token_stride=strides["token"],
            heads=heads,
            head_stride=strides["head"],
            head_bytes=tensor.head_bytes,
            dtype="uint8",
            optional=is_draft and self._is_decode,
            tokens_per_cell=tensor.tokens_per_cell,
        )


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Draw a world: about one in three has a context split on some side, one in two has addresses with bit 63 set."""
    specs = draw(component_specs())
    high = draw(st.booleans())
    prefill = draw(ranks(specs, is_decode=False, high=high))
    decode = draw(ranks(specs, is_decode=True, high=high))
    drawn = {spec.name: draw(ranges(spec)) for spec in specs}
    return World(
        prefill,
        decode,
        wanted={name: wanted for name, (wanted, _) in drawn.items()},
        cuts={name: cuts for name, (_, cuts) in drawn.items()},
        num_tokens={spec.name: spec.num_tokens for spec in specs},
        head_bytes={(spec.name, tensor.name): tensor.head_bytes for spec in specs for tensor in spec.tensors},
    )

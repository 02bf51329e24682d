"""Small instances: how their ranks split a tiny model, and where each of its cells lies.

A cell has eight bytes, which hold a number that identifies it, so a misplaced byte is detected. Layouts and routes are
computed once for each shape and cached.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvflow.geometry.binding import bind_route
from kvflow.geometry.engines import head_range
from kvflow.geometry.layout import Component, KVLayout, Region
from kvflow.geometry.memory import MemoryRange
from kvflow.geometry.routes import compile_routes

__all__ = [
    "CELL_BYTES",
    "KV",
    "MODELS",
    "STATE",
    "CellTable",
    "Model",
    "Shape",
    "cell_value",
    "components_sent",
    "content_of",
    "layer_of",
    "layout_of",
]

CELL_BYTES: Final = 8
KV: Final = "kv"
STATE: Final = "state"

BASE_ADDRESS: Final = 0xFFFF_8000_0000_0000
"""Made-up base address of pools; bit 63 is set, as on some devices."""


class Model(NamedTuple):
    """A model that is split among ranks.

    Attributes:
        tensors: Names of the tensors of each layer.
        heads: Heads of each tensor.
        layers: Layers of the whole model.
        has_state: There is a component whose pages belong to a request instead of to tokens.
    """

    name: str
    tensors: tuple[str, ...]
    heads: int
    layers: int
    has_state: bool = False


MODELS: Final = (
    Model("grouped", ("k", "v"), 2, 2),
    Model("latent", ("latent",), 1, 2),
    Model("hybrid", ("k",), 2, 2, has_state=True),
    Model("deep", ("k",), 2, 4),
)


@dataclass(frozen=True)
class Shape:
    """How an instance splits a model and lays it out.

    Attributes:
        tp: Ranks that share the heads of a layer.
        pp: Stages that share the layers.
        page_size: Tokens of a page.
        slots: Pages of a pool.
        is_head_major: A page stores the tokens of each head together, instead of the heads of each token.
    """

    tp: int = 1
    pp: int = 1
    page_size: int = 2
    slots: int = 8
    is_head_major: bool = False

    @property
    def num_ranks(self) -> int:
        """Number of workers of the instance."""
        return self.tp * self.pp


class CellTable(NamedTuple):
    """Location of the cells of a rank.

    Attributes:
        layout: Layout of the rank.
        base: Address of its first byte.
        num_bytes: Size of its memory.
        first_page: For each component, the number of its first page among the pages of all components.
        num_pages: Pages of all components.
        pages: For each eight-byte word of memory, the page that it belongs to, or -1.
        cells: For each page and each of its tokens, the word and the name of each cell; the name leaves the token out.
    """

    layout: KVLayout
    base: int
    num_bytes: int
    first_page: Mapping[str, int]
    num_pages: int
    pages: tuple[int, ...]
    cells: tuple[tuple[tuple[tuple[int, int], ...], ...], ...]


def cell_value(content: int, name: int, token: int) -> int:
    """Return the value of a cell: whose content it is, which cell, which token."""
    return content << 32 | name << 16 | token


def content_of(value: int) -> int:
    """Return the content that a cell value belongs to."""
    return value >> 32


def layer_of(name: int) -> int:
    """Return the layer of a cell name."""
    return name >> 8


@functools.lru_cache(maxsize=4096)
def layout_of(model: Model, shape: Shape, rank: int) -> CellTable:
    """Return the layout of a rank's part of the model: regions one after another, with a gap between them."""
    stage, tp_rank = divmod(rank, shape.tp)
    num_layers = model.layers // shape.pp
    layers = range(stage * num_layers, (stage + 1) * num_layers)
    heads = head_range(model.heads, shape.tp, tp_rank)
    base = BASE_ADDRESS + rank * 2**24
    regions: list[Region] = []
    at = base

    def add(tensor: str, layer: int, slots: int, tokens: int) -> Region:
        nonlocal at
        count = heads[1] - heads[0]
        token_stride = CELL_BYTES * (1 if shape.is_head_major else count)
        head_stride = CELL_BYTES * (tokens if shape.is_head_major else 1)
        slot_stride = CELL_BYTES * tokens * count
        region = Region(
            tensor, layer, at, slots, slot_stride, tokens, token_stride, heads, head_stride, CELL_BYTES, "int64"
        )
        at = region.end + CELL_BYTES
        return region

    regions = [add(tensor, layer, shape.slots, shape.page_size) for layer in layers for tensor in model.tensors]
    components = [Component(KV, tuple(regions))]
    if model.has_state:
        states = tuple(add("ssm", layer, 4, 1) for layer in layers)
        components.append(Component(STATE, states, kind="slot"))
    allocations = (MemoryRange(base, at - base),)
    return _table(KVLayout(tuple(components), model.name, allocations), model)


def _table(layout: KVLayout, model: Model) -> CellTable:
    base, num_bytes = layout.allocations[0].address, layout.allocations[0].length
    pages = [-1] * (num_bytes // CELL_BYTES)
    first_page: dict[str, int] = {}
    cells: list[list[list[tuple[int, int]]]] = []
    for component in layout.components:
        first_page[component.name] = len(cells)
        cells += [[[] for _ in range(component.tokens_per_slot)] for _ in range(component.slots)]
        for region in component.regions:
            for slot in range(region.slots):
                page = first_page[component.name] + slot
                for token in range(region.tokens_per_slot):
                    for word, name in _cells(region, model, base, slot, token):
                        pages[word] = page
                        cells[page][token].append((word, name))
    table = tuple(tuple(tuple(token) for token in page) for page in cells)
    return CellTable(layout, base, num_bytes, first_page, len(cells), tuple(pages), table)


def _cells(region: Region, model: Model, base: int, slot: int, token: int) -> list[tuple[int, int]]:
    tensor = [*model.tensors, "ssm"].index(region.tensor)
    found = []
    for head in range(*region.heads):
        offset = slot * region.slot_stride + token * region.token_stride
        offset += (head - region.heads[0]) * region.head_stride + region.address - base
        found.append((offset // CELL_BYTES, region.layer << 8 | tensor << 4 | head))
    return found


@functools.lru_cache(maxsize=4096)
def components_sent(
    model: Model, prefill: Shape, decode: Shape, prefill_rank: int, decode_rank: int
) -> tuple[str, ...]:
    """Return the components of which one prefill rank sends something to one decode rank."""
    layouts = {rank: layout_of(model, prefill, rank).layout for rank in range(prefill.num_ranks)}
    mine = layout_of(model, decode, decode_rank).layout
    routes = compile_routes(layouts, mine, decode_rank=decode_rank)
    return tuple(bind_route(routes[prefill_rank], layouts[prefill_rank], mine).expected)

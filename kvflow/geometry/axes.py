"""Axis names: what each dimension of a pool tensor means, which cannot be read from the tensor."""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Final

import msgspec

from kvflow.errors import LayoutError

__all__ = ["Axes"]

AXIS_NAMES: Final = ("layer", "kv", "page", "token", "head", "dim", "1")
"""Meanings of a dimension."""

OTHER_NAMES: Final = {"slot": "page", "row": "token", "block": "token"}
"""Synonyms, for pools that are addressed by request and for block scales."""

KNOWN_NAMES: Final = (*AXIS_NAMES, *OTHER_NAMES)


class Axes(msgspec.Struct, frozen=True):
    """What each dimension of a pool tensor means.

    The names in `order`, outermost dimension first:

    - `page` (or `slot`): entries of the pool. Every pool has this axis.
    - `token` (or `block`, `row`): cells of a page along its tokens; one cell if there is no such axis.
    - `head`: whatever tensor parallelism shards; one head if there is no such axis.
    - `dim`: contiguous elements of a cell. Several `dim` axes form one cell, in this order.
    - `kv`: one tensor name for each index.
    - `layer`: one layer for each index.
    - `1`: no meaning; the size must be 1.
    - `page*token`, `head*dim`, `token*head*dim`, ...: several axes fused into one dimension, outermost first.

    Attributes:
        order: The names, separated by spaces: "page token head dim" (NHD), "page head token dim" (HND).
        heads: Global heads `(start, stop)` in the tensor, see `head_range`. An MLA latent has one.
        page_size: Tokens of a page. Required where `token` is fused, and where a `page` has no `token` axis: the shape
            does not tell a page of one token from one whose cells hold several. Otherwise it is read from the tensor,
            and compared if given. A `slot` needs none.
        tokens_per_cell: Tokens that share one cell (block scales, pages that are opaque).

    Raises:
        LayoutError: An argument has the wrong type; a name is unknown or given twice, there is no page, the page size
            is missing, or the counts contradict each other.
    """

    order: str
    heads: tuple[int, int] = (0, 1)
    page_size: int | None = None
    tokens_per_cell: int = 1

    def __post_init__(self) -> None:
        _check_types(self.order, self.heads, page_size=self.page_size or 0, tokens_per_cell=self.tokens_per_cell)
        factors = [factor for name in self.names for factor in name.split("*")]
        for factor in factors:
            if factor not in AXIS_NAMES:
                similar = get_close_matches(factor, KNOWN_NAMES, 1)
                raise LayoutError(
                    "unknown axis name",
                    field="order",
                    order=self.order,
                    name=factor,
                    did_you_mean=similar[0] if similar else None,
                    known=KNOWN_NAMES,
                )
            if factors.count(factor) > 1 and factor not in ("dim", "1"):
                raise LayoutError("axis name appears twice", field="order", order=self.order, name=factor)
        if "page" not in factors:
            raise LayoutError("axes must include `page` (or `slot`)", field="order", order=self.order)
        if not 0 <= self.heads[0] < self.heads[1]:
            raise LayoutError("`heads` must contain at least one head", field="heads", heads=self.heads)
        if self.tokens_per_cell < 1 or (self.page_size or self.tokens_per_cell) % self.tokens_per_cell:
            raise LayoutError(
                "page size must be a multiple of `tokens_per_cell`",
                field="page_size",
                page_size=self.page_size,
                tokens_per_cell=self.tokens_per_cell,
            )
        if self.page_size is None and any("*" in name and "token" in name.split("*") for name in self.names):
            raise LayoutError("fused token axis needs `page_size`", field="page_size", order=self.order)
        if self.page_size is not None and self.page_size < 1:
            raise LayoutError("page size must be positive", field="page_size", page_size=self.page_size)
        if "slot" not in self.order.replace("*", " ").split():
            self.check_page_size_is_known()

    def check_page_size_is_known(self) -> None:
        """Raise LayoutError for pages without a token axis and without a page size.

        They would be taken for pages of one token, and the wrong bytes would be transferred: an engine whose pages are
        opaque blocks of 16 tokens would ask for 16 times too many.
        """
        if self.page_size is None and not any("token" in name.split("*") for name in self.names):
            raise LayoutError(
                "axes without `token` need `page_size` (1 if a page is one token), and `tokens_per_cell` where "
                "tokens share a cell",
                field="page_size",
                order=self.order,
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the dimensions, with synonyms resolved."""
        return tuple(
            "*".join(OTHER_NAMES.get(factor, factor) for factor in name.split("*")) for name in self.order.split()
        )

    @property
    def num_heads(self) -> int:
        """Heads in the tensor."""
        return self.heads[1] - self.heads[0]

    @property
    def known_sizes(self) -> dict[str, int]:
        """Sizes of the axes that are known without a tensor."""
        sizes = {"head": self.num_heads, "1": 1}
        if self.page_size is not None:
            sizes["token"] = self.page_size // self.tokens_per_cell
        return sizes


def _check_types(order: object, heads: object, **counts: object) -> None:
    if not isinstance(order, str):
        raise LayoutError("axes must be a string of names separated by spaces", field="order", order=order)
    if not isinstance(heads, Sequence) or len(heads) != 2:
        raise LayoutError("`heads` must be a pair (start, stop)", field="heads", heads=heads)
    for field, count in counts.items():
        if not isinstance(count, int):
            raise LayoutError("count must be an integer", field=field, found=count)

"""The contents of an item of a flat pointer list, as its owner declares them."""

from collections.abc import Sequence

import msgspec

from kvflow.errors import LayoutError

__all__ = ["ItemParts", "OpaqueItem", "PagePart", "PageRows"]

ORDERS = ("NHD", "HND")


class PagePart(msgspec.Struct, frozen=True):
    """One tensor within an item: a packed block of cells. Most items have one part; interleaved K and V have two.

    Attributes:
        tensor: Name of the tensor: "k", "v", "latent", "index_k", ...
        head_bytes: Size of a cell: one head of one token.
        dtype: Name of the element type as in torch.
        heads: Global heads `(start, stop)` in the buffer, see `head_range`.
        order: "NHD" if the heads of a token are together, "HND" if the tokens of a head are.
        tokens_per_cell: Tokens that share one cell (block scales).

    Raises:
        LayoutError: A size is not positive, or the order is unknown.
    """

    tensor: str
    head_bytes: int
    dtype: str
    heads: tuple[int, int] = (0, 1)
    order: str = "NHD"
    tokens_per_cell: int = 1

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise LayoutError(
                "unknown page order", tensor=self.tensor, field="order", expected=ORDERS, found=self.order
            )
        for field in ("head_bytes", "tokens_per_cell"):
            if getattr(self, field) < 1:
                raise LayoutError(
                    "size must be positive", tensor=self.tensor, field=field, expected="> 0", found=getattr(self, field)
                )
        if not 0 <= self.heads[0] < self.heads[1]:
            raise LayoutError(
                "part must hold at least one head", tensor=self.tensor, field="heads", expected="> 0", found=self.heads
            )

    @property
    def num_heads(self) -> int:
        """Heads held here."""
        return self.heads[1] - self.heads[0]

    @property
    def row_bytes(self) -> int:
        """Bytes of all heads of one token."""
        return self.num_heads * self.head_bytes

    def num_bytes(self, page_size: int) -> int:
        """Return the bytes of the part in one page; raise LayoutError if a page does not hold whole cells."""
        if page_size < 1 or page_size % self.tokens_per_cell:
            raise LayoutError(
                "page size must be a multiple of `tokens_per_cell`",
                tensor=self.tensor,
                field="page_size",
                expected=self.tokens_per_cell,
                found=page_size,
            )
        return page_size // self.tokens_per_cell * self.row_bytes


class PageRows(msgspec.Struct, frozen=True):
    """Tensors whose cells of one token lie side by side: each row of an item holds those of the first, then the second.

    A convolution state is an example: each of its rows holds blocks of heads (x, B and C; or q, k and v), and tensor
    parallelism shards each block separately, so a rank's row is not a contiguous range of the model's row.

    Attributes:
        parts: One for each block, in memory order, each with the heads of that block which this rank holds. Parts of
            one row are of order NHD, and share `tokens_per_cell`.

    Raises:
        LayoutError: There is no part, or they cannot share rows.
    """

    parts: tuple[PagePart, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise LayoutError("page rows need at least one part", field="parts", expected="> 0", found=0)
        for field in ("order", "tokens_per_cell"):
            expected = "NHD" if field == "order" else self.parts[0].tokens_per_cell
            for part in self.parts:
                if getattr(part, field) != expected:
                    raise LayoutError(
                        "parts of the same page rows must agree",
                        tensor=part.tensor,
                        field=field,
                        expected=expected,
                        found=getattr(part, field),
                    )

    def num_bytes(self, page_size: int) -> int:
        """Return the bytes of the rows of one page; errors as in `PagePart.num_bytes`."""
        return sum(part.num_bytes(page_size) for part in self.parts)


class OpaqueItem(msgspec.Struct, frozen=True):
    """An item of unknown content: one cell, which all tokens of its page share and which is moved as a whole.

    Items of a group may differ in length from layer to layer. Both sides must agree on the length, so everything that
    determines it, such as the page size, must be equal.

    Attributes:
        tensor: Name of the tensor.
        shard: Distinguishes items with different content: the tensor-parallel rank if each rank has its own item, which
            requires equally many ranks on both sides; 0 if all ranks hold the same.

    Raises:
        LayoutError: The shard is negative.
    """

    tensor: str
    shard: int = 0

    def __post_init__(self) -> None:
        if self.shard < 0:
            raise LayoutError(
                "shard must not be negative", tensor=self.tensor, field="shard", expected=">= 0", found=self.shard
            )

    def part(self, item_bytes: int, page_size: int) -> PagePart:
        """Describe an item of a certain length, in bytes."""
        heads = (self.shard, self.shard + 1)
        return PagePart(self.tensor, item_bytes, "uint8", heads, tokens_per_cell=page_size)


ItemParts = Sequence[PagePart | PageRows] | OpaqueItem
"""What an item holds, in memory order."""

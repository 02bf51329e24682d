"""How much may be on its way to one peer. Pure."""

from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Cost", "Window"]


class Cost(NamedTuple):
    """What a post takes up while it is on its way; known before it is planned, so it never has to be corrected.

    Attributes:
        num_bytes: What it moves.
        num_rows: Most descriptors that it can have.
    """

    num_bytes: int
    num_rows: int

    @property
    def packed(self) -> "Cost":
        """What the same post takes up if it is packed."""
        return self._replace(num_rows=1)


@dataclass
class Window:
    """A bound on posts, bytes and descriptors that have begun and not yet ended.

    Attributes:
        max_posts: Posts at once.
        max_bytes: Bytes at once; a larger post is admitted when it is alone.
        max_rows: Descriptors at once; as above.
    """

    max_posts: int
    max_bytes: int
    max_rows: int
    num_posts: int = field(default=0, init=False)
    num_bytes: int = field(default=0, init=False)
    num_rows: int = field(default=0, init=False)

    def admits(self, cost: Cost) -> bool:
        """Say whether a post of this cost may begin now."""
        if self.num_posts == 0:
            return True
        return (
            self.num_posts < self.max_posts
            and self.num_bytes + cost.num_bytes <= self.max_bytes
            and self.num_rows + cost.num_rows <= self.max_rows
        )

    def begin(self, cost: Cost) -> None:
        """Count a post that begins."""
        self.num_posts += 1
        self.num_bytes += cost.num_bytes
        self.num_rows += cost.num_rows

    def end(self, cost: Cost) -> None:
        """Count a post that has ended; `cost` is what it began with."""
        self.num_posts -= 1
        self.num_bytes -= cost.num_bytes
        self.num_rows -= cost.num_rows

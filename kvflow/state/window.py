"""How much may be on its way to one peer. Pure."""

from dataclasses import dataclass, field

__all__ = ["Window"]


@dataclass
class Window:
    """A bound on posts and bytes that have begun and not yet ended.

    Attributes:
        max_posts: Posts at once.
        max_bytes: Bytes at once; a larger post is admitted when it is alone.
    """

    max_posts: int
    max_bytes: int
    num_posts: int = field(default=0, init=False)
    num_bytes: int = field(default=0, init=False)

    def admits(self, num_bytes: int) -> bool:
        """Say whether a post of this size may begin now."""
        if self.num_posts == 0:
            return True
        return self.num_posts < self.max_posts and self.num_bytes + num_bytes <= self.max_bytes

    def begin(self, num_bytes: int) -> None:
        """Count a post that begins."""
        self.num_posts += 1
        self.num_bytes += num_bytes

    def end(self, num_bytes: int) -> None:
        """Count a post that has ended."""
        self.num_posts -= 1
        self.num_bytes -= num_bytes

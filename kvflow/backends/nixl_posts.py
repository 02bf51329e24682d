"""Where a NIXL agent writes to, and what it has begun to write."""

from dataclasses import dataclass
from typing import Any

__all__ = ["Connection", "Post"]


@dataclass(eq=False)
class Connection:
    """One endpoint to a peer.

    Attributes:
        blob: The metadata that it was made of.
        has_erred: Some post over it could not be begun or carried out.
        has_failed: Every post over it raises from now on.
    """

    peer: str
    blob: bytes
    has_erred: bool = False
    has_failed: bool = False


@dataclass(eq=False)
class Post:
    """A post that has begun.

    Attributes:
        number: How many began before it on this agent.
        fence: Once in doubt: the number of the first post that can prove that this one has ended.
    """

    post_id: int
    connection: Connection
    handle: Any
    number: int
    fence: int = 0
    error: str = ""

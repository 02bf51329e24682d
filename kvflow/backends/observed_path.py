"""The path that writes to a peer really take, told from what the kernel has sent over TCP.

A library chooses the path and does not say which. But if the TCP connections to a peer have carried the bytes of its
writes, these went over TCP; if not, over another path that the library may use.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Final

from kvflow.backends.library_sockets import Carried
from kvflow.observe.logs import BoundLogger

__all__ = ["ObservedPath", "count_paths"]

MIN_BYTES: Final = 16_384
"""Mean length of writes from which the path is told: the headers and notices of shorter ones may outweigh them."""


class ObservedPath:
    """The path of the writes over one connection to a peer. Used on one thread.

    Attributes:
        name: The path that was told last; empty until one is known.
    """

    __slots__ = ("_carried", "_num_bytes", "_num_writes", "name")

    def __init__(self) -> None:
        self.name = ""
        self._num_bytes = 0
        self._num_writes = 0
        self._carried = 0

    def count(self, num_bytes: int) -> None:
        """Count a write that has succeeded."""
        self._num_bytes += num_bytes
        self._num_writes += 1

    @property
    def can_be_told(self) -> bool:
        """Whether enough was written since `tell`."""
        return self._num_bytes >= max(self._num_writes, 1) * MIN_BYTES

    def tell(
        self, log: BoundLogger, peer: str, carried: Collection[Carried], other_paths: str, *, may_be_more: bool
    ) -> None:
        """Log the path of the writes counted since the last call, if it is another one than before.

        It is TCP if that has `carried` their bytes, or else `other_paths`, unless TCP may have carried more than that.
        """
        before, self._carried = self._carried, sum(one.num_bytes for one in carried)
        over_tcp = max(self._carried - before, 0)
        is_tcp = 2 * over_tcp >= self._num_bytes
        path = "TCP" if is_tcp else other_paths
        if path != self.name and (is_tcp or not may_be_more):
            self.name = path
            log.info(
                "transport_path",
                peer=peer,
                path=path,
                num_bytes=self._num_bytes,
                num_bytes_tcp=over_tcp,
                addresses=sorted(one.address for one in carried),
            )
        self._num_bytes = self._num_writes = 0


def count_paths(paths: Iterable[ObservedPath]) -> dict[str, int]:
    """Count connections by path, those whose path is known. May be called from any thread."""
    return dict(Counter(path.name for path in paths if path.name))

"""SGLang's metadata buffers (first token, logprobs, ...) as bytes sent with a transfer; they are in host memory."""

import ctypes
from collections.abc import Sequence

from kvflow import LocalProtocolError

__all__ = ["MetadataRows"]


class MetadataRows:
    """Access to the rows of a request in all metadata buffers, concatenated.

    Args:
        addresses: Address of each buffer.
        lengths: Bytes of each buffer.
        rows: Bytes of a row of each buffer.
    """

    def __init__(self, addresses: Sequence[int], lengths: Sequence[int], rows: Sequence[int]) -> None:
        self._buffers = list(zip(addresses, rows, strict=True))
        self._count = min((length // row for length, row in zip(lengths, rows, strict=True)), default=0)
        self.num_bytes = sum(rows)

    def read(self, index: int) -> bytes:
        """Return a copy of the rows of a request.

        Raises:
            LocalProtocolError: There are no such rows.
        """
        self._check(index)
        return b"".join([ctypes.string_at(address + row * index, row) for address, row in self._buffers])

    def write(self, index: int, data: bytes) -> None:
        """Write the rows of a request.

        Raises:
            LocalProtocolError: There are no such rows.
            ValueError: The other side has different buffers.
        """
        self._check(index)
        if len(data) != self.num_bytes:
            raise ValueError(f"metadata has {len(data)} bytes, and the buffers of this side {self.num_bytes}")
        start = 0
        for address, row in self._buffers:
            ctypes.memmove(address + row * index, data[start : start + row], row)
            start += row

    def _check(self, index: int) -> None:
        if not 0 <= index < self._count:
            raise LocalProtocolError("metadata buffers have no such row", index=index, rows=self._count)

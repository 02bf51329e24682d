"""SGLang's metadata buffers (first token, logprobs, ...) as bytes sent with a transfer."""

import ctypes
import operator
import os
from collections.abc import Sequence

from kvflow import ConfigError, LocalProtocolError

__all__ = ["MetadataRows"]


class MetadataRows:
    """Access to the rows of a request in all metadata buffers, concatenated.

    Args:
        addresses: Address of each buffer, which must stay valid.
        lengths: Bytes of each buffer.
        rows: Bytes of a row of each buffer.

    Raises:
        ConfigError: A buffer is not in memory that the CPU can read, as on NPUs.
    """

    def __init__(self, addresses: Sequence[int], lengths: Sequence[int], rows: Sequence[int]) -> None:
        _check_readable(addresses, lengths)
        self._buffers = [
            (memoryview((ctypes.c_char * length).from_address(address)).cast("B"), row)
            for address, length, row in zip(addresses, lengths, rows, strict=True)
        ]
        self._count = min((length // row for length, row in zip(lengths, rows, strict=True)), default=0)
        self.num_bytes = sum(rows)

    def read(self, index: int) -> bytes:
        """Return a copy of the rows of a request; raise LocalProtocolError if there are no such rows."""
        index = self._check(index)
        return b"".join([buffer[row * index : row * (index + 1)] for buffer, row in self._buffers])

    def write(self, index: int, data: bytes) -> None:
        """Write the rows of a request.

        Raises:
            LocalProtocolError: There are no such rows.
            ValueError: The other side has different buffers.
        """
        index = self._check(index)
        if len(data) != self.num_bytes:
            raise ValueError(f"metadata has {len(data)} bytes, and the buffers of this side {self.num_bytes}")
        start = 0
        for buffer, row in self._buffers:
            buffer[row * index : row * (index + 1)] = data[start : start + row]
            start += row

    def _check(self, index: int) -> int:
        index = operator.index(index)  # once, so that the row that is checked is the one that is used
        if not 0 <= index < self._count:
            raise LocalProtocolError("metadata buffers have no such row", index=index, rows=self._count)
        return index


def _check_readable(addresses: Sequence[int], lengths: Sequence[int]) -> None:
    """Check the first and the last byte of each buffer: the kernel reports what would end the process with SIGSEGV."""
    reader, writer = os.pipe()
    try:
        for address, length in zip(addresses, lengths, strict=True):
            for place in (address, address + length - 1):
                os.write(writer, (ctypes.c_char * 1).from_address(place))
                os.read(reader, 1)
    except OSError as error:
        raise ConfigError(
            "SGLang's metadata buffers are not in memory that the CPU can read",
            address=hex(address),
            cause=error.strerror,
            hint="SGLANG_MOONCAKE_CUSTOM_MEM_POOL=INTRA_NODE_NVLINK and NPUs put them on the device",
        ) from error
    finally:
        os.close(reader)
        os.close(writer)

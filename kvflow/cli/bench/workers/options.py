"""What a worker process is told when it starts."""

from typing import Final, Literal

import msgspec

__all__ = ["DECODE", "PREFILL", "SideName", "WorkerOptions"]

SideName = Literal["prefill", "decode"]

PREFILL: Final = "prefill"
DECODE: Final = "decode"
"""Names of the two instances."""


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One life of a worker.

    Attributes:
        side: Which engine it plays.
        registry: Address of the registry.
        bind: Address of the prefill rank's control socket.
        backend: Transport.
        same_host: Tell the transport that both processes are on one host and write to each other's memory themselves.
        lease_s: Silence after which the other side is taken for lost.
        layers: Pieces that a page is cut into, each with an allocation of its own.
        cell_bytes: Bytes of such a piece, which is one descriptor.
        tokens: Pages of one transfer; a page holds one token.
        chunks: Chunks of one transfer.
        pool_pages: Pages that the worker owns.
        log: How to print kvflow's log to standard error: "none", "console" or "json".
    """

    side: SideName = PREFILL
    registry: str = ""
    bind: str = "tcp://127.0.0.1:0"
    backend: str = "nixl"
    same_host: bool = True
    lease_s: float = 3.0
    layers: int = 4
    cell_bytes: int = 4096
    tokens: int = 3072
    chunks: int = 16
    pool_pages: int = 12288
    log: Literal["none", "console", "json"] = "none"

"""What a worker process is told when it starts."""

from typing import Final, Literal, TypeVar

import msgspec

__all__ = ["DECODE", "PREFILL", "AnyOptions", "SideName", "SideOptions", "WorkerOptions"]

SideName = Literal["prefill", "decode"]

PREFILL: Final = "prefill"
DECODE: Final = "decode"
"""Names of the two instances."""


class SideOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What every worker process is told.

    Attributes:
        side: Which engine it plays.
        registry: Address of the registry.
        backend: Transport between the processes.
        log: How to print kvflow's log to standard error: "none", "console" or "json".
    """

    side: SideName = PREFILL
    registry: str = ""
    backend: str = "nixl"
    log: Literal["none", "console", "json"] = "none"


AnyOptions = TypeVar("AnyOptions", bound=SideOptions)


class WorkerOptions(SideOptions, frozen=True, kw_only=True):
    """One life of a worker.

    Attributes:
        bind: Address of the prefill rank's control socket.
        same_host: Tell the transport that both processes are on one host and write to each other's memory themselves.
        lease_s: Silence after which the other side is taken for lost.
        layers: Pieces that a page is cut into, each with an allocation of its own.
        cell_bytes: Bytes of such a piece, which is one descriptor.
        tokens: Pages of one transfer; a page holds one token.
        chunks: Chunks of one transfer.
        pool_pages: Pages that the worker owns.
    """

    bind: str = "tcp://127.0.0.1:0"
    same_host: bool = True
    lease_s: float = 3.0
    layers: int = 4
    cell_bytes: int = 4096
    tokens: int = 3072
    chunks: int = 16
    pool_pages: int = 12288

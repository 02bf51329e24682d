"""Moves the KV cache of requests from prefill servers to decode servers.

The public names are imported when they are first used, so that the pure packages (`kvflow.geometry`, `kvflow.state`)
can be imported without any I/O library.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvflow.config import DecodeConfig, Limits, PrefillConfig, Timeouts
    from kvflow.decode import DecodeRank, Handover, RoomReceiver
    from kvflow.errors import (
        CapacityExceeded,
        FailureReason,
        KvflowError,
        LocalProtocolError,
        PlanError,
        RankBroken,
        RankDraining,
        TransferFailed,
    )
    from kvflow.geometry.layout import KVLayout
    from kvflow.geometry.pages import Part
    from kvflow.geometry.shards import head_range
    from kvflow.geometry.tensors import layout_from_tensors
    from kvflow.observe.logs import configure_logging
    from kvflow.prefill import PrefillRank, RoomSender
    from kvflow.registry.server import Registry
    from kvflow.state.events import LayersReady
    from kvflow.state.tables import Memory, Outcome
    from kvflow.statistics import RankStatistics

__all__ = [
    "CapacityExceeded",
    "DecodeConfig",
    "DecodeRank",
    "FailureReason",
    "Handover",
    "KVLayout",
    "KvflowError",
    "LayersReady",
    "Limits",
    "LocalProtocolError",
    "Memory",
    "Outcome",
    "Part",
    "PlanError",
    "PrefillConfig",
    "PrefillRank",
    "RankBroken",
    "RankDraining",
    "RankStatistics",
    "Registry",
    "RoomReceiver",
    "RoomSender",
    "Timeouts",
    "TransferFailed",
    "configure_logging",
    "head_range",
    "layout_from_tensors",
]

__version__ = "0.1.0"

_HOMES: Final = {
    "CapacityExceeded": "kvflow.errors",
    "DecodeConfig": "kvflow.config",
    "DecodeRank": "kvflow.decode",
    "FailureReason": "kvflow.errors",
    "Handover": "kvflow.decode",
    "KVLayout": "kvflow.geometry.layout",
    "KvflowError": "kvflow.errors",
    "LayersReady": "kvflow.state.events",
    "Limits": "kvflow.config",
    "LocalProtocolError": "kvflow.errors",
    "Memory": "kvflow.state.tables",
    "Outcome": "kvflow.state.tables",
    "Part": "kvflow.geometry.pages",
    "PlanError": "kvflow.errors",
    "PrefillConfig": "kvflow.config",
    "PrefillRank": "kvflow.prefill",
    "RankBroken": "kvflow.errors",
    "RankDraining": "kvflow.errors",
    "RankStatistics": "kvflow.statistics",
    "Registry": "kvflow.registry.server",
    "RoomReceiver": "kvflow.decode",
    "RoomSender": "kvflow.prefill",
    "Timeouts": "kvflow.config",
    "TransferFailed": "kvflow.errors",
    "configure_logging": "kvflow.observe.logs",
    "head_range": "kvflow.geometry.shards",
    "layout_from_tensors": "kvflow.geometry.tensors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

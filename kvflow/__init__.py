"""Moves the KV cache of requests from prefill servers to decode servers.

Public names other than errors are imported when first used, so that pure packages (`kvflow.geometry`, `kvflow.state`)
can be imported without any I/O library.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from kvflow import errors
from kvflow.errors import (
    BackendError,
    BackendUnavailable,
    CapacityExceeded,
    ConfigError,
    FailureReason,
    KvflowError,
    LayoutError,
    LocalProtocolError,
    OfferDeclined,
    PagesInUse,
    PlanError,
    ProtocolError,
    RankBroken,
    RankDraining,
    RegistrationError,
    RemoteProtocolError,
    RouteError,
    Shortage,
    Stage,
    ThreadShortage,
    TicketError,
    TransferFailed,
    Unreachable,
)

if TYPE_CHECKING:
    from kvflow.addresses import Endpoint
    from kvflow.backends import known_backends
    from kvflow.backends.shared import SharedBackend
    from kvflow.config import DecodeConfig, Limits, PrefillConfig, Proofs, Timeouts
    from kvflow.decode import DecodeRank
    from kvflow.directory.server import Registry
    from kvflow.geometry.engines import head_range
    from kvflow.geometry.layout import KVLayout
    from kvflow.geometry.pages import TokenPages
    from kvflow.geometry.tensors import layout_from_tensors
    from kvflow.keys import load_capability_key, load_trust, make_capability
    from kvflow.observe.breakdown import Breakdown
    from kvflow.observe.logs import configure_logging
    from kvflow.offers import MadeOffer, OfferBook, OfferQueue, ReceivedOffer
    from kvflow.open_transfers import QuarantineRecord
    from kvflow.options import ReceiveOptions, SendOptions
    from kvflow.prefill import PrefillRank
    from kvflow.receiver import Handover, RoomReceiver
    from kvflow.sender import RoomSender
    from kvflow.state.events.prefill import LayersReady
    from kvflow.state.quarantine import MissingProof, ProofKind
    from kvflow.state.tables import Memory, Outcome
    from kvflow.statistics import RankStatistics
    from kvflow.trust import Trust, TrustedKey
    from kvflow.wire.ticket import ticket_for_room

__all__ = [
    "BackendError",
    "BackendUnavailable",
    "Breakdown",
    "CapacityExceeded",
    "ConfigError",
    "DecodeConfig",
    "DecodeRank",
    "Endpoint",
    "FailureReason",
    "Handover",
    "KVLayout",
    "KvflowError",
    "LayersReady",
    "LayoutError",
    "Limits",
    "LocalProtocolError",
    "MadeOffer",
    "Memory",
    "MissingProof",
    "OfferBook",
    "OfferDeclined",
    "OfferQueue",
    "Outcome",
    "PagesInUse",
    "PlanError",
    "PrefillConfig",
    "PrefillRank",
    "ProofKind",
    "Proofs",
    "ProtocolError",
    "QuarantineRecord",
    "RankBroken",
    "RankDraining",
    "RankStatistics",
    "ReceiveOptions",
    "ReceivedOffer",
    "RegistrationError",
    "Registry",
    "RemoteProtocolError",
    "RoomReceiver",
    "RoomSender",
    "RouteError",
    "SendOptions",
    "SharedBackend",
    "Shortage",
    "Stage",
    "ThreadShortage",
    "TicketError",
    "Timeouts",
    "TokenPages",
    "TransferFailed",
    "Trust",
    "TrustedKey",
    "Unreachable",
    "configure_logging",
    "head_range",
    "known_backends",
    "layout_from_tensors",
    "load_capability_key",
    "load_trust",
    "make_capability",
    "ticket_for_room",
]

__version__ = "0.2.0"

_HOMES: Final = dict.fromkeys(errors.__all__, "kvflow.errors") | {
    "ProofKind": "kvflow.state.quarantine",
    "Breakdown": "kvflow.observe.breakdown",
    "ReceiveOptions": "kvflow.options",
    "SendOptions": "kvflow.options",
    "DecodeConfig": "kvflow.config",
    "DecodeRank": "kvflow.decode",
    "Endpoint": "kvflow.addresses",
    "Handover": "kvflow.receiver",
    "KVLayout": "kvflow.geometry.layout",
    "LayersReady": "kvflow.state.events.prefill",
    "Limits": "kvflow.config",
    "MadeOffer": "kvflow.offers",
    "OfferBook": "kvflow.offers",
    "OfferQueue": "kvflow.offers",
    "ReceivedOffer": "kvflow.offers",
    "Memory": "kvflow.state.tables",
    "MissingProof": "kvflow.state.quarantine",
    "Outcome": "kvflow.state.tables",
    "QuarantineRecord": "kvflow.open_transfers",
    "TokenPages": "kvflow.geometry.pages",
    "PrefillConfig": "kvflow.config",
    "PrefillRank": "kvflow.prefill",
    "Proofs": "kvflow.config",
    "RankStatistics": "kvflow.statistics",
    "Registry": "kvflow.directory.server",
    "RoomReceiver": "kvflow.receiver",
    "RoomSender": "kvflow.sender",
    "SharedBackend": "kvflow.backends.shared",
    "Timeouts": "kvflow.config",
    "Trust": "kvflow.trust",
    "TrustedKey": "kvflow.trust",
    "configure_logging": "kvflow.observe.logs",
    "head_range": "kvflow.geometry.engines",
    "known_backends": "kvflow.backends",
    "layout_from_tensors": "kvflow.geometry.tensors",
    "load_capability_key": "kvflow.keys",
    "load_trust": "kvflow.keys",
    "make_capability": "kvflow.keys",
    "ticket_for_room": "kvflow.wire.ticket",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

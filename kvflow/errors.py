"""The error tree: one class for each thing a caller does differently.

Every error carries its facts as `values`, never only as text, so that a caller (or a log line) reads them
without parsing: `error.values["page"]`.
"""

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvflow.room import RoomId

if TYPE_CHECKING:
    from kvflow.state.tables import Memory

__all__ = [
    "BackendError",
    "BackendUnavailable",
    "CapacityExceeded",
    "ConfigError",
    "FailureReason",
    "KvflowError",
    "LayoutError",
    "LocalProtocolError",
    "PagesInUse",
    "PlanError",
    "ProtocolError",
    "RankBroken",
    "RankDraining",
    "RegistrationError",
    "RemoteProtocolError",
    "RouteError",
    "Stage",
    "ThreadShortage",
    "TicketError",
    "TransferFailed",
    "Unreachable",
]


class KvflowError(Exception):
    """Base of every error that kvflow raises on purpose.

    Args:
        message: What is wrong, without values in it, so that equal problems read equal.
        values: The values that made it wrong, by name.
    """

    def __init__(self, message: str, /, **values: object) -> None:
        super().__init__(message)
        self.message = message
        self.values = values

    def __str__(self) -> str:
        if not self.values:
            return self.message
        return f"{self.message} ({', '.join(f'{name}={value!r}' for name, value in self.values.items())})"


class ConfigError(KvflowError):
    """A setting is unusable: change the settings."""


class LayoutError(KvflowError):
    """A description of memory contradicts itself or the tensor it describes: change the pools."""


class RouteError(KvflowError):
    """Two sides do not fit each other; `values` names the cell or the field: pair other instances."""


class PlanError(KvflowError):
    """Page tables or a token range do not fit the pools: nothing was posted."""


class ProtocolError(KvflowError):
    """A rule of the protocol was broken; the subclass says by whom. No state changed."""


class LocalProtocolError(ProtocolError):
    """This process broke the rule: fix the calling code."""


class PagesInUse(LocalProtocolError):
    """Another transfer of this rank may still be written to a page; `values` names page and room: take other pages."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the rule: its message was dropped."""


class RankBroken(KvflowError):
    """A task of this rank failed, which no input should cause; the cause is attached: close it, open another."""


class RankDraining(KvflowError):
    """This rank is about to close and takes nothing new: use another one."""


class CapacityExceeded(KvflowError):
    """A bound from the settings is reached: retry later or raise the bound."""


class TicketError(KvflowError):
    """A ticket cannot be used here: fail its request; `values` says what is wrong."""


class Unreachable(KvflowError):
    """Nobody answered in time, or a connection is gone: check addresses, start the other side, try again."""


class ThreadShortage(KvflowError):
    """This process could not start a thread; the function that it was for was not called: try again, or do without."""


class BackendError(KvflowError):
    """The transport library refused or failed an operation."""


class BackendUnavailable(BackendError):
    """The transport library is missing or broken; the message says what to install."""


class RegistrationError(BackendError):
    """Memory could not be registered with the transport."""


class Stage(enum.StrEnum):
    """Where in the pipeline something happened."""

    BOOTSTRAP = "bootstrap"
    """Two ranks find each other, do the handshake, and watch each other."""
    ENQUEUE = "enqueue"
    """A chunk waits for its grant, its data, its turn or credit."""
    PLANNING = "planning"
    """Page tables become descriptors."""
    SUBMIT = "submit"
    """A write is under way."""
    AGGREGATE = "aggregate"
    """What has arrived is counted, scattered and compared."""


class FailureReason(enum.StrEnum):
    """Why a transfer did not succeed."""

    UNREACHABLE = "unreachable"
    """No registry, instance or rank answered in time."""
    REFUSED = "refused"
    """The peer answered the handshake with a refusal; `detail` has its reason."""
    STALE_TICKET = "stale_ticket"
    """The prefill process that gave the ticket has ended: its rank has restarted, or another instance answers."""
    UNKNOWN_ROOM = "unknown_room"
    """The prefill engine did not open this room before the deadline of the grant."""
    ROOM_IN_USE = "room_in_use"
    """The same decode rank asked twice for a room that is still being sent."""
    NOT_GRANTED = "not_granted"
    """The pages were ready, but a decode rank did not ask for them in time."""
    TOKENS_NOT_SERVED = "tokens_not_served"
    """Decode wants tokens that prefill does not have."""
    INVALID_PAGES = "invalid_pages"
    """A page table does not fit the pool or the token range."""
    NOT_READY = "not_ready"
    """The device failed before the pages were computed."""
    INCOMPLETE = "incomplete"
    """A rank said that it was finished, but its notices do not add up to the expected bytes."""
    CORRUPT = "corrupt"
    """What arrived is not what was sent: the digests of a component differ."""
    STALLED = "stalled"
    """Nothing moved for longer than the deadline of progress."""
    WRITE_FAILED = "write_failed"
    """The transport reported that a write failed."""
    ABORTED = "aborted"
    """An engine cancelled; `detected_by` says on which side."""
    DEADLINE = "deadline"
    """The deadline of the transfer passed."""
    PEER_LOST = "peer_lost"
    """A peer was not heard from within its lease."""
    PEER_FAILING = "peer_failing"
    """The prefill instance could not be reached when it was tried last; the handshake goes on being tried."""
    PEER_CLOSED = "peer_closed"
    """A peer said that it is leaving."""
    BROKEN = "broken"
    """A rank could not carry out what follows from an event, which no input should cause; its exit raises the error."""
    CAPACITY = "capacity"
    """A bound of the peer is reached."""
    PAGES_IN_USE = "pages_in_use"
    """It did not begin: another transfer of this rank may still be written to one of its pages."""
    PROTOCOL = "protocol"
    """A peer broke the protocol within this transfer; or, before it began, the engine did: its room is in use, say."""


class TransferFailed(KvflowError):
    """A transfer ended without success.

    Attributes:
        room: The room of the transfer.
        reason: Why, for a program.
        stage: The stage at which it was detected.
        detected_by: The rank that detected it first, as "instance/engine_rank".
        detail: Why, for a person.
    """

    def __init__(
        self,
        room: RoomId,
        reason: FailureReason,
        stage: Stage,
        detected_by: str,
        detail: str,
        *,
        memory: "Callable[[], Memory]",
    ) -> None:
        super().__init__(
            "transfer failed",
            room=room,
            reason=reason.value,
            stage=stage.value,
            detected_by=detected_by,
            detail=detail,
        )
        self.room = room
        self.reason = reason
        self.stage = stage
        self.detected_by = detected_by
        self.detail = detail
        self._memory = memory

    @property
    def memory(self) -> "Memory":
        """Whether somebody can still touch the pages of the transfer: now, not when it failed."""
        return self._memory()

    @property
    def quarantined(self) -> bool:
        """The pages cannot be proved quiet yet: they must not be used again before `memory` is SAFE."""
        return self.memory.value == "quarantined"

"""The exception hierarchy: one class for each case that callers handle differently.

Every error has its details in `values`, not only in the text, so that callers (and log lines) need not parse them:
`error.values["page"]`.
"""

import enum
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

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
    "OfferDeclined",
    "PagesInUse",
    "PlanError",
    "ProtocolError",
    "RankBroken",
    "RankDraining",
    "RegistrationError",
    "RemoteProtocolError",
    "RouteError",
    "Shortage",
    "Stage",
    "ThreadShortage",
    "TicketError",
    "TransferFailed",
    "Unreachable",
]


MAX_TEXT: Final = 500
"""Maximum length of text from a peer or a client in an error or a log line."""


def shorten(text: str) -> str:
    """Truncate a text that may come from a peer or a client."""
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}... ({len(text)} characters)"


def describe(error: BaseException) -> str:
    """Return the text of an error, with its type unless it is kvflow's, even if the engine's `__str__` raises."""
    try:
        return str(error) if isinstance(error, KvflowError) else f"{type(error).__name__}: {error}"
    except BaseException:  # noqa: BLE001 - raised by the engine's `__str__`
        return type(error).__name__


class KvflowError(Exception):
    """Base class of all errors that kvflow raises deliberately. Long values are truncated in its text.

    Args:
        message: What is wrong, without values, so that the same problem always has the same text.
        values: The offending values, by name.
    """

    def __init__(self, message: str, /, **values: object) -> None:
        super().__init__(message)
        self.message = message
        self.values = values

    def __str__(self) -> str:
        if not self.values:
            return self.message
        shown = ", ".join(f"{name}={shorten(repr(value))}" for name, value in self.values.items())
        return f"{self.message} ({shown})"


class ConfigError(KvflowError):
    """A setting is invalid. Change the settings."""


class LayoutError(KvflowError):
    """A memory layout contradicts itself or the tensor it describes. Fix the layout or the pools."""


class RouteError(KvflowError):
    """The two sides are incompatible; `values` names the cell or the field. Pair different instances."""


class PlanError(KvflowError):
    """A page table or token range does not match the pools. Nothing was posted."""


class ProtocolError(KvflowError):
    """A protocol rule was violated, by this process or by a peer (see the subclasses). No state has changed."""


class LocalProtocolError(ProtocolError):
    """This process violated the protocol. Fix the calling code."""


class PagesInUse(LocalProtocolError):
    """Another transfer of this rank may still write to a page; `values` names the page and room. Use other pages."""


class RemoteProtocolError(ProtocolError):
    """A peer violated the protocol. Its message was dropped."""


class RankBroken(KvflowError):
    """The rank has failed because of an internal error (`__cause__`). Close it and open a new one."""


class RankDraining(KvflowError):
    """The rank is draining and accepts no new work. Use another rank."""


class CapacityExceeded(KvflowError):
    """A configured limit is reached. Retry later, or raise the limit."""


class TicketError(KvflowError):
    """The ticket cannot be used; `values` has the reason. Fail its request."""


class OfferDeclined(KvflowError):
    """Another instance does not take an offered room; `values` has the reason. Offer it to another one, or keep it."""


class Unreachable(KvflowError):
    """There was no answer in time, or a connection is gone. Check the addresses, start the other side, and retry."""


class Shortage(KvflowError):
    """The system has refused a resource to this process; `detail` names the error and the limit. Raise it, or retry."""


class ThreadShortage(Shortage):
    """A thread could not be started, and its function was not called. Retry, or do without it."""


class BackendError(KvflowError):
    """An operation of the transport library was refused or failed."""


class BackendUnavailable(BackendError):
    """The transport library is missing or broken; the message says what to install."""


class RegistrationError(BackendError):
    """Memory could not be registered with the transport."""


class Stage(enum.StrEnum):
    """The stage of the pipeline at which something happened."""

    BOOTSTRAP = "bootstrap"
    """Lookup, handshake and liveness checks between ranks."""
    ENQUEUE = "enqueue"
    """A chunk waits for its grant, its data, its turn or credit."""
    PLANNING = "planning"
    """Page tables become descriptors."""
    SUBMIT = "submit"
    """A write is in progress."""
    AGGREGATE = "aggregate"
    """Received data is counted, scattered and compared."""


class FailureReason(enum.StrEnum):
    """Why a transfer failed."""

    UNREACHABLE = "unreachable"
    """No registry, instance or rank answered in time, or the address of a ticket refuses connections."""
    REFUSED = "refused"
    """The peer answered the handshake with a refusal; `detail` has its reason."""
    STALE_TICKET = "stale_ticket"
    """The process that issued the ticket has ended: its rank has restarted, or a different instance answers."""
    SHORTAGE = "shortage"
    """The process of `detected_by` lacks descriptors or another resource; `detail` names the limit."""
    UNKNOWN_ROOM = "unknown_room"
    """The prefill engine did not open this room before the deadline of the grant."""
    ROOM_IN_USE = "room_in_use"
    """The same decode rank asked twice for a room that is still being sent."""
    NOT_GRANTED = "not_granted"
    """The pages were ready, but not every decode rank asked for them in time."""
    TOKENS_NOT_SERVED = "tokens_not_served"
    """Decode wants tokens that prefill does not have."""
    INVALID_PAGES = "invalid_pages"
    """A page table does not fit the pool or the token range."""
    NOT_READY = "not_ready"
    """The device failed before the pages were computed."""
    INCOMPLETE = "incomplete"
    """A rank reported that it had finished, but its notices do not account for all expected bytes."""
    CORRUPT = "corrupt"
    """The received data differs from the sent data: the digests of a component differ."""
    STALLED = "stalled"
    """There was no progress for longer than `progress_s` after the first bytes."""
    WRITE_FAILED = "write_failed"
    """The transport reported that a write failed."""
    ABORTED = "aborted"
    """An engine aborted the transfer; `detected_by` names its rank."""
    DEADLINE = "deadline"
    """The transfer took longer than allowed."""
    PEER_LOST = "peer_lost"
    """A peer was silent for longer than its lease, has died or has restarted."""
    PEER_FAILING = "peer_failing"
    """The last attempt to reach the prefill instance failed; kvflow keeps retrying the handshake."""
    PEER_CLOSED = "peer_closed"
    """A peer is closing."""
    BROKEN = "broken"
    """A rank could not carry out the effects of an event, which should never happen; closing the rank raises the cause.
    """
    CAPACITY = "capacity"
    """A limit of the peer is reached."""
    PAGES_IN_USE = "pages_in_use"
    """The transfer was not started: another transfer on this rank may still write to one of its pages."""
    PROTOCOL = "protocol"
    """A peer violated the protocol in this transfer, or the engine did before it started (for example, the room is in
    use).
    """


class TransferFailed(KvflowError):
    """A transfer ended without success.

    Attributes:
        room: The room of the transfer.
        reason: The reason, for programs.
        stage: The stage at which it was detected.
        detected_by: The rank that detected it first, as "instance/engine_rank".
        detail: The reason, for people.
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

    def __reduce__(self) -> tuple[Callable[..., "TransferFailed"], tuple[object, ...]]:
        """Let it be raised in another process; there `memory` stays what it was when it left."""
        now = self.memory
        made = partial(TransferFailed, memory=partial(type(now), now))
        return made, (self.room, self.reason, self.stage, self.detected_by, self.detail)

    @property
    def memory(self) -> "Memory":
        """Whether anything can still touch the transfer's pages: the current state, not that at the failure."""
        return self._memory()

    @property
    def quarantined(self) -> bool:
        """True while the pages are in quarantine; do not reuse them before `memory` is SAFE."""
        return self.memory.value == "quarantined"

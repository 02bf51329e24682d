"""Messages between processes, as text for stories."""

from typing import Final

from kvflow.errors import RemoteProtocolError
from kvflow.wire.codec import decode
from kvflow.wire.messages import Lookup, Message, Ping, Pong, Records, Register, Registered

__all__ = ["tell_message"]

CHATTER: Final = (Ping, Pong, Register, Registered, Lookup, Records)
"""Messages that stories leave out."""

SHOWN: Final = ("room", "generation", "seq", "ranges", "last", "staged", "failure", "detail", "drained", "fenced")


def tell_message(payload: bytes) -> str | None:
    """Return a message as text; None if stories leave it out."""
    try:
        message = decode(payload)
    except RemoteProtocolError:
        return f"{len(payload)} bytes that are no message"
    return None if isinstance(message, CHATTER) else _words(message)


def _words(message: Message) -> str:
    values = [(name, getattr(message, name)) for name in SHOWN if hasattr(message, name)]
    shown = [f"{name}={_short(value)}" for name, value in values if value not in (None, False, b"", {})]
    return " ".join([type(message).__name__, *shown])


def _short(value: object) -> object:
    reason = getattr(value, "reason", None)
    return value if reason is None else reason.value

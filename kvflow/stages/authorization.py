"""Authorizes messages to a prefill rank, by keys, capabilities and rate limits."""

from collections.abc import Callable
from typing import Final

from kvflow.gate.capability import denial
from kvflow.gate.rates import RateLimiter
from kvflow.gate.sizes import Unread
from kvflow.stages.context import StageContext
from kvflow.state import events as ev
from kvflow.trust import Trust, principal_of, speaks_for
from kvflow.wire.messages import Announce, AnyMessage, Decline, Grant, Hello, PeerId

__all__ = ["Authorizer"]

HELLOS_PER_S: Final = 256
"""Allowed rate of Hellos per principal; without keys, of all peers together. Excess Hellos are not answered; decode
ranks repeat them."""

HELLOS_AT_ONCE: Final = 1_024
"""Allowed burst of Hellos, for example when a whole instance starts."""

HELLO_BYTES_PER_S: Final = 2**19
HELLO_BYTES_AT_ONCE: Final = 4 * 2**20
"""The same limits in bytes, because regions take time to parse: half a megabyte takes less than 0.1 s. The burst is
enough for 350 ranks with 126 layers each."""

STRANGER_MESSAGES_PER_S: Final = 256
"""Allowed rate of messages that a principal sends over connections without a Hello; without keys, of each such
connection. Some may be meant for a previous process at this address."""

STRANGER_MESSAGES_AT_ONCE: Final = 1_024
"""Allowed burst of such messages. Excess ones count as rejected, so that the connection is soon closed."""


class Authorizer:
    """Decides which messages reach the core.

    Peers that may act for different instances have different connections, so the core itself keeps them apart. This
    class checks that the key of a connection permits a Hello for an instance, and that the peer may receive a room.

    Args:
        context: Context of this rank.
        trust: Initial value of the attribute.
        names_of: Returns the instances that the peer of a connection may act for.
        peer_at: Returns the peer that has sent a Hello over a connection; None if there is none.

    Attributes:
        trust: The current keys; may be replaced at any time.
    """

    def __init__(
        self,
        context: StageContext[ev.PrefillEvent],
        trust: Trust,
        names_of: Callable[[bytes], tuple[str, ...]],
        peer_at: Callable[[bytes], PeerId | None],
    ) -> None:
        self.trust = trust
        self._context = context
        self._names_of = names_of
        self._peer_at = peer_at
        self._hellos = RateLimiter[str](HELLOS_AT_ONCE, HELLOS_PER_S)
        self._hello_bytes = RateLimiter[str](HELLO_BYTES_AT_ONCE, HELLO_BYTES_PER_S)
        self._strangers = RateLimiter[bytes | str](STRANGER_MESSAGES_AT_ONCE, STRANGER_MESSAGES_PER_S)

    def principal_of(self, connection: bytes) -> str:
        """Return the principal of a connection; empty without keys."""
        return principal_of(self._names_of(connection)) or ""

    def is_too_much(self, connection: bytes, unread: Unread) -> bool:
        """Return whether a message exceeds its sender's rate limits. If so, it is counted, and must be ignored."""
        is_hello = unread.kind is Hello
        if not is_hello and (unread.kind is Decline or self._peer_at(connection) is not None):
            return False
        now, principal = self._context.now(), self.principal_of(connection)
        if is_hello:
            is_within = self._hellos.spend(principal, now) and self._hello_bytes.spend(principal, now, len(unread.data))
        else:
            is_within = self._strangers.spend(principal or connection, now)
        if not is_within and is_hello:
            self._context.anomalies.postpone("hello_over_budget")
        elif not is_within:
            self._context.anomalies.count("stranger_over_budget")
        return not is_within

    def denial(self, connection: bytes, message: AnyMessage) -> str:
        """Return why a message must be rejected; empty if it is allowed."""
        if isinstance(message, Hello):
            return "" if self.may_speak(connection, message.peer) else self._other_name(connection, message.peer)
        if not isinstance(message, (Grant, Announce, Decline)):
            return ""
        if not self.trust.capability_keys and not isinstance(message, Decline):
            return ""
        peer = self._peer_at(connection)
        if peer is None and isinstance(message, Decline) and message.peer is not None:
            if not self.may_speak(connection, message.peer):
                return self._other_name(connection, message.peer)
            peer = message.peer
        if peer is None or not self.trust.capability_keys:
            return ""
        return denial(
            self.trust.capability_keys,
            message.capability,
            message.room,
            prefill=self._context.me.rank.instance,
            decode=peer.rank.instance,
            now=self._context.ports.unix_time(),
        )

    def may_speak(self, connection: bytes, peer: PeerId) -> bool:
        """Return whether the peer of a connection may act for a rank's instance."""
        return speaks_for(self._names_of(connection), peer.rank.instance)

    def _other_name(self, connection: bytes, peer: PeerId) -> str:
        names = ", ".join(self._names_of(connection)) or "nobody"
        return f"its key is listed for {names}, not for {peer.rank.instance}"

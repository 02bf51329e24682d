"""Who may say what to a prefill rank, by the keys and capabilities that it goes by now."""

from collections.abc import Callable
from typing import Final

from kvflow.capability import denial
from kvflow.stages.context import StageContext
from kvflow.state import events as ev
from kvflow.state.budgets import Budgets
from kvflow.trust import Trust
from kvflow.wire.codec import Unread
from kvflow.wire.messages import Announce, AnyMessage, Decline, Grant, Hello, PeerId
from kvflow.wire.principals import principal_of, speaks_for

__all__ = ["Gate"]

HELLOS_PER_S: Final = 256
"""Of a principal; without keys, of all. Who says more is not answered for now, and decode ranks repeat what is not
answered."""

HELLOS_AT_ONCE: Final = 1_024
"""Such hellos that may come together, as when a whole instance starts."""

HELLO_BYTES_PER_S: Final = 2**19
HELLO_BYTES_AT_ONCE: Final = 4 * 2**20
"""The same in bytes, since regions take time: half a megabyte of them is read in less than 0.1 s. At once it is 350
ranks with 126 layers each."""

GRANT_BYTES_PER_S: Final = 32 * 2**20
GRANT_BYTES_AT_ONCE: Final = 256 * 2**20
"""Of a principal, in long messages besides. It is pages of eight million tokens a second, if each token has one."""

MESSAGES_OF_STRANGERS: Final = 1_024
"""Messages in a second of a principal over connections without a hello; without keys, over one connection. Some may
have been meant for a process before this one."""


class Gate:
    """Says why the core must not do what a message asks for.

    Ends that may speak for different instances have different connections, so the core itself keeps them apart. What is
    left is whether the key of a connection may say hello for an instance, and who may have a room.

    Args:
        context: Of this rank.
        names_of: Gives the instances that the other end of a connection may speak for.
        peer_at: Gives who has said hello over a connection.

    Attributes:
        trust: Goes by it.
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
        self._hellos = Budgets[str](HELLOS_AT_ONCE, HELLOS_PER_S)
        self._hello_bytes = Budgets[str](HELLO_BYTES_AT_ONCE, HELLO_BYTES_PER_S)
        self._grant_bytes = Budgets[str](GRANT_BYTES_AT_ONCE, GRANT_BYTES_PER_S)
        self._strangers = Budgets[bytes | str](MESSAGES_OF_STRANGERS, MESSAGES_OF_STRANGERS)

    def principal_of(self, connection: bytes) -> str:
        """Return who is at the other end of a connection; empty where nobody is asked for a key."""
        return principal_of(self._names_of(connection)) or ""

    def is_too_much(self, connection: bytes, unread: Unread) -> bool:
        """Say whether a message is one more than its sender may say now; it is counted, not read, and not answered."""
        excess = self._excess(connection, unread)
        if excess:
            self._context.anomalies.count(excess)
        return bool(excess)

    def _excess(self, connection: bytes, unread: Unread) -> str:
        """Return the name of the budget that a message is beyond; empty if there is none."""
        now, num_bytes = self._context.now(), len(unread.data)
        if unread.kind is Hello:
            principal = self.principal_of(connection)
            is_within = self._hellos.take(principal, now) and self._hello_bytes.take(principal, now, num_bytes)
            return "" if is_within else "hello_over_budget"
        if self._peer_at(connection) is None:
            stranger = self.principal_of(connection) or connection
            if not self._strangers.take(stranger, now):
                return "stranger_over_budget"
        if unread.is_long and not self._grant_bytes.take(self.principal_of(connection), now, num_bytes):
            return "grant_over_budget"
        return ""

    def denial(self, connection: bytes, message: AnyMessage) -> str:
        """Return why a message must not be obeyed; empty if it may be."""
        if isinstance(message, Hello):
            return "" if self.may_speak(connection, message.peer) else self._other_name(connection, message.peer)
        if not self.trust.capability_keys or not isinstance(message, Grant | Announce | Decline):
            return ""
        peer = self._peer_at(connection)
        if peer is None:
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
        """Return whether who is at the other end of a connection may be a rank."""
        return speaks_for(self._names_of(connection), peer.rank.instance)

    def _other_name(self, connection: bytes, peer: PeerId) -> str:
        names = ", ".join(self._names_of(connection)) or "nobody"
        return f"its key is listed for {names}, not for {peer.rank.instance}"

"""Who may say what to a prefill rank, by the keys and capabilities that it goes by now."""

from collections.abc import Callable
from typing import Final

from kvflow.capability import denial
from kvflow.stages.context import StageContext
from kvflow.state import events as ev
from kvflow.state.budgets import Budgets
from kvflow.trust import Trust, is_named
from kvflow.wire.messages import Announce, AnyMessage, Decline, Grant, Hello, PeerId

__all__ = ["Gate"]

HELLOS_PER_S: Final = 256
"""Of all who may speak for the same instances; without keys, of all. Who says more is not answered for now, and decode
ranks repeat what is not answered."""

HELLOS_AT_ONCE: Final = 1_024
"""Such hellos that may come together, as when a whole instance starts."""


MESSAGES_OF_STRANGERS: Final = 1_024
"""Messages in a second over a connection without a hello: some may have been meant for a process before this one."""


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
        self._hellos = Budgets[tuple[str, ...]](HELLOS_AT_ONCE, HELLOS_PER_S)
        self._strangers = Budgets[bytes](MESSAGES_OF_STRANGERS, MESSAGES_OF_STRANGERS)

    def is_too_much(self, connection: bytes, message: AnyMessage) -> bool:
        """Say whether a message is one more than its sender may say now; it is counted and not answered."""
        if not isinstance(message, Hello):
            return self._peer_at(connection) is None and self._is_too_much_of_a_stranger(connection)
        if self._hellos.take(self._names_of(connection), self._context.now()):
            return False
        self._context.anomalies.count("hello_over_budget", message.peer)
        return True

    def _is_too_much_of_a_stranger(self, connection: bytes) -> bool:
        if self._strangers.take(connection, self._context.now()):
            return False
        self._context.anomalies.count("stranger_over_budget")
        return True

    def denial(self, connection: bytes, message: AnyMessage) -> str:
        """Say why a message must not be obeyed; empty if it may be."""
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
        """Say whether who is at the other end of a connection may be a rank."""
        return any(is_named(name, peer.rank.instance) for name in self._names_of(connection))

    def _other_name(self, connection: bytes, peer: PeerId) -> str:
        names = ", ".join(self._names_of(connection)) or "nobody"
        return f"its key is listed for {names}, not for {peer.rank.instance}"

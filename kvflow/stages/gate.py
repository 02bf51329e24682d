"""Who may say what to a prefill rank, by the keys and capabilities that it goes by now."""

from collections.abc import Callable

from kvflow.capability import denial
from kvflow.stages.context import StageContext
from kvflow.state import events as ev
from kvflow.trust import Trust, short
from kvflow.wire.messages import Announce, AnyMessage, Decline, Grant, Hello, PeerId

__all__ = ["Gate"]


class Gate:
    """Says why the core must not do what a message asks for.

    The name of a connection has the key of its other end in it, so the core itself keeps apart who has said hello under
    different keys. What is left is whether a key may say hello for an instance, and who may have a room.

    Args:
        context: Of this rank.
        key_of: Gives the key of a connection.
        peer_at: Gives who has said hello over a connection.

    Attributes:
        trust: Goes by it.
    """

    def __init__(
        self,
        context: StageContext[ev.PrefillEvent],
        trust: Trust,
        key_of: Callable[[bytes], str],
        peer_at: Callable[[bytes], PeerId | None],
    ) -> None:
        self.trust = trust
        self._context = context
        self._key_of = key_of
        self._peer_at = peer_at

    def denial(self, connection: bytes, message: AnyMessage) -> str:
        """Say why a message must not be obeyed; empty if it may be."""
        if isinstance(message, Hello):
            return "" if self.may_speak(connection, message.peer) else self._wrong_key(connection, message.peer)
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
        return self.trust.may_speak(self._key_of(connection), peer.rank.instance)

    def _wrong_key(self, connection: bytes, peer: PeerId) -> str:
        return f"key {short(self._key_of(connection))} is not listed for {peer.rank.instance}"

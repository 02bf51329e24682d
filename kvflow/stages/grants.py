"""Collects grants whose pages do not come with them, see `kvflow.gate`."""

import asyncio
from collections.abc import Callable, Collection
from typing import Final

from kvflow.gate.grants import GrantGate, GrantId
from kvflow.stages.context import StageContext
from kvflow.state import events as ev
from kvflow.state.prefill.core import PrefillCore
from kvflow.state.settings import PrefillSettings
from kvflow.wire.messages import (
    Ack,
    Announce,
    Cancel,
    Decline,
    Goodbye,
    Grant,
    GrantedPages,
    Hello,
    Message,
    Offer,
    PeerId,
    Ping,
    Pong,
    Refuse,
    SlotReleased,
)

__all__ = ["GrantCollector", "RankMessage"]

RankMessage = (
    Hello
    | Goodbye
    | Refuse
    | Announce
    | Grant
    | GrantedPages
    | Decline
    | Ack
    | Cancel
    | SlotReleased
    | Ping
    | Pong
    | Offer
)
"""Messages from decode ranks."""


COLLECTED: Final = (Grant, GrantedPages, Cancel, Decline)


class GrantCollector:
    """Asks decode ranks for the pages of their grants, and dispatches the grants once they are complete.

    Attributes:
        waiting: The grants that wait for their pages; without any, there is nothing to `follow`.
    """

    def __init__(
        self,
        context: StageContext[ev.PrefillEvent],
        core: PrefillCore,
        settings: PrefillSettings,
        send: Callable[[bytes, Message], None],
    ) -> None:
        self._context = context
        self._core = core
        self._send = send
        self._gate = GrantGate(settings.limits, settings.max_pages, core.requests.has_place, core.rooms.is_open)
        self._is_asking_soon = False
        self.waiting: Collection[GrantId] = self._gate.incoming

    def collect_message(self, connection: bytes, message: RankMessage) -> bool:
        """Take a message if it belongs to an incomplete grant, and so is not for the core; return whether it was taken.

        Raises:
            RemoteProtocolError: No honest peer sends this message.
        """
        if not isinstance(message, COLLECTED) or (isinstance(message, Grant) and not message.num_pages):
            return False
        peer, now = self._core.peers.claimant(connection), self._context.now()
        if peer is None:
            return isinstance(message, GrantedPages)
        grant_id = GrantId(peer, message.room, message.generation)
        if isinstance(message, GrantedPages):
            admitted = self._gate.store_part(grant_id, message, now)
            if admitted is not None:
                self._context.dispatch(ev.MessageArrived(*admitted, was_new=True))
        elif isinstance(message, Cancel | Decline):
            if not self._gate.drop(grant_id):
                return False
            self._context.dispatch(ev.MessageArrived(connection, message, was_new=True))
        elif not self._core.requests.needs_pages(connection, message):
            return False
        else:
            self._gate.receive(connection, self._core.requests.taker(peer), grant_id, message, now)
        self._ask()
        return True

    def forget(self, peer: PeerId) -> None:
        """Forget the grants of a decode rank that was disconnected."""
        self._gate.drop_peer(peer)

    def follow(self, event: ev.PrefillEvent) -> None:
        """Follow an event of the core: grants of a room that was opened no longer wait behind others.

        If any pages are wanted, ask for them on the next turn of the event loop: there may be memory for them now.
        """
        if isinstance(event, ev.SendOpened):
            self._gate.open(event.room)
        if self._gate.has_lines and not self._is_asking_soon:
            self._is_asking_soon = True
            asyncio.get_running_loop().call_soon(self._ask)

    def _ask(self) -> None:
        self._is_asking_soon = False
        for connection, query in self._gate.ask(self._context.now(), self._core.peers.claimant):
            self._send(connection, query)

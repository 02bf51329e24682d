"""Who may say what: keys, capabilities, signed tickets, and the names that peers, routers and directories give. Pure.

Each decision returns why something is denied, or an empty text.
"""

import ipaddress
from collections.abc import Sequence
from typing import Final

from kvflow.addresses import split_address, split_hosts
from kvflow.errors import TicketError
from kvflow.gate.capability import denial
from kvflow.trust import Trust, short, speaks_for
from kvflow.wire.messages import (
    Announce,
    Decline,
    Grant,
    Hello,
    Offer,
    PeerId,
    RankId,
    Refuse,
    RegistrationConflict,
    SealedRecord,
)
from kvflow.wire.ticket import Ticket

__all__ = [
    "AUTHORIZED",
    "REGISTRY",
    "KeyGate",
    "host_denial",
    "message_denial",
    "name_denial",
    "registration_denial",
    "ticket_denial",
]

AUTHORIZED: Final = (Hello, Grant, Announce, Decline, Offer)
"""Kinds of messages to a prefill rank that need a key or a capability."""

REGISTRY: Final = PeerId(RankId("registry", 0), 0)
"""The sender of Refuse messages from a registry, which is not a rank."""

LOCKED_OUT_S: Final = 1.0
"""How long a key is refused after a connection with it was cut because of what it has sent, in seconds."""


class KeyGate:
    """Decides which keys may connect to a listener; `trust` may be replaced at any time."""

    def __init__(self, trust: Trust) -> None:
        self.trust = trust
        self._locked_until: dict[str, float] = {}  # bounded by the keys that were accepted

    def lock_out(self, key: str, now: float) -> None:
        """Refuse a key for the next second."""
        self._locked_until[key] = now + LOCKED_OUT_S

    def denial(self, key: str, now: float) -> str:
        """Return why a peer must not connect that owns a key; empty if it may."""
        if self._locked_until.get(key, now) > now:
            return f"key {short(key)} is locked out for a second"
        if self.trust.knows(key):
            return ""
        return f"key {short(key)} is not listed" if key else "handshake without a key"


def message_denial(
    message: Hello | Grant | Announce | Decline | Offer,
    names: tuple[str, ...],
    sender: PeerId | None,
    prefill: str,
    capability_keys: Sequence[bytes],
    unix_time: float,
) -> str:
    """Return why a message to a prefill rank must be rejected; empty if it is allowed.

    Peers that may act for different instances have different connections, so the core itself keeps them apart. A Hello
    and the ticket of an Offer need a key that is listed for their instance, and what asks for a room may need a
    capability for it.

    `names` are the instances that the sender may act for, and `sender` is the peer that has sent a Hello over the
    connection, if any. Without `capability_keys`, no capabilities are needed.
    """
    if isinstance(message, Hello):
        return name_denial(names, message.peer)
    if isinstance(message, Offer):
        try:
            return name_denial(names, Ticket.from_json(message.ticket).issuer)
        except TicketError as error:
            return str(error)
    if sender is None and isinstance(message, Decline) and message.peer is not None:
        if denied := name_denial(names, message.peer):
            return denied
        sender = message.peer
    if sender is None or not capability_keys:
        return ""
    decode = sender.rank.instance
    return denial(capability_keys, message.capability, message.room, prefill=prefill, decode=decode, now=unix_time)


def name_denial(names: tuple[str, ...], peer: PeerId) -> str:
    """Return why a sender must not act for a rank, given the instances that it may act for; empty if it may."""
    if speaks_for(names, peer.rank.instance):
        return ""
    return f"its key is listed for {', '.join(names) or 'nobody'}, not for {peer.rank.instance}"


def registration_denial(
    names: tuple[str, ...], peer: PeerId, num_ranks: int | None, own: SealedRecord | None
) -> tuple[Refuse | RegistrationConflict, str] | None:
    """Return what the sender is told, and why, if a rank must not be registered or unregistered; None if it may be.

    `names` are the instances that the sender may act for, `num_ranks` is None to unregister, and `own` is the record of
    the rank that hosts the directory, which belongs to its instance only; None for a registry.
    """
    rank = peer.rank
    if not speaks_for(names, rank.instance):
        answerer = REGISTRY if own is None else own.peer
        refused = Refuse(peer=answerer, to=peer, detail=f"your key is not listed for {rank.instance}")
        return refused, "key is not listed for this instance"
    if own is None or num_ranks is None:
        return None
    if rank == own.peer.rank:
        conflict = RegistrationConflict(peer=peer, other=own.peer, other_endpoint=own.endpoint, refused=True)
        return conflict, "another process registers under the name of this rank"
    if (rank.instance, num_ranks) != (own.peer.rank.instance, own.num_ranks):
        detail = f"this is {own.peer.rank} of {own.num_ranks} ranks, which is the registry of its own instance only"
        return Refuse(peer=own.peer, to=peer, detail=detail), "rank of a different instance registers"
    return None


def ticket_denial(ticket: Ticket, trust: Trust, *, must_be_signed: bool) -> str:
    """Return why a ticket that came with a request must be rejected; empty if it is admitted.

    A wrong signature is always rejected if it can be checked, and an unsigned ticket if it `must_be_signed`.
    """
    if not trust.ticket_keys:
        return "this rank has no ticket key to check signatures with" if must_be_signed else ""
    if not ticket.signature:
        return "it is not signed" if must_be_signed else ""
    return "" if ticket.is_signed_by(trust.ticket_keys) else "its signature is not by a ticket key of this rank"


def host_denial(address: str, allowed: Sequence[str]) -> str:
    """Return why a rank must not connect to "tcp://host:port", which it was told; empty if it may.

    `allowed` is the setting `allowed_hosts`; empty for any host.

    Raises:
        ConfigError: The address is malformed.
    """
    host, _ = split_address("address", address)
    for one in split_hosts(host) if allowed else ():
        if not any(_matches(rule, one.lower()) for rule in allowed):
            return f"{one} is not in `allowed_hosts`"
    return ""


def _matches(rule: str, host: str) -> bool:
    """Return whether a host is in a network, or has a name; a rule "*.NAME" matches any name that ends in it."""
    if rule.startswith("*."):
        return host.endswith(rule[1:].lower())
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(rule)
    except ValueError:
        return host == rule.lower()

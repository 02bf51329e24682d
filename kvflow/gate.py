"""Admits untrusted input: one place that decides, by rules that are settings. Pure."""

import ipaddress
from collections.abc import Sequence

from kvflow.config import split_address
from kvflow.trust import Trust
from kvflow.wire.ticket import Ticket

__all__ = ["host_denial", "ticket_denial"]


def ticket_denial(ticket: Ticket, trust: Trust, *, must_be_signed: bool) -> str:
    """Return why a ticket that came with a request must be rejected; empty if it is admitted.

    Args:
        ticket: The ticket; not trusted.
        trust: This rank's keys.
        must_be_signed: Whether an unsigned ticket is rejected. A wrong signature always is, if it can be checked.
    """
    if not trust.ticket_keys:
        return "this rank has no ticket key to check signatures with" if must_be_signed else ""
    if not ticket.signature:
        return "it is not signed" if must_be_signed else ""
    return "" if ticket.is_signed_by(trust.ticket_keys) else "its signature is not by a ticket key of this rank"


def host_denial(address: str, allowed: Sequence[str]) -> str:
    """Return why a rank must not connect to an address that it was told; empty if it may.

    Args:
        address: "tcp://host:port", from a peer, a directory or a request.
        allowed: The setting `allowed_hosts`; empty for any host.

    Raises:
        ConfigError: The address is malformed.
    """
    host, _ = split_address("address", address)
    if not allowed or any(_matches(rule, host.lower()) for rule in allowed):
        return ""
    return f"{host} is not in `allowed_hosts`"


def _matches(rule: str, host: str) -> bool:
    """Return whether a host is in a network, or has a name; a rule "*.NAME" matches any name that ends in it."""
    if rule.startswith("*."):
        return host.endswith(rule[1:].lower())
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(rule)
    except ValueError:
        return host == rule.lower()

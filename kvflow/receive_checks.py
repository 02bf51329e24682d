"""What a receive, announcement or decline asks for: its arguments, checked before anything happens."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, cast

import numpy as np

from kvflow.addresses import SCHEME, Endpoint, check_endpoint, check_needs_trust
from kvflow.checks import check_duration, check_traceparent, is_traceparent
from kvflow.config import DecodeConfig, check_num_ranks, check_priority, is_instance_name
from kvflow.errors import ConfigError, LocalProtocolError, PlanError, TicketError
from kvflow.gate.identity import host_denial, ticket_denial
from kvflow.geometry.layout import KVLayout
from kvflow.geometry.pages import WIRE_PAGES, Pages, PageTable, TokenPages, build_page_tables, normalize
from kvflow.geometry.ranges import TokenRange, check_range
from kvflow.room import RoomId
from kvflow.stages.digests import check_digestible
from kvflow.state import events as ev
from kvflow.state.quarantine import Footprint
from kvflow.transfer import NO_CONTEXT, TraceContext, check_room
from kvflow.trust import Trust
from kvflow.wire.messages import MAX_CAPABILITY
from kvflow.wire.ticket import Ticket

__all__ = ["Prefill", "ReceiveChecks", "ReceiveRequest", "Wanted"]

Prefill = str | Endpoint | Mapping[str, object]
"""How an engine refers to a prefill instance: a name, an address (an `Endpoint` or "tcp://host:port"), or a ticket."""


class Wanted(NamedTuple):
    """The tokens wanted from a room and the pages they go to; see `kvflow.state.events.ReceiveOpened`.

    Attributes:
        digest: Whether to compare digests; None for the configured default.
    """

    ranges: dict[str, TokenRange]
    pages: dict[str, bytes]
    footprint: Footprint
    timeout_s: float
    digest: bool | None


class ReceiveRequest(NamedTuple):
    """A room that the engine asks for.

    Attributes:
        opened: The event that opens it, without generation, secret, pages and timeout.
        timeout_s: The timeout of this transfer; None for the configured one.
        label: The engine's own ID for the request.
        ticket: The ticket that refers to prefill, if it is one.
        trace_context: The trace that it belongs to.
    """

    opened: ev.ReceiveOpened
    timeout_s: float | None
    label: str | None
    ticket: Ticket | None
    trace_context: TraceContext = NO_CONTEXT


class ReceiveChecks:
    """Checks what an engine passes to a decode rank. Changes nothing, and can be used from any thread.

    Args:
        trust: Returns the keys in force.
        footprint: Returns the number of pages and bytes that page tables occupy in the pools.
    """

    def __init__(
        self,
        config: DecodeConfig,
        layout: KVLayout,
        trust: Callable[[], Trust],
        footprint: Callable[[Mapping[str, PageTable]], Footprint],
    ) -> None:
        self._config = config
        self._layout = layout
        self._trust = trust
        self._footprint = footprint

    def check_request(  # noqa: PLR0913 - one parameter an option
        self,
        room: RoomId | None,
        prefill: Prefill,
        *,
        num_ranks: int | None = None,
        timeout_s: float | None = None,
        priority: int = 0,
        label: str | None = None,
        capability: str | None = None,
        traceparent: str | None = None,
    ) -> ReceiveRequest:
        """Check the arguments that do not depend on pages.

        Raises as `DecodeRank.receive`, except that a ticket may be for another model or protocol version.
        """
        room, instance, ticket = self._check_reference(room, prefill)
        signed = "" if ticket is None else ticket.capability
        opened = ev.ReceiveOpened(
            room=room,
            generation=0,
            instance=instance,
            ranges={},
            pages={},
            num_decode_ranks=check_num_ranks(self._config.num_ranks if num_ranks is None else num_ranks),
            timeout_s=0.0,
            secret=b"",
            priority=check_priority("priority", priority),
            issuer=None if ticket is None else ticket.issuer,
            is_own_address=ticket is not None and ticket.own_address,
            capability=signed if capability is None else _check_capability(capability),
        )
        told = "" if ticket is None else ticket.traceparent
        is_valid = is_traceparent(told)
        context = TraceContext(check_traceparent(traceparent), told if is_valid else "", bool(told) and not is_valid)
        return ReceiveRequest(opened, timeout_s, label, ticket, context)

    def timeout_of(self, timeout_s: float | None) -> float:
        """Return the timeout of a transfer: this one, or the configured one if it is None."""
        return self._config.timeouts.transfer_s if timeout_s is None else check_duration("timeout_s", timeout_s)

    def offer_timeout_of(self, timeout_s: float | None) -> float:
        """Return how long an offer waits for an answer: this, or the configured time if it is None."""
        return self._config.timeouts.grant_s if timeout_s is None else check_duration("timeout_s", timeout_s)

    def check_wanted(
        self,
        tokens: TokenRange,
        pages: Mapping[str, Pages],
        *,
        digest: bool | None,
        timeout_s: float | None,
    ) -> Wanted:
        """Check the tokens and pages of a receive; raises PlanError or ConfigError, as that does."""
        digest = _check_digest(digest)
        parts, tables = self._parts(tokens, pages, digest=bool(digest))
        return Wanted(
            ranges={name: part.tokens for name, part in parts.items()},
            pages={name: _to_wire(table) for name, table in tables.items()},
            footprint=self._footprint(tables),
            timeout_s=self.timeout_of(timeout_s),
            digest=digest,
        )

    def _check_reference(self, room: RoomId | None, prefill: Prefill) -> tuple[RoomId, ev.InstanceRef, Ticket | None]:
        """Return the room, the reference to its instance, and the ticket, if there is one."""
        if not isinstance(prefill, str) and isinstance(prefill, Mapping):
            ticket = Ticket.parse(prefill)
            ticket.check_room(None if room is None else check_room(room))
            self._admit(ticket)
            return ticket.room, ev.InstanceAddress(ticket.address, ticket.issuer.rank.instance), ticket
        if isinstance(prefill, (str, bytes)) and prefill[:1] in ("{", b"{"):  # a router that passed on its text
            raise TicketError("ticket is JSON text: pass `json.loads(ticket)`", ticket=str(prefill[:40]))
        if room is None:
            raise LocalProtocolError("room must be an integer or a string, or come with a ticket", room=room)
        return check_room(room), self.check_instance(prefill), None

    def check_instance(self, prefill: str | Endpoint) -> ev.InstanceRef:
        """Check a reference to an instance that is no ticket; raises as `DecodeRank.receive`."""
        if (isinstance(prefill, str) and prefill.startswith(SCHEME)) or isinstance(prefill, Endpoint):
            address = str(prefill)
            check_endpoint("prefill", address)
            check_needs_trust("prefill", address, self._config.trust)
            if denial := host_denial(address, self._config.allowed_hosts):
                raise ConfigError(denial, setting="allowed_hosts", prefill=address)
            return ev.InstanceAddress(address)
        if not is_instance_name(prefill):
            raise LocalProtocolError(
                "prefill must be an instance name, an address (tcp://HOST:PORT or a kvflow.Endpoint) or a ticket",
                prefill=prefill,
            )
        if self._config.registry is None:
            raise ConfigError(
                "prefill is an instance name, which requires `registry`", setting="registry", prefill=prefill
            )
        return prefill

    def _admit(self, ticket: Ticket) -> None:
        """Raise TicketError if a ticket may not be followed."""
        denial = ticket_denial(ticket, self._trust(), must_be_signed=self._config.needs_signed_tickets)
        if denial:
            raise TicketError("ticket is rejected", detail=denial, issuer=str(ticket.issuer), address=ticket.address)
        try:
            check_needs_trust("address", ticket.address, self._config.trust)
        except ConfigError as error:
            raise TicketError("ticket address is not allowed without `trust`", detail=str(error)) from error
        if denial := host_denial(ticket.address, self._config.allowed_hosts):
            raise TicketError("ticket address is not allowed", detail=denial, setting="allowed_hosts")

    def _parts(
        self, tokens: TokenRange, pages: Mapping[str, Pages], *, digest: bool
    ) -> tuple[dict[str, TokenPages], dict[str, PageTable]]:
        if digest:
            check_digestible(self._layout)
        parts = normalize(pages, self._layout, check_range(tokens))
        if not pages.keys() >= self._layout.by_name.keys():
            unsaid = [name for name in self._layout.by_name if name not in pages]
            raise PlanError(
                "pages must list every component (None for those that are not wanted)",
                missing=unsaid,
                given=sorted(pages),
            )
        if not parts:
            raise PlanError("all components are None: there is nothing to receive", components=sorted(pages))
        return parts, build_page_tables(parts, self._layout, distinct=True)


def _check_capability(capability: object) -> str:
    """Raise ConfigError unless a capability is an ASCII string of at most the maximum length."""
    is_text = isinstance(capability, str) and len(capability) <= MAX_CAPABILITY and capability.isascii()
    if not is_text:
        raise ConfigError("capability must be a string from `make_capability`", capability=type(capability))
    return str(capability)


def _to_wire(table: PageTable) -> bytes:
    """Return pages as `WIRE_PAGES`. They may be large, so this is a view, which is encoded as bytes are."""
    return cast("bytes", table.pages.astype(WIRE_PAGES, copy=False).data.cast("B"))


def _check_digest(digest: object) -> bool | None:
    """Convert a bool of any type, or None; raise ConfigError for anything else."""
    if digest is None:
        return None
    if not isinstance(digest, (bool, np.bool_)):
        raise ConfigError("digest must be a bool or None", digest=digest)
    return bool(digest)

"""Whether the processes that have issued tickets still listen at the addresses in them. Pure.

The process that issues a ticket with its own address listens there from its start to its end. So if all hosts of the
address refuse connections once the ticket has come, that process has ended, and a later one at the same address would
not serve the ticket. Its rooms fail then, instead of waiting for `handshake_s`.

Nothing was granted for rooms that wait, so their pages are free. A refusal is no proof for other pages: the address
comes with a request, which may name any closed port.
"""

from kvflow.errors import FailureReason
from kvflow.state.decode.dialing import MAX_LOOKUPS, HandshakeContext
from kvflow.state.decode.instances import Instance, Probed
from kvflow.state.decode.room import Room
from kvflow.state.effects import DecodeEffect, LookUp, ProbeAddress
from kvflow.state.events import AddressProbed, InstanceAddress, InstanceRef

__all__ = ["IssuerProbes"]

PROBE_AGAIN_S = 2.0
"""Interval between probes of an address that did not refuse, in seconds: its process may have ended meanwhile."""


class IssuerProbes:
    """Probes the addresses of tickets that are not answered, and fails their rooms. Methods return effects."""

    def __init__(self, context: HandshakeContext) -> None:
        self._instances, self._peers, self._rooms = context.instances, context.peers, context.rooms
        self._failure = context.failure
        self._running: dict[InstanceRef, None] = {}

    def probe(self, instance: Instance, looked_up: list[DecodeEffect], now: float) -> list[DecodeEffect]:
        """Probe addresses that are looked up again, because they have not answered in time.

        Once for the rooms of each moment, and then at intervals. Each has a place as an unanswered lookup.
        """
        waiting = instance.waiting.values()
        newest = {one.room.opened.instance: one.number for one in waiting if self._is_in_doubt(one.room)}
        instance.probed = {ref: probed for ref, probed in instance.probed.items() if ref in newest}
        effects: list[DecodeEffect] = []
        for lookup in looked_up:
            ref = lookup.instance if isinstance(lookup, LookUp) else None
            if not isinstance(ref, InstanceAddress) or ref not in newest or ref in self._running:
                continue
            last = instance.probed.get(ref)
            is_due = last is None or newest[ref] > last.number or now >= last.began_at + PROBE_AGAIN_S
            if is_due and len(self._running) < MAX_LOOKUPS:
                self._running[ref] = None
                instance.probed[ref] = Probed(newest[ref], now)
                effects.append(ProbeAddress(ref, newest[ref]))
        return effects

    def finished(self, event: AddressProbed, now: float) -> list[DecodeEffect]:
        """Fail the rooms whose tickets had come before a probe that was refused."""
        self._running.pop(event.instance, None)
        instance = self._instances.at(event.instance)
        if instance is None or not event.is_refused:
            return []
        effects: list[DecodeEffect] = []
        for room, number, _ in list(instance.waiting.values()):
            if room.opened.instance == event.instance and number <= event.number and self._is_in_doubt(room):
                detail = (
                    f"{event.instance.address} refuses connections, so the process that has issued the ticket there, "
                    f"{room.opened.issuer}, has ended; or a firewall rejects them, or the address is wrong"
                )
                effects += self._rooms.fail(room, self._failure(FailureReason.UNREACHABLE, detail), now)
        return effects

    def _is_in_doubt(self, room: Room) -> bool:
        """Return whether nobody but the issuer of a room's ticket listens at its address, and it was not heard of.

        One that is connected is left to its lease.
        """
        opened = room.opened
        return opened.is_own_address and opened.issuer is not None and opened.issuer not in self._peers

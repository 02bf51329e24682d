"""Lookups of prefill instances in the directory, repeated while they are needed. Pure.

An address may come from a client. So lookups at addresses that are not answered take turns, and hosts have shares.
"""

from kvflow.state.decode.deadlines import DecodeTimer, RetryLookup
from kvflow.state.decode.dialing import TURN_S
from kvflow.state.decode.instances import Instance, host_of
from kvflow.state.effects import DecodeEffect, LookUp
from kvflow.state.events import InstanceAddress, InstanceRef
from kvflow.state.tables import InstanceState
from kvflow.state.timers import Timers
from kvflow.state.turns import Turns

__all__ = ["MAX_LOOKUPS", "Lookups"]

LOOK_AGAIN_S = 0.25
"""Interval between lookups during a handshake, in seconds: ranks may restart meanwhile."""

MAX_LOOKUPS = 64
"""Maximum number of unanswered lookups at addresses: each takes a socket, and any request may name a new one."""


class Lookups:
    """Asks the directory for instances, and sets the timers after which it is asked again.

    Attributes:
        number: Number of the lookups that are sent now.
    """

    def __init__(self, timers: Timers[DecodeTimer]) -> None:
        self.number = 0
        self._timers = timers
        self._turns = Turns[InstanceRef](MAX_LOOKUPS, TURN_S)

    def expect_newer(self) -> None:
        """Give further lookups a higher number: only their answers are newer than a ticket that has just come."""
        self.number += 1

    def begin(self, instance: Instance, now: float) -> list[DecodeEffect]:
        """Look an instance up anew, and again later."""
        instance.found = None
        return self.repeat(instance, now)

    def repeat(self, instance: Instance, now: float) -> list[DecodeEffect]:
        """Look an instance up again, and once more later."""
        self.postpone(instance, now + LOOK_AGAIN_S)
        return self.ask(instance, now)

    def ask(self, instance: Instance, now: float) -> list[DecodeEffect]:
        """Look up each reference that rooms wait on, if it is its turn."""
        return [LookUp(ref, self.number) for ref in instance.refs_waiting if self._may_ask(instance, ref, now)]

    def ask_later(self, instance: Instance, now: float) -> None:
        """Let an instance be looked up later, unless that is planned."""
        self._timers.set_once(RetryLookup(instance.number), now + LOOK_AGAIN_S)

    def postpone(self, instance: Instance, when: float) -> None:
        """Let an instance be looked up not before `when`."""
        self._timers.set(RetryLookup(instance.number), when)

    def is_planned(self, instance: Instance) -> bool:
        """Return whether an instance will be looked up again."""
        return RetryLookup(instance.number) in self._timers

    def stop(self, instance: Instance) -> None:
        """Look an instance up no more."""
        self._timers.clear(RetryLookup(instance.number))

    def note_answer(self, ref: InstanceRef) -> None:
        """Free the place of a lookup that was answered, or is not wanted any more."""
        self._turns.end_attempt(ref)

    def _may_ask(self, instance: Instance, ref: InstanceRef, now: float) -> bool:
        if not isinstance(ref, InstanceAddress) or instance.state is InstanceState.CONNECTED:
            return True
        return self._turns.take_place(ref, (host_of(ref),), now)[0]

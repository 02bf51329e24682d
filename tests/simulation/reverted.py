"""Defects that were found in the field, reintroduced into the present code. The simulation must find each of them."""

from typing import Any, Final

import pytest

from kvflow.dispatcher import Dispatcher
from kvflow.errors import FailureReason, KvflowError
from kvflow.stages.submit import Submit
from kvflow.state.decode import core as decode_core
from kvflow.state.decode import handshake
from kvflow.state.decode import rooms as decode_rooms
from kvflow.state.decode.liveness import PrefillLiveness
from kvflow.state.decode.windows import StagingWindows
from kvflow.state.effects import CountAnomaly, DecodeEffect, PrefillEffect, Reply
from kvflow.state.events import CloseStarted, TransportClosed
from kvflow.state.prefill import core as prefill_core
from kvflow.state.prefill.slots import RemoteSlots, SlotUnreturned
from kvflow.state.tables import Outcome
from kvflow.transfer import Transfer
from kvflow.wire.messages import Drained, Failed, Goodbye
from simulation.network import Network
from tests.simulation.faulty import Fault

__all__ = ["DEFECTS"]

Patch = pytest.MonkeyPatch


def goodbye_is_said_first_and_proofs_after_it_are_dropped(patch: Patch) -> None:
    """Send Goodbye before all writes have ended, and drop the later messages as those of an unknown peer."""
    handle, obey = prefill_core.PrefillCore._handle, decode_core.DecodeCore._obey

    def handled(self: prefill_core.PrefillCore, event: Any, now: float) -> list[PrefillEffect]:
        if isinstance(event, TransportClosed):
            return []
        effects = handle(self, event, now)
        if not isinstance(event, CloseStarted):
            return effects
        return [*(Reply(peer.connection, Goodbye(peer=self.me)) for peer in self.peers._peers.values()), *effects]

    def obeyed(self: decode_core.DecodeCore, peer: Any, message: Any, now: float) -> list[DecodeEffect]:
        if isinstance(message, (Drained, Failed)) and peer not in self.peers:
            return [CountAnomaly("unknown_peer", peer)]
        return obey(self, peer, message, now)

    patch.setattr(prefill_core.PrefillCore, "_handle", handled)
    patch.setattr(decode_core.DecodeCore, "_obey", obeyed)


def rooms_that_are_not_taken_are_not_declined(patch: Patch) -> None:
    def decline(self: handshake.Instances, room: Any, *_: Any) -> list[DecodeEffect]:
        instance = self._instances.at(room.opened.instance)
        if instance is not None:
            instance.waiting.pop(room.opened.generation, None)
        return []

    patch.setattr(handshake.Instances, "decline", decline)


def the_fate_of_rooms_decides_about_an_instance(patch: Patch) -> None:
    """Open a circuit breaker after three failed rooms in a row, whatever the reason, and probe with real rooms."""
    rooms_that_are_not_taken_are_not_declined(patch)
    want, follow = handshake.Instances.want, decode_rooms.Rooms._follow
    pause_s, most = 2.0, 3

    def breakers(rooms: decode_rooms.Rooms) -> dict[str, list[float]]:
        breakers: dict[str, list[float]] = vars(rooms).setdefault("breakers", {})
        return breakers

    def wanted(self: handshake.Instances, room: Any, now: float) -> list[DecodeEffect]:
        breaker = breakers(self._rooms).setdefault(room.opened.instance, [0, 0.0])
        if breaker[0] >= most and now < breaker[1]:
            vars(room)["is_refused"] = True
            failure = self._failure(FailureReason.PEER_FAILING, "too many rooms have failed")
            return [*self.reconnect(room.opened.instance, now), *self._rooms.fail(room, failure, now)]
        breaker[1] = now + pause_s
        return want(self, room, now)

    def followed(self: decode_rooms.Rooms, room: Any, effects: list[DecodeEffect], now: float) -> list[DecodeEffect]:
        if not room.state.is_pending and not vars(room).get("is_refused"):
            vars(room)["is_refused"] = True
            breaker = breakers(self).setdefault(room.opened.instance, [0, 0.0])
            breaker[0] = 0 if room.state.outcome is Outcome.SUCCESS else breaker[0] + 1
        return follow(self, room, effects, now)

    patch.setattr(handshake.Instances, "want", wanted)
    patch.setattr(decode_rooms.Rooms, "_follow", followed)


def sockets_have_no_heartbeats(patch: Patch) -> None:
    patch.setattr(Network, "_watch_silence", lambda *_: None)


def ports_are_refused_while_bytes_may_still_land(patch: Patch) -> None:
    patch.setattr(Submit, "may_still_land", False)


def windows_do_not_come_back(patch: Patch) -> None:
    patch.setattr(StagingWindows, "fenced", lambda *_: None)


def windows_of_ranks_that_left_are_remembered(patch: Patch) -> None:
    """Keep the window of a decode rank that has left, for good, once its slots have been given back."""

    def drop(self: RemoteSlots, peers: list[Any]) -> None:
        for peer in peers:
            window = self._windows.get(peer)
            if window is None:
                continue
            if window.pool.is_whole:
                del self._windows[peer]
                self._incarnations.remove(peer)
            for delivery, seq in window.uses:
                self._timers.clear(SlotUnreturned(delivery, seq))

    def give_back(self: RemoteSlots, peer: Any, slot: int) -> None:
        known = self._windows.get(peer)
        if known is not None:
            known.pool.give_back(slot)

    patch.setattr(RemoteSlots, "_drop", drop)
    patch.setattr(RemoteSlots, "give_back", give_back)


def broken_connections_say_nothing(patch: Patch) -> None:
    """Detect dead ranks only by a lease of silence, and do not look up their instance before."""
    patch.setattr(PrefillLiveness, "connection_lost", lambda *_: [])


def engines_are_told_when_pages_are_quiet(patch: Patch) -> None:
    async def wait_until_decided(self: Transfer) -> None:
        self._check_begun()
        await self._decided.wait()
        if self.failure is not None:
            await self._settled.wait()
        self._raise_if_failed()

    patch.setattr(Transfer, "_wait_until_decided", wait_until_decided)


def errors_lose_the_remaining_effects(patch: Patch) -> None:
    """Swallow an error of an effect, and lose the remaining effects."""

    def carry_out(self: Dispatcher[Any, Any], event: Any, effects: Any) -> None:
        self._is_dispatching = True
        try:
            while True:
                for effect in effects:
                    self._perform(effect)
                if not self._events:
                    break
                event = self._events.popleft()
                effects = self._handle(event, self._now())
            self._alarm.check()
        except (KvflowError, RuntimeError):
            pass
        finally:
            self._is_dispatching = False

    patch.setattr(Dispatcher, "_carry_out", carry_out)


DEFECTS: Final[tuple[Fault, ...]] = (
    goodbye_is_said_first_and_proofs_after_it_are_dropped,
    the_fate_of_rooms_decides_about_an_instance,
    sockets_have_no_heartbeats,
    ports_are_refused_while_bytes_may_still_land,
    windows_do_not_come_back,
    windows_of_ranks_that_left_are_remembered,
    broken_connections_say_nothing,
    engines_are_told_when_pages_are_quiet,
    errors_lose_the_remaining_effects,
)

"""Deliberate faults in the protocol, one at a time. The simulation must find each of them."""

import dataclasses
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Final

import pytest
from msgspec.structs import replace

from kvflow.backends import shared
from kvflow.backends.base import BackendEvent, PostEnded, PostInDoubt
from kvflow.decode import DecodeRank
from kvflow.stages import aggregate
from kvflow.stages.bootstrap import PeerProofs
from kvflow.stages.submit import Submit
from kvflow.state import tables
from kvflow.state.decode import instances as decode_instances
from kvflow.state.decode import liveness, progress, unconnected
from kvflow.state.decode import peers as decode_peers
from kvflow.state.decode import room as decode_room
from kvflow.state.decode import rooms as decode_rooms
from kvflow.state.decode.deadlines import ReceiveDeadline
from kvflow.state.decode.held import HeldPages
from kvflow.state.effects import DecodeEffect, DropPlan, LastPiece, PostPlan, PrefillEffect, WrittenBy
from kvflow.state.events import Chunk, PlanFinished
from kvflow.state.prefill import delivery as prefill_delivery
from kvflow.state.prefill import peers as prefill_peers
from kvflow.state.prefill import pieces, queue, slots
from kvflow.state.prefill import room as prefill_room
from kvflow.state.prefill import rooms as prefill_rooms
from kvflow.state.prefill.requests import Requests
from kvflow.state.tables import Memory, Outcome, RankState, Signal
from kvflow.wire.messages import Notice
from simulation.dataplane import SimulatedBackend

__all__ = ["FAULTS", "Fault"]

Patch = pytest.MonkeyPatch
Fault = Callable[[Patch], None]


def memory_table(patch: Patch, changes: dict[tuple[Memory, Signal], Memory]) -> None:
    patch.setattr(tables, "MEMORY", MappingProxyType({**tables.MEMORY, **changes}))


def abort_releases_pages(patch: Patch) -> None:
    memory_table(patch, {(Memory.HELD, Signal.ABORTED): Memory.SAFE})


def failure_releases_pages(patch: Patch) -> None:
    memory_table(patch, {(Memory.HELD, Signal.FAILED): Memory.SAFE})


def elapsed_time_is_a_proof(patch: Patch) -> None:
    memory_table(patch, {(Memory.DRAINING, Signal.IN_DOUBT): Memory.SAFE})


def one_complete_rank_is_enough(patch: Patch) -> None:
    original = decode_room.Room._review

    def review(self: decode_room.Room, extra: Signal | None = None) -> list[DecodeEffect]:
        is_complete = any(rank.state is RankState.COMPLETE for rank in self.ranks.values())
        if self.state.is_pending and is_complete and not self.is_scattering:
            self.state.apply(Signal.COMPLETED)
            return [self._report(), *self._acks()]
        return original(self, extra)

    patch.setattr(decode_room.Room, "_review", review)


def change_count(patch: Patch, count: Callable[[progress.RankProgress, Notice, LastPiece], str | None]) -> None:
    """Replace how a rank counts notices; the rank may complete while some are missing."""

    def written(self: progress.RankProgress) -> WrittenBy:
        return WrittenBy(self.rank, tuple(self._notices.values()))

    patch.setattr(progress.RankProgress, "count", count)
    patch.setattr(progress.RankProgress, "written", property(written))


def last_notice_is_enough(patch: Patch) -> None:
    """Complete a rank at its last notice, without counting notices or bytes."""
    original = progress.RankProgress.count

    def count(self: progress.RankProgress, notice: Notice, piece: LastPiece) -> str | None:
        found = original(self, notice, piece)
        if found is None and notice.last:
            self.state = RankState.COMPLETE
        return found

    change_count(patch, count)


def notices_count_twice(patch: Patch) -> None:
    """Count duplicate notices, and ignore their bytes."""
    original = progress.RankProgress.count

    def count(self: progress.RankProgress, notice: Notice, piece: LastPiece) -> str | None:
        counted = vars(self)
        counted["total"] = counted.get("total", 0) + 1
        found = original(self, notice, piece)
        if counted["total"] == self._num_expected:
            self.state = RankState.COMPLETE
        return found

    change_count(patch, count)


def tokens_do_not_matter(patch: Patch) -> None:
    original = decode_room.Room.notice

    def notice(self: decode_room.Room, found: Notice, sender: Any, *rest: float) -> list[DecodeEffect]:
        known = self.ranks.get(found.engine_rank)
        return original(self, replace(found, token=known.token if known else 0), sender, *rest)

    patch.setattr(decode_room.Room, "notice", notice)


def decode_ignores_generations(patch: Patch) -> None:
    def find(self: decode_rooms.Rooms, number: int, generation: int) -> Any:
        return self.rooms.get(self.generations.get(number, generation))

    patch.setattr(decode_rooms.Rooms, "_find", find)


def closed_generations_are_forgotten(patch: Patch) -> None:
    patch.setattr(prefill_peers.DecodePeers, "close", lambda *_: None)


def late_grant_is_obeyed_after_cancel(patch: Patch) -> None:
    original = Requests.cancel

    def cancel(self: Requests, *arguments: Any, **options: Any) -> list[PrefillEffect]:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(prefill_peers.DecodePeers, "close", lambda *_: None)
            return original(self, *arguments, **options)

    patch.setattr(Requests, "cancel", cancel)


def drained_is_said_before_posts_end(patch: Patch) -> None:
    original = prefill_delivery.Delivery._stop

    def stop(self: prefill_delivery.Delivery, signal: Signal, failure: Any) -> None:
        original(self, signal, failure)
        self.apply(Signal.QUIET)

    patch.setattr(prefill_delivery.Delivery, "_stop", stop)
    patch.setattr(prefill_delivery.Delivery, "is_fenced", property(lambda self: not self.state.is_pending))


def posting_goes_on_after_the_end(patch: Patch) -> None:
    """Post what was planned even after the delivery has ended."""
    original = prefill_delivery.Delivery.plan_finished

    def plan_finished(self: prefill_delivery.Delivery, plan: PlanFinished) -> list[PrefillEffect]:
        effects = original(self, plan)
        if not effects or not isinstance(effects[0], DropPlan):
            return effects
        notice = Notice(
            room=self.id.room,
            generation=self.id.generation,
            token=self.grant.token,
            engine_rank=self._context.me.rank.engine_rank,
            seq=plan.seq,
            ranges={},
            num_bytes=0,
            staged=plan.staged,
        )
        self._posted[plan.seq] = notice
        self._on_change(self)
        return [PostPlan(self.id, plan.seq, notice)]

    patch.setattr(prefill_delivery.Delivery, "plan_finished", plan_finished)


def goodbye_is_a_proof(patch: Patch) -> None:
    original = liveness.PrefillLiveness.said_goodbye

    def said_goodbye(self: liveness.PrefillLiveness, peer: Any, goodbye: Any, now: float) -> list[DecodeEffect]:
        return original(self, peer, replace(goodbye, fenced=True), now)

    patch.setattr(liveness.PrefillLiveness, "said_goodbye", said_goodbye)


def death_is_always_a_proof(patch: Patch) -> None:
    """Take death as a proof even on transports whose bytes may outlive their sender."""
    original = decode_peers.PrefillPeers.ended

    def ended(self: decode_peers.PrefillPeers, peer: Any, now: float) -> Any:
        self._ends_with_process = True
        return original(self, peer, now)

    patch.setattr(decode_peers.PrefillPeers, "ended", ended)


def pages_that_are_held_are_taken_again(patch: Patch) -> None:
    patch.setattr(HeldPages, "first_of", lambda _self, _pages: None)


def silence_is_a_proof(patch: Patch) -> None:
    original = decode_room.Room.lost

    def lost(self: decode_room.Room, peer: Any, failure: Any) -> list[DecodeEffect]:
        return [*original(self, peer, failure), *self.fenced(peer, failure)]

    patch.setattr(decode_room.Room, "lost", lost)


def doubt_is_an_end(patch: Patch) -> None:
    original = Submit.handle_event

    def take(self: Submit, event: BackendEvent) -> None:
        if isinstance(event, PostInDoubt):
            event = PostEnded(event.post_id, event.error)
        if isinstance(event, PostEnded) and event.post_id in self._posts:
            original(self, event)

    patch.setattr(Submit, "handle_event", take)


def written_is_delivered(patch: Patch) -> None:
    patch.setattr(
        tables, "OUTCOME", MappingProxyType({**tables.OUTCOME, (Outcome.PENDING, Signal.WRITTEN): Outcome.SUCCESS})
    )


def receivers_have_no_deadline(patch: Patch) -> None:
    patch.setattr(decode_rooms.Rooms, "expired", lambda *_: [])


def senders_have_no_deadline(patch: Patch) -> None:
    patch.setattr(prefill_rooms.Rooms, "expired", lambda *_: [])
    patch.setattr(Requests, "expired", lambda *_: [])


def credit_is_not_given_back(patch: Patch) -> None:
    original = queue.PieceQueue.end_piece

    def end(self: queue.PieceQueue, delivery: Any, seq: int, how: queue.PieceEnd, now: float) -> None:
        if how is not queue.PieceEnd.DROPPED:
            original(self, delivery, seq, how, now)

    patch.setattr(queue.PieceQueue, "end_piece", end)


def free_source_pages_are_a_proof_for_the_destination(patch: Patch) -> None:
    never = property(lambda self: False, lambda self, _: None)
    patch.setattr(prefill_delivery.Delivery, "_lingers", never, raising=False)


def cancels_are_not_said(patch: Patch) -> None:
    patch.setattr(decode_room.Room, "_cancel", lambda self, _: self._acks()[0].message)


def digests_are_believed(patch: Patch) -> None:
    patch.setattr(aggregate, "find_difference", lambda *_: None)


def notices_go_with_writes_that_they_overtake(patch: Patch) -> None:
    """Let every transport state that its notices follow their bytes."""
    original = SimulatedBackend.__init__

    def init(self: SimulatedBackend, *arguments: Any) -> None:
        original(self, *arguments)
        self.capabilities = dataclasses.replace(self.capabilities, in_band_notices=True)

    patch.setattr(SimulatedBackend, "__init__", init)


def notices_prove_ends_although_digests_differ(patch: Patch) -> None:
    original = progress.RankProgress.apply

    def apply(self: progress.RankProgress, signal: Any) -> None:
        if signal is not tables.RankSignal.DOUBTED:
            original(self, signal)

    patch.setattr(progress.RankProgress, "apply", apply)


def change_parts(patch: Patch, change: Callable[[Chunk, list[pieces.ChunkPart]], list[pieces.ChunkPart]]) -> None:
    """Change the parts of each chunk that is split."""

    def changed(chunk: Chunk, *rest: Any) -> list[pieces.ChunkPart]:
        parts = pieces.split_chunk(chunk, *rest)
        return change(chunk, parts) if len(parts) > 1 else parts

    patch.setattr(prefill_delivery, "split_chunk", changed)


def the_first_piece_of_the_last_chunk_ends_the_transfer(patch: Patch) -> None:
    def change(chunk: Chunk, parts: list[pieces.ChunkPart]) -> list[pieces.ChunkPart]:
        first = parts[0]._replace(last=chunk.last)
        return [first, *(part._replace(last=False) for part in parts[1:])]

    change_parts(patch, change)


def the_last_piece_of_every_chunk_ends_the_transfer(patch: Patch) -> None:
    def change(_: Chunk, parts: list[pieces.ChunkPart]) -> list[pieces.ChunkPart]:
        return [*parts[:-1], parts[-1]._replace(last=True)]

    change_parts(patch, change)


def later_layers_are_not_waited_for(patch: Patch) -> None:
    def change(chunk: Chunk, parts: list[pieces.ChunkPart]) -> list[pieces.ChunkPart]:
        if not chunk.layers:
            return parts
        return [part._replace(ready=chunk.layers[0].ready) for part in parts]

    change_parts(patch, change)


def layers_of_a_chunk_count_as_the_whole(patch: Patch) -> None:
    """Complete a rank once each token has some of its layers and the last notice has arrived."""
    original = progress.RankProgress.count

    def cells(ranges: dict[str, tuple[int, int]]) -> list[tuple[str, int]]:
        return [(name, token) for name, tokens in ranges.items() for token in range(*tokens)]

    def count(self: progress.RankProgress, notice: Notice, piece: LastPiece) -> str | None:
        found = original(self, notice, piece)
        brought = [cell for one in self._notices.values() for cell in cells(one.ranges)]
        if self._num_expected is not None and all(cell in brought for cell in cells(self._wanted)):
            self.state = RankState.COMPLETE
        return found

    change_count(patch, count)


def staged_notices_count_before_they_are_scattered(patch: Patch) -> None:
    original = decode_room.Room._stage

    def stage(self: decode_room.Room, known: progress.RankProgress, notice: Notice, piece: Any) -> list[DecodeEffect]:
        effects = original(self, known, notice, piece)
        if not known.scatters(notice.seq) or known.has(notice.seq):
            return effects
        known.scattered(notice.seq)
        known.count(notice, piece)
        return [*effects, *self._judge(known)]

    def scattered(self: decode_room.Room, notice: Notice, _: Any) -> list[DecodeEffect]:
        return [self._slot_released(self.ranks[notice.engine_rank].peer, notice.seq)]

    patch.setattr(decode_room.Room, "_stage", stage)
    patch.setattr(decode_room.Room, "scattered", scattered)


def pages_are_given_back_while_they_are_scattered(patch: Patch) -> None:
    patch.setattr(progress.Tally, "num_scattering", property(lambda _: 0, lambda *_: None))


def slots_are_free_as_soon_as_their_write_has_ended(patch: Patch) -> None:
    original = slots.RemoteSlots.ended

    def ended(self: slots.RemoteSlots, event: Any, now: float) -> None:
        original(self, event, now)
        self.closed(event.delivery)

    patch.setattr(slots.RemoteSlots, "ended", ended)


def slots_of_writes_that_linger_are_used_again(patch: Patch) -> None:
    original = slots.RemoteSlots.ended

    def ended(self: slots.RemoteSlots, event: Any, now: float) -> None:
        original(self, replace(event, lingers=False), now)

    patch.setattr(slots.RemoteSlots, "ended", ended)


def slots_are_not_asked_for(patch: Patch) -> None:
    patch.setattr(slots.RemoteSlots, "expired", lambda *_: [])


def windows_of_the_lost_go_to_others_without_a_proof(patch: Patch) -> None:
    original = liveness.PrefillLiveness._left

    def left(self: liveness.PrefillLiveness, peer: Any, failure: Any, now: float) -> list[DecodeEffect]:
        effects = original(self, peer, failure, now)
        self._peers.windows.fenced(peer)
        self._peers.windows.reclaim(self._rooms.scatter_from)
        return effects

    patch.setattr(liveness.PrefillLiveness, "_left", left)


def tickets_are_good_for_any_process(patch: Patch) -> None:
    patch.setattr(decode_instances.Instance, "is_meant_by", lambda *_: True)
    patch.setattr(unconnected.UnconnectedRooms, "fail_outdated", lambda *_: [])


def pages_that_come_later_are_always_safe(patch: Patch) -> None:
    """Keep an announced room's memory safe even after it has pages."""
    original = decode_room.Room.take_pages

    def take_pages(self: decode_room.Room, given: Any, deadline: float) -> list[DecodeEffect]:
        effects = original(self, given, deadline)
        self.state = tables.TransferState(Memory.SAFE)
        return effects

    patch.setattr(decode_room.Room, "take_pages", take_pages)


def quiesced_pages_are_not_waited_for(patch: Patch) -> None:
    patch.setattr(prefill_delivery.Delivery, "reads_pages", property(lambda _: False))


def direct_writes_of_quiesced_pages_are_not_waited_for(patch: Patch) -> None:
    """Tell the engine that its pages are quiet while only writes from them are left."""
    patch.setattr(
        prefill_delivery.Delivery, "reads_pages", property(lambda self: bool(self._unposted or self._planned))
    )


def plans_of_quiesced_pages_are_not_waited_for(patch: Patch) -> None:
    """Tell the engine that its pages are quiet while pieces are still being planned."""

    def reads_pages(self: prefill_delivery.Delivery) -> bool:
        return any(notice.staged is None for notice in self._posted.values())

    patch.setattr(prefill_delivery.Delivery, "reads_pages", property(reads_pages))


def tokens_that_were_forgotten_do_not_come_again(patch: Patch) -> None:
    original = prefill_delivery.Delivery.roll_back

    def roll_back(self: prefill_delivery.Delivery) -> int | None:
        positions = dict(self._positions)
        found = original(self)
        self._positions.update(positions)
        return found

    patch.setattr(prefill_delivery.Delivery, "roll_back", roll_back)


def events_of_forgotten_data_count_for_what_comes_again(patch: Patch) -> None:
    patch.setattr(prefill_delivery.Delivery, "awaits", lambda self, _: bool(self._not_ready))


def layers_that_have_left_come_again(patch: Patch) -> None:
    """Forget that some layers of a chunk have been posted when the rest is rolled back."""
    original = prefill_delivery.Delivery.roll_back

    def roll_back(self: prefill_delivery.Delivery) -> int | None:
        self._has_begun_layers = False
        return original(self)

    patch.setattr(prefill_delivery.Delivery, "roll_back", roll_back)


def empty_notices_overtake_pieces(patch: Patch) -> None:
    def say_empty(self: prefill_delivery.Delivery, _now: float) -> list[PrefillEffect]:
        effects: list[PrefillEffect] = []
        for seq, (notice, *_) in list(self._unposted.items()):
            if not notice.num_bytes:
                del self._unposted[seq]
                self._written.append(notice)
                effects += self._context.peers.send(self.id.peer, notice)
        return effects

    patch.setattr(prefill_delivery.Delivery, "_say_empty", say_empty)


def ranks_that_leave_end_writes_that_go_on(patch: Patch) -> None:
    """Report the end of writes that go on, when a rank leaves an endpoint that others share."""
    original = shared.SharedBackend.leave

    async def leave(self: shared.SharedBackend, member: shared.RankEndpoint) -> None:
        if len(self.members) > 1 and member._running:
            member.forward_events(
                [PostEnded(post_id, "stopped by closing the endpoint") for post_id in member._running]
            )
        await original(self, member)

    patch.setattr(shared.SharedBackend, "leave", leave)


def notices_go_to_any_rank_of_an_endpoint(patch: Patch) -> None:
    patch.setattr(shared.SharedBackend, "_readers", lambda self: list(self.members)[:1])


def announcements_keep_no_pages(patch: Patch) -> None:
    """Wait for an announced grant no longer than for an unannounced one."""
    patch.setattr(prefill_room.Room, "num_asked", property(lambda self: len(self.deliveries)))


def rooms_are_announced_once(patch: Patch) -> None:
    original = decode_room.Room.retransmit

    def retransmit(self: decode_room.Room, timeout_s: float) -> list[DecodeEffect]:
        return [] if self.is_announced else original(self, timeout_s)

    patch.setattr(decode_room.Room, "retransmit", retransmit)


def announced_rooms_may_be_without_pages_for_ever(patch: Patch) -> None:
    original = decode_rooms.Rooms.expired

    def expired(self: decode_rooms.Rooms, key: Any, now: float) -> list[DecodeEffect]:
        if isinstance(key, ReceiveDeadline) and key.generation in self.announced:
            return []
        return original(self, key, now)

    patch.setattr(decode_rooms.Rooms, "expired", expired)


def announced_rooms_outlive_their_decode_rank(patch: Patch) -> None:
    original = prefill_rooms.Rooms.peer_lost

    def peer_lost(self: prefill_rooms.Rooms, peer: Any, failure: Any, now: float) -> list[PrefillEffect]:
        announced = {room: room.announced for room in self.rooms.values()}
        for room in announced:
            room.announced = {}
        effects = original(self, peer, failure, now)
        for room, before in announced.items():
            room.announced = before
        return effects

    patch.setattr(prefill_rooms.Rooms, "peer_lost", peer_lost)


def declines_of_announced_rooms_are_not_heard(patch: Patch) -> None:
    patch.setattr(Requests, "decline", lambda *_, **__: [])


def pages_of_announced_rooms_are_not_held(patch: Patch) -> None:
    original = decode_rooms.Rooms.take_pages

    def take_pages(self: decode_rooms.Rooms, given: Any, now: float) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(decode_rooms.Rooms, "_hold", lambda *_: None)
            return original(self, given, now)

    patch.setattr(decode_rooms.Rooms, "take_pages", take_pages)


def announced_rooms_are_said_to_hold_pages(patch: Patch) -> None:
    original = DecodeRank._open_transfer

    def open_transfer(self: DecodeRank, generation: int, receiver: Any, event: Any, _: Any = None) -> None:
        original(self, generation, receiver, event)

    patch.setattr(DecodeRank, "_open_transfer", open_transfer)


def sound_connections_of_the_living_must_end(patch: Patch) -> None:
    patch.setattr(PeerProofs, "note_ends", lambda _self, _effect: None)


FAULTS: Final[tuple[Fault, ...]] = (
    abort_releases_pages,
    failure_releases_pages,
    elapsed_time_is_a_proof,
    one_complete_rank_is_enough,
    last_notice_is_enough,
    notices_count_twice,
    tokens_do_not_matter,
    decode_ignores_generations,
    closed_generations_are_forgotten,
    late_grant_is_obeyed_after_cancel,
    drained_is_said_before_posts_end,
    posting_goes_on_after_the_end,
    goodbye_is_a_proof,
    death_is_always_a_proof,
    pages_that_are_held_are_taken_again,
    silence_is_a_proof,
    doubt_is_an_end,
    written_is_delivered,
    receivers_have_no_deadline,
    senders_have_no_deadline,
    credit_is_not_given_back,
    free_source_pages_are_a_proof_for_the_destination,
    cancels_are_not_said,
    digests_are_believed,
    notices_go_with_writes_that_they_overtake,
    notices_prove_ends_although_digests_differ,
    the_first_piece_of_the_last_chunk_ends_the_transfer,
    the_last_piece_of_every_chunk_ends_the_transfer,
    later_layers_are_not_waited_for,
    layers_of_a_chunk_count_as_the_whole,
    staged_notices_count_before_they_are_scattered,
    pages_are_given_back_while_they_are_scattered,
    slots_are_free_as_soon_as_their_write_has_ended,
    slots_of_writes_that_linger_are_used_again,
    slots_are_not_asked_for,
    windows_of_the_lost_go_to_others_without_a_proof,
    tickets_are_good_for_any_process,
    pages_that_come_later_are_always_safe,
    quiesced_pages_are_not_waited_for,
    direct_writes_of_quiesced_pages_are_not_waited_for,
    plans_of_quiesced_pages_are_not_waited_for,
    tokens_that_were_forgotten_do_not_come_again,
    events_of_forgotten_data_count_for_what_comes_again,
    layers_that_have_left_come_again,
    empty_notices_overtake_pieces,
    ranks_that_leave_end_writes_that_go_on,
    notices_go_to_any_rank_of_an_endpoint,
    announcements_keep_no_pages,
    rooms_are_announced_once,
    announced_rooms_may_be_without_pages_for_ever,
    announced_rooms_outlive_their_decode_rank,
    declines_of_announced_rooms_are_not_heard,
    pages_of_announced_rooms_are_not_held,
    announced_rooms_are_said_to_hold_pages,
    sound_connections_of_the_living_must_end,
)

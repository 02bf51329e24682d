"""Deliberate faults in the protocol, one at a time. The simulation must find each of them."""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Final

import msgspec
import pytest
from msgspec.structs import replace

from kvflow.backends.base import PostEnded, PostInDoubt
from kvflow.errors import FailureReason
from kvflow.stages import verify
from kvflow.stages.submit import Submit
from kvflow.state import core, receiver, receivers, sender, senders, slots, tables
from kvflow.state.acquaintances import Acquaintances
from kvflow.state.effects import Effect, PostPlan, WrittenBy
from kvflow.state.events import Chunk, PlanFinished
from kvflow.state.pieces import Piece, pieces_of
from kvflow.state.tables import Memory, Outcome, RankState, Signal
from kvflow.wire.messages import Notice

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
    memory_table(patch, {(Memory.DRAINING, Signal.DOUBTED): Memory.SAFE})


def one_complete_rank_is_enough(patch: Patch) -> None:
    def count(progress: receiver.RankProgress) -> bool:
        return progress.state is RankState.COMPLETE

    original = receiver.Receiver._review

    def review(self: receiver.Receiver, extra: Signal | None = None) -> list[Effect]:
        if self.state.is_pending and any(count(progress) for progress in self.ranks.values()):
            self.state.apply(Signal.COMPLETED)
            return [self._report(), *self._received()]
        return original(self, extra)

    patch.setattr(receiver.Receiver, "_review", review)


def change_count(patch: Patch, count: Callable[[receiver.RankProgress, Notice], str | None]) -> None:
    """Count notices in another way, which may call a rank complete while some are missing."""

    def written(self: receiver.RankProgress) -> WrittenBy:
        return WrittenBy(self.rank, tuple(self._notices.values()))

    patch.setattr(receiver.RankProgress, "count", count)
    patch.setattr(receiver.RankProgress, "written", property(written))


def last_notice_is_enough(patch: Patch) -> None:
    """Notices are not counted, and their bytes not added up."""
    original = receiver.RankProgress.count

    def count(self: receiver.RankProgress, notice: Any) -> str | None:
        found = original(self, notice)
        if found is None and notice.last:
            self.state = RankState.COMPLETE
        return found

    patch.setattr(receiver.RankProgress, "count", count)


def notices_count_twice(patch: Patch) -> None:
    """A duplicate counts like another notice, and nobody adds up the bytes."""
    original = receiver.RankProgress.count

    def count(self: receiver.RankProgress, notice: Any) -> str | None:
        counted = vars(self)
        counted["total"] = counted.get("total", 0) + 1
        found = original(self, notice)
        if counted["total"] == self._num_expected:
            self.state = RankState.COMPLETE
        return found

    change_count(patch, count)


def tokens_do_not_matter(patch: Patch) -> None:
    original = receiver.Receiver.notice

    def notice(self: receiver.Receiver, found: Any, peer: Any) -> list[Effect]:
        progress = self.ranks.get(found.engine_rank)
        token = progress.token if progress else 0
        return original(self, msgspec.structs.replace(found, token=token), peer)

    patch.setattr(receiver.Receiver, "notice", notice)


def decode_ignores_generations(patch: Patch) -> None:
    def find(self: receivers.Receivers, room: int, generation: int) -> Any:
        return self.receivers.get(self.rooms.get(room, generation))

    patch.setattr(receivers.Receivers, "_find", find)


def tombstones_are_forgotten(patch: Patch) -> None:
    patch.setattr(Acquaintances, "end", lambda *_: None)


def late_grant_is_obeyed_after_cancel(patch: Patch) -> None:
    original = senders.Senders.cancel

    def cancel(self: senders.Senders, peer: Any, message: Any, now: float) -> list[Effect]:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Acquaintances, "end", lambda *_: None)
            return original(self, peer, message, now)

    patch.setattr(senders.Senders, "cancel", cancel)


def drained_is_said_before_posts_end(patch: Patch) -> None:
    original = sender.Delivery._stop

    def stop(self: sender.Delivery, signal: Signal, failure: Any) -> list[Effect]:
        effects = original(self, signal, failure)
        self.state.apply(Signal.QUIET)
        return effects

    patch.setattr(sender.Delivery, "_stop", stop)


def posting_goes_on_after_the_end(patch: Patch) -> None:
    """Whatever was planned is posted, though the delivery has ended."""
    original = sender.Delivery.plan_finished

    def plan_finished(self: sender.Delivery, plan: PlanFinished) -> list[Effect]:
        effects = original(self, plan)
        if self.state.is_pending or not plan.num_bytes:
            return effects
        self._posted[plan.seq] = self._noticed[0] if self._noticed else template(self, plan.seq, plan.num_bytes)
        return [PostPlan(self.id, plan.seq, self._posted[plan.seq])]

    patch.setattr(sender.Delivery, "plan_finished", plan_finished)


def template(delivery: sender.Delivery, seq: int, num_bytes: int) -> Any:
    grant = delivery.grant
    return Notice(
        room=grant.room,
        generation=grant.generation,
        token=grant.token,
        engine_rank=delivery._me.rank.engine_rank,
        seq=seq,
        ranges={},
        num_bytes=num_bytes,
    )


def goodbye_is_a_proof(patch: Patch) -> None:
    original = core.Core._said_goodbye

    def said_goodbye(self: core.Core, peer: Any, goodbye: Any, now: float) -> list[Effect]:
        failure = self._failure(FailureReason.PEER_CLOSED, "closing")
        return [*self.receivers.gone(peer, failure, now), *original(self, peer, goodbye, now)]

    patch.setattr(core.Core, "_said_goodbye", said_goodbye)


def death_is_always_a_proof(patch: Patch) -> None:
    """Whatever the transport says about bytes that outlive their sender."""
    original = core.Core._peer_gone

    def peer_gone(self: core.Core, event: Any, now: float) -> list[Effect]:
        self._ends_with_process = True
        return original(self, event, now)

    patch.setattr(core.Core, "_peer_gone", peer_gone)


def silence_is_a_proof(patch: Patch) -> None:
    original = receiver.Receiver.lost

    def lost(self: receiver.Receiver, peer: Any, failure: Any) -> list[Effect]:
        return [*original(self, peer, failure), *self.fenced(peer, failure)]

    patch.setattr(receiver.Receiver, "lost", lost)


def doubt_is_an_end(patch: Patch) -> None:
    def in_doubt(self: Submit, event: PostInDoubt) -> None:
        if event.post_id in self._posts:
            self.ended(PostEnded(event.post_id, event.error))

    original = Submit.ended

    def ended(self: Submit, event: PostEnded) -> None:
        if event.post_id in self._posts:
            original(self, event)

    patch.setattr(Submit, "in_doubt", in_doubt)
    patch.setattr(Submit, "ended", ended)


def written_is_delivered(patch: Patch) -> None:
    patch.setattr(
        tables, "OUTCOME", MappingProxyType({**tables.OUTCOME, (Outcome.PENDING, Signal.WRITTEN): Outcome.SUCCESS})
    )


def receivers_have_no_deadline(patch: Patch) -> None:
    patch.setattr(receivers.Receivers, "expired", lambda *_: [])


def senders_have_no_deadline(patch: Patch) -> None:
    patch.setattr(senders.Senders, "expired", lambda *_: [])


def credit_is_not_given_back(patch: Patch) -> None:
    def drop(self: Submit, effect: Any) -> None:
        self._waiting.pop((effect.delivery, effect.seq))

    patch.setattr(Submit, "drop", drop)


def free_source_pages_are_a_proof_for_the_destination(patch: Patch) -> None:
    patch.setattr(sender.Delivery, "is_proved", property(lambda self: not self._posted))


def cancels_are_not_said(patch: Patch) -> None:
    patch.setattr(receiver.Receiver, "_cancel", lambda self, _: self._received()[0].message)


def digests_are_believed(patch: Patch) -> None:
    patch.setattr(verify._Comparison, "_find_difference", lambda *_: None)


def change_pieces(patch: Patch, change: Callable[[Chunk, list[Piece]], list[Piece]]) -> None:
    """Change what a chunk is cut into, if it is cut at all."""

    def changed(chunk: Chunk, *rest: Any) -> list[Piece]:
        pieces = pieces_of(chunk, *rest)
        return change(chunk, pieces) if len(pieces) > 1 else pieces

    patch.setattr(sender, "pieces_of", changed)


def the_first_piece_of_the_last_chunk_ends_the_transfer(patch: Patch) -> None:
    def change(chunk: Chunk, pieces: list[Piece]) -> list[Piece]:
        first = replace(pieces[0].chunk, last=chunk.last, metadata=chunk.metadata)
        rest = [piece._replace(chunk=replace(piece.chunk, last=False)) for piece in pieces[1:]]
        return [pieces[0]._replace(chunk=first), *rest]

    change_pieces(patch, change)


def the_last_piece_of_every_chunk_ends_the_transfer(patch: Patch) -> None:
    def change(_: Chunk, pieces: list[Piece]) -> list[Piece]:
        last = pieces[-1]
        return [*pieces[:-1], last._replace(chunk=replace(last.chunk, last=True))]

    change_pieces(patch, change)


def later_layers_are_not_waited_for(patch: Patch) -> None:
    def change(chunk: Chunk, pieces: list[Piece]) -> list[Piece]:
        if not chunk.layers:
            return pieces
        return [piece._replace(chunk=replace(piece.chunk, ready=chunk.layers[0].ready)) for piece in pieces]

    change_pieces(patch, change)


def layers_of_a_chunk_count_as_the_whole(patch: Patch) -> None:
    """Whoever has brought some layers of each token, and the last notice, has brought everything."""
    original = receiver.RankProgress.count

    def cells(ranges: dict[str, tuple[int, int]]) -> list[tuple[str, int]]:
        return [(name, token) for name, tokens in ranges.items() for token in range(*tokens)]

    def count(self: receiver.RankProgress, notice: Notice) -> str | None:
        found = original(self, notice)
        brought = [cell for one in self._notices.values() for cell in cells(one.ranges)]
        if self._num_expected is not None and all(cell in brought for cell in cells(self._wanted)):
            self.state = RankState.COMPLETE
        return found

    change_count(patch, count)


def staged_notices_count_before_they_are_scattered(patch: Patch) -> None:
    original = receiver.Receiver._stage

    def stage(self: receiver.Receiver, progress: Any, notice: Any) -> list[Effect]:
        effects = original(self, progress, notice)
        if not progress.scatters(notice.seq) or progress.has(notice.seq):
            return effects
        progress.scattered(notice.seq)
        progress.count(notice)
        return [*effects, *self._judge(progress)]

    def scattered(self: receiver.Receiver, notice: Any, _: Any) -> list[Effect]:
        return [self._unstaged(self.ranks[notice.engine_rank].peer, notice.seq)]

    patch.setattr(receiver.Receiver, "_stage", stage)
    patch.setattr(receiver.Receiver, "scattered", scattered)


def pages_are_given_back_while_they_are_scattered(patch: Patch) -> None:
    patch.setattr(receiver.Receiver, "is_scattering", property(lambda _: False))


def slots_are_free_as_soon_as_their_write_has_ended(patch: Patch) -> None:
    original = slots.RemoteSlots.settled

    def settled(self: slots.RemoteSlots, event: Any, now: float) -> list[Effect]:
        return [*original(self, event, now), *self.over(event.delivery)]

    patch.setattr(slots.RemoteSlots, "settled", settled)


def slots_of_writes_that_linger_are_used_again(patch: Patch) -> None:
    original = slots.RemoteSlots.settled

    def settled(self: slots.RemoteSlots, event: Any, now: float) -> list[Effect]:
        return original(self, msgspec.structs.replace(event, lingers=False), now)

    patch.setattr(slots.RemoteSlots, "settled", settled)


def slots_are_not_asked_for(patch: Patch) -> None:
    patch.setattr(slots.RemoteSlots, "expired", lambda *_: [])


def windows_of_the_lost_go_to_others_without_a_proof(patch: Patch) -> None:
    original = core.Core._left

    def left(self: core.Core, peer: Any, failure: Any, now: float) -> list[Effect]:
        effects = original(self, peer, failure, now)
        if self.staging is not None:
            self.staging.gone(peer)
            self._reclaim_windows()
        return effects

    patch.setattr(core.Core, "_left", left)


FAULTS: Final[tuple[Fault, ...]] = (
    abort_releases_pages,
    failure_releases_pages,
    elapsed_time_is_a_proof,
    one_complete_rank_is_enough,
    last_notice_is_enough,
    notices_count_twice,
    tokens_do_not_matter,
    decode_ignores_generations,
    tombstones_are_forgotten,
    late_grant_is_obeyed_after_cancel,
    drained_is_said_before_posts_end,
    posting_goes_on_after_the_end,
    goodbye_is_a_proof,
    death_is_always_a_proof,
    silence_is_a_proof,
    doubt_is_an_end,
    written_is_delivered,
    receivers_have_no_deadline,
    senders_have_no_deadline,
    credit_is_not_given_back,
    free_source_pages_are_a_proof_for_the_destination,
    cancels_are_not_said,
    digests_are_believed,
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
)

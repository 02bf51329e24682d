"""The receiving machine: one room on one decode rank.

It grants its pages to every rank of the prefill instance, counts notices by `engine_rank`, and ends in success only
when each rank that owes it bytes has accounted for all of them and, if that was asked for, what arrived has the digests
of what was sent. Any other end drains: every rank that could still write is told to stop, and the pages are given back
when each has said that it did.
"""

import hashlib
from collections.abc import Sequence

from kvflow.errors import FailureReason, Stage
from kvflow.state.effects import (
    CountOddity,
    Effect,
    Handed,
    ProbePeer,
    ReportReceiver,
    ScatterStaged,
    SendMessage,
    VerifyDigests,
)
from kvflow.state.events import GreetedRank, ReceiveOpened
from kvflow.state.progress import RankProgress
from kvflow.state.tables import Memory, Outcome, RankSignal, RankState, Signal, TransferState
from kvflow.wire.messages import Cancel, Failure, Grant, Notice, PeerId, Received, Unstaged

__all__ = ["RankProgress", "Receiver"]


class Receiver:
    """One room, from the engine's wish to the last proof that its pages are quiet.

    Attributes:
        is_probe: Its end is to say whether its instance is worth another try.
    """

    def __init__(self, me: PeerId, opened: ReceiveOpened, *, gives_up: float, progress_s: float) -> None:
        self._progress_s = progress_s
        self.opened = opened
        self.gives_up = gives_up
        self.state = TransferState()
        self.failure: Failure | None = None
        self.ranks: dict[int, RankProgress] = {}
        self.num_repeats = 0
        self.is_probe = False
        self._me = me
        self.is_verifying = False
        self._is_verified = False
        self._granted: tuple[PeerId, ...] = ()

    @property
    def room(self) -> int:
        """The router's id of the request."""
        return self.opened.room

    @property
    def generation(self) -> int:
        """The number of this transfer, unique in the life of the decode rank."""
        return self.opened.generation

    @property
    def granted(self) -> tuple[PeerId, ...]:
        """Every rank of the instance, once they may write."""
        return self._granted

    @property
    def num_notices(self) -> int:
        """Notices counted, of all ranks."""
        return sum(progress.num_notices for progress in self.ranks.values())

    @property
    def num_arrived(self) -> int:
        """The same, and those of which something is being scattered."""
        return sum(progress.num_arrived for progress in self.ranks.values())

    def involves(self, peer: PeerId) -> bool:
        """Say whether a peer was granted these pages."""
        return peer in self._granted

    def grant(self, ranks: Sequence[GreetedRank], timeout_s: float) -> list[Effect]:
        """Let every rank of the instance write; those that owe nothing only learn that they are done."""
        self._granted = tuple(rank.peer for rank in ranks)
        effects: list[Effect] = []
        for rank in ranks:
            engine_rank = rank.peer.rank.engine_rank
            if not rank.debts.keys().isdisjoint(self.opened.ranges):
                token = grant_token(self.opened.secret, engine_rank)
                self.ranks[engine_rank] = RankProgress(rank, token, self.opened.ranges)
            effects.append(SendMessage(rank.peer, self._grant(rank.peer, timeout_s)))
        return [*effects, *self._review()]

    def repeat(self, timeout_s: float) -> list[Effect]:
        """Say again to each rank what it seems to have missed, and ask after those that are silent."""
        self.num_repeats += 1
        effects: list[Effect] = []
        for peer in self._granted:
            progress = self.ranks.get(peer.rank.engine_rank)
            if progress is not None and not progress.state.is_quiet:
                effects += self._say_again(progress, timeout_s)
            elif progress is None and self.state.is_pending:
                effects.append(SendMessage(peer, self._grant(peer, timeout_s)))
        return effects

    def remind(self, peer: PeerId) -> list[Effect]:
        """Ask a rank that can be reached again for the proof that it owes."""
        progress = self._progress_of(peer)
        if self.failure is None or progress is None or progress.state.is_quiet:
            return []
        return [SendMessage(peer, self._cancel(self.failure))]

    def regreeted(self, rank: GreetedRank) -> list[Effect]:
        """Note what a rank has been told anew, and ask it for the proof that it owes."""
        progress = self._progress_of(rank.peer)
        if progress is not None:
            progress.regreeted(rank)
        return self.remind(rank.peer)

    def _say_again(self, progress: RankProgress, timeout_s: float) -> list[Effect]:
        if self.failure is None:
            return [SendMessage(progress.peer, self._grant(progress.peer, timeout_s))]
        probe: list[Effect] = [ProbePeer(progress.peer)] if progress.state is RankState.LOST else []
        return [*probe, SendMessage(progress.peer, self._cancel(self.failure))]

    def _grant(self, peer: PeerId, timeout_s: float) -> Grant:
        progress = self.ranks.get(peer.rank.engine_rank)
        return Grant(
            room=self.room,
            generation=self.generation,
            token=progress.token if progress else 0,
            ranges=dict(self.opened.ranges),
            pages=dict(self.opened.pages) if progress else {},
            num_decode_ranks=self.opened.num_decode_ranks,
            timeout_s=timeout_s,
            progress_s=self._progress_s,
            priority=self.opened.priority,
            digest=self.opened.digest,
        )

    def _cancel(self, failure: Failure) -> Cancel:
        return Cancel(room=self.room, generation=self.generation, failure=failure)

    def notice(self, notice: Notice, sender: PeerId | None) -> list[Effect]:
        """Count what a rank says it has written; `sender` is None if the notice came in band."""
        progress = self.ranks.get(notice.engine_rank)
        if progress is None or sender not in (None, progress.peer):
            return [self._oddity("notice_from_unknown_rank", sender)]
        if notice.token != progress.token:
            return [self._oddity("notice_with_wrong_token", progress.peer)]
        is_late = progress.state is RankState.DRAINED
        if notice.staged is not None and not progress.has(notice.seq):
            return self._stage(progress, notice)
        oddity = "notice_after_drained" if is_late else progress.count(notice)
        if oddity is not None:
            return [self._oddity(oddity, progress.peer)]
        again = [self._unstaged(progress.peer, notice.seq)] if notice.staged is not None else []
        return [*again, *self._judge(progress)]

    def _stage(self, progress: RankProgress, notice: Notice) -> list[Effect]:
        """Have what a notice brought scattered, once, and only while somebody wants it."""
        if not self.state.is_pending:
            return []
        if progress.scatters(notice.seq):
            return []
        oddity = progress.stage(notice)
        if oddity is not None:
            return [self._oddity(oddity, progress.peer)]
        return [ScatterStaged(self.opened, progress.rank, notice)]

    def scattered(self, notice: Notice, failure: Failure | None) -> list[Effect]:
        """Take in what came of scattering: only now the notice counts, and its slot may be written again."""
        progress = self.ranks[notice.engine_rank]
        progress.scattered(notice.seq)
        unstaged = self._unstaged(progress.peer, notice.seq)
        if failure is not None:
            return [unstaged, *self.stop(Signal.FAILED, failure)]
        oddity = progress.count(notice)
        if oddity is not None:
            return [unstaged, self._oddity(oddity, progress.peer), *self._review()]
        return [unstaged, *self._judge(progress)]

    def unstage(self, peer: PeerId, seq: int) -> list[Effect]:
        """Say that the slot of a notice is not read any more, if that is so."""
        progress = self._progress_of(peer)
        if progress is None or progress.scatters(seq) or (self.state.is_pending and not progress.has(seq)):
            return []
        return [self._unstaged(peer, seq)]

    @property
    def is_scattering(self) -> bool:
        """Something is written to the pages from here."""
        return any(progress.is_scattering for progress in self.ranks.values())

    def scattered_peers(self) -> list[PeerId]:
        """Ranks whose slots are being read."""
        return [progress.peer for progress in self.ranks.values() if progress.is_scattering]

    def _unstaged(self, peer: PeerId, seq: int) -> Effect:
        engine_rank = peer.rank.engine_rank
        word = Unstaged(room=self.room, generation=self.generation, engine_rank=engine_rank, seq=seq)
        return SendMessage(peer, word)

    def _judge(self, progress: RankProgress) -> list[Effect]:
        """See whether a rank has accounted for everything, or never will."""
        if progress.has_all_notices and progress.state is RankState.OWING:
            detail = progress.shortfall() or "nothing is missing"
            return self.stop(Signal.FAILED, self._error(FailureReason.INCOMPLETE, progress.peer, detail))
        return self._review()

    def verified(self, failure: Failure | None) -> list[Effect]:
        """Take in whether what arrived has the digests of what was sent."""
        self.is_verifying = False
        if failure is not None:
            return self.stop(Signal.FAILED, failure)
        self._is_verified = True
        return self._review()

    def drained(self, peer: PeerId, failure: Failure | None) -> list[Effect]:
        """Take a rank's word that it can write nothing more."""
        progress = self._progress_of(peer)
        if progress is None:
            return []
        was_owing = progress.state is not RankState.COMPLETE
        progress.apply(RankSignal.DRAINED)
        if not (self.state.is_pending and was_owing):
            return self._review()
        detail = "the rank drained without being asked to"
        return self.stop(Signal.FAILED, failure or self._error(FailureReason.PROTOCOL, peer, detail), spare=peer)

    def failed(self, peer: PeerId, failure: Failure, *, is_drained: bool) -> list[Effect]:
        """End it because a prefill rank said so."""
        progress = self._progress_of(peer)
        if progress is not None and is_drained:
            progress.apply(RankSignal.DRAINED)
        return self.stop(Signal.FAILED, failure, spare=peer)

    def lost(self, peer: PeerId, failure: Failure) -> list[Effect]:
        """End it because a rank that still owes something is gone."""
        progress = self._progress_of(peer)
        if progress is None or progress.state.is_quiet:
            return []
        progress.apply(RankSignal.LOST)
        return [*self.stop(Signal.FAILED, failure), ProbePeer(peer)]

    def fenced(self, peer: PeerId, failure: Failure) -> list[Effect]:
        """Note that nothing of a rank's life can be written any more, because it is over."""
        progress = self._progress_of(peer)
        if progress is None or progress.state.is_quiet:
            return []
        progress.apply(RankSignal.FENCED)
        return self.stop(Signal.FAILED, failure, spare=peer)

    def release(self) -> list[Effect]:
        """Take the pages back unproved, as an operator says."""
        return self._review(Signal.RELEASED)

    def stop(self, signal: Signal, failure: Failure, *, spare: PeerId | None = None) -> list[Effect]:
        """End it without success: tell every granted rank to stop, but for `spare`, which said so itself."""
        if not self.state.is_pending:
            return self._review()
        self.failure = failure
        self.state.apply(signal)
        cancels = [SendMessage(peer, self._cancel(failure)) for peer in self._granted if peer != spare]
        return [self._report(), *cancels, *self._review()]

    def doubt(self) -> list[Effect]:
        """Give up waiting for ranks that do not say Drained."""
        return self._review(Signal.DOUBTED)

    def _review(self, extra: Signal | None = None) -> list[Effect]:
        """Draw the transfer's conclusion from its ranks; report when a fact has changed."""
        if self._must_verify():
            self.is_verifying = True
            return [VerifyDigests(self.opened, tuple(progress.written for progress in self.ranks.values()))]
        before = (self.state.outcome, self.state.memory)
        if not self.is_verifying and not self.is_scattering:  # meanwhile the pages are read, or written from here
            self._conclude()
        if extra is not None:
            self.state.apply(extra)
        after = (self.state.outcome, self.state.memory)
        if after == before:
            return []
        is_success = self.state.outcome is Outcome.SUCCESS
        return [self._report(), *(self._received() if is_success else [])]

    def _must_verify(self) -> bool:
        if not self.opened.digest or self._is_verified or self.is_verifying or not self.state.is_pending:
            return False
        if self.is_scattering:  # what is compared must stay as it is
            return False
        return bool(self.ranks) and all(progress.state is RankState.COMPLETE for progress in self.ranks.values())

    def _conclude(self) -> None:
        states = [progress.state for progress in self.ranks.values()]
        if self._granted and all(state is RankState.COMPLETE for state in states):
            self.state.apply(Signal.COMPLETED)
        elif not self.state.is_pending and all(state.is_quiet for state in states):
            self.state.apply(Signal.QUIET)

    def _received(self) -> list[Effect]:
        received = Received(room=self.room, generation=self.generation)
        return [SendMessage(peer, received) for peer in self._granted]

    def _report(self) -> Effect:
        return ReportReceiver(
            room=self.room,
            generation=self.generation,
            outcome=self.state.outcome,
            memory=self.state.memory,
            failure=self.failure,
            handed=self._handed() if self.state.memory is Memory.SAFE and self.failure is None else None,
        )

    def _handed(self) -> Handed:
        return Handed(
            metadata={rank: progress.metadata for rank, progress in self.ranks.items() if progress.metadata},
            num_bytes=sum(progress.num_bytes for progress in self.ranks.values()),
            num_notices=self.num_notices,
        )

    def _progress_of(self, peer: PeerId) -> RankProgress | None:
        progress = self.ranks.get(peer.rank.engine_rank)
        return progress if progress is not None and progress.peer == peer else None

    def _oddity(self, kind: str, peer: PeerId | None) -> Effect:
        return CountOddity(kind, peer, self.room)

    def _error(self, reason: FailureReason, peer: PeerId, detail: str) -> Failure:
        return Failure(reason, Stage.AGGREGATE, str(self._me.rank), f"{peer.rank}: {detail}")


def grant_token(secret: bytes, engine_rank: int) -> int:
    """The number that notices of one rank must repeat; no rank can work out another's."""
    digest = hashlib.blake2b(engine_rank.to_bytes(8, "little"), key=secret, digest_size=8).digest()
    return int.from_bytes(digest, "little")

"""What one prefill rank must send in one transfer, and what has arrived. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from kvflow.geometry.expected import expected_bytes
from kvflow.geometry.ranges import TokenRange
from kvflow.state.effects import LastPiece, WrittenBy
from kvflow.state.events import ConnectedRank
from kvflow.state.tables import QUIET, RANK, RankSignal, RankState
from kvflow.wire.messages import Notice

__all__ = ["RankProgress", "Tally"]


PROOFS: Final = frozenset({RankSignal.DRAINED, RankSignal.FENCED})
"""Signals that a rank writes nothing more, whatever its notices say."""


@dataclass(slots=True)
class Tally:
    """Counters over the prefill ranks of one transfer, so that handling a notice of one rank reads no other.

    Attributes:
        num_complete: Ranks that have accounted for every byte.
        num_quiet: Ranks that can write nothing more.
        num_arrived: Notices that have arrived: those counted, and those whose pieces are scattered first.
        num_notices: Notices counted.
        last: The piece of the notice that was counted last.
        num_scattering: Notices whose pieces are being copied from a staging slot to the pages.
    """

    num_complete: int = 0
    num_quiet: int = 0
    num_arrived: int = 0
    num_notices: int = 0
    last: LastPiece | None = None
    num_scattering: int = 0


class RankProgress:
    """What one prefill rank must send in one transfer, and what has arrived.

    If it `has_landed`, what it had in flight when its writes ended cannot land any more.
    """

    def __init__(self, rank: ConnectedRank, token: int, ranges: Mapping[str, TokenRange], tally: Tally) -> None:
        self.rank = rank
        self.peer = rank.peer
        self.token = token
        self.state = RankState.WRITING
        self.num_bytes = 0
        self.metadata = b""
        self._expected = rank.expected
        self._wanted = {name: tokens for name, tokens in ranges.items() if name in rank.expected}
        self._max_notices = sum(
            (stop - start) * rank.expected[name].max_layers for name, (start, stop) in self._wanted.items()
        )
        self._notices: dict[int, Notice] = {}
        self._scattering: dict[int, tuple[Notice, LastPiece]] = {}
        self.has_landed = False
        self._has_proof = False
        self._num_expected: int | None = None
        self._num_checked = 0
        self._positions = {name: start for name, (start, _) in self._wanted.items()}
        self._unfinished: Notice | None = None  # the last one checked, if more layers of its tokens follow
        self._mistake: str | None = None
        self._tally = tally

    def apply(self, signal: RankSignal) -> None:
        """Apply a signal to the state table."""
        self._has_proof |= signal in PROOFS
        before, self.state = self.state, RANK[self.state, signal]
        if signal is RankSignal.DOUBTED and self._has_proof:
            self.state = RankState.DRAINED  # the proof came while the notices were believed
        if self.state is not before:
            self._tally.num_complete += (self.state is RankState.COMPLETE) - (before is RankState.COMPLETE)
            self._tally.num_quiet += (self.state in QUIET) - (before in QUIET)

    @property
    def is_scattering(self) -> bool:
        """Whether a piece of this rank is being copied from a staging slot to the pages."""
        return bool(self._scattering)

    def has(self, seq: int) -> bool:
        """Return whether a notice was counted."""
        return seq in self._notices

    def scatters(self, seq: int) -> bool:
        """Return whether the piece of a notice is being copied to the pages."""
        return seq in self._scattering

    def count(self, notice: Notice, piece: LastPiece) -> str | None:
        """Count a notice once, however often it arrives. Return the anomaly if it is rejected."""
        if notice.seq in self._notices:
            return None if _says_the_same(notice, self._notices[notice.seq]) else "notice_contradicts_itself"
        anomaly = self._anomaly(notice)
        if anomaly is not None:
            return anomaly
        if notice.last:
            self._num_expected = notice.seq + 1
            self.metadata = notice.metadata
        self._notices[notice.seq] = notice
        self._tally.num_arrived += notice.staged is None
        self._tally.num_notices += 1
        self._tally.last = piece
        self.num_bytes += notice.num_bytes
        self._check_next()
        whole = len(self._notices) == self._num_expected and self.shortfall() is None
        self.apply(RankSignal.COMPLETED if whole else RankSignal.NOTICED)
        return None

    def stage(self, notice: Notice, piece: LastPiece) -> str | None:
        """Record a notice whose piece must be scattered before it counts. Return the anomaly if it is rejected."""
        if notice.seq in self._scattering:
            return None if _says_the_same(notice, self._scattering[notice.seq][0]) else "notice_contradicts_itself"
        window, staged = self.rank.staging, notice.staged
        if window is None or staged is None or staged.slot >= window.num_slots or notice.num_bytes > window.slot_bytes:
            return "notice_staged_nowhere"
        for name, (start, stop) in notice.ranges.items():
            if name not in self._wanted or not self._wanted[name][0] <= start <= stop <= self._wanted[name][1]:
                return "notice_of_other_tokens"
        if any(other.staged is not None and other.staged.slot == staged.slot for other, _ in self._scattering.values()):
            return "notice_of_taken_slot"
        anomaly = self._anomaly(notice)
        if anomaly is None:
            self._scattering[notice.seq] = notice, piece
            self._tally.num_arrived += 1
            self._tally.num_scattering += 1
        return anomaly

    def reconnected(self, rank: ConnectedRank) -> None:
        """Update the window of an incarnation that has reconnected: it may have had none before."""
        if self.rank.staging is None:
            self.rank = replace(self.rank, staging=rank.staging)

    def scattered(self, seq: int) -> LastPiece:
        """Note that the scatter of a notice's piece has ended, and return the piece."""
        self._tally.num_scattering -= 1
        return self._scattering.pop(seq)[1]

    def _anomaly(self, notice: Notice) -> str | None:
        if notice.seq > self._max_notices:
            return "notice_seq_impossible"  # every notice but the last carries at least a layer of a token
        if self._num_expected is not None and (notice.last or notice.seq >= self._num_expected):
            return "notice_after_last"
        if notice.last and any(seq > notice.seq for seq in self._notices):
            return "notice_after_last"
        return None

    @property
    def written(self) -> WrittenBy:
        """What the rank reports to have written; requires that all notices have arrived."""
        return WrittenBy(self.rank, tuple(self._notices[seq] for seq in range(len(self._notices))))

    @property
    def has_all_notices(self) -> bool:
        """Whether every notice up to the last one has arrived."""
        return len(self._notices) == self._num_expected

    def shortfall(self) -> str | None:
        """Return what is missing or wrong in the counted notices; None if they account for everything."""
        if self._mistake is not None:
            return self._mistake
        if self._num_checked < len(self._notices):
            return f"notice {self._num_checked} is missing"
        if self._unfinished is not None:
            return f"the layers up to those of notice {self._unfinished.seq} were written, the others were not"
        for name, (_, stop) in self._wanted.items():
            if self._positions[name] != stop:
                return f"tokens {self._positions[name]}:{stop} of component {name} were not written"
        return None

    def _check_next(self) -> None:
        """Check each notice once, in order, as soon as all before it have arrived."""
        while self._mistake is None and (notice := self._notices.get(self._num_checked)) is not None:
            self._mistake = _layers_anomaly(notice, self._unfinished) or self._tokens_anomaly(notice)
            self._num_checked += 1
            goes_on = notice.layer_range[1] is not None
            self._unfinished = notice if goes_on else None
            if not goes_on:
                self._positions.update({name: stop for name, (_, stop) in notice.ranges.items()})

    def _tokens_anomaly(self, notice: Notice) -> str | None:
        for name, (start, stop) in notice.ranges.items():
            if start != self._positions.get(name) or stop < start:
                return f"tokens {start}:{stop} of component {name} do not follow what was written before"
        expected = expected_bytes(self._expected, notice.ranges, self._wanted, notice.layer_range)
        if notice.num_bytes == expected:
            return None
        return f"{notice.num_bytes} bytes were written, but {expected} were expected"


def _says_the_same(notice: Notice, before: Notice) -> bool:
    """Return whether a repeated notice is the same as before, apart from when its piece was sent."""
    return replace(notice, stamps=before.stamps) == before


def _layers_anomaly(notice: Notice, before: Notice | None) -> str | None:
    """Return what is wrong with the layers of a notice; `before` is the notice that it continues, if any."""
    start, stop = notice.layer_range
    expected = 0 if before is None or before.layers is None else before.layers[1]
    if start != expected or (stop is not None and stop <= start):
        return f"layers {start}:{stop or ''} of notice {notice.seq} do not follow what was written before"
    if before is not None and notice.ranges != before.ranges:
        return f"notice {notice.seq} has different tokens than the layers before it"
    return None

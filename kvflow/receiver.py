"""The receiving side of one room, as an engine sees it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

import anyio.lowlevel
from typing_extensions import override

from kvflow.errors import KvflowError, LocalProtocolError
from kvflow.geometry.pages import Pages
from kvflow.geometry.ranges import TokenRange
from kvflow.observe.breakdown import Breakdown, Timeline
from kvflow.observe.trace import TransferLine
from kvflow.receive_checks import ReceiveRequest, Wanted
from kvflow.state import effects as ef
from kvflow.state import events as ev
from kvflow.state.quarantine import NO_MEMORY
from kvflow.transfer import Transfer
from kvflow.wire.messages import Failure

if TYPE_CHECKING:
    from kvflow.decode import DecodeRank

__all__ = ["Handover", "RoomReceiver"]

MANY_PAGES: Final = 2**20
"""A receive of more pages lets other tasks run between checking its page tables and entering its block."""


@dataclass(frozen=True)
class Handover:
    """The result of a successful receive.

    Attributes:
        metadata: Metadata from the prefill engine, of the lowest engine rank that sent any; empty if none did.
        metadata_by_rank: The metadata of every rank that sent any, by engine rank.
        num_bytes: Bytes written into this rank's pages.
        num_notices: Number of pieces received, from all prefill ranks.
        elapsed_s: Seconds from the start of the receive (from the grant, if the room was announced) to the last notice.
        first_notice_s: Seconds from the same start to the first notice.
        timeline: What `breakdown` is computed from.
    """

    metadata: bytes
    metadata_by_rank: Mapping[int, bytes]
    num_bytes: int
    num_notices: int
    elapsed_s: float
    first_notice_s: float
    timeline: Timeline | None = field(default=None, repr=False)

    @property
    def breakdown(self) -> Breakdown | None:
        """Where the time went, on both sides; None if nothing was to be sent, or prefill is older and does not tell."""
        return None if self.timeline is None else self.timeline.break_down()


class RoomReceiver(Transfer):
    """The receiving side of one room. Returned by `DecodeRank.receive` and `DecodeRank.announce`.

    Attributes:
        handover: The result, once the transfer has succeeded; None until then.
        traceparent: W3C trace context that the room belongs to: the one that the engine has passed or, by default, that
            of the ticket; empty if there is none.
    """

    __slots__ = ("_generation", "_opened", "_wanted", "handover")

    _rank: "DecodeRank"

    def __init__(
        self, rank: "DecodeRank", asked: ReceiveRequest, opened: ev.ReceiveOpened, wanted: Wanted | None
    ) -> None:
        super().__init__(rank, opened.room, asked.label, asked.trace_context)
        self.handover: Handover | None = None
        self._opened = opened
        self._wanted = wanted
        self._generation = 0

    @property
    def traceparent(self) -> str:  # noqa: D102 - described with the class
        return self.trace_context.own or self.trace_context.ticket

    @property
    def is_announced(self) -> bool:
        """True while the room is only announced and has no pages."""
        return self._wanted is None

    def grant(
        self,
        *,
        tokens: TokenRange,
        pages: Mapping[str, Pages],
        digest: bool | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Provide the pages of an announced room; from then on it behaves like one from `receive`. Call it once.

        Args:
            tokens: As in `DecodeRank.receive`.
            pages: As in `DecodeRank.receive`. If this raises, the pages are not in use.
            digest: As in `DecodeRank.receive`.
            timeout_s: How long the transfer may take from now on; by default `Timeouts.transfer_s`.

        Raises:
            PlanError: A page table does not match the pool or the tokens, or digests were requested for device memory.
            ConfigError: `timeout_s` or `digest` is invalid.
            PagesInUse: Another transfer may still write to one of the pages; the room stays announced.
            CapacityExceeded: Too much memory is in quarantine; the room stays announced.
            LocalProtocolError: It already has pages, was not entered, or this is the wrong event loop.
            TransferFailed: It was aborted or has already failed, for example because prefill gave up the room.
        """
        self._take_pages(self._check_grant(tokens=tokens, pages=pages, digest=digest, timeout_s=timeout_s))

    def _check_grant(
        self,
        *,
        tokens: TokenRange,
        pages: Mapping[str, Pages],
        digest: bool | None = None,
        timeout_s: float | None = None,
    ) -> Wanted:
        """Check the arguments of `grant`. Can be called from any thread."""
        self._check_announced()
        return self._rank._check_wanted(tokens, pages, digest=digest, timeout_s=timeout_s)

    def _take_pages(self, wanted: Wanted) -> None:
        """Grant pages whose arguments have been checked."""
        self._check_begun()
        self._raise_if_failed()
        self._check_announced()
        self._wanted, self._opened_at = wanted, self._rank._now()
        try:
            self._rank._grant_pages(self.room, self._generation, wanted)
        except KvflowError:
            self._wanted = None
            raise

    def _check_announced(self) -> None:
        if not self.is_announced:
            raise LocalProtocolError("transfer already has pages", room=self.room)

    async def done(self) -> Handover:
        """Wait until all pages have been received.

        Raises:
            TransferFailed: The transfer failed; raised as soon as that is known. The pages may still be in use until
                the block exits; check `memory`.
        """
        await self._wait_until_decided()
        return self._take_handover()

    def _take_handover(self) -> Handover:
        """Return the result of a transfer that has succeeded, and note when the engine had it. Works in any thread."""
        handover = self.handover
        if handover is None:
            raise LocalProtocolError("transfer has no result", room=self.room, outcome=self.outcome.value)
        timeline = handover.timeline
        if timeline is not None and timeline.noticed_at is None:
            now = self._rank._now()
            self.handover = handover = replace(handover, timeline=timeline._replace(noticed_at=now))
            self._rank._totals.noticed_s.append(now - timeline.complete_at)
        return handover

    def _note_received(self, received: ef.ReceivedRoom) -> Handover:
        """Set `handover` from the core's report of a complete transfer, and return it."""
        first = min(received.metadata, default=None)
        now = self._rank._now()
        self.handover = handover = Handover(
            metadata=b"" if first is None else received.metadata[first],
            metadata_by_rank=received.metadata,
            num_bytes=received.num_bytes,
            num_notices=received.num_notices,
            elapsed_s=now - self._opened_at,
            first_notice_s=received.first_notice_at - self._opened_at,
            timeline=None if received.last is None else Timeline(self._opened_at, received.last, now),
        )
        return handover

    @override
    def _log_line(self) -> TransferLine:
        held = NO_MEMORY if self._wanted is None else self._wanted.footprint
        return TransferLine(
            role="receive",
            room=self.room,
            outcome=self.outcome,
            prefill=str(self._opened.instance),
            num_bytes=None if self.handover is None else self.handover.num_bytes,
            num_pages=held.num_pages,
            page_bytes=held.num_bytes,
            elapsed_s=self._elapsed_s,
            failure=self.failure,
            label=self.label,
            breakdown=None if self.handover is None else self.handover.breakdown,
        )

    @override
    def _open_room(self) -> None:
        self._generation = self._rank._open_receiver(self, self._opened, self._wanted)

    async def __aenter__(self) -> Self:
        if self._wanted is not None and self._wanted.footprint.num_pages > MANY_PAGES:
            await anyio.lowlevel.cancel_shielded_checkpoint()  # checking and holding them takes 20 ms each for millions
        self._open_room()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._rank._check_loop()
        await self._wait_until_settled()
        if exc is None:
            self._raise_if_untold()

    @override
    def _report_abort(self, failure: Failure) -> None:
        self._rank._dispatch(ev.ReceiveAborted(self.room, failure))

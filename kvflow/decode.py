"""The service that an engine's decode worker embeds."""

import asyncio
import hashlib
import itertools
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from types import TracebackType

import msgspec
from typing_extensions import Self, override

from kvflow.aio.clock import now
from kvflow.backends.base import Backend, BackendEvent, NoticeArrived
from kvflow.config import DecodeConfig, check_count, check_duration, check_priority
from kvflow.errors import ConfigError, FailureReason, LocalProtocolError, PlanError, Stage
from kvflow.geometry.layout import KVLayout
from kvflow.geometry.pages import WIRE_PAGES, Pages, Part, check_parts, spell_out
from kvflow.geometry.tokens import TokenRange
from kvflow.rank import Rank
from kvflow.registry import RegistryClient
from kvflow.stages.aggregate import Aggregate
from kvflow.stages.digests import OwnMemory, check_digestible
from kvflow.stages.greeting import DecodeBootstrap
from kvflow.stages.scatter import Scatter
from kvflow.stages.verify import Verify
from kvflow.state import effects as ef
from kvflow.state import events as ev
from kvflow.state.effects import Handed
from kvflow.state.staging import StagingArea
from kvflow.state.tables import Memory, Outcome
from kvflow.statistics import StagingStatistics
from kvflow.transfer import Transfer, check_instance, check_room
from kvflow.wire.messages import Message, Notice, PeerId, Received

__all__ = ["DecodeRank", "Handover", "RoomReceiver"]

SECRET_BYTES = 16


@dataclass(frozen=True)
class Handover:
    """What a complete transfer brought.

    Attributes:
        metadata: From the prefill engine: that of the lowest engine rank that sent any; empty if none did.
        metadata_by_rank: All of it.
        num_bytes: Bytes written into this rank's pages.
        num_notices: Chunks they came in, over all prefill ranks.
        elapsed_s: From the start of the receive to the last notice.
        first_notice_s: From the start to the first notice.
    """

    metadata: bytes
    metadata_by_rank: Mapping[int, bytes]
    num_bytes: int
    num_notices: int
    elapsed_s: float
    first_notice_s: float


class DecodeRank(Rank["RoomReceiver"]):
    """Receives the KV cache of rooms from prefill instances. Use it as an async context manager.

    Args:
        config: Settings.
        layout: The pools to receive into; they must stay allocated until the rank is closed.
        backend: A transport to use instead of the one that the settings name.

    Raises:
        ConfigError: The backend is not known, the settings ask for digests of device memory, or the device has no
            memory left for `staging_bytes`.
        BackendUnavailable: The transport's library is missing or broken.
        RegistrationError: The transport does not take the memory.
    """

    def __init__(self, config: DecodeConfig, layout: KVLayout, backend: Backend | None = None) -> None:
        if config.digest_every and layout.memory_kind != "DRAM":
            raise ConfigError(
                "digests need host memory", digest_every=config.digest_every, memory_kind=layout.memory_kind
            )
        self._staging_slots = config.staging_slots
        super().__init__(config, layout, backend)
        self._digest_every = config.digest_every
        self._generations = itertools.count(1)
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._put_off: list[tuple[PeerId, Message]] = []
        self._is_watching = False

    def receive(  # noqa: PLR0913 - each one is a choice of the engine, by name
        self,
        room: int,
        *,
        prefill: str,
        tokens: TokenRange,
        pages: Mapping[str, Pages],
        num_ranks: int | None = None,
        timeout_s: float | None = None,
        digest: bool | None = None,
        priority: int = 0,
    ) -> "RoomReceiver":
        """Start to receive a room; use the result as an async context manager.

        Leaving the block, by any way, means that no write can reach the pages any more (or `memory` says that they
        are quarantined).

        Args:
            room: The router's id of the request, the same on both sides.
            prefill: Name of the instance that computes it.
            tokens: Positions `[start, stop)` that are wanted; `start` is past a prefix that this side has already,
                and `(n, n)` asks for the metadata only.
            pages: For each component of the layout, the pool pages to write `tokens` to: one for each page-sized
                block that the range touches. A `Part` asks for other tokens (a window); for a component of kind
                "slot", the one slot; None says that a component is not wanted.
            num_ranks: Decode ranks that receive this room; all ranks of this instance by default.
            timeout_s: How long the whole transfer may take; from the settings by default.
            digest: Compare what has arrived with digests of what was sent before it counts as complete; a difference
                fails the transfer with the reason `corrupt`. As the settings say (`digest_every`) by default.
            priority: Class of the transfer on every prefill rank, 0 (first) to 7 (last): where chunks wait
                for this rank, those of a lower number go first. Waiting lifts a chunk by one class after each
                `Timeouts.ageing_s` of the prefill rank.

        Raises:
            PlanError: A page table does not fit the pool or the tokens, or digests are wanted of device memory.
            ConfigError: `num_ranks`, `timeout_s` or `priority` is out of range.
            LocalProtocolError: On entry: the room is being received already, or the rank is not open.
            CapacityExceeded: On entry: too many rooms are open, or too much memory is in quarantine.
            RankDraining: On entry: the rank is about to close.
            TransferFailed: On exit: the transfer failed, and nobody has been told by `done`.
        """
        parts = self._wanted(tokens, pages, digest=bool(digest))
        tables = check_parts(parts, self.layout, distinct=True)
        timeout_s = self.config.timeouts.transfer_s if timeout_s is None else timeout_s
        check_duration("timeout_s", timeout_s)
        num_ranks = check_count("num_ranks", self.config.num_ranks if num_ranks is None else num_ranks)
        wish = ev.ReceiveOpened(
            room=check_room(room),
            generation=0,
            instance=check_instance(prefill),
            ranges={name: part.tokens for name, part in parts.items()},
            pages={name: table.pages.astype(WIRE_PAGES, copy=False).tobytes() for name, table in tables.items()},
            num_decode_ranks=num_ranks,
            timeout_s=timeout_s,
            secret=b"",
            footprint=self.footprint(tables),
            priority=check_priority("priority", priority),
        )
        return RoomReceiver(self, wish, digest)

    def _wanted(self, tokens: TokenRange, pages: Mapping[str, Pages], *, digest: bool) -> dict[str, Part]:
        if digest:
            check_digestible(self.layout)
        if not pages.keys() >= self.layout.by_name.keys():
            unsaid = [name for name in self.layout.by_name if name not in pages]
            raise PlanError("pages must be given for each component, or None", missing=unsaid, given=sorted(pages))
        parts = spell_out(pages, self.layout, tokens)
        if not parts:
            raise PlanError("nothing is wanted", components=sorted(pages))
        return parts

    def next_generation(self) -> int:
        """A number that no transfer of this life has had."""
        return next(self._generations)

    def secret(self, generation: int) -> bytes:
        """Derive the secret of a transfer; asking the system for random bytes each time takes many times as long."""
        return hashlib.blake2b(generation.to_bytes(8, "little"), key=self._secret, digest_size=SECRET_BYTES).digest()

    def is_sampled(self, generation: int) -> bool:
        """Say whether the settings want digests for a transfer."""
        return bool(self._digest_every) and generation % self._digest_every == 0

    def _open(self) -> None:
        self._registry = self._resources.enter_context(closing(RegistryClient(self.config.registry, self._log)))
        self._bootstrap = DecodeBootstrap(
            self._context,
            self.layout,
            self._backend,
            self._registry.lookup,
            self._on_message,
            staging=self._core.staging,
        )
        self._aggregate = Aggregate(self._context, self._note)
        self._scatter = Scatter(self._context, self.layout, self._backend.view, self._staging)
        self._verify = Verify(self._context, OwnMemory(self.layout, self._backend.view))

    def _staging_statistics(self) -> StagingStatistics:
        area = self._core.staging
        if area is None:
            return StagingStatistics()
        return StagingStatistics(windows_taken=area.num_taken, windows_free=area.num_windows - area.num_taken)

    def _staging_area(self) -> StagingArea | None:
        if self._staging is None:
            return None
        return self._staging.area(slot_bytes=self.config.staging_slot_bytes, num_slots=self._staging_slots)

    def _runners(self) -> list[Callable[[], Awaitable[None]]]:
        return [self._registry.run]

    def _carry_out(self, effect: ef.Effect) -> None:
        match effect:
            case ef.GreetInstance(instance):
                self._bootstrap.greet(instance)
            case ef.ProbePeer(peer):
                self._bootstrap.probe(peer)
            case ef.ScatterStaged():
                self._scatter.start(effect)
            case ef.VerifyDigests():
                self._verify.start(effect)
            case ef.ReportReceiver():
                self._finish(effect)

    def _finish(self, effect: ef.ReportReceiver) -> None:
        if effect.outcome is not Outcome.PENDING:
            self._verify.stop(effect.generation)
        receiver = self._transfers.get(effect.generation)
        if receiver is not None and effect.handed is not None:
            receiver.hand(effect.handed)
            self._times.add(Stage.AGGREGATE, receiver.notices_s)
        if effect.memory is Memory.SAFE:
            self._scatter.drop(effect.generation)
        self._report(effect.generation, effect)

    def _send(self, peer: PeerId, message: Message) -> None:
        """Send at once; but the engine, which has just been told of a success, goes on before Received is sent."""
        if isinstance(message, Received):
            if not self._put_off:
                asyncio.get_running_loop().call_soon(self._send_put_off)
            self._put_off.append((peer, message))
            return
        self._send_put_off()
        self._bootstrap.send(peer, message)

    def _send_put_off(self) -> None:
        put_off, self._put_off = self._put_off, []
        for peer, message in put_off:
            self._bootstrap.send(peer, message)

    def _forget(self, peer: PeerId) -> None:
        self._bootstrap.forget(peer)

    def _on_message(self, peer: PeerId, message: Message) -> None:
        if isinstance(message, Notice):
            self._note(message)
        self.dispatch(ev.MessageReceived(peer, message))

    def _note(self, notice: Notice) -> None:
        receiver = self._transfers.get(notice.generation)
        if receiver is not None:
            receiver.note_notice()

    def _after_dispatch(self) -> None:
        """Let the transport poll sharply while somebody may write here."""
        is_watching = bool(self._core.receivers.rooms)
        if is_watching != self._is_watching:
            self._is_watching = is_watching
            self._backend.watch(active=is_watching)

    def _take_backend_event(self, event: BackendEvent) -> None:
        if isinstance(event, NoticeArrived):
            self._aggregate.take(event.payload)
        else:
            self._ignore("post_on_decode_rank")


class RoomReceiver(Transfer):
    """One room, as the decode engine receives it. Made by `DecodeRank.receive`."""

    __slots__ = ("_digest", "_handover", "_is_told", "_notices_at", "_num_noted", "_opened_at", "_rank", "_wish")

    def __init__(self, rank: DecodeRank, wish: ev.ReceiveOpened, digest: bool | None) -> None:
        super().__init__(wish.room)
        self._rank = rank
        self._wish = wish
        self._digest = digest
        self._opened_at = 0.0
        self._notices_at = (0.0, 0.0)
        self._num_noted = 0
        self._handover: Handover | None = None
        self._is_told = False

    @property
    def notices_s(self) -> float:
        """Time from the first notice to the last so far."""
        return self._notices_at[1] - self._notices_at[0]

    async def done(self) -> Handover:
        """Wait until the pages are complete.

        Raises:
            TransferFailed: They never will be. The pages are not quiet before the block is left.
        """
        self._check_begun()
        await self._decided.wait()
        self._is_told = True
        self._raise_if_failed()
        if self._handover is None:
            raise LocalProtocolError("transfer has no result", room=self.room, outcome=self.outcome.value)
        return self._handover

    def note_notice(self) -> None:
        """Remember when notices came."""
        at = now()
        self._notices_at = (self._notices_at[0] if self._num_noted else at, at)
        self._num_noted += 1

    def hand(self, handed: Handed) -> None:
        """Take in what the core says a complete transfer brought."""
        first = min(handed.metadata, default=None)
        self._handover = Handover(
            metadata=b"" if first is None else handed.metadata[first],
            metadata_by_rank=handed.metadata,
            num_bytes=handed.num_bytes,
            num_notices=handed.num_notices,
            elapsed_s=now() - self._opened_at,
            first_notice_s=self._notices_at[0] - self._opened_at,
        )

    @property
    def handover(self) -> Handover | None:
        """What it has brought, once it is a success."""
        return self._handover

    @override
    def open(self) -> None:
        self._opened_at = now()
        generation = self._rank.next_generation()
        digest = self._rank.is_sampled(generation) if self._digest is None else self._digest
        secret = self._rank.secret(generation)
        self._wish = msgspec.structs.replace(self._wish, generation=generation, digest=digest, secret=secret)
        self._rank.open_transfer(generation, self, self._wish)

    async def __aenter__(self) -> Self:
        self.open()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        is_news = self._decided.is_set and not self._is_told
        await self._end(exc)
        if exc is None and is_news:
            self._raise_if_failed()

    def _abort(self) -> None:
        detail = "the decode engine left the room before it was complete"
        self._rank.dispatch(ev.ReceiveAborted(self.room, self._rank.failure(FailureReason.ABORTED, detail)))

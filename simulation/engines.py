"""Toy engines: schedulers that use kvflow's public API, with pools that can run full.

Each worker is a process with one rank. As in a real engine, each request is a task: it takes pages, lets kvflow move
them, and returns the pages when they are safe.
"""

import asyncio
import functools
import itertools
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import anyio

from kvflow.backends.base import Backend
from kvflow.backends.shared import SharedBackend
from kvflow.config import DecodeConfig, PrefillConfig
from kvflow.decode import DecodeRank
from kvflow.errors import (
    CapacityExceeded,
    LocalProtocolError,
    PagesInUse,
    RankBroken,
    RankDraining,
    TransferFailed,
)
from kvflow.geometry.pages import pages_spanned
from kvflow.geometry.ranges import ALL_LAYERS, LayerRange, TokenRange
from kvflow.prefill import PrefillRank
from kvflow.state.events import LayersReady
from kvflow.state.tables import Memory, Outcome
from kvflow.wire.messages import RankId
from simulation.loop import NotYet, Process
from simulation.memory import Lease, Pool
from simulation.model import KV, STATE
from simulation.requests import Receiving, Request, Sending

if TYPE_CHECKING:
    from simulation.deployment import Deployment
    from simulation.offers import Offers

__all__ = [
    "POLL_S",
    "REFUSALS",
    "Announcing",
    "Course",
    "DecodeWorker",
    "DeviceEvent",
    "Preemption",
    "PrefillWorker",
    "Worker",
    "cancelled_at",
]

POLL_S: Final = 0.02
"""How often a worker looks for free pages, and checks whether pages that it could not return are safe by now."""

PARTNER_S: Final = 1.0
"""Maximum delay between the exits of the two workers in one process."""

REUSING_ROOM: Final = 2**62
"""Room of receives that are meant to be refused."""

REFUSALS: Final = (TransferFailed, LocalProtocolError, CapacityExceeded, RankDraining, RankBroken, TimeoutError)
"""Errors by which kvflow reports a failed request, or by which an engine gives one up."""

OnEnd = Callable[[bool], None]

AnyRoom = TypeVar("AnyRoom", Sending, Receiving)


class DeviceEvent:
    """An event of a simulated device, set once when it has computed something.

    `synchronize` waits as a thread would.
    """

    def __init__(self) -> None:
        self._has_happened = False
        self._waiting: list[Callable[[], object]] = []

    def happen(self) -> None:
        """Set the event."""
        self._has_happened = True
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()

    def synchronize(self) -> None:
        """Wait until the event is set."""
        if not self._has_happened:
            raise NotYet(self._waiting.append)


class Preemption(NamedTuple):
    """When an engine preempts a request.

    Attributes:
        chunk: Number of the chunk after which it preempts.
        after_s: Delay after that chunk.
        rest_s: How long other requests may use the pages.
    """

    chunk: int
    after_s: float
    rest_s: float


class Announcing(NamedTuple):
    """How a decode engine gets pages for a room that it announces.

    Attributes:
        after_s: Delay between the announcement and the search for pages; None if it never looks for any.
        is_hasty: Before it looks for pages, it grants those of another transfer.
    """

    after_s: float | None
    is_hasty: bool = False


class Course(NamedTuple):
    """How a worker handles a request.

    Attributes:
        cuts: Where the chunks of a prefill end; the last may be empty, and None means that prefill hangs there.
        pauses: For each chunk that is offered before it is computed: where groups of layers end, and how long the
            device takes for each.
        preemption: When the engine preempts the request; None if it does not.
        announcing: How a decode engine gets pages if it announces the request first.
        pace_s: How long the computation of a chunk takes.
        wait_s: How long the worker tries to start the request.
        give_up_s: How long after the start it gives the request up.
        abort_s: When it aborts the request; None if it does not.
        aborts_at_bytes: Whether `abort_s` counts from the first bytes of the request, not from its start.
        cancel_at: Number of the await point at which the task is cancelled; None if it is not.
    """

    cuts: tuple[int | None, ...] = ()
    pauses: tuple[tuple[tuple[int, float], ...], ...] = ()
    preemption: Preemption | None = None
    announcing: Announcing | None = None
    pace_s: float = 0.0
    wait_s: float = 1.0
    give_up_s: float = 60.0
    abort_s: float | None = None
    aborts_at_bytes: bool = False
    cancel_at: int | None = None


class Worker:
    """One rank in a process.

    Args:
        deployment: The deployment that it belongs to.
        rank: Its instance and number.
        process: The process that it runs in.
        pool: Its memory.
        host: The worker of the other role in the same process, whose pool and transport it shares; None if it has a
            process of its own, or is the host itself.

    Attributes:
        rank: kvflow's rank, once it is ready.
        transfers: Transfers whose pages it holds.
        tasks: The task that serves each request.
        is_ready: Its rank is open.
    """

    rank: PrefillRank | DecodeRank

    def __init__(
        self, deployment: "Deployment", rank: RankId, process: Process, pool: Pool, host: "Worker | None" = None
    ) -> None:
        self.deployment = deployment
        self.world = deployment.world
        self.oracle = deployment.oracle
        self.rank_id = rank
        self.process = process
        self.pool = pool
        self.partner = host
        if host is None:
            self.backend = self.world.backend(process, {pool.table.base: pool.memory})
            self.shared = SharedBackend(lambda: self.backend, close_timeout_s=POLL_S)
        else:
            self.backend, self.shared, host.partner = host.backend, host.shared, self
        self.transfers: dict[Sending | Receiving, None] = {}
        self.tasks: dict[Request, asyncio.Task[None]] = {}
        self.is_ready = False
        self.is_leaving = False
        self._parked: dict[Sending | Receiving, None] = {}
        self._closing = anyio.Event()
        self._drain_s = 0.0
        self._lives_on = False
        self._on_ends: dict[OnEnd, None] = {}

    def close(self, drain_s: float = 0.0, *, lives_on: bool = False) -> None:
        """Close the rank, after a drain of up to `drain_s`. Call it in the process, which then ends unless it lives on.

        The other worker in the process closes somewhat later.
        """
        if self.is_leaving:
            return
        self.is_leaving = True
        self._drain_s = drain_s
        self._lives_on = lives_on
        self._closing.set()
        if self.partner is not None:
            after_s = PARTNER_S * self.world.rng.random()
            leave = functools.partial(self.partner.close, drain_s, lives_on=lives_on)
            self.world.loop.call_in(after_s, self.process.call, leave)

    @property
    def transport(self) -> Backend | SharedBackend:
        """The transport that its rank writes through."""
        return self.backend if self.partner is None else self.shared

    def submit(self, request: Request, course: Course, on_end: OnEnd, after_s: float) -> None:
        """Start a request in a task of its own.

        Args:
            request: The request.
            course: How to handle it.
            on_end: Called once with whether it succeeded, even if the process ends before it starts.
            after_s: Delay until the request arrives here.
        """
        if not self.process.is_alive:
            on_end(False)
            return
        self._on_ends[on_end] = None
        self.world.loop.call_in(after_s, self.process.call, self._start, request, course, on_end)

    def _start(self, request: Request, course: Course, on_end: OnEnd) -> None:
        if not self.is_ready:
            self._answer(on_end, has_succeeded=False)
            return
        task = self.tasks[request] = self.process.spawn(self._serve(request, course, on_end))
        if course.abort_s is not None:
            abort_s = course.abort_s

            def abort() -> None:
                self.world.loop.call_in(abort_s, self.process.call, task.cancel)

            if course.aborts_at_bytes:
                self.oracle.at_bytes(self.process, request.room, abort)
            else:
                abort()

    def abort(self, request: Request) -> None:
        """Abort a request, if it is being served."""
        task = self.tasks.get(request)
        if task is not None:
            self.process.call(task.cancel)

    def fail_requests(self) -> None:
        """Report every unanswered request to the router as failed."""
        for on_end in list(self._on_ends):
            self._answer(on_end, has_succeeded=False)

    def _answer(self, on_end: OnEnd, *, has_succeeded: bool) -> None:
        if on_end in self._on_ends:
            del self._on_ends[on_end]
            on_end(has_succeeded)

    async def _serve(self, request: Request, course: Course, on_end: OnEnd) -> None:
        has_succeeded = False
        serving = self.serve(request, course)
        try:
            if course.cancel_at is None:
                has_succeeded = await serving
            else:
                has_succeeded = await cancelled_at(serving, course.cancel_at)
        except asyncio.CancelledError:  # a cancelled task that nothing awaits
            self.world.tell(f"{request} on {self.rank_id}: the engine's task was cancelled")
        finally:
            self.tasks.pop(request, None)
            self._answer(on_end, has_succeeded=has_succeeded)

    async def serve(self, request: Request, course: Course) -> bool:
        """Serve a request, and return whether it succeeded."""
        raise NotImplementedError

    async def _run(self, rank: PrefillRank | DecodeRank) -> None:
        """Serve until `close` is called."""
        async with rank:
            self.rank = rank
            self.is_ready = True
            if isinstance(rank, PrefillRank) and self.deployment.offers is not None:
                self.process.spawn(self._take_offers(rank, self.deployment.offers))
            await self._closing.wait()
            if self._drain_s:
                await rank.drain(self._drain_s)
        if self._lives_on:
            await anyio.sleep_forever()

    async def _take_offers(self, rank: PrefillRank, offers: "Offers") -> None:
        with suppress(LocalProtocolError, RankBroken):  # the rank is closed or broken
            while True:
                offers.decide(await rank.offers.wait_for_offer())

    async def _carry_out(
        self, prepare: Callable[[], AnyRoom | None], move: Callable[[AnyRoom], Awaitable[None]], wait_s: float
    ) -> bool:
        """Move the pages of a request, and return whether it succeeded.

        Args:
            prepare: Takes pages; returns None if there are not enough.
            move: Sends or receives, once kvflow has opened the room.
            wait_s: How long to wait for pages: a full pool empties when other requests end.
        """
        one = prepare()
        with anyio.move_on_after(wait_s):
            while one is None:
                await anyio.sleep(POLL_S)
                one = prepare()
        if one is None:
            return False
        try:
            async with one.transfer:
                self.begin(one)
                await move(one)
        except REFUSALS as error:
            self._refused(one, error)
        finally:
            self.end(one)
        return one.outcome is Outcome.SUCCESS

    def _take(self, request: Request, counts: Mapping[str, int]) -> Lease | None:
        for one in list(self._parked):
            self._give_back(one)
        return self.pool.take(f"{request} on {self.rank_id}", request.room, counts)

    def begin(self, one: Sending | Receiving) -> None:
        """Record that kvflow has opened a room."""
        self.transfers[one] = None
        self.oracle.opened(one)
        if self.world.story is not None:
            self.world.tell(f"{one} begins")

    def _refused(self, one: Sending | Receiving, error: Exception) -> None:
        """Record why a request failed; close a broken rank."""
        self.world.tell(f"{one}: {type(error).__name__}: {error}")
        if isinstance(error, RankBroken):
            self.close()

    def end(self, one: Sending | Receiving) -> None:
        """Return pages that are safe; check the others again later."""
        if one not in self.transfers:  # it was refused, so the rank never used the pages
            self.pool.give_back(one.lease)
            return
        if isinstance(one, Receiving):
            self.oracle.check_announced(one)
        else:
            self.oracle.check_not_lost(one)
        if self.world.story is not None:
            reason = "" if one.failure is None else f" ({one.failure.reason.value}: {one.failure.detail})"
            self.world.tell(f"{one} ENDS {one.outcome.value}, memory {one.memory.value}{reason}")
        if one.outcome is Outcome.SUCCESS:
            if isinstance(one, Receiving):
                self.oracle.check_success(one)
            else:
                self.oracle.check_delivered(one)
        if not self._give_back(one) and self.process.is_alive:
            self._parked[one] = None
            self.process.spawn(self._give_back_later(one))

    def _give_back(self, one: Sending | Receiving) -> bool:
        if one.memory is not Memory.SAFE:
            return False
        if one in self.transfers:
            del self.transfers[one]
            self._parked.pop(one, None)
            self.pool.give_back(one.lease)
        return True

    async def _give_back_later(self, one: Sending | Receiving) -> None:
        while not self._give_back(one):  # noqa: ASYNC110 - a transfer does not notify when its memory changes
            await anyio.sleep(POLL_S)


class PrefillWorker(Worker):
    """A worker of a prefill instance."""

    rank: PrefillRank

    @property
    def gives_tickets(self) -> bool:
        """The rank is open and not broken."""
        return self.is_ready and self.process.is_alive and not self.is_leaving and self.rank._is_usable

    async def run(self, config: PrefillConfig) -> None:
        """Serve until `close` is called."""
        layout = self.pool.table.layout
        await self._run(PrefillRank(config, layout, self.transport, ports=self.world.ports(self.process)))

    def prepare(self, request: Request) -> Sending | None:
        """Take pages for a request; return None if there are not enough."""
        lease = self._take_pages(request)
        if lease is None:
            return None
        sender = self.rank.send(request.room, background=request.is_background)
        return Sending(request, self.process, self.rank_id, self.pool, lease, sender, self.world.now)

    def _take_pages(self, request: Request) -> Lease | None:
        size = self.pool.table.layout.component(KV).tokens_per_slot
        counts = {KV: pages_spanned((0, request.num_tokens), size)}
        if STATE in self.pool.table.first_page:
            counts[STATE] = 1
        return self._take(request, counts)

    async def serve(self, request: Request, course: Course) -> bool:
        """Compute a request chunk by chunk, and send it."""
        return await self._carry_out(lambda: self.prepare(request), lambda one: self._send(one, course), course.wait_s)

    async def _send(self, one: Sending, course: Course) -> None:
        try:
            with anyio.fail_after(course.give_up_s):
                await self._send_chunks(one, course)
        except BaseException:
            self.oracle.left(one)
            raise

    async def _send_chunks(self, one: Sending, course: Course) -> None:
        pauses: tuple[tuple[tuple[int, float], ...], ...] = course.pauses or ((),) * len(course.cuts)
        last = len(course.cuts) - 1
        for number, (stop, groups) in enumerate(zip(course.cuts, pauses, strict=True)):
            await anyio.sleep(course.pace_s)
            if stop is None:
                await anyio.sleep_forever()
            elif stop > one.position or number == last:
                await self.chunk(one, stop, is_last=number == last, pauses=groups)
            if course.preemption is not None and course.preemption.chunk == number:
                await anyio.sleep(course.preemption.after_s)
                goes_on = await self.preempt(one, course.preemption.rest_s)
                if goes_on and number == last:
                    await self.chunk(one, one.request.num_tokens, is_last=True)

    async def preempt(self, one: Sending, rest_s: float = 0.0) -> bool:
        """Take the pages of a request back and overwrite them; recompute the same tokens in other pages.

        Args:
            one: The preempted transfer.
            rest_s: How long other requests may use the pages.

        Returns:
            Whether tokens remain to be offered, for the first time or again.
        """
        resume_at = await one.transfer.quiesce()
        self.world.tell(f"{one} is preempted and goes on at {resume_at}")
        self.pool.give_back(one.lease)
        one.lease = self.pool.nothing(one.lease.name, one.request.room)
        if resume_at is None:
            self.oracle.finished(one)
            return False
        if rest_s:
            await anyio.sleep(rest_s)
        lease = self._take_pages(one.request)
        while lease is None:
            await anyio.sleep(POLL_S)
            lease = self._take_pages(one.request)
        one.lease, one.position = lease, resume_at
        self._compute_layers(one, {KV: (0, resume_at)}, ALL_LAYERS)
        return True

    async def chunk(self, one: Sending, stop: int, *, is_last: bool, pauses: Sequence[tuple[int, float]] = ()) -> None:
        """Compute tokens up to `stop` and send them.

        Args:
            one: The transfer.
            stop: Where the chunk ends.
            is_last: No chunk follows.
            pauses: If the chunk is offered before it is computed: where groups of layers end, and how long the device
                takes for each.
        """
        tokens = (one.position, stop)
        size = self.pool.table.layout.component(KV).tokens_per_slot
        slots = one.lease.pages[KV][tokens[0] // size : -(-stop // size)] if tokens[0] < stop else ()
        pages: dict[str, Any] = {KV: list(slots)}
        ranges = {KV: tokens}
        if is_last and STATE in one.lease.pages:
            pages[STATE] = list(one.lease.pages[STATE])
            ranges[STATE] = (0, 1)
        one.position = stop
        layers = self._compute(one, ranges, pauses)
        if is_last:
            self.oracle.finished(one)
            await one.transfer.finish(tokens, pages, metadata=one.request.metadata, layers=layers)
        else:
            await one.transfer.chunk(tokens, pages, layers=layers)

    def _compute(
        self, one: Sending, ranges: Mapping[str, TokenRange], pauses: Sequence[tuple[int, float]]
    ) -> tuple[LayersReady, ...]:
        """Compute now or, if there are pauses, one group of layers after another.

        The last group has all remaining layers.
        """
        if not pauses:
            self._compute_layers(one, ranges, ALL_LAYERS)
            return ()
        groups = []
        start, after_s = 0, 0.0
        for number, (stop, pause_s) in enumerate(pauses):
            layers = (start, stop if number < len(pauses) - 1 else None)
            event = DeviceEvent()
            groups.append(LayersReady(stop, event))
            start, after_s = stop, after_s + pause_s
            self.world.loop.call_in(after_s, self._finish_layers, one, one.lease, dict(ranges), layers, event)
        return tuple(groups)

    def _finish_layers(
        self, one: Sending, lease: Lease, ranges: Mapping[str, TokenRange], layers: LayerRange, event: DeviceEvent
    ) -> None:
        if not lease.is_free and self.process.is_alive:
            self._compute_layers(one, ranges, layers)
        event.happen()

    def _compute_layers(self, one: Sending, ranges: Mapping[str, TokenRange], layers: LayerRange) -> None:
        for name, tokens in ranges.items():
            self.pool.compute(one.lease, name, tokens, one.request.content, layers)


class DecodeWorker(Worker):
    """A worker of a decode instance.

    Attributes:
        num_refused: How often kvflow refused it pages that another transfer still needs.
    """

    rank: DecodeRank
    num_refused = 0

    async def run(self, config: DecodeConfig) -> None:
        """Serve until `close` is called."""
        layout = self.pool.table.layout
        await self._run(DecodeRank(config, layout, self.transport, ports=self.world.ports(self.process)))

    def reuse_too_early(self) -> None:
        """Receive into pages that another transfer still needs, as a buggy engine does; kvflow must refuse it."""
        one = self._find_reusable()
        if one is None:
            return
        another = self.rank.receive(
            REUSING_ROOM,
            prefill=_prefill_of(one.request),
            tokens=_tokens_of(one.request),
            pages=self._page_lists(one.lease, one.ranges),
        )
        self._reuse(one, another._open_room)

    def _find_reusable(self) -> Receiving | None:
        return next((one for one in self.transfers if isinstance(one, Receiving) and _is_reusable(one)), None)

    def _reuse(self, one: Receiving, begin: Callable[[], object]) -> None:
        """Start something in the pages of another transfer; kvflow must refuse it."""
        try:
            begin()
        except PagesInUse as refusal:
            self.num_refused += 1
            self.oracle.check_refused(one, refusal)
        except REFUSALS:  # for a reason that is checked before the pages
            return
        else:
            self.oracle.check_refused(one, None)

    def _page_lists(self, lease: Lease, ranges: Mapping[str, TokenRange]) -> dict[str, Any]:
        return {name: list(lease.pages[name]) if name in ranges else None for name in self.pool.table.first_page}

    def _take_ranges(self, request: Request) -> tuple[Lease | None, dict[str, TokenRange]]:
        """Take pages for the tokens and states that a request wants; return them, or None, and these ranges."""
        ranges = {KV: _tokens_of(request)}
        counts = {KV: pages_spanned(ranges[KV], self.pool.table.layout.component(KV).tokens_per_slot)}
        if STATE in self.pool.table.first_page and request.wants_state:
            ranges[STATE] = (0, 1)
            counts[STATE] = 1
        return self._take(request, counts), ranges

    def prepare(self, request: Request, timeout_s: float | None = None) -> Receiving | None:
        """Take pages for a request; return None if there are not enough."""
        self.reuse_too_early()
        lease, ranges = self._take_ranges(request)
        if lease is None:
            return None
        timeout_s = self.deployment.timeouts.transfer_s if timeout_s is None else timeout_s
        receiver = self.rank.receive(
            request.room,
            prefill=_prefill_of(request),
            tokens=_tokens_of(request),
            pages=self._page_lists(lease, ranges),
            num_ranks=request.num_decode_ranks,
            timeout_s=timeout_s,
            digest=request.digest,
            priority=request.priority,
        )
        at = self.world.now
        return Receiving(
            request, self.process, self.rank_id, self.pool, lease, receiver, at, timeout_s=timeout_s, ranges=ranges
        )

    def announce(self, request: Request, timeout_s: float | None = None) -> Receiving:
        """Announce a request, without pages."""
        timeout_s = self.deployment.announced_s if timeout_s is None else timeout_s
        receiver = self.rank.announce(
            request.room,
            prefill=_prefill_of(request),
            num_ranks=request.num_decode_ranks,
            timeout_s=timeout_s,
            priority=request.priority,
        )
        lease = self.pool.nothing(f"{request} on {self.rank_id}", request.room)
        at = self.world.now
        return Receiving(
            request,
            self.process,
            self.rank_id,
            self.pool,
            lease,
            receiver,
            at,
            timeout_s=timeout_s,
            is_announced=True,
            announced_at=at,
        )

    def grant(self, one: Receiving, *, is_hasty: bool = False) -> bool:
        """Allocate pages for an announced request, and grant them.

        Args:
            one: The announced transfer.
            is_hasty: Grant the pages of another transfer first, as a buggy engine does; kvflow must refuse it.

        Returns:
            Whether the attempt is complete, granted or refused; False if there are no pages yet.
        """
        if is_hasty and (other := self._find_reusable()) is not None:
            tokens, pages = _tokens_of(other.request), self._page_lists(other.lease, other.ranges)
            self._reuse(other, lambda: one.transfer.grant(tokens=tokens, pages=pages))
        lease, ranges = self._take_ranges(one.request)
        if lease is None:
            return False
        timeout_s = self.deployment.timeouts.transfer_s
        try:
            one.transfer.grant(
                tokens=_tokens_of(one.request),
                pages=self._page_lists(lease, ranges),
                digest=one.request.digest,
                timeout_s=timeout_s,
            )
        except CapacityExceeded:
            self.pool.give_back(lease)
            return False
        except REFUSALS as error:
            self.pool.give_back(lease)
            self.world.tell(f"{one} gets no pages: {type(error).__name__}: {error}")
            return True
        one.lease, one.ranges, one.timeout_s, one.is_announced = lease, ranges, timeout_s, False
        self.world.tell(f"{one} has pages")
        self.oracle.granted(one)
        return True

    def _grant_in_time(self, one: Receiving, *, is_hasty: bool) -> None:
        """Grant pages as soon as there are some, unless the engine has left the transfer by then."""
        if not one.is_told and not self.grant(one, is_hasty=is_hasty):
            again = functools.partial(self._grant_in_time, one, is_hasty=is_hasty)
            self.world.loop.call_in(POLL_S, self.process.call, again)

    async def _receive_announced(self, one: Receiving, announcing: Announcing) -> None:
        if announcing.after_s is not None:
            grant = functools.partial(self._grant_in_time, one, is_hasty=announcing.is_hasty)
            self.world.loop.call_in(announcing.after_s, self.process.call, grant)
        await self.receive(one)

    async def serve(self, request: Request, course: Course) -> bool:
        """Receive a request, after announcing it if its course says so."""
        announcing = course.announcing
        if announcing is None:
            return await self._carry_out(lambda: self.prepare(request), self.receive, course.wait_s)
        return await self._carry_out(
            lambda: self.announce(request), lambda one: self._receive_announced(one, announcing), course.wait_s
        )

    async def receive(self, one: Receiving) -> None:
        """Wait until a room has been received, and check its contents."""
        try:
            handover = await one.transfer.done()
        finally:
            one.is_told = True
            self.oracle.left(one)
        self.oracle.check_handover(one, handover)
        self.oracle.check_success(one)


def _prefill_of(request: Request) -> Any:
    """Return what a request gives the decode engine to refer to the prefill instance."""
    return request.prefill if request.reference is None else request.reference


def _tokens_of(request: Request) -> TokenRange:
    """Return the tokens that a request wants to receive."""
    return (request.start, request.num_tokens)


def _is_reusable(one: Receiving) -> bool:
    """Return whether pages of a transfer may still be written to.

    Tickets are excluded: their room is in use already.
    """
    if isinstance(one.request.reference, (str, Mapping)):
        return False
    return one.memory is not Memory.SAFE and any(one.lease.pages[name] for name in one.ranges)


@types.coroutine
def cancelled_at(coroutine: Coroutine[Any, Any, bool], number: int) -> Generator[Any, Any, bool]:
    """Drive a coroutine, and cancel the current task when the coroutine waits for the `number`-th time (from 1)."""
    task = asyncio.current_task()
    resume: Callable[[], Any] = lambda: coroutine.send(None)  # noqa: E731 - replaced at each step
    for step in itertools.count(1):
        try:
            awaited = resume()
        except StopIteration as stop:
            return bool(stop.value)
        if step == number and task is not None:
            task.cancel()
        try:
            sent = yield awaited
        except BaseException as error:  # noqa: BLE001 - passed on to the coroutine
            resume = functools.partial(coroutine.throw, error)
        else:
            resume = functools.partial(coroutine.send, sent)
    raise AssertionError

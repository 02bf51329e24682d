"""A router that feeds the engines: clients start requests at a steady rate, even while earlier ones are unfinished."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import anyio

from kvflow.room import RoomId
from kvflow.wire.messages import RankId
from simulation.deployment import Deployment
from simulation.engines import Announcing, Course, DecodeWorker, Preemption, PrefillWorker, Worker
from simulation.loop import Process
from simulation.oracle import Instance
from simulation.requests import Request

__all__ = ["ANNOUNCED_S", "Announcements", "Router", "Trial"]

MAX_TRIES: Final = 3
MAX_TOKENS: Final = 8
ASKING: Final = 0.3
"""Chance that a decode engine does not announce a request, in a seed with announcements."""
ABORTED_AT_START: Final = 0.4
ABORTED_AT_BYTES: Final = 0.8
"""Chance that an abort comes within milliseconds of the start, and of the first bytes or the start."""
LAYER_CUT: Final = 0.8
DEVICE_S: Final = 0.03
STALE_S: Final = 2.0
"""Time after which a prefill engine gives up a request that it cannot finish."""
ANNOUNCED_S: Final = 3.0
"""Time after which a room that is only announced is given up."""
LATE_S: Final = 2.4
"""Maximum time that a decode engine is without pages: longer than prefill waits for a silent one."""
SOON_S: Final = 0.05
NUM_LATE_TOKENS: Final = 16
"""Minimum size of a prefill pool that can spare pages for a request that waits so long."""


@dataclass
class Trial:
    """One request as a client saw it.

    Attributes:
        began: Virtual time of its start.
        ended: Virtual time of its end; None while it lasts.
        has_succeeded: It succeeded on every rank.
    """

    request: Request
    began: float
    ended: float | None = None
    has_succeeded: bool = False


class _Attempt:
    """A request that ranks are serving."""

    def __init__(self, ranks: list[RankId], done: "asyncio.Future[bool]") -> None:
        self.waiting = dict.fromkeys(ranks)
        self.has_succeeded = True
        self.done = done

    def ended(self, rank: RankId, *, has_succeeded: bool) -> None:
        """Record the result of one rank."""
        self.waiting.pop(rank, None)
        self.has_succeeded = self.has_succeeded and has_succeeded
        if not self.waiting and not self.done.done():
            self.done.set_result(self.has_succeeded)


class Announcements:
    """Draws which requests decode engines announce, and when they have pages for them.

    Args:
        rng: Separate source of these draws.

    Attributes:
        has_late_ones: Some requests get pages later than prefill waits for silent decode ranks. There is one such
            request at a time, so that the others still find pages on prefill.
    """

    def __init__(self, rng: random.Random) -> None:
        self.has_late_ones = True
        self._rng = rng
        self._late: int | None = None
        self._late_until = 0.0

    def draw(self, deployment: Deployment, request: Request) -> Announcing | None:
        """Draw how one decode engine announces a request; None if it receives at once, when it has pages."""
        rng, world = self._rng, deployment.world
        if rng.random() < ASKING:
            return None
        is_hasty = rng.random() < 0.3
        if rng.random() < world.faults.no_pages:
            world.count("no pages")
            return Announcing(None, is_hasty)
        after_s = SOON_S * rng.random() * rng.choice((0, 1))
        if rng.random() < 0.5 and self._may_be_late(deployment, request):
            after_s = LATE_S * rng.random() ** 0.5
        return Announcing(after_s, is_hasty)

    def _may_be_late(self, deployment: Deployment, request: Request) -> bool:
        shape = deployment.instances[request.prefill].shape
        if not self.has_late_ones or shape.slots * shape.page_size < NUM_LATE_TOKENS:
            return False
        now = deployment.world.now
        if request.content != self._late:
            if now < self._late_until:
                return False
            self._late, self._late_until = request.content, now + LATE_S
        return True


class Router:
    """Sends requests to the workers of a deployment.

    Args:
        deployment: The deployment.
        num_clients: Number of clients, each with its own rate.
        interval_s: Interval between two requests of a client, however long they take.
        preemptions: Draws which requests prefill engines preempt; None for no preemption.
        announcements: Draws which requests decode engines announce; None for no announcement.

    Attributes:
        trials: Every request so far.
        is_open: Clients send new requests.
    """

    def __init__(
        self,
        deployment: Deployment,
        *,
        num_clients: int,
        interval_s: float,
        preemptions: random.Random | None = None,
        announcements: Announcements | None = None,
    ) -> None:
        self.deployment = deployment
        self.world = deployment.world
        self.trials: list[Trial] = []
        self._interval_s = interval_s
        self.is_open = True
        self._num_clients = num_clients
        self._preemptions = preemptions
        self._announcements = announcements
        self._num_rooms = 0
        self._num_tries = 0
        self._rng = random.Random(self.world.rng.getrandbits(64))  # noqa: S311 - chance must be repeatable here
        self.process: Process

    def hasten_announcements(self) -> None:
        """From now on, have decode engines find pages soon after each announcement."""
        if self._announcements is not None:
            self._announcements.has_late_ones = False

    def start(self) -> None:
        """Start the clients."""
        self.process = self.world.start("router", self._run)

    async def _run(self, _: Process) -> None:
        async with anyio.create_task_group() as group:
            for _number in range(self._num_clients):
                group.start_soon(self._ask)

    async def _ask(self) -> None:
        """Start requests at a steady rate, however long earlier ones take."""
        rng = self._rng
        await anyio.sleep(self._interval_s * rng.random())
        async with anyio.create_task_group() as group:
            while True:
                if self.is_open:
                    group.start_soon(self._request)
                await anyio.sleep(self._interval_s + 0.05 * rng.random())

    async def _request(self) -> None:
        """Send one request, and retry it if it fails, as some clients do."""
        rng = self._rng
        request = self.new_request(self._pick(is_decode=False), self._pick(is_decode=True))
        tries = 1
        while not await self.try_request(request) and tries < MAX_TRIES and self._retries():
            self.world.count("retry")
            tries += 1
            await anyio.sleep(0.3 * rng.random())
            request = self._again(request)

    def _retries(self) -> bool:
        return self.is_open and self._rng.random() < self.world.faults.retry

    def _pick(self, *, is_decode: bool) -> Instance:
        return self._rng.choice([one for one in self.deployment.instances.values() if one.is_decode is is_decode])

    # Requests --------------------------------------------------------------------------------------------------------

    def new_request(self, prefill: Instance, decode: Instance) -> Request:
        """Create a request with a new room."""
        rng = self._rng
        num_tokens = rng.randint(1, MAX_TOKENS)
        return self._route(
            Request(
                room=self._name_room(),
                content=self._next_try(),
                num_tokens=num_tokens,
                start=0 if rng.random() < 0.6 else rng.randint(0, num_tokens),
                wants_state=rng.random() < 0.8,
                prefill=prefill.name,
                decode=decode.name,
                num_decode_ranks=decode.shape.num_ranks,
                digest=rng.random() < 0.15,
                priority=rng.choice((0, 0, 0, 1, 7)),
            )
        )

    def _name_room(self) -> RoomId:
        """Return a new room; every third one is a string."""
        self._num_rooms += 1
        return f"request-{self._num_rooms}" if self._num_rooms % 3 == 0 else self._num_rooms

    def _again(self, request: Request) -> Request:
        """Create another try of a request, half of the time with the same room, and on any prefill instance."""
        room = request.room
        if self._rng.random() < 0.5:
            room = self._name_room()
        prefill = self._pick(is_decode=False)
        return self._route(
            Request(
                room=room,
                content=self._next_try(),
                num_tokens=request.num_tokens,
                start=request.start,
                wants_state=request.wants_state,
                prefill=prefill.name,
                decode=request.decode,
                num_decode_ranks=request.num_decode_ranks,
                digest=request.digest,
                priority=request.priority,
            )
        )

    def _next_try(self) -> int:
        self._num_tries += 1
        return self._num_tries

    def _route(self, request: Request) -> Request:
        request = self.deployment.refer(request)
        self.deployment.oracle.routed(request)
        return request

    async def try_request(self, request: Request) -> bool:
        """Submit a request to the engines of both sides, each after a delay, and wait until all have answered."""
        if self.world.story is not None:
            tokens = f"{request.start}:{request.num_tokens}"
            self.world.tell(f"router sends {request}, {tokens} from {request.prefill} to {request.decode}")
        trial = Trial(request, self.world.now)
        self.trials.append(trial)
        instances = self.deployment.instances
        ranks = [*instances[request.prefill].ranks, *instances[request.decode].ranks]
        attempt = _Attempt(ranks, asyncio.get_running_loop().create_future())
        self._send(request, attempt)
        trial.has_succeeded = await attempt.done
        trial.ended = self.world.now
        if self.world.story is not None:
            self.world.tell(f"router: {request} {'succeeded' if trial.has_succeeded else 'FAILED'}")
        return trial.has_succeeded

    def _send(self, request: Request, attempt: _Attempt) -> None:
        chunks = self._draw_chunks(request)
        offers = self.deployment.offers
        if offers is not None and offers.draw(request):
            self._serve(request, attempt, chunks, request.prefill)
            offers.deliver(
                request,
                lambda offered: self._serve(offered, attempt, chunks, request.decode),
                lambda: self._refuse(request, attempt),
            )
            return
        for side in (request.prefill, request.decode):
            self._serve(request, attempt, chunks, side)

    def _refuse(self, request: Request, attempt: _Attempt) -> None:
        """Report that a request was not offered with success."""
        for rank in self.deployment.instances[request.decode].ranks:
            self._on_end(attempt, request, rank)(False)

    def _serve(self, request: Request, attempt: _Attempt, chunks: Course, side: str) -> None:
        """Submit a request to the engines of one side."""
        rng, faults = self._rng, self.world.faults
        late_s = rng.random() if self.world.injected and faults.absence and rng.random() < 0.2 else 0.0
        for rank in self.deployment.instances[side].ranks:
            on_end = self._on_end(attempt, request, rank)
            if faults.absence and rng.random() < faults.absence:
                self.world.count("engine absent")
                on_end(False)
                continue
            worker = self.deployment.workers[rank]
            course = self._draw_course(request, chunks, worker)
            worker.submit(request, course, on_end, late_s + 0.02 * rng.random())

    def _on_end(self, attempt: _Attempt, request: Request, rank: RankId) -> Callable[[bool], None]:
        def ended(has_succeeded: bool) -> None:
            self.process.call(lambda: attempt.ended(rank, has_succeeded=has_succeeded))
            if not has_succeeded and self._rng.random() < 0.5:
                self.world.loop.call_in(0.05 * self._rng.random(), self._abort_siblings, request, rank)

        return ended

    def _abort_siblings(self, request: Request, rank: RankId) -> None:
        """Abort a request on the other workers of an instance after it failed on one."""
        for sibling in self.deployment.instances[rank.instance].ranks:
            self.deployment.workers[sibling].abort(request)

    def _draw_chunks(self, request: Request) -> Course:
        """Draw how every rank of the prefill instance computes a request."""
        rng = self._rng
        inner = [rng.randint(1, request.num_tokens) for _ in range(rng.randint(0, 2))]
        cuts = (*sorted(set(inner)), request.num_tokens)
        pauses: tuple[tuple[tuple[int, float], ...], ...] = ()
        if rng.random() < 0.3:
            pauses = tuple(tuple(self._draw_pauses()) for _ in cuts)
        return Course(cuts, pauses, pace_s=0.1 * rng.random())

    def _draw_pauses(self) -> list[tuple[int, float]]:
        """Draw where the groups of layers end that a device finishes together, and how long it takes for each."""
        rng, num_layers = self._rng, self.deployment.model.layers
        stops = [stop for stop in range(1, num_layers) if rng.random() < LAYER_CUT]
        return [(stop, DEVICE_S * rng.random()) for stop in (*stops, num_layers)]

    def _draw_course(self, request: Request, chunks: Course, worker: Worker) -> Course:
        """Draw what goes wrong with a request in one engine."""
        rng, faults = self._rng, self.world.faults
        course = chunks._replace(give_up_s=STALE_S)
        if faults.absence and rng.random() < faults.absence:
            self.world.count("unfinished prefill")
            course = course._replace(cuts=(*course.cuts[:-1], None))
        if faults.abort and rng.random() < faults.abort:
            self.world.count("abort")
            # While the first messages are in flight, or bytes are landing or being scattered, or later.
            when_s, when = rng.random(), rng.random()
            at_bytes = ABORTED_AT_START < when < ABORTED_AT_BYTES
            abort_s = when_s * (0.004 if when < ABORTED_AT_BYTES else 0.5)
            course = course._replace(abort_s=abort_s, aborts_at_bytes=at_bytes)
        if faults.cancel and rng.random() < faults.cancel:
            self.world.count("cancelled task")
            course = course._replace(cancel_at=rng.randint(1, 12))
        if isinstance(worker, DecodeWorker) and self._announcements is not None:
            return course._replace(announcing=self._announcements.draw(self.deployment, request))
        return self._draw_preemption(course) if isinstance(worker, PrefillWorker) else course

    def _draw_preemption(self, course: Course) -> Course:
        rng = self._preemptions
        if rng is None or rng.random() < 0.5:
            return course
        after_s = rng.choice((0.0, 0.001, 0.05)) * rng.random()
        rest_s = rng.choice((0.0, 0.05)) * rng.random()
        return course._replace(preemption=Preemption(rng.randrange(len(course.cuts)), after_s, rest_s))

"""Instances of several ranks, each a process with toy engines, and a supervisor that restarts processes."""

import dataclasses
import logging
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import anyio
from typing_extensions import override

from kvflow.addresses import Endpoint
from kvflow.config import DecodeConfig, Limits, Packing, PrefillConfig, Timeouts
from kvflow.errors import Shortage
from kvflow.observe.logs import LOGGER
from kvflow.state.tables import Memory
from kvflow.wire.messages import RankId
from simulation.engines import POLL_S, DecodeWorker, PrefillWorker, Worker
from simulation.invariants import check_invariants
from simulation.loop import PROCESS, Process, Violation
from simulation.memory import Pool
from simulation.model import Model, layout_of
from simulation.offers import Offers
from simulation.oracle import Instance, Oracle
from simulation.references import References
from simulation.requests import Receiving, Request
from simulation.world import REGISTRY, World

__all__ = ["SOON_S", "Deployment", "StagingShape", "leftovers", "watch_logs"]

FIRST_FIXED_PORT: Final = 10_000

SOON_S: Final = 0.1
"""Maximum delay after which the supervisor restarts a process, once no more faults are injected."""

QUIET_S: Final = 0.5
"""Time that contains a moment without any write in flight, although requests continue."""

LAST_WORDS_S: Final = 0.75
"""Time after which the last messages of a leaving rank have arrived, if messages may be late."""


@dataclass(frozen=True)
class StagingShape:
    """Staging memory of every rank.

    Attributes:
        slot_bytes: Size of a slot.
        num_slots: Slots of a window.
        num_windows: Windows of a decode rank.
        num_local: Slots of a prefill rank.
    """

    slot_bytes: int
    num_slots: int
    num_windows: int
    num_local: int

    def num_bytes(self, *, is_decode: bool) -> int:
        """Return the size of the staging memory of one rank."""
        return self.slot_bytes * (self.num_slots * self.num_windows if is_decode else self.num_local)


class Deployment:
    """Every worker of some instances.

    Args:
        world: The world that they run in.
        model: The model that the ranks share.
        instances: The instances.
        timeouts: Timeouts of every rank.
        announced_s: How long decode engines keep a room announced, unless they say otherwise; `transfer_s` if None.
        limits: Limits of every rank.
        staging: Staging memory for packing; None to pack no pieces.
        fixed_ports: A prefill rank that restarts gets the same port again.
        may_lose_messages: A rank that leaves in order may be unable to tell its peers.
        references: How requests refer to prefill instances; by name if None.
        hosts: For each decode instance whose workers live in the processes of a prefill instance and share their pools,
            the name of that prefill instance.

    Attributes:
        workers: The latest worker of each rank.
        sabotaged: Processes that are allowed to fail.
        restart_s: Maximum delay after which the supervisor restarts a process; None if there is no supervisor.
        hosts: As above.
        offers: Delivers some requests by offers; None if prefill ranks take none.
    """

    def __init__(  # noqa: PLR0913 - all by keyword
        self,
        world: World,
        model: Model,
        instances: list[Instance],
        *,
        timeouts: Timeouts,
        announced_s: float | None = None,
        limits: Limits,
        staging: StagingShape | None = None,
        fixed_ports: bool = False,
        may_lose_messages: bool = False,
        references: References | None = None,
        hosts: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.world = world
        self.model = model
        self.instances = {instance.name: instance for instance in instances}
        self.timeouts = timeouts
        self.limits = limits
        self.announced_s = timeouts.transfer_s if announced_s is None else announced_s
        self.oracle = Oracle(
            world,
            model,
            self.instances,
            timeouts,
            self.announced_s,
            may_lose_messages=may_lose_messages,
            hosts=hosts,
        )
        self.hosts = hosts
        self.offers: Offers | None = None
        self._guests = {host: guest for guest, host in hosts.items()}
        self.workers: dict[RankId, Worker] = {}
        self.sabotaged: dict[Process, None] = {}
        self._said_last: dict[RankId, float] = {}
        self._last_words_s = LAST_WORDS_S if world.faults.delay or world.faults.reorder else 0.0
        self.restart_s: float | None = None
        self._staging = staging
        self._fixed_ports = fixed_ports
        self._references = references
        self._rng = random.Random(world.rng.getrandbits(64))  # noqa: S311 - chance must be repeatable here

    @property
    def is_disturbed(self) -> bool:
        """Whether faults are injected."""
        return self.restart_s != SOON_S

    @property
    def ranks(self) -> list[RankId]:
        """Every rank of every instance."""
        return [rank for instance in self.instances.values() for rank in instance.ranks]

    def start_all(self) -> None:
        """Start the registry and every worker that is not running."""
        self.start_registry()
        for rank in self.ranks:
            self.start(rank)

    def start_registry(self) -> None:
        """Start the registry, unless it is running."""
        registry = self.world.processes.get("registry")
        if registry is None or not registry.is_alive:
            self.world.start_registry()

    def start(self, rank: RankId) -> None:
        """Start a worker, and the other worker of its process if there is one, unless they are running."""
        rank = rank._replace(instance=self.hosts.get(rank.instance, rank.instance))
        worker = self.workers.get(rank)
        if worker is not None and worker.process.is_alive:
            return
        pool = Pool(layout_of(self.model, self.instances[rank.instance].shape, rank.engine_rank))
        self.oracle.knows(str(rank), pool)
        process = self.world.start(str(rank), lambda _: self._main(rank))
        host = self._add(rank, process, pool)
        guest = self._guest_of(rank)
        if guest is not None:
            self._add(guest, process, pool, host)

    def _add(self, rank: RankId, process: Process, pool: Pool, host: Worker | None = None) -> Worker:
        ended_at = self._said_last.pop(rank, None)
        if ended_at is not None and self.world.now < ended_at + self._last_words_s:
            self.oracle.overtaken(str(rank), ended_at)
        make = DecodeWorker if self.instances[rank.instance].is_decode else PrefillWorker
        worker = self.workers[rank] = make(self, rank, process, pool, host)
        process.when_dead(lambda: self._ended(worker))
        return worker

    def _guest_of(self, rank: RankId) -> RankId | None:
        guest = self._guests.get(rank.instance)
        return None if guest is None else rank._replace(instance=guest)

    async def _main(self, rank: RankId) -> None:
        host, guest = self.workers[rank], self._guest_of(rank)
        if guest is None:
            await self._run(host)
            return
        async with anyio.create_task_group() as group:
            group.start_soon(self._run, host)
            while not host.is_ready:  # noqa: ASYNC110 - the agent is named after the rank that opens it
                await anyio.sleep(POLL_S / 4)
            if not host.is_leaving:
                group.start_soon(self._run, self.workers[guest])

    async def _run(self, worker: Worker) -> None:
        rank = worker.rank_id
        if isinstance(worker, DecodeWorker):
            await worker.run(DecodeConfig(**self._settings(rank, is_decode=True)))
        elif isinstance(worker, PrefillWorker):
            is_fixed = self._fixed_ports or self._answers(rank)
            port = self._endpoint(rank).port if is_fixed else 0
            packing: Packing = "never" if self._staging is None else "always"
            settings = self._settings(rank, is_decode=False)
            bind, takes_offers = f"tcp://127.0.0.1:{port}", self.offers is not None
            await worker.run(PrefillConfig(bind=bind, packing=packing, takes_offers=takes_offers, **settings))

    def _settings(self, rank: RankId, *, is_decode: bool) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "instance": rank.instance,
            "engine_rank": rank.engine_rank,
            "num_ranks": self.instances[rank.instance].shape.num_ranks,
            "registry": self._registry_of(rank, is_decode=is_decode),
            "timeouts": self.timeouts,
            "limits": self.limits,
            "staging_bytes": 0,
        }
        if self._staging is not None:
            settings["staging_bytes"] = self._staging.num_bytes(is_decode=is_decode)
            settings["staging_slot_bytes"] = self._staging.slot_bytes
            if is_decode:
                settings["staging_slots"] = self._staging.num_slots
        return settings

    def _answers(self, rank: RankId) -> bool:
        """Return whether a rank answers for its instance."""
        answering = () if self._references is None else self._references.answering
        return rank.instance in answering and rank.engine_rank == 0

    def _endpoint(self, rank: RankId) -> Endpoint:
        return Endpoint("127.0.0.1", FIRST_FIXED_PORT + self.ranks.index(rank))

    def _registry_of(self, rank: RankId, *, is_decode: bool) -> str | None:
        first = rank._replace(engine_rank=0)
        if self._references is None or (is_decode and self._references.names):
            return REGISTRY
        if is_decode or self._answers(rank):
            return None
        return str(self._endpoint(first)) if self._answers(first) else REGISTRY

    def refer(self, request: Request) -> Request:
        """Draw how a request refers to its prefill instance; while faults are injected, tickets may be stale."""
        if self._references is None:
            return request
        ranks = self.instances[request.prefill].ranks
        workers = [worker for rank in ranks if isinstance(worker := self.workers[rank], PrefillWorker)]
        is_stale = self.is_disturbed
        reference = self._references.of(request, self._endpoint(ranks[0]), workers, may_be_stale=is_stale)
        return dataclasses.replace(request, reference=reference)

    def _ended(self, worker: Worker) -> None:
        process = worker.process
        is_sound = process.exit is None and process not in self.sabotaged
        in_order = worker.is_leaving and is_sound and not process.was_killed
        self.oracle.ended(str(worker.rank_id), in_order=in_order)
        self._said_last[worker.rank_id] = self.world.now
        self.oracle.gone(worker.backend.agent_name)
        if not worker.is_leaving and not process.has_vanished:
            self.oracle.died(process)
        worker.fail_requests()
        if process.exit is not None and process not in self.sabotaged and not _lacks_sockets(process.exit):
            violation = Violation(f"{process} ends with {process.exit!r}")
            violation.__cause__ = process.exit
            self.world.loop.fail(violation)
        if self.restart_s is not None:
            after_s = 0.05 + self.restart_s * self._rng.random()
            if in_order:
                after_s += self._last_words_s
            self.world.loop.call_in(after_s, self._restart, worker.rank_id)

    def _restart(self, rank: RankId) -> None:
        if self.restart_s is not None:
            self.start(rank)

    def living(self) -> list[Worker]:
        """Return the workers whose process runs or is paused."""
        return [worker for worker in self.workers.values() if worker.process.is_alive]

    # What must hold ------------------------------------------------------------------------------------------------

    def check_now(self) -> None:
        """Check that every core is consistent, and that engines are told of decided outcomes.

        Raises:
            InvariantBroken: A core is inconsistent.
            Violation: An engine is not told.
        """
        for worker in self.living():
            if worker.is_ready and worker.process.is_running:
                check_invariants(worker.rank._core)
                for one in worker.transfers:
                    if isinstance(one, Receiving):
                        self.oracle.check_told(one)
                        self.oracle.check_announced(one)

    def check_quarantine(self) -> None:
        """Check that every transfer in quarantine has an excuse.

        Raises:
            Violation: One has none.
        """
        for worker in self.living():
            for one in worker.transfers:
                if one.memory is Memory.QUARANTINED and not self.oracle.is_excused(one):
                    raise Violation(f"{one} is {one.outcome.value}, in quarantine for no reason")

    def _check_windows(self, worker: Worker) -> None:
        """Check that the staging windows of ranks that are gone were returned and forgotten."""
        if isinstance(worker, DecodeWorker):
            taken = worker.rank.statistics().staging.windows_taken
            self.oracle.check_windows(str(worker.rank_id), taken)
        elif isinstance(worker, PrefillWorker):
            num_decode = sum(len(one.ranks) for one in self.instances.values() if one.is_decode)
            remembered = len(worker.rank._core.slots._windows)
            if remembered > num_decode:
                raise Violation(f"{worker.process} remembers {remembered} windows of {num_decode} decode ranks")

    def release_quarantine(self) -> None:
        """Release, as an operator, the pages that ended processes have left in quarantine, once no write is in flight.

        Under load this may take several attempts.
        """
        latest = self.world.now + QUIET_S
        while self.world.plane.num_active:
            if self.world.now >= latest:
                return
            self.world.run(POLL_S)
        self.look_at_quarantine()
        self.world.run(2 * POLL_S)

    def look_at_quarantine(self) -> None:
        """Release the pages that ended processes have left in quarantine, unless a write is in flight.

        Without a write in flight, nothing can land in them any more.
        """
        if self.world.plane.num_active:
            return
        for worker in self.living():
            for one in list(worker.transfers):
                if one.memory is Memory.QUARANTINED and self.oracle.is_excused(one):
                    record = self.oracle.check_record(one, worker.rank.quarantined())
                    self.world.tell(f"operator releases {record}")
                    worker.process.call(worker.rank.release, record)

    def is_quiet(self) -> bool:
        """Return whether nothing is open in any engine or rank."""
        if self.world.plane.num_active:
            return False
        return all(not worker.transfers and not any(leftovers(worker).values()) for worker in self.living())

    def check_nothing_is_left(self) -> None:
        """Check that no rank keeps anything of what is over.

        Raises:
            Violation: A rank does.
        """
        for worker in self.living():
            left = {name: count for name, count in leftovers(worker).items() if count}
            if left:
                raise Violation(f"{worker.process} still has {left}")
            if worker.transfers or not worker.pool.is_whole:
                raise Violation(f"{worker.process} holds pages of {list(map(str, worker.transfers))}")
            worker.pool.check_free_pages()
            if worker.is_ready:
                self._check_windows(worker)
        self.oracle.check_agreement()


def _lacks_sockets(error: BaseException) -> bool:
    """Return whether a process failed to start only because it had no sockets left."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(_lacks_sockets, error.exceptions))
    return isinstance(error, Shortage)


def leftovers(worker: Worker) -> Mapping[str, int]:
    """Return the counters of a rank that are zero when nothing is open."""
    if not worker.is_ready:
        return {}
    counts = worker.rank.statistics()
    return {
        "rooms": counts.rooms,
        "quarantined": counts.quarantined,
        "quarantined_pages": counts.quarantined_pages,
        "waiting_grants": counts.waiting_grants,
        "announced": counts.announced,
        "queued_chunks": counts.queued_chunks,
        "posted": counts.posted,
        "slots_taken": counts.staging.slots_taken,
        "offers": len(worker.rank._core.offers),
    }


class _LogWatch(logging.Handler):
    """Treats an error logged by a rank as a violation, and adds other log lines to the story."""

    def __init__(self, deployment: Deployment) -> None:
        super().__init__()
        self._deployment = deployment

    @override
    def emit(self, record: logging.LogRecord) -> None:
        process = PROCESS.get(None)
        world = self._deployment.world
        if world.story is not None:
            world.tell(f"{process} logs {_line(record)}")
        if record.levelno >= logging.ERROR and process not in self._deployment.sabotaged:
            violation = Violation(f"{process} logs {_line(record)}")
            world.loop.fail(violation)


def _line(record: logging.LogRecord) -> str:
    if not isinstance(record.msg, dict):
        return record.getMessage()
    hidden = ("exception", "event", "level", "timestamp", "instance", "engine_rank", "stage")
    values = " ".join(f"{name}={value}" for name, value in record.msg.items() if name not in hidden)
    return f"{record.msg.get('event')} {values}"


@contextmanager
def watch_logs(deployment: Deployment) -> Iterator[None]:
    """Pass log lines of ranks to a `_LogWatch` instead of the application's handlers."""
    watch = _LogWatch(deployment)
    before = LOGGER.level, LOGGER.propagate, LOGGER.handlers[:]
    LOGGER.setLevel(logging.INFO if deployment.world.story is not None else logging.ERROR)
    LOGGER.propagate = False
    LOGGER.handlers[:] = [watch]
    try:
        yield
    finally:
        level, LOGGER.propagate, LOGGER.handlers[:] = before
        LOGGER.setLevel(level)

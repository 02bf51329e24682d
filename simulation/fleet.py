"""Fleets in virtual time: many instances of one role and few of the other, whose processes are replaced all the time.

Every rank is a real one. While requests go on, a part of the fleet is killed and replaced each minute, the registry is
away for a while, and two racks are cut off from each other. Afterwards nothing may be stuck, lost or left.
"""

import gc
import random
from collections import Counter
from typing import Final

import msgspec

from kvflow.bounds import Bounds
from kvflow.config import Timeouts
from simulation.deployment import SOON_S, Deployment, watch_logs
from simulation.loop import Violation
from simulation.model import MODELS, Shape
from simulation.network import Session
from simulation.oracle import Instance
from simulation.router import Router
from simulation.run import settle
from simulation.world import World

__all__ = ["FleetRow", "run_fleet"]

TIMEOUTS: Final = Timeouts(
    handshake_s=1.0, transfer_s=3.0, open_s=1.5, grant_s=1.5, progress_s=1.0, drain_s=0.6, lease_s=2.0
)

POOL_TOKENS: Final = 256

STEADY_S: Final = 5.0
"""How long messages are counted without faults, once every pair has met."""

CUT_S, OUTAGE_S, DISTURBED_S, HEALED_S = 3.0, 5.0, 20.0, 8.0

LAST_S: Final = 5.0
"""How long the last requests may take: transfers take 3 s at most."""

REPLACED_PER_MIN: Final = 0.1


class FleetRow(msgspec.Struct, frozen=True):
    """What a fleet of one size did.

    Attributes:
        num_prefill: Prefill ranks, each an instance.
        num_decode: Decode ranks, each an instance.
        requests: Requests of the whole run.
        successes: Those that succeeded.
        replaced: Processes that were killed and replaced.
        connections: Control connections of the rank that has most.
        idle_messages: Messages a second that this rank sends and receives while nothing is transferred.
        messages_per_request: Messages of all ranks for one request, besides those of idle ranks.
        violation: What was violated; None if nothing was.
    """

    num_prefill: int
    num_decode: int
    requests: int
    successes: int
    replaced: int
    connections: int
    idle_messages: float
    messages_per_request: float
    violation: str | None = None


class _Traffic:
    """Counts messages by the process at either end."""

    def __init__(self, world: World) -> None:
        self.by_process: Counter[str] = Counter()
        transmit = world.network.transmit

        def count(session: Session, way: int, payload: bytes) -> None:
            self.by_process.update(process.name for process in session.ends(way))
            transmit(session, way, payload)

        world.network.transmit = count  # type: ignore[method-assign]

    def take(self) -> Counter[str]:
        """Return the counts since the last call."""
        taken, self.by_process = self.by_process, Counter()
        return taken


def run_fleet(seed: int, num_prefill: int, num_decode: int, *, requests_per_s: float) -> FleetRow:
    """Run a fleet of one size: until every pair has met, then idle, then under load, then with faults, then healed."""
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        with World(f"fleet {seed}", ends_with_process=True) as world:
            return _Fleet(world, num_prefill, num_decode, requests_per_s).run()
    finally:
        if was_collecting:
            gc.enable()


class _Fleet:
    def __init__(self, world: World, num_prefill: int, num_decode: int, requests_per_s: float) -> None:
        shape = Shape(1, 1, 4, slots=POOL_TOKENS // 4, is_head_major=False)
        self._prefill = [Instance(f"prefill-{number}", False, shape) for number in range(num_prefill)]
        self._decode = [Instance(f"decode-{number}", True, shape) for number in range(num_decode)]
        self._world = world
        self._deployment = Deployment(
            world,
            MODELS[0],
            [*self._prefill, *self._decode],
            timeouts=TIMEOUTS,
            limits=Bounds(),
            fixed_ports=True,
            may_lose_messages=True,
        )
        self._router = Router(self._deployment, num_clients=4, interval_s=4 / requests_per_s)
        self._traffic = _Traffic(world)
        self._rng = random.Random(f"fleet faults {world.rng.random()}")  # noqa: S311 - repeatable
        self._num_replaced = 0

    def run(self) -> FleetRow:
        violation = None
        idle: Counter[str] = Counter()
        loaded: Counter[str] = Counter()
        num_loaded = 0
        with watch_logs(self._deployment):
            try:
                self._deployment.start_all()
                self._router.is_open = False
                self._router.start()
                self._world.run(1.0)
                self._let_all_meet()
                self._traffic.take()
                self._world.run(STEADY_S)
                idle = self._traffic.take()
                self._router.is_open = True
                before = len(self._router.trials)
                self._world.run(STEADY_S)
                loaded, num_loaded = self._traffic.take(), len(self._router.trials) - before
                self._disturb()
                self._heal()
            except Exception as error:  # noqa: BLE001 - any exception that escapes the code under test is a violation
                violation = f"{type(error).__name__}: {error}"
        trials = self._router.trials
        return FleetRow(
            num_prefill=len(self._prefill),
            num_decode=len(self._decode),
            requests=len(trials),
            successes=sum(trial.has_succeeded for trial in trials),
            replaced=self._num_replaced,
            connections=max(self._connections().values(), default=0),
            idle_messages=max(idle.values(), default=0) / STEADY_S,
            messages_per_request=(loaded.total() - idle.total()) / 2 / max(num_loaded, 1),
            violation=violation,
        )

    def _let_all_meet(self) -> None:
        """Send one request between any two instances, a few at a time."""
        for prefill in self._prefill:
            for decode in self._decode:
                self._router.process.spawn(self._router.try_request(self._router.new_request(prefill, decode)))
                self._world.run(0.02)
        self._world.run(1.0)

    def _connections(self) -> Counter[str]:
        return Counter(process.name for session in self._world.network.sessions() for process in session.ends(0))

    def _disturb(self) -> None:
        """Replace a part of the fleet, take the registry away, and cut two racks off from each other."""
        world, deployment, names = self._world, self._deployment, [*map(str, self._deployment.ranks)]
        deployment.restart_s = 1.0
        count = max(2, round(len(names) * REPLACED_PER_MIN * DISTURBED_S / 60))
        for _ in range(count):
            world.loop.call_in(DISTURBED_S * self._rng.random(), self._replace)
        world.loop.call_in(1.0, world.processes["registry"].kill)
        world.loop.call_in(1.0 + OUTAGE_S, deployment.start_registry)
        racks = names[::2], names[1::2]
        ways = [(one, other) for one in racks[0] for other in racks[1]]
        world.loop.call_in(8.0, world.count, "partition")
        for one, other in [*ways, *((other, one) for one, other in ways)]:
            world.loop.call_in(8.0, world.network.cut, one, other)
            world.loop.call_in(8.0 + CUT_S, world.network.mend, one, other)
        self._pass_time(DISTURBED_S)

    def _replace(self) -> None:
        living = [worker for worker in self._deployment.living() if worker.is_ready]
        if living:
            self._num_replaced += 1
            self._world.count("process killed")
            self._rng.choice(living).process.kill()

    def _heal(self) -> None:
        """Check that service is back, and that nothing is left."""
        deployment, router = self._deployment, self._router
        self._world.heal()
        deployment.oracle.healed()
        deployment.restart_s = SOON_S
        deployment.start_all()
        self._pass_time(HEALED_S)
        router.is_open = False
        self._pass_time(LAST_S)  # a request that has just begun is in no rank yet
        lasting = [str(trial.request) for trial in router.trials if trial.ended is None]
        if lasting:
            raise Violation(f"{', '.join(lasting)} still last")
        settle(deployment)
        deployment.check_quarantine()
        deployment.release_quarantine()
        deployment.check_nothing_is_left()

    def _pass_time(self, lasts_s: float) -> None:
        for _ in range(round(lasts_s)):
            self._world.run(1.0)
            self._deployment.check_now()

"""Injects a seed's faults into the processes, connections and links of a deployment."""

import random
from collections.abc import Callable
from typing import Final

from kvflow.wire.messages import RankId
from simulation.dataplane import Write
from simulation.deployment import Deployment
from simulation.engines import Worker
from simulation.network import Session

__all__ = ["ACTIVE_S", "FaultInjector"]

ACTIVE_S: Final = 3.0
"""How long faults are injected, in virtual seconds."""

Strike = Callable[[RankId | None], None]


class FaultInjector:
    """Injects faults at random times.

    Args:
        deployment: The deployment.

    Attributes:
        is_active: Whether it still injects faults.
    """

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._world = deployment.world
        self._rng = random.Random(self._world.rng.getrandbits(64))  # noqa: S311 - chance must be repeatable here
        self.is_active = True

    def begin(self) -> None:
        """Schedule all faults."""
        faults, rng = self._world.faults, self._rng
        strikes: tuple[tuple[int, Callable[[], None]], ...] = (
            (faults.kills, lambda: self._when_writing(self._kill)),
            (faults.vanishes, lambda: self._when_writing(self._vanish)),
            (faults.crashes, lambda: self._when_writing(self._crash)),
            (faults.stops, lambda: self._when_writing(self._stop)),
            (faults.blocks, lambda: self._when_writing(self._block)),
            (faults.clock_stops, lambda: self._when_writing(self._stop_clock)),
            (faults.closings, lambda: self._when_writing(self._close)),
            (faults.partitions, self._cut),
            (faults.breaks, self._break),
            (faults.half_open, self._swallow),
            (faults.registry_restarts, self._restart_registry),
        )
        for times, strike in strikes:
            for _ in range(times):
                self._world.loop.call_in(rng.random() * ACTIVE_S, self._strike, strike)

    def _strike(self, strike: Callable[[], None]) -> None:
        if self.is_active:
            strike()

    # Targets -----------------------------------------------------------------------------------------------------

    def _when_writing(self, strike: Strike) -> None:
        """Strike a random rank, or an end of the next write while it is in flight, where a strike does most harm."""
        rng = self._rng
        if rng.random() < 0.4:
            living = [worker.rank_id for worker in self._deployment.living() if not worker.is_leaving]
            strike(rng.choice(living) if living else None)
            return

        def aim(write: Write) -> None:
            target = self._world.plane.endpoints.get(write.peer)
            end = write.sender if target is None or rng.random() < 0.7 else target
            instance, _, number = end.process.name.rpartition("/")
            victim = RankId(instance, int(number))
            self._world.loop.call_in(rng.random() * write.pace_s, self._strike, lambda: strike(victim))

        self._world.plane.when_posted.append(aim)

    def _victim(self, rank: RankId | None) -> Worker | None:
        worker = None if rank is None else self._deployment.workers[rank]
        return worker if worker is not None and worker.process.is_alive else None

    # Processes ---------------------------------------------------------------------------------------------------

    def _kill(self, rank: RankId | None) -> None:
        worker = self._victim(rank)
        if worker is not None:
            self._world.count("process killed")
            worker.process.kill()

    def _vanish(self, rank: RankId | None) -> None:
        worker = self._victim(rank)
        if worker is not None:
            self._world.count("host lost")
            worker.process.kill(vanish=True)

    def _crash(self, rank: RankId | None) -> None:
        worker = self._victim(rank)
        if worker is None or worker.is_leaving or not worker.is_ready:
            return
        self._world.count("crash")
        self._deployment.sabotaged[worker.process] = None
        if self._rng.random() < 0.5:
            worker.backend.is_raising = True
        else:
            worker.process.call(worker.backend.break_down)
        self._world.loop.call_in(0.5 + self._rng.random(), worker.process.kill)

    def _stop(self, rank: RankId | None) -> None:
        self._pause(rank, "process suspended", stalls=True, stops_clock=False)

    def _block(self, rank: RankId | None) -> None:
        self._pause(rank, "blocked loop", stalls=False, stops_clock=False)

    def _stop_clock(self, rank: RankId | None) -> None:
        self._pause(rank, "host suspended", stalls=True, stops_clock=True)

    def _pause(self, rank: RankId | None, kind: str, *, stalls: bool, stops_clock: bool) -> None:
        worker = self._victim(rank)
        if worker is not None and worker.process.is_running:
            self._world.count(kind)
            self._world.pause(worker.process, stalls=stalls, stops_clock=stops_clock)
            self._world.loop.call_in(self._rng.random() * ACTIVE_S, self._world.resume, worker.process)

    def _close(self, rank: RankId | None) -> None:
        worker = self._victim(rank)
        if worker is not None and not worker.is_leaving and worker.is_ready:
            self._world.count("rank closed")
            self._world.tell(f"{rank} is told to close")
            worker.process.call(worker.close, 0.0 if self._rng.random() < 0.5 else self._rng.random())

    def _restart_registry(self) -> None:
        self._world.count("registry restart")
        self._world.processes["registry"].kill()
        self._world.loop.call_in(self._rng.random(), self._deployment.start_registry)

    # Links and connections ---------------------------------------------------------------------------------------

    def _cut(self) -> None:
        rng, network = self._rng, self._world.network
        names = [*map(str, self._deployment.ranks), "registry"]
        one, other = rng.sample(names, 2)
        ways = rng.choice([[(one, other)], [(other, one)], [(one, other), (other, one)]])
        lasts_s = rng.random() * ACTIVE_S
        for way in ways:
            self._world.count("partition")
            self._world.tell(f"network from {way[0]} to {way[1]} is cut")
            network.cut(*way)
            self._world.loop.call_in(lasts_s, network.mend, *way)

    def _break(self) -> None:
        session = self._draw_session("broken connection", "breaks")
        if session is not None:
            self._world.network.break_session(session)

    def _swallow(self) -> None:
        session = self._draw_session("half-open connection", "is half open")
        if session is not None:
            self._world.network.swallow(session)

    def _draw_session(self, fault: str, what: str) -> Session | None:
        """Draw the connection that a fault hits, if there is one."""
        sessions = self._world.network.sessions()
        if not sessions:
            return None
        session = self._rng.choice(sessions)
        self._world.count(fault)
        self._world.tell(f"connection of {session.dialer.process} to {session.listener.process} {what}")
        return session

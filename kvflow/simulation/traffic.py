"""Requests and misfortunes of one run: engines, a router that feeds them, and a fate that strikes, all drawn."""

from collections.abc import Callable
from typing import Final, NamedTuple

from kvflow.errors import CapacityExceeded, LocalProtocolError, RankDraining
from kvflow.simulation.faults import Faults
from kvflow.simulation.requests import Receiving, Request, Sending
from kvflow.simulation.world import Instance, World
from kvflow.simulation.writes import Write
from kvflow.state.tables import Outcome
from kvflow.wire.messages import RankId

__all__ = ["ACTIVE_S", "Traffic", "draw_pauses"]

ACTIVE_S: Final = 3.0
"""How long faults strike and requests come."""

MAX_TRIES: Final = 3
LAYER_CUT: Final = 0.8
DEVICE_S: Final = 0.03
RETRY_S: Final = 0.05
GIVE_UP_S: Final = 1.0
STALE_S: Final = 2.0
"""After which a prefill engine aborts what it cannot finish."""


class Course(NamedTuple):
    """How the ranks of a prefill instance get through a request.

    Attributes:
        cuts: Where its chunks end; the last may be empty.
        pace_s: How long a chunk takes at most.
        give_up: When a rank stops trying to begin.
        streams: Chunks are offered before they are computed, and get ready by layers.
    """

    cuts: list[int]
    pace_s: float
    give_up: float
    streams: bool


def draw_pauses(world: World) -> list[tuple[int, float]]:
    """Where the groups of layers end that a device finishes together, and how long it takes for each."""
    rng, num_layers = world.rng, world.model.layers
    stops = [stop for stop in range(1, num_layers) if rng.random() < LAYER_CUT]
    return [(stop, DEVICE_S * rng.random()) for stop in (*stops, num_layers)]


class Traffic:
    """Drives a world.

    Args:
        world: What to drive.
        faults: What goes wrong meanwhile.
    """

    def __init__(self, world: World, faults: Faults) -> None:
        self.world = world
        self.num_requests = 0
        self.num_tries = 0
        self._rng = world.rng
        self._faults = faults
        self._is_active = True
        self._tries: dict[int, int] = {}
        world.faults = faults
        world.without_notices = faults.without_notices
        world.is_fenced = faults.is_fenced
        world.on_report = self._take_report

    # Requests --------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Let requests come and faults strike."""
        rng = self._rng
        self._is_decode_slow = rng.random() < 0.3
        for _ in range(rng.randint(2, 5)):
            self.world.schedule.at(rng.random() * ACTIVE_S * 0.6, self._route)
        self._strike()

    def end(self) -> None:
        """Start nothing new, and let nothing go wrong any more."""
        self._is_active = False
        for host in self.world.living():
            if host.is_broken:
                self.world.kill(host.me.rank)
        self.world.tell("everything is healed")
        self.world.heal()

    def _route(self) -> None:
        prefill, decode = self._pick(is_decode=False), self._pick(is_decode=True)
        self.num_requests += 1
        self._send(self.new_request(self.num_requests, prefill, decode))

    def _pick(self, *, is_decode: bool) -> Instance:
        return self._rng.choice([one for one in self.world.instances.values() if one.is_decode is is_decode])

    def new_request(self, room: int, prefill: Instance, decode: Instance) -> Request:
        """Make a try of a room."""
        rng = self._rng
        num_tokens = rng.randint(1, 8)
        start = 0 if rng.random() < 0.6 else rng.randint(0, num_tokens)
        self.num_tries += 1
        request = Request(
            room=room,
            content=self.num_tries,
            num_tokens=num_tokens,
            start=start,
            wants_state=rng.random() < 0.8,
            prefill=prefill.name,
            decode=decode.name,
            num_decode_ranks=decode.shape.num_ranks,
            digest=rng.random() < 0.15,
            priority=rng.choice((0, 0, 0, 1, 7)),
        )
        self.world.oracle.requests.setdefault(room, []).append(request)
        self._tries[room] = self._tries.get(room, 0) + 1
        return request

    def _send(self, request: Request) -> None:
        """Give a request to the engines of both sides; each rank gets to it when it gets to it."""
        world, rng = self.world, self._rng
        tells = f"{request}: {request.start}:{request.num_tokens} from {request.prefill} to {request.decode}"
        world.tell(f"router sends {tells}")
        cuts = self._cuts(request)
        streams = rng.random() < 0.3
        pace_s = rng.random() * 0.2
        for side in (request.prefill, request.decode):
            late_s = rng.random() if rng.random() < 0.2 else 0.0
            for rank in world.instances[side].ranks:
                if rng.random() < self._faults.absence:
                    world.count("absent engine")
                    continue
                when = world.schedule.now + late_s + 0.02 * rng.random()
                if world.instances[side].is_decode:
                    world.schedule.at(when, self._receive, request, rank, when + GIVE_UP_S)
                else:
                    world.schedule.at(when, self._open, request, rank, Course(cuts, pace_s, when + GIVE_UP_S, streams))

    def _cuts(self, request: Request) -> list[int]:
        """Where the chunks of a request end; the last may be empty."""
        rng = self._rng
        inner = [rng.randint(1, request.num_tokens) for _ in range(rng.randint(0, 2))]
        return [*sorted(set(inner)), request.num_tokens]

    def _receive(self, request: Request, rank: RankId, give_up: float) -> None:
        host = self.world.decode(rank)

        def act() -> bool:
            receiving = host.receive(request)
            if receiving is not None and self._rng.random() < self._faults.abort:
                self.world.count("decode abort")
                self.world.schedule.after(self._moment(), host.call, host.abort_room, receiving)
            return receiving is not None

        host.call(self._attempt, act, lambda: self._receive(request, rank, give_up), give_up)

    def _open(self, request: Request, rank: RankId, course: Course) -> None:
        host = self.world.prefill(rank)

        def act() -> bool:
            sending = host.open_room(request)
            if sending is None:
                return False
            schedule, rng = self.world.schedule, self._rng
            if rng.random() < self._faults.abort:
                self.world.count("prefill abort")
                schedule.after(self._moment(), host.call, host.abort_room, sending)
            stops: list[int | None] = [*course.cuts]
            if rng.random() < self._faults.absence:
                self.world.count("unfinished prefill")
                stops[-1] = None
            schedule.after(rng.random() * 0.1, host.call, self._compute, sending, stops, course)
            schedule.after(STALE_S, host.call, self._abandon, sending)
            return True

        host.call(self._attempt, act, lambda: self._open(request, rank, course), course.give_up)

    def _moment(self) -> float:
        """When an engine gives up: while the first words are on their way, or later."""
        return self._rng.random() * (0.004 if self._rng.random() < 0.4 else 0.5)

    def _attempt(self, act: Callable[[], bool], again: Callable[[], None], give_up: float) -> None:
        """Start a transfer; try again for a while if there is no room for it now."""
        try:
            has_begun = act()
        except (LocalProtocolError, CapacityExceeded, RankDraining):
            has_begun = False
        if not has_begun and self.world.schedule.now < give_up and self._is_active:
            self.world.schedule.after(RETRY_S, again)

    def _compute(self, sending: Sending, cuts: list[int | None], course: Course) -> None:
        """Compute the next chunk, and plan the one after it; None means that the engine gets stuck."""
        host = self.world.processes[sending.host.me.rank]
        if host is not sending.host or cuts[0] is None:
            return
        pauses = draw_pauses(self.world) if course.streams else []
        if self.world.prefill(host.me.rank).compute(sending, cuts[0], is_last=len(cuts) == 1, pauses=pauses):
            cuts.pop(0)
        if cuts:
            delay_s = course.pace_s * self._rng.random() + 0.001 + sum(pause_s for _, pause_s in pauses)
            self.world.schedule.after(delay_s, host.call, self._compute, sending, cuts, course)

    def _abandon(self, sending: Sending) -> None:
        host = self.world.processes[sending.host.me.rank]
        if host is sending.host and not sending.is_finished:
            self.world.prefill(host.me.rank).abort_room(sending)

    def _take_report(self, transfer: Sending | Receiving) -> None:
        """An engine learns how a transfer stands: if it failed, so have its siblings, and the router may try again."""
        if transfer.outcome in (Outcome.PENDING, Outcome.SUCCESS) or transfer.decided_at != self.world.schedule.now:
            return
        rng = self._rng
        if rng.random() < 0.5:
            self.world.schedule.after(0.05 * rng.random(), self._abort_siblings, transfer)
        request = transfer.request
        is_first = isinstance(transfer, Receiving) and self.num_tries >= request.content
        if is_first and self._is_active and rng.random() < self._faults.retry and self._tries[request.room] < MAX_TRIES:
            self.world.schedule.after(rng.random() * 0.3, self._retry, request, rng.random() < 0.5)

    def _abort_siblings(self, transfer: Sending | Receiving) -> None:
        for rank in self.world.instances[transfer.host.me.rank.instance].ranks:
            host = self.world.processes[rank]
            for other in [one for one in host.transfers.values() if one.request is transfer.request]:
                if isinstance(other, Receiving):
                    host.call(self.world.decode(rank).abort_room, other)
                else:
                    host.call(self.world.prefill(rank).abort_room, other)

    def _retry(self, request: Request, is_same_room: bool) -> None:
        if not self._is_active or self._tries[request.room] >= MAX_TRIES:
            return
        room = request.room
        if not is_same_room:
            self.num_requests += 1
            room = self.num_requests
        self.world.count("retry")
        decode = self.world.instances[request.decode]
        again = self.new_request(room, self._pick(is_decode=False), decode)
        again.num_tokens, again.start, again.wants_state = request.num_tokens, request.start, request.wants_state
        self._send(again)

    # Misfortunes -----------------------------------------------------------------------------------------------------

    def _strike(self) -> None:
        faults = self._faults
        for times, strike in (
            (faults.kills, lambda: self._when_writing(self._kill)),
            (faults.crashes, lambda: self._when_writing(self._crash)),
            (faults.freezes, lambda: self._when_writing(lambda victim: self._freeze(victim, stalls=True))),
            (faults.blocks, lambda: self._when_writing(lambda victim: self._freeze(victim, stalls=False))),
            (faults.closings, lambda: self._when_writing(self._close)),
            (faults.partitions, self._part),
            (faults.breaks, self._break),
        ):
            for _ in range(times):
                self.world.schedule.at(self._rng.random() * ACTIVE_S, strike)

    def _victim(self) -> RankId | None:
        living = [host.me.rank for host in self.world.living() if not host.is_closing]
        return self._rng.choice(living) if living else None

    def _when_writing(self, strike: Callable[[RankId | None], None]) -> None:
        """Strike anywhere, or at an end of the next write while it is on its way: that is where it hurts."""
        rng = self._rng
        if rng.random() < 0.4:
            strike(self._victim())
            return

        def aim(write: Write) -> None:
            target = self.world.lives.get(write.peer)
            victim = write.sender if target is None or rng.random() < 0.7 else target
            self.world.schedule.after(rng.random() * write.pace_s, strike, victim.me.rank)

        self.world.plane.when_started.append(aim)

    def _kill(self, victim: RankId | None) -> None:
        if victim is not None and self._is_active and self.world.processes[victim].is_alive:
            self.world.count("death")
            self.world.kill(victim)
            self.world.schedule.after(0.05 + self._rng.random(), self._restart, victim)

    def _crash(self, victim: RankId | None) -> None:
        host = self.world.processes[victim] if victim is not None else None
        if victim is not None and host is not None and self._is_active and not host.is_closing and not host.is_frozen:
            self.world.count("crash")
            self.world.tell(f"{victim} BREAKS, its writes go on")
            host.crash()
            self.world.schedule.after(self._rng.random(), self.world.kill, victim)
            self.world.schedule.after(1.0 + self._rng.random(), self._restart, victim)

    def _restart(self, rank: RankId) -> None:
        if not self.world.processes[rank].is_alive:
            self.world.start(rank)

    def _freeze(self, victim: RankId | None, *, stalls: bool) -> None:
        if victim is not None and self._is_active:
            self.world.count("stop" if stalls else "blocked loop")
            self.world.freeze(victim, stalls=stalls)
            self.world.schedule.after(self._rng.random() * ACTIVE_S, self.world.thaw, victim)

    def _close(self, victim: RankId | None) -> None:
        host = self.world.processes[victim] if victim is not None else None
        if victim is not None and host is not None and self._is_active and not host.is_closing:
            self.world.count("closing")
            self.world.tell(f"{victim} is told to close")
            if self._rng.random() < 0.5:
                host.call(host.start_closing)
            else:
                host.call(host.start_draining, self._rng.random())
            self.world.schedule.after(ACTIVE_S * 0.7, self._restart, victim)

    def _part(self) -> None:
        rng = self._rng
        sides = [self._pick(is_decode=is_decode) for is_decode in (False, True)]
        prefill, decode = (rng.choice(side.ranks) for side in sides)
        ways = rng.choice([[(prefill, decode)], [(decode, prefill)], [(prefill, decode), (decode, prefill)]])
        lasts_s = rng.random() * ACTIVE_S
        for way in ways:
            self.world.count("partition")
            self.world.tell(f"network from {way[0]} to {way[1]} is cut")
            self.world.network.cut(*way)
            self.world.schedule.after(lasts_s, self.world.network.mend, *way)

    def _break(self) -> None:
        lines = self.world.network.open_lines()
        if lines:
            line = self._rng.choice(lines)
            self.world.count("broken connection")
            self.world.tell(f"connection of {line.dialer.me.rank} to {line.to} breaks")
            self.world.network.break_line(line)

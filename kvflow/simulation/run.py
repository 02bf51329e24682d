"""One seed from its first to its last moment."""

import random
from dataclasses import dataclass, field
from typing import Final

from kvflow.config import Limits, Timeouts
from kvflow.errors import CapacityExceeded, KvflowError
from kvflow.simulation.faults import Faults, draw_faults
from kvflow.simulation.pool import Violation
from kvflow.simulation.requests import Receiving, Request
from kvflow.simulation.shapes import MODELS, Shape
from kvflow.simulation.traffic import ACTIVE_S, Traffic
from kvflow.simulation.world import Instance, World
from kvflow.state.tables import Memory, Outcome

__all__ = ["Result", "run_seed"]

STEP_S: Final = 0.25
SETTLE_S: Final = 12.0
"""After healing, everything has ended by then."""

FIRST_FRESH_ROOM: Final = 1_000

SPLITS: Final = (*[(1, 1)] * 8, *[(2, 1)] * 4, *[(1, 2)] * 4, (2, 2))


@dataclass
class Result:
    """What became of a seed.

    Attributes:
        violation: What was broken; None if nothing was.
        time: In the run, in seconds, when it was.
        injected: Faults, by kind.
        num_requests: Requests that the router sent.
        num_successes: Transfers to decode ranks that succeeded.
        num_steps: Calls of the schedule.
        story: What happened, if it was asked for.
    """

    seed: int
    violation: str | None = None
    time: float = 0.0
    injected: dict[str, int] = field(default_factory=dict)
    num_requests: int = 0
    num_successes: int = 0
    num_steps: int = 0
    story: list[str] = field(default_factory=list)


def run_seed(seed: int, *, lossy: bool = False, tells: bool = False, faults: Faults | None = None) -> Result:
    """Run a seed.

    Args:
        seed: Decides everything.
        lossy: The network may also lose, repeat and reorder messages.
        tells: Keep a story.
        faults: Instead of drawn ones.
    """
    rng = random.Random(seed)  # noqa: S311
    world = _draw_world(seed, rng, tells=tells)
    drawn = draw_faults(rng, lossy=lossy)
    traffic = Traffic(world, drawn if faults is None else faults)
    result = Result(seed)
    try:
        _run(world, traffic)
    except (Violation, KvflowError, LookupError, ArithmeticError, TypeError, ValueError, AttributeError) as error:
        kind = "" if isinstance(error, Violation) else f"{type(error).__name__}: "
        result.violation = f"{kind}{error}"
        world.tell(f"VIOLATION {result.violation}")
    result.time = world.schedule.now
    result.injected = world.injected
    result.num_requests = traffic.num_requests
    result.num_steps = world.schedule.num_steps
    result.num_successes = sum(one.outcome is Outcome.SUCCESS for one in world.oracle.receivings)
    result.story = world.story or []
    return result


def _draw_world(seed: int, rng: random.Random, *, tells: bool) -> World:
    instances = []
    for is_decode, letter in ((False, "prefill"), (True, "decode")):
        for number in range(1 if rng.random() < 0.8 else 2):
            tp, pp = rng.choice(SPLITS)
            size = rng.choice((1, 2, 4))
            shape = Shape(tp, pp, size, slots=24 // size, is_head_major=rng.random() < 0.5)
            instances.append(Instance(f"{letter}-{number}", is_decode, shape))
    timeouts = Timeouts(
        handshake_s=1.0,
        transfer_s=rng.choice((1.5, 3.0)),
        open_s=1.5,
        grant_s=1.5,
        first_bytes_s=2.0,
        progress_s=1.0,
        drain_s=0.6,
        lease_s=rng.choice((1.0, 2.0)),
    )
    limits = Limits(posts_per_peer=rng.choice((1, 2, 16)), bytes_per_peer=rng.choice((64, 2**20)), queued_chunks=4)
    return World(seed, rng.choice(MODELS), instances, timeouts=timeouts, limits=limits, tells=tells)


def _run(world: World, traffic: Traffic) -> None:
    world.start_all()
    traffic.begin()
    world.schedule.run_until(ACTIVE_S)
    traffic.end()
    _settle(world, 1.5 * world.timeouts.lease_s)
    world.oracle.check_end()
    _check_liveness(world, traffic)
    _settle(world, 0.0)
    world.oracle.check_end()


def _settle(world: World, at_least_s: float) -> None:
    """Let everything end, and let peers that died be found out."""
    earliest = world.schedule.now + at_least_s
    latest = world.schedule.now + SETTLE_S
    while world.schedule.now < latest and (world.schedule.now < earliest or _is_busy(world)):
        world.schedule.run_until(world.schedule.now + STEP_S)
        world.start_all()


def _is_busy(world: World) -> bool:
    for host in world.living():
        if host.is_closing or any(transfer.memory is not Memory.QUARANTINED for transfer in host.transfers.values()):
            return True
        if any(host.leftovers().values()):
            return True
    return False


def _check_liveness(world: World, traffic: Traffic) -> None:
    """A fresh transfer between all instances must succeed."""
    instances = list(world.instances.values())
    pairs = [(one, other) for one in instances for other in instances if not one.is_decode and other.is_decode]
    fresh: list[Receiving] = []
    for number, (prefill, decode) in enumerate(pairs):
        request = traffic.new_request(FIRST_FRESH_ROOM + number, prefill, decode)
        fresh += _transfer(world, request)
    end = world.schedule.now + world.timeouts.transfer_s
    while world.schedule.now < end and any(receiving.decided_at is None for receiving in fresh):
        world.schedule.run_until(world.schedule.now + STEP_S)
    for receiving in fresh:
        if receiving.outcome is not Outcome.SUCCESS:
            raise Violation(f"fresh {receiving.lease.name} does not succeed: {receiving.failure}")


def _transfer(world: World, request: Request) -> list[Receiving]:
    """Send a request; nothing is expected where quarantine has left no pages."""
    world.tell(f"fresh {request} from {request.prefill} to {request.decode}")
    receivings = []
    for rank in world.instances[request.prefill].ranks:
        sending = world.prefill(rank).open_room(request)
        if sending is not None:
            world.prefill(rank).compute(sending, request.num_tokens, is_last=True)
    for rank in world.instances[request.decode].ranks:
        try:
            receiving = world.decode(rank).receive(request)
        except CapacityExceeded:
            receiving = None
        if receiving is None:
            return []
        receivings.append(receiving)
    return receivings

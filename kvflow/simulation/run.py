"""One seed from its first to its last moment."""

import random
from dataclasses import dataclass, field
from typing import Final

from kvflow.config import Limits, Timeouts
from kvflow.errors import FailureReason, KvflowError
from kvflow.simulation.faults import Faults, draw_faults
from kvflow.simulation.pool import Violation
from kvflow.simulation.requests import Receiving, Request
from kvflow.simulation.shapes import MODELS, Shape
from kvflow.simulation.traffic import ACTIVE_S, Traffic, draw_pauses
from kvflow.simulation.world import Instance, StagingShape, World
from kvflow.state.events import QuarantineReleased
from kvflow.state.quarantine import NO_MEMORY
from kvflow.state.tables import Memory, Outcome

__all__ = ["Result", "run_seed", "settle"]

STEP_S: Final = 0.25
SETTLE_S: Final = 12.0
"""After healing, everything has ended by then."""

LIVELY_S: Final = 12.0
"""A peer that failed again and again is tried again by then."""

FRESH_TOKENS: Final = 4
PAUSE_S: Final = 1.0
FRESH_STEP_S: Final = 0.05
STREAMED: Final = 0.3
"""Share of fresh transfers that go layer by layer."""

PAUSES: Final = (FailureReason.PEER_FAILING, FailureReason.NOT_GRANTED, FailureReason.ABORTED)
"""Why a fresh transfer may fail at first: some rank of the instance still avoids the other side."""

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


def run_seed(seed: int, *, tells: bool = False, faults: Faults | None = None) -> Result:
    """Run a seed.

    Args:
        seed: Decides everything.
        tells: Keep a story.
        faults: Instead of drawn ones.
    """
    rng = random.Random(seed)  # noqa: S311
    world = _draw_world(seed, rng, tells=tells)
    drawn = draw_faults(rng)
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
    limits = Limits(
        bytes_per_post=rng.choice((1, 64, 200, 2**20)),
        bytes_per_layer_piece=rng.choice((1, 100, 2**20)),
        posts_per_peer=rng.choice((1, 2, 16)),
        bytes_per_peer=rng.choice((64, 2**20)),
        queued_chunks=4,
    )
    staging = _draw_staging(seed)
    return World(seed, rng.choice(MODELS), instances, timeouts=timeouts, limits=limits, staging=staging, tells=tells)


def _draw_staging(seed: int) -> StagingShape | None:
    """Half of the seeds pack; they are the same seeds as before in all else."""
    rng = random.Random(f"staging of {seed}")  # noqa: S311
    if rng.random() < 0.5:
        return None
    return StagingShape(
        slot_bytes=rng.choice((64, 200, 1024)),
        num_slots=rng.choice((1, 1, 2, 4)),
        num_windows=rng.choice((1, 2, 8)),
        num_local=rng.choice((1, 2, 8)),
    )


def _run(world: World, traffic: Traffic) -> None:
    world.start_all()
    traffic.begin()
    world.schedule.run_until(ACTIVE_S)
    traffic.end()
    settle(world, 1.5 * world.timeouts.lease_s)
    world.oracle.check_nothing_is_left()
    _check_liveness(world, traffic)
    settle(world, 0.0)
    world.oracle.check_nothing_is_left()
    world.oracle.check_end()
    _release(world)


def settle(world: World, at_least_s: float) -> None:
    """Let everything end, and let peers that died be found out."""
    earliest = world.schedule.now + at_least_s
    latest = world.schedule.now + SETTLE_S
    while world.schedule.now < latest and (world.schedule.now < earliest or _is_busy(world)):
        world.schedule.run_until(world.schedule.now + STEP_S)
        world.start_all()


def _is_busy(world: World) -> bool:
    if world.plane.num_active:
        return True
    for host in world.living():
        if host.is_closing or any(host.leftovers().values()):
            return True
        for transfer in host.transfers.values():
            if transfer.memory is not Memory.QUARANTINED or not world.oracle.is_excused(transfer):
                return True
    return False


def _check_liveness(world: World, traffic: Traffic) -> None:
    """A fresh transfer between all instances must succeed, after as many pauses as a peer that failed is given."""
    instances = list(world.instances.values())
    pairs = [(one, other) for one in instances for other in instances if not one.is_decode and other.is_decode]
    room = FIRST_FRESH_ROOM
    latest = world.schedule.now + LIVELY_S
    while pairs:
        fresh = []
        for prefill, decode in pairs:
            room += 1
            request = traffic.new_request(room, prefill, decode)
            request.num_tokens = request.num_tokens % FRESH_TOKENS + 1
            request.start = 0
            fresh.append(_transfer(world, request))
        end = world.schedule.now + world.timeouts.transfer_s
        while world.schedule.now < end and any(one.decided_at is None for receivings in fresh for one in receivings):
            world.schedule.run_until(world.schedule.now + FRESH_STEP_S)
        failures = [[one.failure for one in receivings if one.outcome is not Outcome.SUCCESS] for receivings in fresh]
        pairs = [pair for pair, failed in zip(pairs, failures, strict=True) if failed]
        for failure in [failure for failed in failures for failure in failed]:
            if failure is None or failure.reason not in PAUSES or world.schedule.now > latest:
                raise Violation(f"a fresh transfer does not succeed: {failure}")
        if pairs:
            settle(world, PAUSE_S)


def _release(world: World) -> None:
    """Let an operator take back what the dead have left: no process remains that could write."""
    for host in world.living():
        for key in list(host.transfers):
            host.dispatch(QuarantineReleased(key))
        if not host.core.is_idle or host.core.quarantine.total != NO_MEMORY or not host.pool.is_whole:
            raise Violation(f"{host.me} holds something although everything was released")


def _transfer(world: World, request: Request) -> list[Receiving]:
    """Send a request; where quarantine has left too few pages, only its metadata."""
    receivers = [world.decode(rank) for rank in world.instances[request.decode].ranks]
    if any(host.pool.num_free(name) < request.num_tokens for host in receivers for name in host.pool.table.first_page):
        request.start, request.wants_state = request.num_tokens, False
    world.tell(f"fresh {request} from {request.prefill} to {request.decode}, {request.start}:{request.num_tokens}")
    for rank in world.instances[request.prefill].ranks:
        sending = world.prefill(rank).open_room(request)
        if sending is not None:
            pauses = draw_pauses(world) if world.rng.random() < STREAMED else []
            world.prefill(rank).compute(sending, request.num_tokens, is_last=True, pauses=pauses)
    opened = [host.receive(request) for host in receivers]
    return [receiving for receiving in opened if receiving is not None]

"""One run of a seed, from start to end."""

import dataclasses
import gc
import random
from dataclasses import dataclass, field
from typing import Final

from kvflow.bounds import Bounds
from kvflow.config import Timeouts
from simulation.deployment import SOON_S, Deployment, StagingShape, watch_logs
from simulation.faults import Faults, draw_faults
from simulation.injection import ACTIVE_S, FaultInjector
from simulation.loop import Violation
from simulation.model import MODELS, Shape
from simulation.offers import Offers
from simulation.oracle import Instance
from simulation.references import References
from simulation.router import ANNOUNCED_S, Announcements, Router
from simulation.world import World

__all__ = ["Result", "may_lose_messages", "run_seed", "settle"]

STEP_S: Final = 0.25
"""Interval between checks of what must always hold."""

RECOVERY_S: Final = 5.0
"""Time after the last fault within which service is back at its full rate."""

OPERATOR_S: Final = 3.0
"""Time after the last fault by which the deadline of every earlier transfer has passed, and an operator starts to
release pages that ended processes have left in quarantine. Such pages may fill a pool, so service cannot recover
earlier."""

STRICT_S: Final = 1.0
"""Duration after the recovery within which every request must succeed."""

PATIENCE_S: Final = 1.0
"""Maximum duration of a request during this time."""

SETTLE_S: Final = 4.0
"""Time after the last request within which everything is released."""

SHOWN: Final = 0.4
"""Fraction of seeds whose transport shows when the last bytes of a dead process have landed."""

BY_NAME: Final = 0.6
"""Fraction of seeds in which every request refers to its instance by name."""

BOTH_ROLES: Final = 0.1
"""Fraction of seeds in which processes have both roles."""

PREEMPTING: Final = 0.35
"""Fraction of seeds in which prefill engines preempt requests."""

ANNOUNCING: Final = 0.35
"""Fraction of seeds in which decode engines announce requests."""

OVERTAKING: Final = 0.3
"""Fraction of seeds in which notices may overtake their bytes."""

NO_PAGES: Final = 0.2
"""Maximum chance that a decode engine never gets pages. Half of the seeds with announcements draw one."""

OFFERING: Final = 0.5
"""Share of the seeds with both roles in each process in which requests are offered."""

SPLITS: Final = (*[(1, 1)] * 8, *[(2, 1)] * 4, *[(1, 2)] * 4, (2, 2))

POOL_TOKENS: Final = 32
TIGHT_POOL_TOKENS: Final = 8
"""Enough for one request of any length.

Only one side has such a small pool, and only instances of one rank: workers hold pages for a request while others have
none for it yet, so several small pools would deadlock.
"""


@dataclass
class Result:
    """Result of a seed.

    Attributes:
        violation: What was violated; None if nothing was.
        time: Virtual time at which the run ended, in seconds.
        injected: Number of injected faults, by kind.
        num_requests: Requests that the router sent.
        num_successes: Requests that succeeded on every rank.
        num_callbacks: Callbacks of the event loop.
        story: What happened, if a story was kept.
    """

    seed: int
    violation: str | None = None
    time: float = 0.0
    injected: dict[str, int] = field(default_factory=dict)
    num_requests: int = 0
    num_successes: int = 0
    num_callbacks: int = 0
    story: list[str] = field(default_factory=list)


def run_seed(seed: int, *, tells: bool = False, faults: Faults | None = None, by_name: bool = False) -> Result:
    """Run a seed.

    Args:
        seed: Determines everything.
        tells: Keep a story.
        faults: Used instead of drawn ones.
        by_name: Every request refers to its instance by name, nothing is preempted or announced, and each process has
            one role, as in many seeds anyway.
    """
    rng = random.Random(f"kvflow {seed}")  # noqa: S311 - chance must be repeatable here
    drawn = draw_faults(rng)
    announcements = None if by_name else _draw_announcements(seed)
    if announcements is not None:
        own = _own(seed, "no pages")
        drawn = dataclasses.replace(drawn, no_pages=NO_PAGES * own.random() if own.random() < 0.5 else 0.0)
    own = _own(seed, "overtaking notices")
    if own.random() < OVERTAKING:
        drawn = dataclasses.replace(drawn, overtaking_notice=own.random())
    result = Result(seed)
    was_collecting = gc.isenabled()
    gc.disable()  # too slow for a short run, and objects of dead processes would be finalized in no fixed order
    try:
        with World(
            f"world {seed}",
            faults=drawn if faults is None else faults,
            ends_with_process=rng.random() < 0.4,
            in_band_notices=rng.random() < 0.7,
            shows_last_bytes=_own(seed, "last bytes").random() < SHOWN,
            tells=tells,
        ) as world:
            world.plane.shares_network = rng.random() < 0.5
            deployment = _draw_deployment(rng, world, None if by_name else seed)
            with watch_logs(deployment):
                preemptions = None if by_name else _draw_preemptions(seed)
                deployment.offers = None if by_name else _draw_offers(seed, deployment)
                router = Router(
                    deployment,
                    num_clients=rng.choice((1, 1, 2)),
                    interval_s=rng.uniform(0.7, 1.6),
                    preemptions=preemptions,
                    announcements=announcements,
                )
                _run_watched(deployment, router, result)
    finally:
        if was_collecting:
            gc.enable()
    return result


def _own(seed: int, what: str) -> random.Random:
    """Return a separate random generator, so that its draws do not change any others."""
    return random.Random(f"kvflow {what} {seed}")  # noqa: S311 - chance must be repeatable here


def _run_watched(deployment: Deployment, router: Router, result: Result) -> None:
    world = deployment.world
    try:
        _run(deployment, router)
    except Exception as error:  # noqa: BLE001 - any exception that escapes the code under test is a violation
        kind = "" if isinstance(error, Violation) else f"{type(error).__name__}: "
        result.violation = f"{kind}{error}"
        world.tell(f"VIOLATION {result.violation}")
    result.time = world.now
    result.injected = world.injected
    result.num_requests = len(router.trials)
    result.num_successes = sum(trial.has_succeeded for trial in router.trials)
    result.num_callbacks = world.loop.num_callbacks
    result.story = world.story or []


def _draw_deployment(rng: random.Random, world: World, seed: int | None) -> Deployment:
    instances = []
    is_tight = rng.choice((None, True, False))
    for is_decode, letter in ((False, "prefill"), (True, "decode")):
        for number in range(1 if rng.random() < 0.8 else 2):
            tp, pp = rng.choice(SPLITS)
            size = rng.choice((1, 2, 4))
            num_tokens = TIGHT_POOL_TOKENS if is_tight is is_decode and (tp, pp) == (1, 1) else POOL_TOKENS
            shape = Shape(tp, pp, size, slots=num_tokens // size, is_head_major=rng.random() < 0.5)
            instances.append(Instance(f"{letter}-{number}", is_decode, shape))
    timeouts = Timeouts(
        handshake_s=1.0,
        transfer_s=rng.choice((1.5, 3.0)),
        open_s=1.5,
        grant_s=1.5,
        progress_s=1.0,
        drain_s=0.6,
        lease_s=rng.choice((1.0, 2.0)),
    )
    limits = Bounds(
        bytes_per_post=rng.choice((1, 64, 200, 2**20)),
        bytes_per_layer_piece=rng.choice((1, 100, 2**20)),
        posts_per_peer=rng.choice((1, 2, 16)),
        bytes_per_peer=rng.choice((64, 2**20)),
        queued_chunks=rng.choice((4, 64)),
        descriptors_planned_inline=rng.choice((1, 2**15)),
    )
    model, staging = rng.choice(MODELS), _draw_staging(rng)
    is_fixed = rng.random() < 0.5
    instances, hosts = _draw_hosts(seed, instances)
    return Deployment(
        world,
        model,
        instances,
        timeouts=timeouts,
        announced_s=ANNOUNCED_S,
        limits=limits,
        staging=staging,
        fixed_ports=is_fixed,
        may_lose_messages=may_lose_messages(world.faults),
        references=None if seed is None else _draw_references(seed, instances),
        hosts=hosts,
    )


def _draw_hosts(seed: int | None, instances: list[Instance]) -> tuple[list[Instance], dict[str, str]]:
    """Draw whether every process has both roles, decode in the processes of prefill, with one pool for both."""
    rng = random.Random(f"guests {seed}")  # noqa: S311 - chance must be repeatable here
    if seed is None or rng.random() >= BOTH_ROLES:
        return instances, {}
    found, hosts = [], {}
    for one in [one for one in instances if not one.is_decode]:
        slots = 2 * POOL_TOKENS // one.shape.page_size
        host = dataclasses.replace(one, shape=dataclasses.replace(one.shape, slots=slots))
        guest = Instance(one.name.replace("prefill", "decode"), is_decode=True, shape=host.shape)
        found += [host, guest]
        hosts[guest.name] = host.name
    return found, hosts


def _draw_references(seed: int, instances: list[Instance]) -> References | None:
    """Draw whether some instances answer for themselves and requests carry tickets; this changes no other draws."""
    rng = random.Random(f"references {seed}")  # noqa: S311 - chance must be repeatable here
    if rng.random() < BY_NAME:
        return None
    return References.draw(rng, [one.name for one in instances if not one.is_decode])


def _draw_preemptions(seed: int) -> random.Random | None:
    """Return a generator for preemptions in about a third of the seeds, else None; this changes no other draws."""
    rng = random.Random(f"preempting {seed}")  # noqa: S311 - chance must be repeatable here
    return rng if rng.random() < PREEMPTING else None


def _draw_announcements(seed: int) -> Announcements | None:
    """Return a generator for announcements in about a third of the seeds, else None; this changes no other draws."""
    rng = random.Random(f"announcing {seed}")  # noqa: S311 - chance must be repeatable here
    return Announcements(rng) if rng.random() < ANNOUNCING else None


def _draw_offers(seed: int, deployment: Deployment) -> Offers | None:
    """Return what offers requests, in some of the seeds with both roles; this changes no other draws."""
    rng = _own(seed, "offering")
    if not deployment.hosts or rng.random() >= OFFERING:
        return None
    return Offers(deployment, rng, share=0.2 + 0.8 * rng.random(), declines=0.4 * rng.random())


def may_lose_messages(faults: Faults) -> bool:
    """Return whether the last messages of a leaving rank may be lost."""
    return bool(
        faults.drop
        or faults.full_queue
        or faults.handshake_reset
        or faults.breaks
        or faults.half_open
        or faults.partitions
        or faults.stops
        or faults.blocks
        or faults.clock_stops
    )


def _draw_staging(rng: random.Random) -> StagingShape | None:
    """Draw staging memory; half of the seeds have some, and pack every piece."""
    if rng.random() < 0.5:
        return None
    return StagingShape(
        slot_bytes=rng.choice((64, 200, 1024)),
        num_slots=rng.choice((1, 1, 2, 4)),
        num_windows=rng.choice((1, 2, 8)),
        num_local=rng.choice((1, 2, 8)),
    )


def _run(deployment: Deployment, router: Router) -> None:
    injector = FaultInjector(deployment)
    deployment.restart_s = 1.0
    deployment.start_all()
    router.start()
    injector.begin()
    _pass_time(deployment, ACTIVE_S)
    injector.is_active = False
    router.hasten_announcements()
    _heal(deployment)
    _recover(deployment)
    deployment.check_quarantine()
    deployment.release_quarantine()
    _check_rate(deployment, router)
    router.is_open = False
    settle(deployment)
    deployment.check_quarantine()
    deployment.release_quarantine()
    deployment.check_nothing_is_left()


def _heal(deployment: Deployment) -> None:
    """End all faults, and replace broken ranks."""
    world = deployment.world
    world.tell("everything is healed")
    world.heal()
    deployment.oracle.healed()
    for worker in deployment.living():
        if worker.process in deployment.sabotaged:
            worker.process.kill()
    deployment.restart_s = SOON_S
    deployment.start_all()


def _recover(deployment: Deployment) -> None:
    """Give service time to recover, with an operator who releases what ended processes have left in quarantine."""
    _pass_time(deployment, OPERATOR_S)
    for _ in range(round((RECOVERY_S - OPERATOR_S) / STEP_S)):
        deployment.look_at_quarantine()
        _pass_time(deployment, STEP_S)


def _pass_time(deployment: Deployment, lasts_s: float) -> None:
    for _ in range(round(lasts_s / STEP_S)):
        deployment.world.run(STEP_S)
        deployment.check_now()


def _check_rate(deployment: Deployment, router: Router) -> None:
    """Check that every request started now succeeds, including one between any two instances."""
    world = deployment.world
    begins = world.now
    instances = deployment.instances.values()
    for prefill in [one for one in instances if not one.is_decode]:
        for decode in [one for one in instances if one.is_decode]:
            router.process.spawn(router.try_request(router.new_request(prefill, decode)))
    _pass_time(deployment, STRICT_S)
    router.is_open = False
    _pass_time(deployment, PATIENCE_S)
    for trial in router.trials:
        if trial.began >= begins and not trial.has_succeeded:
            how = "lasts" if trial.ended is None else "failed"
            raise Violation(f"the rate is not back {RECOVERY_S:.0f} s after the last fault: {trial.request} {how}")
        if trial.began < begins and trial.ended is None:
            raise Violation(f"{trial.request} began at {trial.began:.3f} s and still lasts")


def settle(deployment: Deployment) -> None:
    """Let everything end, within `SETTLE_S`."""
    latest = deployment.world.now + SETTLE_S
    while deployment.world.now < latest and not deployment.is_quiet():
        _pass_time(deployment, STEP_S)

"""Scenarios: races that somebody met in the field, played by the real code in virtual time."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from kvflow.config import Limits, Timeouts
from kvflow.errors import CapacityExceeded, KvflowError, LocalProtocolError, RankDraining
from kvflow.simulation.host import Host
from kvflow.simulation.interference import Interference
from kvflow.simulation.pool import Violation
from kvflow.simulation.requests import Receiving, Request, Sending
from kvflow.simulation.run import settle
from kvflow.simulation.script import ScenarioError, Statement, parse
from kvflow.simulation.shapes import KV, MODELS, Model, Shape
from kvflow.simulation.world import Instance, World
from kvflow.state.events import QuarantineReleased
from kvflow.wire.messages import RankId

__all__ = ["Scenario", "play"]

TIMEOUTS = Timeouts(
    handshake_s=1.0,
    transfer_s=5.0,
    open_s=3.0,
    grant_s=3.0,
    first_bytes_s=4.0,
    progress_s=2.0,
    drain_s=0.5,
    lease_s=1.0,
)

DRAINING_S = 1.0

ACTS = {name: f"_set_{name}" for name in ("model", "timeouts", "limits", "transport")}
"""Methods that would have the name of what they set."""


def play(text: str) -> list[str]:
    """Play a scenario to its end, heal everything, and see that nothing is left.

    Args:
        text: In the language of `kvflow.simulation.script`.

    Returns:
        Its story.

    Raises:
        ScenarioError: It is not understood, something cannot be done, an expectation is not met, or a promise is
            broken; `story` has what happened.
    """
    statements = parse(text)
    scenario = Scenario()
    for statement in statements:
        scenario.act(statement)
    return scenario.end()


class Scenario:
    """A scenario while it is played; the methods are named after what `script.STATEMENTS` calls the acts."""

    def __init__(self) -> None:
        self._model: Model = MODELS[0]
        self._instances: list[Instance] = []
        self._timeouts = TIMEOUTS
        self._limits = Limits()
        self._transport: list[str] = []
        self._requests: dict[int, Request] = {}
        self._num_tries = 0
        self._stage: tuple[World, Interference] | None = None

    def act(self, statement: Statement) -> None:
        """Carry out one line.

        Raises:
            ScenarioError: That is not possible, or not what is found.
        """
        if self._stage is not None:
            self._world.tell(f"> {statement.text}")
        act: Callable[..., None] = getattr(self, ACTS.get(statement.act, f"_{statement.act}"))
        try:
            act(**statement.values)
        except ScenarioError as error:
            raise error.at(statement.line, statement.text, self._story()) from error.__cause__
        except (Violation, KvflowError, LookupError, TypeError, ValueError) as error:
            raise ScenarioError(str(error)).at(statement.line, statement.text, self._story()) from error

    def end(self) -> list[str]:
        """Heal everything and see that nothing is left; give the story.

        Raises:
            ScenarioError: Something is.
        """
        world = self._world
        self._interference.end()
        try:
            world.heal()
            settle(world, 1.5 * world.timeouts.lease_s)
            world.oracle.check_nothing_is_left()
            world.oracle.check_end()
        except (Violation, KvflowError) as error:
            raise ScenarioError(str(error)).at(0, "the end", self._story()) from error
        return self._story()

    def _story(self) -> list[str]:
        """What has happened so far."""
        return [] if self._stage is None else self._world.story or []

    # The stage -------------------------------------------------------------------------------------------------------

    @property
    def _world(self) -> World:
        return self._set()[0]

    @property
    def _interference(self) -> Interference:
        return self._set()[1]

    def _set(self) -> tuple[World, Interference]:
        """Everything is set when it is needed first; nothing can be described after that."""
        if self._stage is None:
            if not self._instances:
                raise ScenarioError("no instance is described yet")
            world = World(0, self._model, self._instances, timeouts=self._timeouts, limits=self._limits, tells=True)
            world.without_notices = "without notices" in self._transport
            world.is_fenced = "that ends with the process" in self._transport
            world.start_all()
            self._stage = world, Interference(world)
        return self._stage

    def _describe(self) -> None:
        if self._stage is not None:
            raise ScenarioError("this must be said before anything is done")

    def _set_model(self, name: str) -> None:
        self._describe()
        self._model = {model.name: model for model in MODELS}[name]

    def _instance(self, kind: str, name: str, options: dict[str, str] | None) -> None:
        self._describe()
        given = dict(options or {})
        shape = Shape(
            tp=int(given.pop("ranks", 1)),
            pp=int(given.pop("stages", 1)),
            page_size=int(given.pop("page", 2)),
            slots=int(given.pop("pages", 8)),
        )
        if given:
            raise ScenarioError("instance has no such option", given=sorted(given))
        self._instances.append(Instance(name, kind == "decode", shape))

    def _set_timeouts(self, settings: dict[str, float]) -> None:
        self._describe()
        changes: dict[str, Any] = {f"{name}_s": value for name, value in settings.items()}
        self._timeouts = dataclasses.replace(self._timeouts, **changes)

    def _set_limits(self, settings: dict[str, float]) -> None:
        self._describe()
        changes: dict[str, Any] = {name: int(value) for name, value in settings.items()}
        self._limits = dataclasses.replace(self._limits, **changes)

    def _set_transport(self, kind: str) -> None:
        self._describe()
        self._transport.append(kind)

    # Engines ---------------------------------------------------------------------------------------------------------

    def _request(self, room: int, tokens: int, prefill: str, decode: str, has: int | None) -> None:
        self._num_tries += 1
        num_ranks = self._world.instances[decode].shape.num_ranks
        request = Request(room, self._num_tries, tokens, has or 0, True, prefill, decode, num_ranks)
        self._requests[room] = request
        self._world.oracle.requests.setdefault(room, []).append(request)

    def _open(self, who: str, verb: str, room: int) -> None:
        for rank in self._ranks(who):
            host = self._world.prefill(rank)
            self._begin(verb == "opens", functools.partial(host.open_room, self._requests[room]))

    def _receive(self, who: str, verb: str, room: int, within: float | None) -> None:
        for rank in self._ranks(who):
            host = self._world.decode(rank)
            self._begin(verb == "receives", functools.partial(host.receive, self._requests[room], within))

    def _begin(self, is_allowed: bool, begin: Callable[[], Sending | Receiving | None]) -> None:
        try:
            has_begun = begin() is not None
        except (LocalProtocolError, CapacityExceeded, RankDraining):
            if is_allowed:
                raise
            has_begun = False
        if has_begun != is_allowed:
            raise ScenarioError("transfer has begun" if has_begun else "pool has no pages left")

    def _compute(self, who: str, room: int, stop: int) -> None:
        for rank in self._ranks(who):
            self._world.prefill(rank).compute(self._sending(rank, room), stop, is_last=False)

    def _finish(self, who: str, room: int) -> None:
        for rank in self._ranks(who):
            sending = self._sending(rank, room)
            self._world.prefill(rank).compute(sending, sending.request.num_tokens, is_last=True)

    def _abort(self, who: str, room: int) -> None:
        for rank in self._ranks(who):
            transfer = self._transfer(rank, room)
            if isinstance(transfer, Receiving):
                self._world.decode(rank).abort_room(transfer)
            else:
                self._world.prefill(rank).abort_room(transfer)

    # Processes -------------------------------------------------------------------------------------------------------

    def _process(self, who: str, verb: str) -> None:
        for rank in self._ranks(who):
            self._strike(rank, verb)

    def _strike(self, rank: RankId, verb: str) -> None:
        world = self._world
        host = world.processes[rank]
        match verb:
            case "dies":
                world.kill(rank)
            case "starts":
                world.start(rank)
            case "stops" | "is blocked":
                world.freeze(rank, stalls=verb == "stops")
            case "goes on":
                world.thaw(rank)
            case "closes":
                host.start_closing()
            case "drains":
                host.start_draining(DRAINING_S)
            case "breaks":
                host.crash()

    def _release(self, room: int, who: str) -> None:
        for rank in self._ranks(who):
            transfer = self._transfer(rank, room)
            key = transfer.generation if isinstance(transfer, Receiving) else room
            transfer.host.dispatch(QuarantineReleased(key))

    def _run(self, lasts: float) -> None:
        self._world.schedule.run_until(self._world.schedule.now + lasts)

    # Network and transport -------------------------------------------------------------------------------------------

    def _message(self, verb: str, kind: str, source: str, target: str) -> None:
        self._interference.message(verb, kind, source, target)

    def _release_messages(self) -> None:
        self._interference.release_messages()

    def _hold_writes(self, source: str | None, target: str | None) -> None:
        self._interference.hold_writes(source, target)

    def _release_writes(self) -> None:
        self._interference.release_writes()

    def _held_writes(self, verb: str) -> None:
        self._interference.held_writes(verb)

    def _notices(self, verb: str, target: str) -> None:
        self._interference.notices(verb, target)

    def _release_notices(self) -> None:
        self._interference.release_notices()

    def _cut(self, source: str, target: str) -> None:
        for one in self._ranks(source):
            for other in self._ranks(target):
                self._world.network.cut(one, other)

    def _mend(self) -> None:
        self._world.network.mend_all()

    # What must be seen -----------------------------------------------------------------------------------------------

    def _expect(self, who: str, room: int, facts: tuple[str, ...]) -> None:
        for rank in self._ranks(who):
            transfer = self._transfer(rank, room)
            reason = transfer.failure.reason.value if transfer.failure else "no_reason"
            found = (transfer.outcome.value, transfer.memory.value, reason)
            missing = [fact for fact in facts if fact not in found]
            if missing:
                raise ScenarioError("transfer is not as expected", rank=str(rank), found=found, expected=facts)

    def _expect_pages(self, who: str, facts: tuple[str, ...]) -> None:
        for rank in self._ranks(who):
            host = self._world.processes[rank]
            found = pages(host)
            expected = {name: int(count) for count, name in (fact.split() for fact in facts)}
            if any(found[name] != count for name, count in expected.items()):
                raise ScenarioError("pages are not as expected", rank=str(rank), found=found, expected=expected)

    def _expect_oddity(self, who: str, kind: str) -> None:
        for rank in self._ranks(who):
            counts = self._world.processes[rank].context.oddities.counts
            if kind not in counts:
                raise ScenarioError("nothing of that kind was ignored", rank=str(rank), found=counts)

    def _ranks(self, who: str) -> list[RankId]:
        name, _, number = who.partition("/")
        if name not in self._world.instances:
            raise ScenarioError("no such instance", name=name, known=sorted(self._world.instances))
        ranks = self._world.instances[name].ranks
        return [ranks[int(number)]] if number else ranks

    def _sending(self, rank: RankId, room: int) -> Sending:
        transfer = self._transfer(rank, room)
        if not isinstance(transfer, Sending):
            raise ScenarioError("only a prefill rank computes", rank=str(rank))
        return transfer

    def _transfer(self, rank: RankId, room: int) -> Sending | Receiving:
        """The latest try of a room on a rank, in whatever life."""
        oracle = self._world.oracle
        every: list[Sending | Receiving] = [*oracle.sendings, *oracle.receivings]
        found = [one for one in every if one.host.me.rank == rank and one.request.room == room]
        if not found:
            raise ScenarioError("rank has never had this room", rank=str(rank), room=room)
        return found[-1]


def pages(host: Host) -> dict[str, int]:
    """Pages of the main component of a rank, by what holds them."""
    leases = [transfer.lease for transfer in host.transfers.values() if not transfer.lease.is_free]
    counts = {"free": host.pool.num_free(KV), "held": 0, "quarantined": 0}
    for lease in leases:
        counts["quarantined" if lease.is_quarantined else "held"] += len(lease.pages.get(KV, ()))
    return counts

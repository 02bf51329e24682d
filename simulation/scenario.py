"""Scenarios: race conditions met in the field, played by the real code in virtual time."""

import asyncio
import dataclasses
import functools
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from kvflow.bounds import Bounds
from kvflow.config import Timeouts
from kvflow.errors import KvflowError
from kvflow.room import RoomId
from kvflow.sender import RoomSender
from kvflow.state.tables import Memory
from kvflow.wire.messages import RankId
from simulation.deployment import Deployment, StagingShape, watch_logs
from simulation.engines import REFUSALS, DecodeWorker, PrefillWorker, Worker
from simulation.faults import Faults
from simulation.interference import Interference
from simulation.loop import Violation
from simulation.model import KV, MODELS, Model, Shape
from simulation.oracle import Instance
from simulation.references import References
from simulation.requests import Receiving, Request, Sending
from simulation.run import settle
from simulation.script import ScenarioError, Statement, parse
from simulation.world import World

__all__ = ["Scenario", "play"]

TIMEOUTS = Timeouts(
    handshake_s=1.0,
    transfer_s=5.0,
    open_s=3.0,
    grant_s=3.0,
    progress_s=2.0,
    drain_s=0.5,
    lease_s=1.0,
)

DRAINING_S = 1.0

BEGINNING_S = 0.05
"""Time until all ranks are registered."""

PACE = 0.2
"""Factor on the duration of quick operations.

It is small, so that a scenario can rely on when something has happened.
"""

ACTS = {name: f"_set_{name}" for name in ("model", "timeouts", "limits", "transport", "staging")}
"""Acts whose method is named `_set_...`, because `_...` is the attribute that it sets."""

Command = Callable[[], Awaitable[bool]]
"""A command to an engine within a room; returns whether the room is finished."""


def play(text: str) -> list[str]:
    """Play a scenario to its end, heal everything, and check that nothing is left.

    Args:
        text: Scenario in the language of `simulation.script`.

    Returns:
        The story, line by line.

    Raises:
        ScenarioError: A line cannot be parsed or carried out, an expectation is not met, or a promise is broken;
            `story` tells what happened.
    """
    statements = parse(text)
    scenario = Scenario()
    try:
        for statement in statements:
            scenario.act(statement)
        return scenario.end()
    finally:
        scenario.close()


class _Stage:
    """The deployment that a scenario is played on."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.world = deployment.world
        self.interference = Interference(self.world)


class _Engine:
    """One room on one worker, with an engine that executes commands.

    Args:
        worker: The worker.
        one: Its transfer of the room.
    """

    def __init__(self, worker: Worker, one: Sending | Receiving) -> None:
        self.one = one
        self.refusal: Exception | None = None
        self.commands: asyncio.Queue[Command] = asyncio.Queue()
        self._worker = worker
        self.task = worker.process.spawn(self._run())

    async def _run(self) -> None:
        worker, one = self._worker, self.one
        try:
            async with one.transfer:
                worker.begin(one)
                if isinstance(one, Receiving) and isinstance(worker, DecodeWorker):
                    await worker.receive(one)
                elif isinstance(one, Sending):
                    await self._obey(one.transfer)
        except REFUSALS as error:
            self.refusal = error
        except asyncio.CancelledError:  # an abort
            pass
        finally:
            worker.end(one)

    async def _obey(self, sender: RoomSender) -> None:
        """Execute commands until one ends the room, or until the transfer fails."""
        failing = asyncio.ensure_future(sender.delivered())
        try:
            is_finished = False
            while not is_finished:
                command = asyncio.ensure_future(self.commands.get())
                await asyncio.wait([command, failing], return_when=asyncio.FIRST_COMPLETED)
                if failing.done():
                    command.cancel()
                    return failing.result()
                is_finished = await command.result()()
        finally:
            failing.cancel()


class Scenario:
    """A scenario being played. Its methods are named after the acts in `script.STATEMENTS`."""

    def __init__(self) -> None:
        self._model: Model = MODELS[0]
        self._instances: list[Instance] = []
        self._answering: list[str] = []
        self._timeouts = TIMEOUTS
        self._limits = Bounds()
        self._transport: list[str] = []
        self._staging: StagingShape | None = None
        self._requests: dict[RoomId, Request] = {}
        self._engines: dict[tuple[RankId, RoomId], _Engine] = {}
        self._num_tries = 0
        self._on_stage: _Stage | None = None

    def act(self, statement: Statement) -> None:
        """Carry out one line.

        Raises:
            ScenarioError: The act is not possible, or an expectation is not met.
        """
        if self._on_stage is not None:
            self._world.tell(f"> {statement.text}")
        act: Callable[..., None] = getattr(self, ACTS.get(statement.act, f"_{statement.act}"))
        try:
            with self._watched():
                act(**statement.values)
                if self._on_stage is not None:
                    self._world.run(0.0)
        except ScenarioError as error:
            raise error.at(statement.line, statement.text, self._story()) from error.__cause__
        except (Violation, KvflowError, LookupError, TypeError, ValueError) as error:
            raise ScenarioError(str(error)).at(statement.line, statement.text, self._story()) from error

    def end(self) -> list[str]:
        """Heal everything, check that nothing is left, and return the story.

        Raises:
            ScenarioError: Something is left.
        """
        world, deployment = self._world, self._stage.deployment
        self._stage.interference.end()
        try:
            with self._watched():
                world.heal()
                deployment.oracle.healed()
                deployment.start_all()
                world.run(1.5 * self._timeouts.lease_s)
                settle(deployment)
                deployment.check_quarantine()
                deployment.release_quarantine()
                deployment.check_nothing_is_left()
        except (Violation, KvflowError) as error:
            raise ScenarioError(str(error)).at(0, "the end", self._story()) from error
        return self._story()

    def close(self) -> None:
        """End all processes and the event loop."""
        if self._on_stage is not None:
            with self._watched():
                self._world.close()

    def _watched(self) -> AbstractContextManager[None]:
        return nullcontext() if self._on_stage is None else watch_logs(self._on_stage.deployment)

    def _story(self) -> list[str]:
        """Return the story so far."""
        return [] if self._on_stage is None else self._on_stage.world.story or []

    # The stage -------------------------------------------------------------------------------------------------------

    @property
    def _world(self) -> World:
        return self._stage.world

    @property
    def _stage(self) -> _Stage:
        """Build and start the deployment on first use; after that, nothing can be described any more."""
        if self._on_stage is None:
            if not self._instances:
                raise ScenarioError("no instance has been described yet")
            outlives = "that outlives the process" in self._transport
            world = World(
                0,
                faults=Faults(writes_of_dead=float(outlives)),
                ends_with_process="that ends with the process" in self._transport,
                in_band_notices="without notices" not in self._transport,
                shows_last_bytes="that shows last bytes" in self._transport,
                tells=True,
            )
            world.pace = PACE
            deployment = Deployment(
                world,
                self._model,
                self._instances,
                timeouts=self._timeouts,
                limits=self._limits,
                staging=self._staging,
                fixed_ports=True,
                references=References(world.rng, self._answering, names=True),
            )
            self._on_stage = _Stage(deployment)
            deployment.start_all()
            with self._watched():
                world.run(BEGINNING_S)
        return self._on_stage

    def _describe(self) -> None:
        if self._on_stage is not None:
            raise ScenarioError("statement must come before any action")

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
        if given.pop("answers for", None) == "itself":
            self._answering.append(name)
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

    def _set_staging(self, options: dict[str, str]) -> None:
        self._describe()
        counts = {name: int(value) for name, value in options.items()}
        self._staging = StagingShape(
            slot_bytes=counts.pop("bytes", 1024),
            num_slots=counts.pop("slots", 1),
            num_windows=counts.pop("windows", 1),
            num_local=counts.pop("local", 8),
        )
        if counts:
            raise ScenarioError("staging has no such option", given=sorted(counts))

    # Engines ---------------------------------------------------------------------------------------------------------

    def _request(self, room: RoomId, tokens: int, prefill: str, decode: str, has: int | None) -> None:
        self._num_tries += 1
        num_ranks = self._stage.deployment.instances[decode].shape.num_ranks
        request = Request(room, self._num_tries, tokens, has or 0, True, prefill, decode, num_ranks)
        self._requests[room] = request
        self._stage.deployment.oracle.routed(request)

    def _ticket(self, who: str, room: RoomId) -> None:
        for rank in self._ranks(who):
            worker = self._worker(rank)
            if not isinstance(worker, PrefillWorker):
                raise ScenarioError("only prefill ranks give tickets", rank=str(rank))
            reference = worker.rank.ticket(room)
            self._requests[room] = dataclasses.replace(self._requests[room], reference=reference)

    def _open(self, who: str, verb: str, room: RoomId) -> None:
        for rank in self._ranks(who):
            worker = self._worker(rank)
            if not isinstance(worker, PrefillWorker):
                raise ScenarioError("only prefill ranks open rooms", rank=str(rank))
            self._begin(worker, room, worker.prepare(self._requests[room]), is_allowed=verb == "opens")

    def _receive(self, who: str, verb: str, room: RoomId, within: float | None) -> None:
        for rank in self._ranks(who):
            worker = self._decode_worker(rank)
            one = worker.prepare(self._requests[room], within)
            self._begin(worker, room, one, is_allowed=verb == "receives")

    def _announce(self, who: str, room: RoomId, within: float | None) -> None:
        for rank in self._ranks(who):
            worker = self._decode_worker(rank)
            self._begin(worker, room, worker.announce(self._requests[room], within), is_allowed=True)

    def _grant(self, who: str, verb: str, room: RoomId) -> None:
        for rank in self._ranks(who):
            worker, one = self._decode_worker(rank), self._transfer(rank, room)
            if not isinstance(one, Receiving):
                raise ScenarioError("room can be granted only where it is being received", rank=str(rank))
            worker.process.call(worker.grant, one)
            self._world.run(0.0)
            if one.is_announced is (verb == "grants"):
                raise ScenarioError("room has no pages" if one.is_announced else "room has pages", rank=str(rank))

    def _decode_worker(self, rank: RankId) -> DecodeWorker:
        worker = self._worker(rank)
        if not isinstance(worker, DecodeWorker):
            raise ScenarioError("only decode ranks can do this", rank=str(rank))
        return worker

    def _begin(self, worker: Worker, room: RoomId, one: Sending | Receiving | None, *, is_allowed: bool) -> None:
        if one is None:
            if is_allowed:
                raise ScenarioError("pool has no pages left")
            return
        engine = _Engine(worker, one)
        self._world.run(0.0)
        if engine.refusal is not None and is_allowed:
            raise engine.refusal
        if engine.refusal is None:
            self._engines[worker.rank_id, room] = engine
            if not is_allowed:
                raise ScenarioError("transfer has started")

    def _reuse(self, who: str) -> None:
        for rank in self._ranks(who):
            worker = self._decode_worker(rank)
            before = worker.num_refused
            worker.process.call(worker.reuse_too_early)
            self._world.run(0.0)
            if worker.num_refused == before:
                raise ScenarioError("no transfer holds pages", rank=str(rank))

    def _compute(self, who: str, room: RoomId, stop: int) -> None:
        self._command(who, room, stop, is_last=False)

    def _finish(self, who: str, room: RoomId) -> None:
        self._command(who, room, None, is_last=True)

    def _command(self, who: str, room: RoomId, stop: int | None, *, is_last: bool) -> None:
        for rank in self._ranks(who):
            one, worker = self._sending(rank, room)
            self._engines[rank, room].commands.put_nowait(_computing(worker, one, stop, is_last=is_last))

    def _preempt(self, who: str, room: RoomId) -> None:
        for rank in self._ranks(who):
            one, worker = self._sending(rank, room)
            self._engines[rank, room].commands.put_nowait(_preempting(worker, one))

    def _abort(self, who: str, room: RoomId) -> None:
        for rank in self._ranks(who):
            self._transfer(rank, room)
            self._worker(rank).process.call(self._engines[rank, room].task.cancel)

    # Processes -------------------------------------------------------------------------------------------------------

    def _process(self, who: str, verb: str) -> None:
        for rank in self._ranks(who):
            self._strike(rank, verb)

    def _strike(self, rank: RankId, verb: str) -> None:
        world, deployment = self._world, self._stage.deployment
        worker = self._worker(rank)
        match verb:
            case "dies" | "vanishes":
                worker.process.kill(vanish=verb == "vanishes")
            case "starts":
                deployment.start(rank)
            case "stops" | "is blocked":
                world.pause(worker.process, stalls=verb == "stops")
            case "goes on":
                world.resume(worker.process)
            case "closes its rank":
                worker.process.call(functools.partial(worker.close, lives_on=True))
            case "closes" | "drains":
                worker.process.call(worker.close, DRAINING_S if verb == "drains" else 0.0)
            case "breaks":
                deployment.sabotaged[worker.process] = None
                worker.process.call(worker.backend.break_down)

    def _release(self, room: RoomId, who: str) -> None:
        for rank in self._ranks(who):
            worker = self._worker(rank)
            worker.process.call(worker.rank.release, room)

    def _run(self, lasts: float) -> None:
        self._world.run(lasts)

    # Network and transport -------------------------------------------------------------------------------------------

    def _message(self, verb: str, kind: str, source: str, target: str) -> None:
        self._stage.interference.message(verb, kind, source, target)

    def _release_messages(self) -> None:
        self._stage.interference.release_messages()

    def _hold_writes(self, source: str | None, target: str | None) -> None:
        self._stage.interference.hold_writes(source, target)

    def _hold_no_more_writes(self) -> None:
        self._stage.interference.hold_no_more_writes()

    def _release_writes(self) -> None:
        self._stage.interference.release_writes()

    def _held_writes(self, verb: str) -> None:
        self._stage.interference.held_writes(verb)

    def _notices(self, verb: str, target: str) -> None:
        self._stage.interference.notices(verb, target)

    def _release_notices(self) -> None:
        self._stage.interference.release_notices()

    def _cut(self, source: str, target: str) -> None:
        for one in self._ranks(source):
            for other in self._ranks(target):
                self._world.network.cut(str(one), str(other))

    def _mend(self) -> None:
        self._world.network.heal()

    # What must be seen -----------------------------------------------------------------------------------------------

    def _expect(self, who: str, room: RoomId, facts: tuple[str, ...]) -> None:
        for rank in self._ranks(who):
            one = self._transfer(rank, room)
            reason = one.failure.reason.value if one.failure else "no_reason"
            found = (one.outcome.value, one.memory.value, reason)
            missing = [fact for fact in facts if fact not in found]
            if missing:
                raise ScenarioError("transfer is not as expected", rank=str(rank), found=found, expected=facts)

    def _expect_pages(self, who: str, facts: tuple[str, ...]) -> None:
        for rank in self._ranks(who):
            found = pages(self._worker(rank))
            expected = {name: int(count) for count, name in (fact.split() for fact in facts)}
            if any(found[name] != count for name, count in expected.items()):
                raise ScenarioError("pages are not as expected", rank=str(rank), found=found, expected=expected)

    def _expect_anomaly(self, who: str, kind: str) -> None:
        for rank in self._ranks(who):
            counts = self._worker(rank).rank.statistics().anomalies
            if kind not in counts:
                raise ScenarioError("no anomaly of this kind was counted", rank=str(rank), found=counts)

    def _ranks(self, who: str) -> list[RankId]:
        name, _, number = who.partition("/")
        instances = self._stage.deployment.instances
        if name not in instances:
            raise ScenarioError("no such instance", name=name, known=sorted(instances))
        ranks = instances[name].ranks
        return [ranks[int(number)]] if number else ranks

    def _worker(self, rank: RankId) -> Worker:
        return self._stage.deployment.workers[rank]

    def _sending(self, rank: RankId, room: RoomId) -> tuple[Sending, PrefillWorker]:
        one, worker = self._transfer(rank, room), self._worker(rank)
        if not isinstance(one, Sending) or not isinstance(worker, PrefillWorker):
            raise ScenarioError("only prefill ranks compute", rank=str(rank))
        return one, worker

    def _transfer(self, rank: RankId, room: RoomId) -> Sending | Receiving:
        """Return the latest transfer of a room on a rank, in whatever incarnation."""
        oracle = self._stage.deployment.oracle
        every: list[Sending | Receiving] = [*oracle.sendings, *oracle.receivings]
        found = [one for one in every if one.rank == rank and one.request.room == room]
        if not found:
            raise ScenarioError("rank has never had this room", rank=str(rank), room=room)
        return found[-1]


def _preempting(worker: PrefillWorker, one: Sending) -> Command:
    async def preempt() -> bool:
        return not await worker.preempt(one)

    return preempt


def _computing(worker: PrefillWorker, one: Sending, stop: int | None, *, is_last: bool) -> Command:
    async def compute() -> bool:
        await worker.chunk(one, one.request.num_tokens if stop is None else stop, is_last=is_last)
        return is_last

    return compute


def pages(worker: Worker) -> dict[str, int]:
    """Count the pages of a rank's main component by state: free, held, quarantined."""
    counts = {"free": worker.pool.num_free(KV), "held": 0, "quarantined": 0}
    for one in worker.transfers:
        counts["quarantined" if one.memory is Memory.QUARANTINED else "held"] += len(one.lease.pages.get(KV, ()))
    return counts

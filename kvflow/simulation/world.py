"""Everything together: instances, network, transport, registry and oracle, on one clock and one source of chance."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvflow.config import DecodeConfig, Limits, PrefillConfig, RankConfig, Timeouts
from kvflow.registry.table import RegistryTable, is_complete
from kvflow.simulation.clock import Schedule
from kvflow.simulation.decode_host import DecodeHost
from kvflow.simulation.faults import Faults
from kvflow.simulation.host import Host
from kvflow.simulation.network import Network
from kvflow.simulation.oracle import Oracle
from kvflow.simulation.prefill_host import PrefillHost
from kvflow.simulation.requests import Receiving, Sending
from kvflow.simulation.shapes import Model, Shape, layout_of
from kvflow.simulation.story import is_chatter, tell_effect, tell_event
from kvflow.simulation.writes import DataPlane
from kvflow.stages.submit import agent_name
from kvflow.state import effects as ef
from kvflow.state import events as ev
from kvflow.wire.messages import Card, PeerId, RankId

__all__ = ["Instance", "StagingShape", "World"]

REGISTRY: Final = "tcp://127.0.0.1:1"
REGISTRY_LEASE_S: Final = 1.0
"""How long the registry goes on knowing a process that died."""


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
        """Of one rank."""
        return self.slot_bytes * (self.num_slots * self.num_windows if is_decode else self.num_local)


@dataclass(frozen=True)
class Instance:
    """A prefill or decode server of several ranks."""

    name: str
    is_decode: bool
    shape: Shape

    @property
    def ranks(self) -> list[RankId]:
        """Its workers."""
        return [RankId(self.name, rank) for rank in range(self.shape.num_ranks)]


class SimRegistry:
    """The real registry's table, asked without sockets.

    Args:
        world: Whose ranks register.
    """

    def __init__(self, world: "World") -> None:
        self._world = world
        self._table = RegistryTable()
        self._cards: dict[PeerId, Card] = {}

    def register(self, host: Host) -> None:
        """Note a prefill rank."""
        instance = self._world.instances[host.me.rank.instance]
        card = Card(
            peer=host.me,
            num_ranks=instance.shape.num_ranks,
            endpoint="tcp://127.0.0.1:1",
            backend=host.backend.name,
            layout=host.pool.table.layout,
        )
        self._cards[host.me] = card
        self.renew(host)

    def renew(self, host: Host) -> None:
        """Begin a rank's lease anew."""
        card = self._cards.get(host.me)
        if card is not None:
            self._table.register(card, REGISTRY_LEASE_S, self._world.schedule.now)

    def unregister(self, host: Host) -> None:
        """Forget a rank that was closed."""
        self._table.unregister(host.me)

    def cards(self, instance: str) -> tuple[Card, ...]:
        """Ranks of an instance, if all of them are known."""
        for host in self._world.living():
            if not host.is_frozen and not host.is_closing and host.me in self._cards:
                self.renew(host)
        now = self._world.schedule.now
        self._table.expire(now)
        answers = self._table.lookup(instance, 0.0, b"simulation", now) or self._table.expire(now)
        cards = answers[0].cards.cards if answers else ()
        return cards if is_complete(cards) else ()


class World:
    """A run.

    Args:
        seed: Where all chance comes from.
        model: What is moved.
        instances: Who moves it.
        timeouts: Of every rank.
        limits: Of every rank.
        staging: What is packed goes through it; nothing is if None.
        tells: Keep a story.
    """

    def __init__(  # noqa: PLR0913 - options, all by name
        self,
        seed: int,
        model: Model,
        instances: list[Instance],
        *,
        timeouts: Timeouts,
        limits: Limits | None = None,
        staging: StagingShape | None = None,
        tells: bool = False,
    ) -> None:
        self.rng = random.Random(seed)  # noqa: S311
        self.schedule = Schedule()
        self.faults = Faults()
        self.without_notices = False
        self.is_fenced = False
        self.model = model
        self.instances = {instance.name: instance for instance in instances}
        self.timeouts = timeouts
        self.limits = limits or Limits()
        self.staging = staging
        self.story: list[str] | None = [] if tells else None
        self.injected: dict[str, int] = {}
        self.network = Network(self)
        self.plane = DataPlane(self)
        self.oracle = Oracle(self)
        self.lives: dict[str, Host] = {}
        self.processes: dict[RankId, Host] = {}
        self.registry = SimRegistry(self)
        self.on_report: Callable[[Sending | Receiving], None] | None = None

    def start_all(self) -> None:
        """Start every rank that does not run."""
        for instance in self.instances.values():
            for rank in instance.ranks:
                if rank not in self.processes or not self.processes[rank].is_alive:
                    self.start(rank)

    def start(self, rank: RankId) -> Host:
        """Start a new life of a rank."""
        instance = self.instances[rank.instance]
        me = PeerId(rank, self.rng.getrandbits(64))
        table = layout_of(self.model, instance.shape, rank.engine_rank)
        config = self._config(instance, rank)
        host = (DecodeHost if instance.is_decode else PrefillHost)(self, config, me, table)
        self.processes[rank] = host
        self.lives[agent_name(me)] = host
        if not instance.is_decode:
            self.network.listen(host)
            self.registry.register(host)
        self.tell(f"{rank} starts, incarnation {me.incarnation & 0xFFFF:04x}")
        return host

    def _config(self, instance: Instance, rank: RankId) -> RankConfig:
        kind = DecodeConfig if instance.is_decode else PrefillConfig
        return kind(
            instance=instance.name,
            engine_rank=rank.engine_rank,
            num_ranks=instance.shape.num_ranks,
            registry=REGISTRY,
            timeouts=self.timeouts,
            limits=self.limits,
            staging_bytes=self.staging.num_bytes(is_decode=instance.is_decode) if self.staging is not None else 0,
            staging_slot_bytes=self.staging.slot_bytes if self.staging is not None else 1,
        )

    def kill(self, rank: RankId) -> None:
        """Let a process die."""
        host = self.processes[rank]
        if host.is_alive:
            self.tell(f"{rank} DIES")
            self.registry.renew(host)
            host.kill()

    def freeze(self, rank: RankId, *, stalls: bool) -> None:
        """Stop a process, or only its event loop."""
        host = self.processes[rank]
        if host.is_alive and not host.is_frozen:
            self.tell(f"{rank} {'is STOPPED' if stalls else 'is BLOCKED'}")
            self.registry.renew(host)
            host.freeze(stalls=stalls)

    def thaw(self, rank: RankId) -> None:
        """Let a process go on."""
        host = self.processes[rank]
        if host.is_alive and host.is_frozen:
            self.tell(f"{rank} goes on")
            host.thaw()

    def closed(self, host: Host) -> None:
        """A rank was closed in order."""
        self.tell(f"{host.me.rank} has CLOSED")
        self.registry.unregister(host)

    def living(self) -> list[Host]:
        """Current lives of all ranks, in order."""
        return [host for host in self.processes.values() if host.is_alive]

    def prefill(self, rank: RankId) -> PrefillHost:
        """The current life of a prefill rank."""
        host = self.processes[rank]
        if not isinstance(host, PrefillHost):
            raise TypeError(rank)
        return host

    def decode(self, rank: RankId) -> DecodeHost:
        """The current life of a decode rank."""
        host = self.processes[rank]
        if not isinstance(host, DecodeHost):
            raise TypeError(rank)
        return host

    def receiving_of(self, host: Host, generation: int) -> Receiving:
        """A transfer of a decode rank."""
        if not isinstance(host, DecodeHost):
            raise TypeError(host.me)
        return host.receiving[generation]

    def reported(self, transfer: Sending | Receiving) -> None:
        """A rank has told its engine something."""
        if self.on_report is not None:
            self.on_report(transfer)

    def heal(self) -> None:
        """Let nothing go wrong any more, and everybody live."""
        self.faults = Faults()
        self.network.mend_all()
        for host in self.living():
            if host.is_frozen:
                self.thaw(host.me.rank)
        self.start_all()
        self.plane.hasten()

    def count(self, kind: str) -> None:
        """Count a fault."""
        self.injected[kind] = self.injected.get(kind, 0) + 1

    def tell(self, text: str) -> None:
        """Add a line to the story, if one is kept."""
        if self.story is not None:
            self.story.append(f"{self.schedule.now:9.4f}  {text}")

    def tell_event(self, host: Host, event: ev.Event, effects: list[ef.Effect]) -> None:
        """Add what a rank was told, and what it does about it."""
        if is_chatter(event, effects):
            return
        self.tell(f"{host.me.rank} {tell_event(event)}")
        for effect in effects:
            line = tell_effect(effect)
            if line is not None:
                self.tell(f"    {line}")

"""What delays the rooms that wait for a prefill instance, in words. Pure."""

from collections.abc import Iterator

from kvflow.state.decode.instances import Instance, InstanceTable
from kvflow.state.decode.peers import PrefillPeers
from kvflow.state.events import ConnectFailed, ConnectionObstructed, InstanceAddress, LookUpRefused
from kvflow.state.tables import InstanceState

__all__ = ["Obstacles"]


class Obstacles:
    """Notes why instances cannot be looked up or connected to, and describes what delays their rooms.

    Args:
        instances: All prefill instances.
        peers: Known prefill ranks.
        registry: Address of the registry; empty if there is none.
    """

    def __init__(self, instances: InstanceTable, peers: PrefillPeers, registry: str) -> None:
        self._instances = instances
        self._peers = peers
        self._registry = registry

    def note_obstacle(self, event: LookUpRefused | ConnectFailed | ConnectionObstructed) -> None:
        """Record why an instance, or any registry name, cannot be looked up, or why there is no connection to a rank.

        An obstruction without a detail says that there is a connection.
        """
        if isinstance(event, LookUpRefused):
            for instance in self._instances:
                is_named = not isinstance(instance.ref, InstanceAddress)
                if instance.ref == event.instance or (event.instance is None and is_named):
                    instance.refusal, instance.is_short = event.detail, event.is_short
            return
        found = self._instances.find_by_peer(event.peer)
        if found is None:
            return
        if isinstance(event, ConnectionObstructed):
            if event.peer not in found.peers:
                return
            found.obstacles[event.peer] = event.detail or "it is connected, but does not answer"
        if event.is_short:  # this process lacks what a connection takes
            found.refusal, found.is_short = event.detail, True

    def describe(self, instance: Instance) -> str:
        """Return what delays the rooms of an instance."""
        if instance.is_short:
            return instance.refusal
        if instance.state is InstanceState.COMPILING:
            return "its routes are still being compiled"
        if instance.state is not InstanceState.LOOKING_UP:
            return next(self._silent(instance), "one of its ranks is still connecting")
        if instance.found is None:
            if isinstance(instance.ref, InstanceAddress):
                return instance.refusal or "no answer"
            registry = f"the registry at {self._registry}" if self._registry else "the registry"
            silence = f"{registry} does not answer"
            return f"{silence}: {instance.refusal}" if instance.refusal else silence
        ended = [str(record.peer.rank) for record in instance.found.records if self._peers.has_ended(record.peer)]
        if ended:
            return f"processes that are still registered have ended: {', '.join(ended)}"
        if not instance.found.records:
            return "none of its ranks is registered"
        registered = [record.peer.rank.engine_rank for record in instance.found.records]
        needed = instance.found.records[0].num_ranks
        return f"only ranks {registered} of {needed} are registered"

    def _silent(self, instance: Instance) -> Iterator[str]:
        """Yield the reason for each rank that delays the rooms of an instance."""
        for record in instance.records:
            who = f"rank {record.peer.rank} at {record.endpoint}"
            if record.peer in instance.undialed:
                yield f"{who} has not been asked: too many other ranks do not answer"
            elif record.peer in instance.hellos:
                obstacle = instance.obstacles.get(record.peer)
                yield f"{who}: {obstacle}" if obstacle else f"{who} does not answer"
            elif not self._peers.is_connected(record.peer):
                obstacle = instance.obstacles.get(record.peer)
                yield f"{who} has been silent since its connection broke" + (f": {obstacle}" if obstacle else "")

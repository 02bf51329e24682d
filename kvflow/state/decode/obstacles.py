"""What delays the rooms that wait for a prefill instance, in words. Pure."""

from collections.abc import Iterator

from kvflow.state.decode.instances import Instance
from kvflow.state.decode.peers import PrefillPeers
from kvflow.state.events import InstanceAddress
from kvflow.state.tables import InstanceState

__all__ = ["obstacle_of"]


def obstacle_of(instance: Instance, peers: PrefillPeers, registry: str | None) -> str:
    """Return what delays the rooms of an instance."""
    if instance.is_short:
        return instance.refusal
    if instance.state is InstanceState.COMPILING:
        return "its routes are still being compiled"
    if instance.state is not InstanceState.LOOKING_UP:
        return next(_silent(instance, peers), "one of its ranks is still connecting")
    if instance.found is None:
        if isinstance(instance.ref, InstanceAddress):
            return instance.refusal or "no answer"
        silence = f"the registry at {registry} does not answer" if registry else "the registry does not answer"
        return f"{silence}: {instance.refusal}" if instance.refusal else silence
    ended = [str(record.peer.rank) for record in instance.found.records if peers.has_ended(record.peer)]
    if ended:
        return f"processes that are still registered have ended: {', '.join(ended)}"
    if not instance.found.records:
        return "none of its ranks is registered"
    registered = [record.peer.rank.engine_rank for record in instance.found.records]
    needed = instance.found.records[0].num_ranks
    return f"only ranks {registered} of {needed} are registered"


def _silent(instance: Instance, peers: PrefillPeers) -> Iterator[str]:
    """Yield the reason for each rank that delays the rooms of an instance."""
    for record in instance.records:
        who = f"rank {record.peer.rank} at {record.endpoint}"
        if record.peer in instance.undialed:
            yield f"{who} has not been asked: too many other ranks do not answer"
        elif record.peer in instance.hellos:
            obstacle = instance.obstacles.get(record.peer)
            yield f"{who}: {obstacle}" if obstacle else f"{who} does not answer"
        elif not peers.is_connected(record.peer):
            obstacle = instance.obstacles.get(record.peer)
            yield f"{who} has been silent since its connection broke" + (f": {obstacle}" if obstacle else "")

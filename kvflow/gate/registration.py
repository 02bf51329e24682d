"""Who may register a rank with a directory, and what others are told. Pure."""

from typing import Final

from kvflow.trust import speaks_for
from kvflow.wire.messages import PeerId, RankId, Refuse, RegistrationConflict, SealedRecord

__all__ = ["REGISTRY", "registration_denial"]

REGISTRY: Final = PeerId(RankId("registry", 0), 0)
"""The sender of Refuse messages from a registry, which is not a rank."""


def registration_denial(
    names: tuple[str, ...], peer: PeerId, num_ranks: int | None, own: SealedRecord | None
) -> tuple[Refuse | RegistrationConflict, str] | None:
    """Return what the sender is told, and why, if a rank must not be registered or unregistered; None if it may be.

    Args:
        names: The instances that the sender may act for.
        peer: The rank.
        num_ranks: Number of ranks of its instance that it registers with; None if it is unregistered.
        own: Record of the rank that hosts the directory, which belongs to its instance only; None for a registry.
    """
    rank = peer.rank
    if not speaks_for(names, rank.instance):
        answerer = REGISTRY if own is None else own.peer
        refused = Refuse(peer=answerer, to=peer, detail=f"your key is not listed for {rank.instance}")
        return refused, "key is not listed for this instance"
    if own is None or num_ranks is None:
        return None
    if rank == own.peer.rank:
        conflict = RegistrationConflict(peer=peer, other=own.peer, other_endpoint=own.endpoint, refused=True)
        return conflict, "another process registers under the name of this rank"
    if (rank.instance, num_ranks) != (own.peer.rank.instance, own.num_ranks):
        detail = f"this is {own.peer.rank} of {own.num_ranks} ranks, which is the registry of its own instance only"
        return Refuse(peer=own.peer, to=peer, detail=detail), "rank of a different instance registers"
    return None

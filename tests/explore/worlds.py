"""Worlds small enough to be explored completely in seconds."""

from types import MappingProxyType
from typing import Final

from simulation.explore import Setup

__all__ = ["WORLDS"]

WORLDS: Final = MappingProxyType(
    {
        "without faults": Setup(max_faults=0),
        "handshake without faults": Setup(max_faults=0, is_connected=False),
        "two prefill ranks without faults": Setup(max_faults=0, num_prefill=2),
        "one fault": Setup(max_faults=1),
        "one fault with one staging slot": Setup(max_faults=1, slots=1),
        "two rooms with one post of credit between them": Setup(max_faults=0, rooms=(1, 2), posts_per_peer=1),
        "two writes that are quiesced": Setup(max_faults=0, num_writes=2, posts_per_peer=1, quiesces=True),
        "one fault with an announcement": Setup(max_faults=1, announces=True),
        "one fault with the handshake": Setup(max_faults=1, is_connected=False),
        "two faults with an offer": Setup(max_faults=2, rooms=(), offers=True),
        "two faults with an offer that is declined": Setup(max_faults=2, rooms=(), offers=True, accepts=False),
        "one fault with an offer and the handshake": Setup(max_faults=1, rooms=(), offers=True, is_connected=False),
    }
)

"""The two ranks for engines with a synchronous scheduler loop.

The event loop runs in a thread. Methods that a scheduler calls per request or per step never wait for that thread: they
check their arguments, queue the work and return. Call `completed` in each step to learn what has changed. Methods that
block say so in their documentation.
"""

from kvflow.aio.loop_thread import LoopThread
from kvflow.blocking.ranks import DecodeRank, PrefillRank
from kvflow.blocking.registry import Registry
from kvflow.blocking.transfers import BlockingReceiver, BlockingSender, TransferUpdate
from kvflow.state.tables import Memory, Outcome

__all__ = [
    "BlockingReceiver",
    "BlockingSender",
    "DecodeRank",
    "LoopThread",
    "Memory",
    "Outcome",
    "PrefillRank",
    "Registry",
    "TransferUpdate",
]

"""The same two ranks for engines with a synchronous scheduler loop.

The event loop runs in a thread. What a scheduler calls for a request or in a step never waits for that thread: calls
check their arguments, queue what is to be done, and return; `completed` says in each step what has changed meanwhile.
What does wait says so.
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

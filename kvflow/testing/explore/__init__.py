"""Exhaustive exploration of the cores in small worlds: every interleaving, with a bounded number of faults.

The cores are pure, so the code itself is model-checked, and no copy of it in another language: a `SmallWorld` holds
real cores, the messages between them, and the writes that are under way. `explore` walks every state that can be
reached, breadth first, and checks in each what kvflow promises.
"""

from kvflow.testing.explore.search import Exploration, Violation, explore
from kvflow.testing.explore.world import FAULTS, Setup, SmallWorld

__all__ = ["FAULTS", "Exploration", "Setup", "SmallWorld", "Violation", "explore"]

"""Exhaustive exploration of the cores in small worlds: every interleaving, with a bounded number of faults.

The cores are pure, so the code itself is model-checked, not a model of it in another language: a `SmallWorld` holds
real cores, the messages between them, and the writes in flight. `explore` searches every reachable state, breadth
first, and checks kvflow's promises in each.
"""

from simulation.explore.search import Exploration, Violation, explore
from simulation.explore.setup import FAULTS, Setup
from simulation.explore.small import SmallWorld

__all__ = ["FAULTS", "Exploration", "Setup", "SmallWorld", "Violation", "explore"]

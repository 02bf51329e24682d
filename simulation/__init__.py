"""Simulation of whole instances in virtual time: the real ranks under faults of network, transport and processes.

`python -m simulation run`. Not part of the wheel.
"""

from simulation.faults import NO_FAULTS, Faults
from simulation.loop import Process, Violation
from simulation.run import Result, run_seed
from simulation.runner import FoundViolation, Report, simulate
from simulation.scenario import play
from simulation.script import ScenarioError
from simulation.world import REGISTRY, World

__all__ = [
    "NO_FAULTS",
    "REGISTRY",
    "Faults",
    "FoundViolation",
    "Process",
    "Report",
    "Result",
    "ScenarioError",
    "Violation",
    "World",
    "play",
    "run_seed",
    "simulate",
]

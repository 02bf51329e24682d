"""Simulation of whole instances in virtual time: the real ranks under faults of network, transport and processes."""

from kvflow.testing.simulation.faults import NO_FAULTS, Faults
from kvflow.testing.simulation.loop import Process, Violation
from kvflow.testing.simulation.run import Result, run_seed
from kvflow.testing.simulation.runner import FoundViolation, Report, simulate
from kvflow.testing.simulation.scenario import play
from kvflow.testing.simulation.script import ScenarioError
from kvflow.testing.simulation.world import REGISTRY, World

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

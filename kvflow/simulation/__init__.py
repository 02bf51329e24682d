"""Whole instances in virtual time: many ranks, a hostile network and transport, and an oracle that knows the truth.

Everything that is not I/O is the real code. A seed decides everything, so any run can be told again.
"""

from kvflow.simulation.faults import Faults
from kvflow.simulation.pool import Violation
from kvflow.simulation.run import Result, run_seed
from kvflow.simulation.runner import Report, simulate
from kvflow.simulation.scenario import play
from kvflow.simulation.script import ScenarioError

__all__ = ["Faults", "Report", "Result", "ScenarioError", "Violation", "play", "run_seed", "simulate"]

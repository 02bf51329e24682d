"""Whole instances in virtual time: many ranks, a hostile network and transport, and an oracle that knows the truth.

Everything that is not I/O is the real code. A seed decides everything, so any run can be told again.
"""

from kvflow.simulation.faults import Faults
from kvflow.simulation.pool import Violation
from kvflow.simulation.run import Result, run_seed
from kvflow.simulation.runner import Report, simulate

__all__ = ["Faults", "Report", "Result", "Violation", "run_seed", "simulate"]

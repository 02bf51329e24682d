"""The steps of `make test-device`, the most telling ones first: time may run out."""

import sys
from pathlib import Path
from typing import Final

from tests.device.driver import ROOT, Step

__all__ = ["CACHE", "TOTAL_S", "steps_of"]

CACHE: Final = ROOT / ".cache/device"

TOTAL_S: Final = 590.0
"""Ten minutes, less what it takes to start and to end."""

MOONCAKE: Final = ("-k", "mooncake")
OTHERS: Final = ("-k", "not mooncake")

PARALLEL: Final = ("-n", "4")
"""For tests that mostly wait."""


def steps_of(cache: Path, *, is_rehearsal: bool) -> list[Step]:
    """Return the steps, in order.

    Args:
        cache: Directory for what is installed.
        is_rehearsal: Run the tests in this environment, and install nothing.
    """
    environment, vllm = cache / "env", cache / "vllm"
    python = sys.executable if is_rehearsal else str(environment / "bin/python")
    of_vllm = sys.executable if is_rehearsal else str(vllm / "bin/python")

    def install(part: str, into: Path, limit_s: float) -> Step:
        command = ("sh", "scripts/install-device.sh", part, sys.executable, str(into), str(environment))
        return Step(f"install {part}", limit_s, command)

    def test(name: str, limit_s: float, *tests: str) -> Step:
        return Step(name, limit_s, tests=tests, python=python)

    steps = [
        install("torch", environment, 270),
        install("nixl", environment, 90),
        test("inventory", 40, "tests/device/test_inventory.py"),
        test("layouts", 30, "tests/geometry/test_tensors.py"),
        test("roles in one process", 60, "tests/device/test_one_process.py", *OTHERS),
        test("roles in two processes", 60, "tests/device/test_two_processes.py", *OTHERS),
        test("events", 60, "tests/device/test_events.py"),
        test("contract suite", 90, "tests/device/test_contract.py", *OTHERS),
        test("device packing", 90, "tests/packing/test_device.py", "tests/service/test_packing_on_devices.py"),
        test("bench of handovers", 90, "tests/device/test_benchmarks.py", "-k", "handover"),
        test("bench of transfers", 90, "tests/device/test_benchmarks.py", "-k", "not handover"),
        install("mooncake", environment, 60),
        test("contract suite (Mooncake)", 150, "tests/device/test_contract.py", *PARALLEL, *MOONCAKE),
        test("roles in one process (Mooncake)", 40, "tests/device/test_one_process.py", *MOONCAKE),
        test("roles in two processes (Mooncake)", 40, "tests/device/test_two_processes.py", *MOONCAKE),
        install("vllm", vllm, 240),
        Step("vLLM's connector", 150, tests=("tests/device/test_vllm.py",), python=of_vllm),
    ]
    return [step for step in steps if not (is_rehearsal and step.command)]

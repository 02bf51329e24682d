"""`make test-device`: check everything that needs a CUDA device, in ten minutes, and print one table.

The table is also in `.cache/device/report.md`, and the output of each step beside it. With FAKE_DEVICE=low or
FAKE_DEVICE=high in the environment, this is a rehearsal on a fake device; it installs nothing.
"""

import argparse
import ctypes
import os
import signal
import sys
from pathlib import Path

from tests.device.driver import Result, Step, run_steps, table_of
from tests.device.steps import CACHE, TOTAL_S, steps_of


def main(words: list[str]) -> int:
    """Run the steps, and return the exit code: 1 if one failed."""
    is_rehearsal = bool(os.environ.get("FAKE_DEVICE"))
    steps = steps_of(CACHE, is_rehearsal=is_rehearsal)
    parser = argparse.ArgumentParser(prog="make test-device", description=__doc__)
    names = ", ".join(step.name for step in steps)
    parser.add_argument("--steps", default="", metavar="NAME,...", help=f"only these: {names}")
    parser.add_argument("--total-s", type=float, default=TOTAL_S, help="maximum time of all steps together")
    arguments = parser.parse_args(words)
    wanted = [name.strip() for name in arguments.steps.split(",") if name.strip()]
    unknown = set(wanted) - {step.name for step in steps}
    if unknown:
        parser.error(f"unknown steps: {', '.join(sorted(unknown))}")
    if not is_rehearsal and not has_cuda_device():
        print("no CUDA device here; rehearse with FAKE_DEVICE=low make test-device", file=sys.stderr)
        return 2
    chosen = [step for step in steps if not wanted or step.name in wanted]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return run(chosen, CACHE, arguments.total_s)


def run(steps: list[Step], folder: Path, total_s: float) -> int:
    """Run steps, print the table and write it to `report.md`, and return the exit code."""
    results: list[Result] = []
    report = folder / "report.md"
    try:
        for result in run_steps(steps, folder, total_s):
            results.append(result)
            report.write_text(table_of(results))
            first = result.found.partition("\n")[0]
            print(f"{result.step}: {result.outcome}, {result.seconds:.0f} s: {first}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    print(table_of(results))
    return 0 if len(results) == len(steps) and all(one.outcome != "failed" for one in results) else 1


def has_cuda_device() -> bool:
    """Ask the driver."""
    count = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Runs many seeds in several processes."""

import gc
import multiprocessing
import time
from collections.abc import Callable, Iterator

import msgspec

from simulation.run import run_seed

__all__ = ["FoundViolation", "Report", "simulate"]

SEEDS_AT_ONCE = 20
"""Seeds passed to a process at a time."""


class FoundViolation(msgspec.Struct, frozen=True):
    """A broken promise.

    Attributes:
        seed: Seed that reproduces it.
        time: Virtual time in seconds.
        callback: Number of event loop callbacks until then.
        message: What was broken.
    """

    seed: int
    time: float
    callback: int
    message: str


class Report(msgspec.Struct):
    """Results of many seeds.

    Attributes:
        seeds: Number of seeds run.
        violations: Violations, sorted by seed.
        seeds_per_s: Over all processes, on the wall clock.
        faults_injected: Number of injected faults, by kind.
        requests: Requests of the clients.
        successes: Requests that succeeded on every rank.
        jobs: Number of processes.
    """

    seeds: int = 0
    violations: list[FoundViolation] = []
    seeds_per_s: float = 0.0
    faults_injected: dict[str, int] = {}
    requests: int = 0
    successes: int = 0
    jobs: int = 1

    def add(self, other: "Report") -> None:
        """Add the results of another report."""
        self.seeds += other.seeds
        self.requests += other.requests
        self.successes += other.successes
        self.violations += other.violations
        for kind, count in other.faults_injected.items():
            self.faults_injected[kind] = self.faults_injected.get(kind, 0) + count


def simulate(seeds: range, *, jobs: int = 1, on_progress: Callable[[Report], None] | None = None) -> Report:
    """Run seeds and return a report.

    Args:
        seeds: Seeds to run.
        jobs: Number of processes; with one, seeds run in this process.
        on_progress: Called with the report so far, after each batch.
    """
    began = time.perf_counter()
    report = Report(jobs=jobs)
    for part in _parts(seeds, jobs):
        report.add(part)
        report.seeds_per_s = report.seeds / (time.perf_counter() - began)
        if on_progress is not None:
            on_progress(report)
    report.violations.sort(key=lambda violation: violation.seed)
    report.faults_injected = dict(sorted(report.faults_injected.items()))
    return report


def _parts(seeds: range, jobs: int) -> Iterator[Report]:
    batches = [seeds[at : at + SEEDS_AT_ONCE] for at in range(0, len(seeds), SEEDS_AT_ONCE)]
    if jobs == 1:
        yield from map(_run_batch, batches)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(_run_batch, batches)


def _run_batch(seeds: range) -> Report:
    report = Report(seeds=len(seeds))
    gc.collect()
    gc.freeze()  # exclude existing objects from collection
    for seed in seeds:
        result = run_seed(seed)
        report.requests += result.num_requests
        report.successes += result.num_successes
        if result.violation is not None:
            found = FoundViolation(seed, result.time, result.num_callbacks, result.violation)
            report.violations.append(found)
        for kind, count in result.injected.items():
            report.faults_injected[kind] = report.faults_injected.get(kind, 0) + count
    return report

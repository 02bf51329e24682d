"""Probe transfers, as findings."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvflow.doctor.findings import DoctorOptions, Finding, fail, ok, unknown, warn
from kvflow.doctor.probe import NUM_PIECES, PIECE_BYTES, ProbeOrder, ProbeResult, log_ucx_to, run_in_child

__all__ = ["judge_probe", "paths_of", "transfer_on_this_host"]

IN_ONE_HOST: Final = (
    "unset UCX_TLS, or add cma to it; in containers: the same user and PID namespace, and --cap-add=SYS_PTRACE"
)
BETWEEN_HOSTS: Final = "unset UCX_TLS and UCX_NET_DEVICES, and see the finding on RDMA devices"
MANY_TIMES: Final = 3.0


def transfer_on_this_host(options: DoctorOptions) -> Iterator[Finding]:
    """Move 16 MiB between two processes of this host: path, latency, rates, and whether the bytes are right."""
    if not options.probe_s:
        return
    if options.backend == "memory":
        yield ok("the transport memory does not leave its process")
        return
    order = ProbeOrder(backend=options.backend, backend_options=options.backend_options)
    with tempfile.TemporaryDirectory() as place:
        result = run_in_child("pair", order, log_ucx_to(Path(place, "ucx.log")), options.probe_s)
    if result is None:
        cause = f"a transfer between two processes of this host has not ended within {options.probe_s:g} s"
        yield fail(cause, "py-spy dump --pid PID of the process `kvflow.doctor.probe`; report it with `kvflow report`")
        return
    if result.failure:
        fix = "pip install 'kvflow[nixl-cu12]'" if "not installed" in result.failure else "kvflow report"
        yield fail(f"two processes of this host cannot transfer: {result.failure}", fix)
        return
    yield from judge_probe(result, is_same_host=True, has_rdma=False)


def paths_of(result: ProbeResult) -> list[str]:
    """Return the paths of a probe: as UCX names its transports, or else as the kernel's TCP byte counters tell."""
    facts = result.facts
    return [] if facts is None else facts.ucx or facts.paths


def judge_probe(result: ProbeResult, *, is_same_host: bool, has_rdma: bool) -> Iterator[Finding]:
    """Return what a probe that has ended says.

    Args:
        result: What was measured.
        is_same_host: Whether both processes are on one host, where shared memory is possible.
        has_rdma: Whether this host has an active RDMA device.
    """
    if not result.is_identical:
        cause = "bytes arrived that were not sent: the transport, a driver or a device corrupts data"
        yield fail(cause, "take this host out of service; set digest_every=1; report it with `kvflow report`")
    paths = paths_of(result)
    path = ", ".join(paths)
    if not paths:
        yield unknown("the path of the writes is unknown")
    elif not all("tcp" in one.lower() for one in paths):
        yield ok(f"path: {path}")
    elif is_same_host:
        yield warn(f"path: {path}, although both processes are on one host and could share memory", IN_ONE_HOST)
    elif has_rdma:
        yield warn(f"path: {path}, although this host has an active RDMA device", BETWEEN_HOSTS)
    else:
        yield ok(f"path: {path}")
    rates = [f"{NUM_PIECES * PIECE_BYTES / seconds / 1e9:.2f} GB/s" for seconds in (result.whole_s, result.pieces_s)]
    text = f"latency {result.latency_s * 1e3:.2f} ms; {rates[0]} in one piece, {rates[1]} in {NUM_PIECES:,} pieces"
    each_us = max(result.pieces_s - result.whole_s, 0.0) / NUM_PIECES * 1e6
    if result.pieces_s > MANY_TIMES * result.whole_s:
        yield ok(f"{text}: each piece costs {each_us:.1f} us, so larger pages or packing help small ones")
    else:
        yield ok(f"{text}: limited by the bytes, not by the number of pieces")

"""The checks of this host, in the order in which they are shown."""

from typing import Final

from kvflow.doctor import devices, host, ranks, software, transport
from kvflow.doctor.findings import Check, DoctorOptions, Finding, run_checks

__all__ = ["CHECKS", "examine_host"]

CHECKS: Final[tuple[Check, ...]] = (
    ranks.running_ranks,
    software.versions,
    software.transport_library,
    transport.transfer_on_this_host,
    host.file_descriptors,
    host.threads,
    host.locked_memory,
    host.shared_memory,
    host.cpu_quota,
    host.cpu_pinning,
    host.monotonic_clock,
    host.ipv6,
    devices.rdma_devices,
    devices.gpu_peer_memory,
    devices.numa_affinity,
    software.key_files,
)
"""Silent failures of running ranks come first. docs/doctor.md lists the docstrings."""


def examine_host(options: DoctorOptions) -> list[Finding]:
    """Run all checks of this host; they take some seconds, most of them for a probe transfer."""
    return run_checks(CHECKS, options)

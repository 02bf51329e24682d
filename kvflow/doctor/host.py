"""Limits of this process and properties of its host."""

import os
import time
from typing import Final

from kvflow.doctor.findings import DoctorOptions, Finding, fail, ok, unknown, warn
from kvflow.errors import ThreadShortage
from kvflow.resources import check_threads, limit_of, num_descriptors_left

__all__ = [
    "cpu_pinning",
    "cpu_quota",
    "file_descriptors",
    "ipv6",
    "locked_memory",
    "monotonic_clock",
    "shared_memory",
    "threads",
]

FEW_DESCRIPTORS: Final = 64
"""With less, a rank cannot connect to its first peer, or libraries abort the process."""

SOME_DESCRIPTORS: Final = 512
SHARED_BYTES: Final = 64 * 2**20
NUM_THREADS: Final = 16
FEW_CPUS: Final = 2

SLOW_CLOCKS: Final = frozenset({"acpi_pm", "hpet", "jiffies", "refined-jiffies"})


def locked_memory(options: DoctorOptions) -> Finding:
    """How much memory this process may lock, which registering memory with an RDMA device needs."""
    limit = limit_of("RLIMIT_MEMLOCK")
    if not limit:
        return unknown("this system has no limit of locked memory that can be read")
    if limit.endswith("unlimited"):
        return ok(limit)
    if options.list_names("sys/class/infiniband"):
        fix = "ulimit -l unlimited; in a container: docker run --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity"
        return fail(f"{limit} bytes: RDMA devices cannot register the KV cache", fix)
    return ok(f"{limit} bytes, which matters with RDMA devices only; there is none")


def file_descriptors(_: DoctorOptions) -> Finding:
    """How many more files and connections this process may open; each peer takes several."""
    left, limit, fix = num_descriptors_left(), limit_of("RLIMIT_NOFILE"), "ulimit -n 65536; systemd: LimitNOFILE=65536"
    if left is None:
        return ok(limit or "unlimited")
    if left < FEW_DESCRIPTORS:
        return fail(f"{limit}, {left} left: too few to connect to a peer", fix)
    if left < SOME_DESCRIPTORS:
        return warn(f"{limit}, {left} left: enough for a few peers", fix)
    return ok(f"{limit}, {left} left")


def shared_memory(options: DoctorOptions) -> Finding:
    """How much shared memory is free, in which transports of one host meet."""
    found = os.statvfs(options.root / "dev/shm")
    num_bytes = found.f_bavail * found.f_frsize
    text = f"/dev/shm has {num_bytes // 2**20} MiB free"  # noqa: S108 - it is only asked how full it is
    if num_bytes < SHARED_BYTES:
        return warn(
            f"{text}: UCX may not start, or do without it",
            "mount -o remount,size=1G /dev/shm; docker run --shm-size=1g",
        )
    return ok(text)


def threads(options: DoctorOptions) -> Finding:
    """Whether this process may start the threads that a rank and its transport need."""
    most = options.read("sys/fs/cgroup/pids.max") or "unknown"
    text = f"{limit_of('RLIMIT_NPROC')}, cgroup pids.max is {most}"
    try:
        check_threads(NUM_THREADS)
    except ThreadShortage:
        return fail(
            f"{NUM_THREADS} threads cannot be started: {text}", "ulimit -u unlimited; docker run --pids-limit=-1"
        )
    return ok(text)


def cpu_quota(options: DoctorOptions) -> Finding:
    """Whether the cgroup limits the CPU time, so that the kernel stops all threads of the process at times."""
    own = next((line[3:] for line in options.read("proc/self/cgroup").splitlines() if line.startswith("0::")), "")
    places = [f"sys/fs/cgroup{own}", "sys/fs/cgroup"]
    place = next((place for place in places if options.read(f"{place}/cpu.max")), None)
    if place is None:
        return ok("no CPU quota")
    quota, _, period = options.read(f"{place}/cpu.max").partition(" ")
    if quota == "max":
        return ok("no CPU quota")
    counts = dict(line.split() for line in options.read(f"{place}/cpu.stat").splitlines())
    num_cpus, throttled = int(quota) / int(period or 100_000), int(counts.get("nr_throttled", "0"))
    text = f"{num_cpus:g} CPUs, throttled {throttled} times so far"
    if throttled or num_cpus < FEW_CPUS:
        fix = "raise or remove the CPU limit of the container (docker run --cpus; Kubernetes resources.limits.cpu)"
        return warn(f"{text}: while it is throttled, no transfer goes on", fix)
    return ok(text)


def cpu_pinning(_: DoctorOptions) -> Finding:
    """On which CPUs this process may run. The threads of a rank and of the engine share them."""
    allowed, total = os.sched_getaffinity(0), os.cpu_count() or 1
    text = f"{len(allowed)} of {total} CPUs"
    if len(allowed) < min(FEW_CPUS, total):
        fix = f"taskset -cp 0-{total - 1} {os.getpid()}; or set `affinity` in the options of the engine's adapter"
        return warn(f"{text}: a busy engine leaves kvflow no CPU", fix)
    return ok(text)


def monotonic_clock(options: DoctorOptions) -> Finding:
    """Which clock the deadlines and measured times come from, and how fine it is."""
    source = options.read("sys/devices/system/clocksource/clocksource0/current_clocksource") or "unknown"
    resolution_s = time.get_clock_info("monotonic").resolution
    text = f"clock source {source}, resolution {resolution_s * 1e9:g} ns"
    if source in SLOW_CLOCKS or resolution_s > 1e-3:
        fix = "echo tsc > /sys/devices/system/clocksource/clocksource0/current_clocksource"
        return warn(f"{text}: reading the time is slow or coarse", fix)
    return ok(text)


def ipv6(options: DoctorOptions) -> Finding:
    """Whether this host has an IPv6 address besides that of the loopback interface."""
    lines = [line.split() for line in options.read("proc/net/if_inet6").splitlines()]
    interfaces = sorted({line[5] for line in lines if line[3] == "00"} - {"lo"})
    if interfaces:
        return ok(f"global addresses on {', '.join(interfaces)}")
    return ok("no global address: peers cannot be at addresses like tcp://[2001:db8::1]:7000")

"""The paths that a NIXL write may take, and whether the kernel shows what an ended process has left in flight on them.

Between processes of one host, UCX copies large pieces directly (CMA). A thread of the writer does this in a system
call, so no copy outlives the process. Everything else goes over TCP, where the kernel shows the data in flight.
Observations:

* `UCX_PROTO_INFO` shows `cma` for puts and `tcp/lo` for messages between two processes on one host.
* With `UCX_TLS=tcp`, or if the processes cannot access each other's memory, everything goes over TCP.

The kernel does not show data in flight over RDMA, in the shared-memory queues that UCX uses only if an option enables
them (`MM_ERROR_HANDLING`, or another error handling mode), or data that plugin threads have read but not yet stored. If
one of these may be in use, there is no way to tell what has landed.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

__all__ = ["can_be_seen", "describe_paths", "may_use_rdma", "paths_besides_tcp"]

RDMA_DEVICES: Final = Path("/sys/class/infiniband")
SEEN: Final = frozenset({"tcp", "cma", "self", "shm", "sm", "mm", "posix", "sysv"})
"""Transports whose data in flight the kernel shows, or that end with their process."""

QUEUES: Final = "ERROR_HANDLING"
COPIES: Final = "CMA_ERROR_HANDLING"
"""The only option with the suffix `QUEUES` that enables copies, not queues."""

OFF: Final = frozenset({"n", "no", "0", "off"})


def may_use_rdma(environment: Mapping[str, str] = os.environ, devices: Path = RDMA_DEVICES) -> bool:
    """Return whether UCX may use an RDMA device of this host, which the kernel lists in the directory `devices`."""
    return not _transports(environment) <= SEEN and devices.is_dir() and any(devices.iterdir())


def describe_paths(plugin: str) -> str:
    """Return the paths among which UCX chooses, for the log."""
    paths = paths_besides_tcp(plugin)
    if plugin != "UCX":
        return ", ".join(paths)
    chosen = _transports(os.environ)
    if chosen & {"tcp", "all"} or any(name.startswith("^") for name in chosen):
        paths.append("TCP")
    settings = [f"{name}={os.environ[name]}" for name in ("UCX_TLS", "UCX_NET_DEVICES") if name in os.environ]
    return ", ".join(paths) + (f" ({', '.join(settings)})" if settings else "")


def paths_besides_tcp(plugin: str) -> list[str]:
    """Return those of the paths of `describe_paths` that are not TCP."""
    if plugin != "UCX":
        return [plugin]
    paths = []
    if _transports(os.environ) != {"tcp"}:
        paths.append("shared memory within the host")
    if may_use_rdma():
        paths.append(f"RDMA over {', '.join(sorted(device.name for device in RDMA_DEVICES.iterdir()))}")
    return paths


def _transports(environment: Mapping[str, str]) -> set[str]:
    return {name.strip() for name in environment.get("UCX_TLS", "all").split(",")}


def can_be_seen(
    plugin: str,
    plugin_options: Mapping[str, str],
    environment: Mapping[str, str] = os.environ,
    devices: Path = RDMA_DEVICES,
) -> bool:
    """Return whether every path of a write ends with its process, or shows its data in flight."""
    if plugin != "UCX" or may_use_rdma(environment, devices):
        return False
    if plugin_options.get("ucx_error_handling_mode", "peer") != "peer" or int(plugin_options.get("num_threads", "0")):
        return False
    pairs = (pair.partition("=") for pair in plugin_options.get("engine_config", "").split(","))
    settings = {f"UCX_{name.strip()}": value for name, _, value in pairs} | dict(environment)
    queues = [name for name in settings if name.startswith("UCX_") and name.endswith(QUEUES) and COPIES not in name]
    return all(settings[name].strip().lower() in OFF for name in queues)

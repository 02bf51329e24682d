"""Which ways a write can take, as far as it matters for what a process that has ended leaves behind.

On one host UCX copies large pieces from process to process (CMA). A thread of the writer does that in a system call, so
it is over when the process has ended. Everything else goes over TCP, where the kernel shows what is under way. These
are seen:

* `UCX_PROTO_INFO` shows `cma` for puts, and `tcp/lo` for messages, of two processes on one host.
* With `UCX_TLS=tcp`, or with processes that cannot reach each other's memory, everything goes over TCP.

Nothing shows what is under way over RDMA, nor in the queues in shared memory that UCX uses only if an option asks for
it (`MM_ERROR_HANDLING`, or another mode of error handling); nor what threads of the plugin have read and not yet
placed. Where one of these may be used, nobody says what has landed.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

__all__ = ["can_be_seen", "may_use_rdma"]

RDMA_DEVICES: Final = Path("/sys/class/infiniband")
SEEN: Final = frozenset({"tcp", "cma", "self", "shm", "sm", "mm", "posix", "sysv"})
"""Transports that the kernel shows, or that end with their process."""

QUEUES: Final = "ERROR_HANDLING"
COPIES: Final = "CMA_ERROR_HANDLING"
"""The one of these options that is for copies and not for queues."""

OFF: Final = frozenset({"n", "no", "0", "off"})


def may_use_rdma(environment: Mapping[str, str] = os.environ, devices: Path = RDMA_DEVICES) -> bool:
    """Return whether there is a device for RDMA that UCX is not told to leave alone.

    Args:
        environment: What UCX reads.
        devices: Where the kernel lists them.
    """
    transports = {name.strip() for name in environment.get("UCX_TLS", "all").split(",")}
    return not transports <= SEEN and devices.is_dir() and any(devices.iterdir())


def can_be_seen(
    plugin: str,
    plugin_options: Mapping[str, str],
    environment: Mapping[str, str] = os.environ,
    devices: Path = RDMA_DEVICES,
) -> bool:
    """Return whether each way of a write ends with its process, or shows what is under way.

    Args:
        plugin: NIXL plugin.
        plugin_options: Its parameters.
        environment: What UCX reads.
        devices: Where the kernel lists devices for RDMA.
    """
    if plugin != "UCX" or may_use_rdma(environment, devices):
        return False
    if plugin_options.get("ucx_error_handling_mode", "peer") != "peer" or int(plugin_options.get("num_threads", "0")):
        return False
    pairs = (pair.partition("=") for pair in plugin_options.get("engine_config", "").split(","))
    settings = {f"UCX_{name.strip()}": value for name, _, value in pairs} | dict(environment)
    queues = [name for name in settings if name.startswith("UCX_") and name.endswith(QUEUES) and COPIES not in name]
    return all(settings[name].strip().lower() in OFF for name in queues)

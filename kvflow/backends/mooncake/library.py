"""Imports Mooncake, sets the environment variables it reads, and silences its log.

Mooncake reads its settings from environment variables, some on import and some when an engine is created. It reports
errors only on standard error, so its log is turned off for programs that use standard error themselves.
"""

import contextlib
import ctypes
import functools
import importlib
import importlib.metadata
import ipaddress
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Final, Literal

from kvflow.errors import BackendUnavailable

__all__ = [
    "BUILDS",
    "ENVIRONMENT",
    "PEER_TO_PEER",
    "EngineSettings",
    "Library",
    "Protocol",
    "environment_for",
    "installed_builds",
    "memory_kinds",
    "shortest_timeout_s",
]

Protocol = Literal["tcp", "rdma"]

PEER_TO_PEER: Final = "P2PHANDSHAKE"
"""Value for no metadata server: engines ask each other."""

MODULE: Final = "mooncake.engine"

IPV6_VARIABLE: Final = "MC_USE_IPV6"
"""Makes the library use only IPv6, in the whole process; read on import."""

HOST: Final = frozenset({"DRAM"})
HOST_AND_DEVICE: Final = frozenset({"DRAM", "VRAM"})

BUILDS: Final = {
    "mooncake-transfer-engine": HOST_AND_DEVICE,
    "mooncake-transfer-engine-cuda13": HOST_AND_DEVICE,
    "mooncake-transfer-engine-non-cuda": HOST,
    "mooncake-transfer-engine-npu": HOST,
}
"""Distributions, and the memory kinds each can register. All install the same module over each other."""

ENVIRONMENT: Final = {
    "MC_LOG_LEVEL": "ERROR",
    # A peer whose queue has overflowed once is never written to again, so use the maximum length.
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    # The library's defaults for these two; kvflow needs them to distinguish a refusal from a timeout.
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "30",
    "MC_TCP_STATUS_TIMEOUT_SEC": "30",
    # Detects a hanging peer sooner than the library's 5 s and 30 s.
    "MC_HANDSHAKE_CONNECT_TIMEOUT": "2",
    "MC_TRANSFER_TIMEOUT": "5",
}
"""Variables to set before the library is loaded, unless they are set already."""

FATAL: Final = 3
"""glog's level for messages that end the process."""

LEVEL_VARIABLE: Final = "_ZN3fLI17FLAGS_minloglevelE"
"""glog's `FLAGS_minloglevel`. Mooncake overwrites its environment variable."""


TIMEOUT_VARIABLES: Final = ("MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TCP_STATUS_TIMEOUT_SEC")
TIMEOUT_DEFAULT_S: Final = 30.0
TIMEOUT_MARGIN: Final = 0.9


@dataclass(frozen=True)
class EngineSettings:
    """Settings of new engines.

    Attributes:
        host: Name, or IPv4 or IPv6 address without brackets, at which peers reach this process.
        protocol: "tcp" or "rdma".
        devices: RDMA devices to use; all if empty.
        metadata_server: URL, or `PEER_TO_PEER`.
    """

    host: str
    protocol: Protocol
    devices: tuple[str, ...]
    metadata_server: str

    @property
    def is_peer_to_peer(self) -> bool:
        """Whether engines ask each other."""
        return self.metadata_server == PEER_TO_PEER

    def session(self, port: int) -> str:
        """Return the session name of an engine that listens on a port, if engines ask each other."""
        return f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"


def installed_builds() -> list[str]:
    """Return the installed distributions of Mooncake."""
    return [name for name in BUILDS if _is_installed(name)]


def memory_kinds() -> frozenset[str]:
    """Return the memory kinds that the installed build can register; host memory if none or several are installed."""
    builds = installed_builds()
    return BUILDS[builds[0]] if len(builds) == 1 else HOST


def environment_for(settings: EngineSettings, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set, including those that follow from the settings.

    If the environment forces TCP or the other IP version on this process, raise BackendUnavailable.
    """
    complete = dict(environment)
    if _needs_ipv6(settings.host):
        if MODULE in sys.modules and IPV6_VARIABLE not in os.environ:
            raise BackendUnavailable(
                "Mooncake was loaded for IPv4 in this process; set MC_USE_IPV6=1 before it starts", host=settings.host
            )
        complete[IPV6_VARIABLE] = "1"
    elif IPV6_VARIABLE in os.environ and _is_ipv4(settings.host):
        raise BackendUnavailable(
            "MC_USE_IPV6 is set, so Mooncake cannot reach IPv4 addresses; unset it, or advertise an IPv6 address",
            host=settings.host,
        )
    if settings.protocol == "tcp":
        complete["MC_FORCE_TCP"] = "1"
    elif "MC_FORCE_TCP" in os.environ:
        raise BackendUnavailable(
            "MC_FORCE_TCP is set, so Mooncake would use TCP; unset it, and open no backend with protocol tcp before"
        )
    if not settings.is_peer_to_peer:
        complete["MC_TCP_BIND_ADDRESS"] = settings.host
    return complete


def _needs_ipv6(host: str) -> bool:
    """Return whether a host has only IPv6 addresses; False if it cannot be resolved."""
    try:
        found = {family for family, *_ in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return socket.AF_INET6 in found and socket.AF_INET not in found


def _is_ipv4(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 4
    except ValueError:
        return False


def shortest_timeout_s() -> float:
    """Return a time in seconds; a write that fails sooner was not timed out by the library."""
    return TIMEOUT_MARGIN * min(_seconds(os.environ.get(variable, "")) for variable in TIMEOUT_VARIABLES)


def _seconds(text: str) -> float:
    return float(text) if text.isdecimal() and int(text) > 0 else TIMEOUT_DEFAULT_S


class Library:
    """The loaded library.

    Args:
        environment: Variables to set first, unless they are set already.

    Raises:
        BackendUnavailable: It is missing, installed more than once, or does not load.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        _check_builds()
        for variable, value in environment.items():
            os.environ.setdefault(variable, value)
        if "MC_LOG_DIR" in os.environ:
            raise BackendUnavailable(
                "Mooncake ends the process when MC_LOG_DIR is set; unset it", MC_LOG_DIR=os.environ["MC_LOG_DIR"]
            )
        self.engine: ModuleType = _import_engine()
        self._level = _level_variable(str(self.engine.__file__))
        if self._level is not None and os.environ.get("MC_LOG_LEVEL") == "ERROR":
            self._level.value = FATAL

    @contextlib.contextmanager
    def silence(self) -> Iterator[None]:
        """Suppress the log inside the block, whatever the log level is."""
        if self._level is None:
            yield
            return
        before, self._level.value = self._level.value, FATAL
        try:
            yield
        finally:
            self._level.value = before


def _check_builds() -> None:
    builds = installed_builds()
    if not builds:
        raise BackendUnavailable(
            "Mooncake is not installed; install kvflow[mooncake-cpu], or kvflow[mooncake] for CUDA 12, "
            "kvflow[mooncake-cuda13] for CUDA 13, kvflow[mooncake-npu] for Ascend"
        )
    if len(builds) > 1:
        raise BackendUnavailable(
            "several builds of Mooncake are installed over one another; uninstall them all and install one",
            installed=builds,
        )


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _import_engine() -> ModuleType:
    try:
        return importlib.import_module(MODULE)
    except ImportError as error:
        raise BackendUnavailable(
            "Mooncake does not load; missing libraries are in system packages (Debian libibverbs1, libnuma1, libcurl4)",
            detail=str(error),
        ) from error


@functools.cache
def _level_variable(path: str) -> ctypes.c_int32 | None:
    """Return the minimum level that is logged, if this build uses glog."""
    try:
        return ctypes.c_int32.in_dll(ctypes.CDLL(path), LEVEL_VARIABLE)
    except (OSError, ValueError):
        return None

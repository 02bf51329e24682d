"""Finds Mooncake, prepares the environment it reads, and keeps it quiet.

Mooncake reads its settings from environment variables: some at the import, some when an engine is made. It says what
goes wrong only on standard error, so that a program which wants its standard error for itself has to turn it down.
"""

import contextlib
import ctypes
import functools
import importlib
import importlib.metadata
import os
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Final

from kvflow.errors import BackendUnavailable

__all__ = ["BUILDS", "ENVIRONMENT", "Library", "installed_builds", "memory_kinds"]

HOST: Final = frozenset({"DRAM"})
HOST_AND_DEVICE: Final = frozenset({"DRAM", "VRAM"})

BUILDS: Final = {
    "mooncake-transfer-engine": HOST_AND_DEVICE,
    "mooncake-transfer-engine-cuda13": HOST_AND_DEVICE,
    "mooncake-transfer-engine-non-cuda": HOST,
    "mooncake-transfer-engine-npu": HOST,
}
"""Distributions, and the memory each can register. All install the same module over each other."""

ENVIRONMENT: Final = {
    "MC_LOG_LEVEL": "ERROR",
    # A peer whose queue was too short once is never written to again, so it is made as long as it can be.
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    # These two are the library's own; kvflow has to know them to tell a refusal from a timeout.
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "30",
    "MC_TCP_STATUS_TIMEOUT_SEC": "30",
    # A hung peer is noticed sooner than after the library's 5 s and 30 s.
    "MC_HANDSHAKE_CONNECT_TIMEOUT": "2",
    "MC_TRANSFER_TIMEOUT": "5",
}
"""Variables to set before the library is loaded, unless they are set already."""

FATAL: Final = 3
"""glog's level for messages after which the process ends."""

LEVEL_VARIABLE: Final = "_ZN3fLI17FLAGS_minloglevelE"
"""glog's `FLAGS_minloglevel`. The environment variable for it is overwritten by Mooncake."""


def installed_builds() -> list[str]:
    """Distributions of Mooncake that are installed."""
    return [name for name in BUILDS if _is_installed(name)]


def memory_kinds() -> frozenset[str]:
    """Memory that the installed build can register; host memory if it cannot be told which one that is."""
    builds = installed_builds()
    return BUILDS[builds[0]] if len(builds) == 1 else HOST


class Library:
    """The loaded library.

    Args:
        environment: Variables to set first, unless they are set already.

    Raises:
        BackendUnavailable: It is missing, there are two, or it does not load.
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
        if os.environ.get("MC_LOG_LEVEL") == "ERROR":
            _set_log_level(self.engine, FATAL)

    @contextlib.contextmanager
    def silence(self) -> Iterator[None]:
        """Log nothing meanwhile, whatever the user wants to see otherwise."""
        before = _log_level(self.engine)
        if before is None:
            yield
            return
        _set_log_level(self.engine, FATAL)
        try:
            yield
        finally:
            _set_log_level(self.engine, before)


def _check_builds() -> None:
    builds = installed_builds()
    if not builds:
        raise BackendUnavailable(
            "Mooncake is not installed; install kvflow[mooncake-cpu], or kvflow[mooncake] for CUDA 12, "
            "kvflow[mooncake-cuda13] for CUDA 13, kvflow[mooncake-npu] for Ascend"
        )
    if len(builds) > 1:
        raise BackendUnavailable(
            "several builds of Mooncake are installed over each other; uninstall all of them and install one",
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
        return importlib.import_module("mooncake.engine")
    except ImportError as error:
        raise BackendUnavailable(
            "Mooncake does not load; a missing .so is a system package, on Debian libibverbs1, libnuma1 or libcurl4",
            detail=str(error),
        ) from error


@functools.cache
def _level_variable(path: str) -> ctypes.c_int32 | None:
    try:
        return ctypes.c_int32.in_dll(ctypes.CDLL(path), LEVEL_VARIABLE)
    except (OSError, ValueError):
        return None  # a build with another log library


def _log_level(engine: ModuleType) -> int | None:
    variable = _level_variable(str(engine.__file__))
    return None if variable is None else variable.value


def _set_log_level(engine: ModuleType, level: int) -> None:
    """Set the least level that is logged, if this build has such a variable."""
    variable = _level_variable(str(engine.__file__))
    if variable is not None:
        variable.value = level

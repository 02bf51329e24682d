"""Finds NIXL, prepares the environment that it reads, and says in words what it raises."""

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Final

from kvflow.errors import BackendUnavailable

__all__ = ["ENGINE_CONFIG", "default_environment", "error_text", "load"]

DISTRIBUTIONS: Final = ("nixl_cu12", "nixl_cu13")
"""Import names, in order of preference. The umbrella package `nixl` imports torch to choose between them."""

QUIET: Final = {
    # Without these, NIXL and UCX print, NIXL an error for each post to a peer that has died.
    "NIXL_LOG_LEVEL": "FATAL",
    "UCX_LOG_LEVEL": "fatal",
    # UCX would handle SIGHUP itself, and print everything it does from then on.
    "UCX_DEBUG_SIGNO": "0",
}

WITHOUT_EFA: Final = {"UCX_MODULES": "^efa"}
"""Keeps UCX from loading its EFA module, in the whole process.

The module of the wheel needs the system's libefa, whose clean-up crashes the interpreter at exit. But an engine that
uses UCX too may want the device.
"""

EFA_DRIVER: Final = Path("/sys/bus/pci/drivers/efa")
"""Has an entry named after its PCI address for each EFA device of the host."""

ENGINE_CONFIG: Final = "CMA_ERROR_HANDLING=y"
"""Keeps the copies that UCX makes from process to process on one host, although peer error handling is on."""


def default_environment(efa_driver: Path = EFA_DRIVER) -> dict[str, str]:
    """Return the variables that NIXL needs on this host.

    Args:
        efa_driver: Where the kernel lists EFA devices.
    """
    has_efa = any(efa_driver.glob("*:*:*"))
    return QUIET if has_efa else QUIET | WITHOUT_EFA


def load(environment: Mapping[str, str] | None = None) -> ModuleType:
    """Import the NIXL build that is installed.

    Args:
        environment: Variables to set first, unless they are set already; `default_environment()` by default.

    Raises:
        BackendUnavailable: None is installed, or it does not load.
    """
    if environment is None:
        environment = default_environment()
    for variable, value in environment.items():
        os.environ.setdefault(variable, value)
    failures = {}
    for distribution in DISTRIBUTIONS:
        try:
            return importlib.import_module(f"{distribution}._api")
        except ImportError as error:
            failures[distribution] = str(error)
    raise BackendUnavailable(
        "NIXL is not installed or does not load; install kvflow[nixl-cu12] or kvflow[nixl-cu13]", **failures
    )


def error_text(error: Exception) -> str:
    """Return type and text of an exception: the text of NIXL's own is only the name of a status."""
    return f"{type(error).__name__}: {error}"

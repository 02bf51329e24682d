"""Imports NIXL, and sets the environment variables it reads."""

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Final

from kvflow.errors import BackendUnavailable

__all__ = ["ENGINE_CONFIG", "default_environment", "load"]

DISTRIBUTIONS: Final = ("nixl_cu12", "nixl_cu13")
"""Import names in order of preference. The umbrella package `nixl` imports torch to choose between them."""

QUIET: Final = {
    # Without these, NIXL and UCX print messages; NIXL prints an error for each post to a dead peer.
    "NIXL_LOG_LEVEL": "FATAL",
    "UCX_LOG_LEVEL": "fatal",
    # UCX would otherwise handle SIGHUP itself, and print everything it does from then on.
    "UCX_DEBUG_SIGNO": "0",
}

WITHOUT_EFA: Final = {"UCX_MODULES": "^efa"}
"""Keeps UCX from loading its EFA module, in the whole process.

The wheel's module needs the system's libefa, whose clean-up crashes the interpreter at exit. Not set on hosts with an
EFA device, because an engine that also uses UCX may need it.
"""

EFA_DRIVER: Final = Path("/sys/bus/pci/drivers/efa")
"""Contains an entry named after the PCI address of each EFA device of the host."""

ENGINE_CONFIG: Final = "CMA_ERROR_HANDLING=y"
"""Enables direct copies between processes of one host, which UCX otherwise disables under peer error handling."""


def default_environment(efa_driver: Path = EFA_DRIVER) -> dict[str, str]:
    """Return the variables that NIXL needs on this host."""
    has_efa = any(efa_driver.glob("*:*:*"))
    return QUIET if has_efa else QUIET | WITHOUT_EFA


def load(environment: Mapping[str, str] | None = None) -> ModuleType:
    """Import the installed NIXL build, or raise BackendUnavailable.

    The variables of `environment`, by default `default_environment()`, are set first, unless they are set already.
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

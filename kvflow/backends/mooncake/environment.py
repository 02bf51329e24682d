"""Variables that Mooncake reads, and what follows from them."""

import os
from collections.abc import Mapping
from typing import Final

from kvflow.backends.mooncake.engine import PEER_TO_PEER, EngineSettings
from kvflow.errors import BackendUnavailable

__all__ = ["environment_for", "shortest_timeout_s"]

TIMEOUT_VARIABLES: Final = ("MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TCP_STATUS_TIMEOUT_SEC")
TIMEOUT_DEFAULT_S: Final = 30.0
TIMEOUT_MARGIN: Final = 0.9


def environment_for(settings: EngineSettings, environment: Mapping[str, str]) -> dict[str, str]:
    """Give the variables to set, with those that follow from the settings.

    Raises:
        BackendUnavailable: The process was told to use TCP only.
    """
    complete = dict(environment)
    if settings.protocol == "tcp":
        complete["MC_FORCE_TCP"] = "1"
    elif "MC_FORCE_TCP" in os.environ:
        raise BackendUnavailable(
            "MC_FORCE_TCP is set, so Mooncake would use TCP; unset it, and open no backend with protocol tcp before"
        )
    if settings.metadata_server != PEER_TO_PEER:
        complete["MC_TCP_BIND_ADDRESS"] = settings.host
    return complete


def shortest_timeout_s() -> float:
    """A write that fails sooner than this was not timed out by the library."""
    return TIMEOUT_MARGIN * min(_seconds(os.environ.get(variable, "")) for variable in TIMEOUT_VARIABLES)


def _seconds(text: str) -> float:
    return float(text) if text.isdecimal() and int(text) > 0 else TIMEOUT_DEFAULT_S

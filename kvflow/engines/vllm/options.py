"""`kv_connector_extra_config`: settings for which vLLM has no options of its own. Pure."""

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import msgspec

from kvflow import ConfigError
from kvflow.engines.settings import AdapterSettings

__all__ = ["Options", "read_options"]

TIMEOUTS: Final = {
    "lease_s": 1.0,
    "handshake_s": 15.0,
    "transfer_s": 600.0,
    "progress_s": 120.0,
}
"""With this lease, prefill's blocks are free within a second after decode was killed.

A worker that computes, or shares its cores, may be silent for seconds, which is tolerated for ten leases. Requests may
wait in vLLM's queues for minutes, on prefill before the first byte has moved.
"""


class Options(AdapterSettings, frozen=True, forbid_unknown_fields=True):
    """Options of the connector. By default, kvflow's threads use the CPUs of the process that started the worker.

    Attributes:
        host: Address at which decode servers reach this one, or several, as in `kvflow.PrefillConfig.advertise`.
        port: Port of the first prefill worker; the others, and the first if this is 0, use a free one of `ports`.
        mooncake_port: Port at which routers of the MooncakeConnector's dialect ask, like its
            `VLLM_MOONCAKE_BOOTSTRAP_PORT`. Set `port`, too: routers ask once, so a restarted server must have the same
            address.
        registry: As in `kvflow.RankConfig`. Not required: prefill's reply contains its address.
        layerwise: Send each layer of a step as soon as it is computed, instead of all of them after the step.
        signed_tickets: As in `kvflow.DecodeConfig`.
        keep_turns_s: How long decode keeps the blocks of a finished turn for the prefill server that computes the next
            one; 0 for not at all. Both servers need it, and vLLM's role `kv_both`.
        spin: Leave vLLM's processes spinning while requests move, instead of letting them sleep; see `waiting`.
    """

    source: ClassVar[str] = "kv_connector_extra_config"

    host: str = "127.0.0.1"
    port: int = 0
    mooncake_port: int | None = None
    registry: str | None = None
    layerwise: bool = False
    signed_tickets: bool | None = None
    keep_turns_s: float = 0.0
    spin: bool = False


def read_options(extra_config: Mapping[str, Any]) -> Options:
    """Parse `kv_connector_extra_config`; raise ConfigError if an option is unknown or has the wrong type."""
    try:
        return msgspec.convert(dict(extra_config), Options)
    except msgspec.ValidationError as error:
        raise ConfigError(
            "options cannot be read", setting=Options.source, value=dict(extra_config), detail=str(error)
        ) from error

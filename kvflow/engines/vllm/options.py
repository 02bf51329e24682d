"""`kv_connector_extra_config`: settings for which vLLM has no options of its own. Pure."""

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import msgspec

from kvflow import ConfigError, Limits, Proofs, Timeouts

Made = TypeVar("Made")

__all__ = ["Options", "read_options"]

VLLM_TIMEOUTS: Final = {
    "lease_s": 1.0,
    "handshake_s": 15.0,
    "transfer_s": 600.0,
    "first_bytes_s": 600.0,
    "progress_s": 120.0,
}
"""With this lease, prefill's blocks are free within a second after decode was killed.

A worker that computes, or shares its cores, may be silent for seconds, which is tolerated for ten leases. Requests may
wait in vLLM's queues for minutes, on prefill before the first byte has moved.
"""


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the connector.

    Attributes:
        host: Address at which decode servers reach this one.
        port: Port of the first prefill worker; the others, and the first if this is 0, use a free one.
        mooncake_port: Port at which routers of the MooncakeConnector's dialect ask, like its
            `VLLM_MOONCAKE_BOOTSTRAP_PORT`. Set `port`, too: routers ask once, so a restarted server must have the same
            address.
        registry: As in `kvflow.RankConfig`. Not required: prefill's reply contains its address.
        backend: Transport, as in `kvflow.RankConfig`.
        backend_options: Options of the transport.
        fingerprint: What makes two caches interchangeable; by default model, types, attention backend and block size.
        timeouts: `kvflow.Timeouts` to use instead of the defaults for vLLM.
        limits: `kvflow.Limits` to use instead of the defaults.
        staging_bytes: As in `kvflow.RankConfig`.
        digest_every: As in `kvflow.DecodeConfig`.
        proofs: `kvflow.Proofs` to use instead of the defaults, on decode.
        layerwise: Send each layer of a step as soon as it is computed, instead of all of them after the step.
        affinity: CPUs of kvflow's threads; by default those of the process that started the worker, because vLLM may
            have pinned the worker to one CPU.
        keys: Directory of keys, see `kvflow keys` and docs/security.md.
        plain: Require no keys from peers. Without it and without `keys`, only the loopback interface is used.
        signed_tickets: As in `kvflow.DecodeConfig`.
        allowed_hosts: As in `kvflow.DecodeConfig`.
    """

    host: str = "127.0.0.1"
    port: int = 0
    mooncake_port: int | None = None
    registry: str | None = None
    backend: str = "nixl"
    backend_options: dict[str, Any] = {}
    fingerprint: str | None = None
    timeouts: dict[str, float] = {}
    limits: dict[str, int] = {}
    staging_bytes: int | None = None
    digest_every: int = 0
    proofs: dict[str, Any] = {}
    layerwise: bool = False
    affinity: tuple[int, ...] | None = None
    keys: str | None = None
    plain: bool = False
    signed_tickets: bool | None = None
    allowed_hosts: tuple[str, ...] = ()

    def make_timeouts(self) -> Timeouts:
        """Return the timeouts.

        Raises:
            ConfigError: A timeout is unknown or out of range.
        """
        return _make(Timeouts, {**VLLM_TIMEOUTS, **self.timeouts}, "timeouts")

    def make_limits(self) -> Limits:
        """Return the limits.

        Raises:
            ConfigError: A limit is unknown or out of range.
        """
        return _make(Limits, self.limits, "limits")

    def make_proofs(self) -> Proofs:
        """Return the settings of what proves that a prefill process can no longer write.

        Raises:
            ConfigError: A setting is unknown or out of range.
        """
        return _make(Proofs, self.proofs, "proofs")


def _make(kind: Callable[..., Made], values: Mapping[str, Any], setting: str) -> Made:
    try:
        return kind(**values)
    except TypeError as error:
        raise ConfigError("unknown setting", setting=setting, value=dict(values)) from error


def read_options(extra_config: Mapping[str, Any]) -> Options:
    """Parse `kv_connector_extra_config`.

    Raises:
        ConfigError: An option is unknown or has the wrong type.
    """
    try:
        return msgspec.convert(dict(extra_config), Options)
    except msgspec.ValidationError as error:
        raise ConfigError(
            "options cannot be read", setting="kv_connector_extra_config", value=dict(extra_config), detail=str(error)
        ) from error

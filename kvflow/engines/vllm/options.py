"""`kv_connector_extra_config`: what vLLM's own options have no words for. Pure."""

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import msgspec

from kvflow import ConfigError, Limits, Proofs, Timeouts

Made = TypeVar("Made")

__all__ = ["Options", "read_options"]

VLLM_TIMEOUTS: Final = {"lease_s": 1.0, "handshake_s": 15.0, "transfer_s": 600.0, "progress_s": 120.0}
"""Prefill's blocks are free within a second after decode was killed. A worker that computes, or shares its cores, may
not answer for seconds, which it may for ten leases; queues of vLLM last for minutes."""


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the connector.

    Attributes:
        host: Address under which decode servers reach this one.
        port: Of the first prefill worker; the others, and it if this is 0, take a free one.
        mooncake_port: Where routers of the MooncakeConnector's dialect ask, as its `VLLM_MOONCAKE_BOOTSTRAP_PORT`. Set
            `port`, too: they ask once, so a server that is started again must have the same one.
        registry: As in `kvflow.RankConfig`. None is needed: the reply of prefill says where it is.
        backend: Transport, as in `kvflow.RankConfig`.
        backend_options: Its options.
        fingerprint: What makes two caches interchangeable; by default model, types, attention backend and block size.
        timeouts: `kvflow.Timeouts` to use instead of those that suit vLLM.
        limits: `kvflow.Limits` to use instead of the defaults.
        staging_bytes: As in `kvflow.RankConfig`.
        digest_every: As in `kvflow.DecodeConfig`.
        proofs: `kvflow.Proofs` to use instead of the defaults, on decode.
        layerwise: Send each layer of a step as soon as it is computed, and not all of them after it.
        affinity: CPUs of kvflow's threads; by default those of the process that started the worker, which vLLM may have
            pinned to one.
        keys: Directory of keys, see `kvflow keys` and docs/security.md.
        plain: Ask nobody for a key. Without it and without `keys`, only the loopback interface is used.
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

    def make_timeouts(self) -> Timeouts:
        """Return the timeouts.

        Raises:
            ConfigError: One is unknown or out of range.
        """
        return _make(Timeouts, {**VLLM_TIMEOUTS, **self.timeouts}, "timeouts")

    def make_limits(self) -> Limits:
        """Return the limits.

        Raises:
            ConfigError: One is unknown or out of range.
        """
        return _make(Limits, self.limits, "limits")

    def make_proofs(self) -> Proofs:
        """Return what proves that a prefill process can write nothing any more.

        Raises:
            ConfigError: One is unknown or out of range.
        """
        return _make(Proofs, self.proofs, "proofs")


def _make(kind: Callable[..., Made], values: Mapping[str, Any], setting: str) -> Made:
    try:
        return kind(**values)
    except TypeError as error:
        raise ConfigError("unknown setting", setting=setting, value=dict(values)) from error


def read_options(extra_config: Mapping[str, Any]) -> Options:
    """Read `kv_connector_extra_config`.

    Raises:
        ConfigError: An option is unknown or of a wrong type.
    """
    try:
        return msgspec.convert(dict(extra_config), Options)
    except msgspec.ValidationError as error:
        raise ConfigError(
            "options cannot be read", setting="kv_connector_extra_config", value=dict(extra_config), detail=str(error)
        ) from error

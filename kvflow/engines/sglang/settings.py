"""Settings that SGLang's command line lacks: JSON in an environment variable, which its processes inherit."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from kvflow import ConfigError, Limits, Proofs, Timeouts

Made = TypeVar("Made")

__all__ = ["VARIABLE", "Settings", "read_settings"]

VARIABLE: Final = "KVFLOW_SGLANG"
IB_DEVICE: Final = "--disaggregation-ib-device"


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the adapter.

    Attributes:
        backend: Transport, as in `kvflow.RankConfig`.
        backend_options: Options of the transport.
        fingerprint: What makes two caches interchangeable; by default model architecture, sizes and cache type.
        timeouts: `kvflow.Timeouts` to use instead of those derived from SGLang's.
        limits: `kvflow.Limits` to use instead of the defaults.
        staging_bytes: As in `kvflow.RankConfig`.
        digest_every: As in `kvflow.DecodeConfig`.
        proofs: `kvflow.Proofs` to use instead of the defaults, on decode.
        releases: Directory in which an operator names rooms whose pages may be reused without a proof.
        affinity: CPUs of kvflow's threads; by default those of the scheduler.
        keys: Directory of keys, see `kvflow keys` and docs/security.md.
        plain: Require no keys from peers. Without it and without `keys`, only the loopback interface is used.
        allowed_hosts: As in `kvflow.DecodeConfig`.
    """

    backend: str = "nixl"
    backend_options: dict[str, Any] = {}
    fingerprint: str | None = None
    timeouts: dict[str, float] = {}
    limits: dict[str, int] = {}
    staging_bytes: int | None = None
    digest_every: int = 0
    proofs: dict[str, Any] = {}
    releases: str | None = None
    affinity: tuple[int, ...] | None = None
    keys: str | None = None
    plain: bool = False
    allowed_hosts: tuple[str, ...] = ()

    def options_for(
        self, devices: Sequence[str], plugin: str | None, plugin_options: Mapping[str, str]
    ) -> dict[str, Any]:
        """Return the options of the transport: those set here, and those that SGLang has for its own backends.

        Args:
            devices: RDMA devices of this rank's GPU; none to let the transport choose.
            plugin: SGLang's choice of a NIXL plugin, if it was set.
            plugin_options: SGLang's parameters of it.

        Raises:
            ConfigError: An option is set in both places to different values, or the transport cannot be told which
                devices to use.
        """
        own: dict[str, Any] = {}
        if self.backend == "nixl":
            own = {"plugin": plugin} if plugin else {}
            own["plugin_options"] = dict(plugin_options)
        if devices:
            if any(not name or ":" in name for name in devices):
                raise ConfigError("devices must be named without ports", setting=IB_DEVICE, value=list(devices))
            used = plugin or self.backend_options.get("plugin", "UCX")
            match self.backend, used:
                case "nixl", "UCX":  # which splits the list at these two characters, and appends port 1
                    own["plugin_options"] = _merged(own["plugin_options"], {"device_list": ", ".join(devices)})
                case "mooncake", _:
                    own = {"protocol": "rdma", "devices": list(devices)}
                case _:
                    raise ConfigError(
                        "kvflow cannot tell this transport which devices to use",
                        setting=IB_DEVICE,
                        value=list(devices),
                        backend=self.backend,
                        plugin=used if self.backend == "nixl" else None,
                    )
        return _merged(own, self.backend_options)

    def timeouts_for(self, wait_s: float) -> Timeouts:
        """Return timeouts with which SGLang decides how long a request waits for the other side.

        Raises:
            ConfigError: A timeout is unknown or out of range.
        """
        names = ("transfer_s", "open_s", "grant_s", "first_bytes_s", "progress_s", "announced_s")
        return _make(Timeouts, {"lease_s": 10.0, **dict.fromkeys(names, wait_s), **self.timeouts}, "timeouts")

    def make_proofs(self) -> Proofs:
        """Return the settings of what proves that a prefill process can no longer write.

        Raises:
            ConfigError: A setting is unknown or out of range.
        """
        return _make(Proofs, self.proofs, "proofs")

    def limits_for(self, metadata_bytes: int) -> Limits:
        """Return limits that allow the size of the metadata.

        Raises:
            ConfigError: A limit is unknown or out of range, or the metadata is larger than can be sent.
        """
        needed = max(Limits().metadata_bytes, metadata_bytes)
        return _make(Limits, {"metadata_bytes": needed, **self.limits}, "limits")


def _make(kind: Callable[..., Made], values: Mapping[str, Any], setting: str) -> Made:
    try:
        return kind(**values)
    except TypeError as error:
        raise ConfigError("unknown setting", setting=f"{VARIABLE}.{setting}", value=dict(values)) from error


def _merged(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return both, with the options of plugins merged in turn.

    Raises:
        ConfigError: They contradict each other.
    """
    merged = dict(own)
    for name, value in given.items():
        if isinstance(value, Mapping) and isinstance(merged.get(name), Mapping):
            merged[name] = _merged(merged[name], value)
        elif merged.setdefault(name, value) != value:
            raise ConfigError(
                "two settings contradict each other",
                setting=f"{VARIABLE}.backend_options",
                option=name,
                value=value,
                elsewhere=merged[name],
            )
    return merged


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Read the settings of this process.

    Raises:
        ConfigError: They are not valid JSON, or a setting is unknown or has the wrong type.
    """
    text = environment.get(VARIABLE, "{}")
    try:
        return msgspec.json.decode(text, type=Settings)
    except msgspec.MsgspecError as error:
        raise ConfigError("settings cannot be read", setting=VARIABLE, value=text, error=str(error)) from error

"""Settings that SGLang's command line lacks: JSON in an environment variable, which its processes inherit."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import msgspec

from kvflow import ConfigError, Limits
from kvflow.engines.settings import AdapterSettings

__all__ = ["VARIABLE", "Settings", "default_limits", "default_timeouts", "read_settings"]

VARIABLE: Final = "KVFLOW_SGLANG"
IB_DEVICE: Final = "--disaggregation-ib-device"
ANSWER_BYTES: Final = 1 << 20
"""Four for each token of an answer."""


class Settings(AdapterSettings, frozen=True, forbid_unknown_fields=True):
    """Settings of the adapter.

    By default, the fingerprint is made of the model's architecture, its sizes and the type of its cache, the timeouts
    follow SGLang's, and kvflow's threads use the CPUs of the scheduler.

    Attributes:
        releases: Directory in which an operator names rooms whose pages may be reused without a proof.
        return_turns: Move finished turns of conversations back to the prefill servers that computed their prompts.
    """

    source: ClassVar[str] = VARIABLE

    releases: str | None = None
    return_turns: bool = False

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


def default_timeouts(wait_s: float) -> dict[str, float]:
    """Return timeouts with which SGLang decides how long a request waits for the other side."""
    names = ("transfer_s", "open_s", "grant_s", "progress_s")
    return {"lease_s": 10.0, **dict.fromkeys(names, wait_s)}


def default_limits(metadata_bytes: int, *, returns_turns: bool = False) -> dict[str, int]:
    """Return limits that allow the size of the metadata, and of the tokens of an answer if turns go back."""
    return {"metadata_bytes": max(Limits().metadata_bytes, metadata_bytes, ANSWER_BYTES if returns_turns else 0)}


def _merged(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return both, with the options of plugins merged in turn; raise ConfigError if they contradict each other."""
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
    """Read the settings of this process; raise ConfigError if they are not valid JSON, or one is not valid."""
    text = environment.get(VARIABLE, "{}")
    try:
        return msgspec.json.decode(text, type=Settings)
    except msgspec.MsgspecError as error:
        raise ConfigError("settings cannot be read", setting=VARIABLE, value=text, error=str(error)) from error

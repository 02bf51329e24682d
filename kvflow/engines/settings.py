"""Settings that the adapters of engines share; each adapter adds those of its engine. Pure."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import msgspec

from kvflow import ConfigError, Limits, Proofs, Timeouts, Trust, load_trust
from kvflow.addresses import join_address

__all__ = ["AdapterSettings"]

Made = TypeVar("Made")


class AdapterSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of every adapter.

    Attributes:
        backend: Transport, as in `kvflow.RankConfig`.
        backend_options: Options of the transport.
        fingerprint: What makes two caches interchangeable; by default, what the adapter knows of the model.
        timeouts: `kvflow.Timeouts` to use instead of those of the adapter.
        limits: `kvflow.Limits` to use instead of the defaults.
        staging_bytes: As in `kvflow.RankConfig`.
        admin: As in `kvflow.RankConfig`.
        black_box: As in `kvflow.RankConfig`.
        doctor: Run the checks of `kvflow doctor` in each worker when it starts, and log the findings.
        digest_every: As in `kvflow.DecodeConfig`.
        proofs: `kvflow.Proofs` to use instead of the defaults, on decode.
        affinity: CPUs of kvflow's threads.
        keys: Directory of keys, see `kvflow keys` and docs/security.md.
        plain: Require no keys from peers. Without it and without `keys`, only the loopback interface is used.
        allowed_hosts: As in `kvflow.DecodeConfig`.
        ports: Range of ports for prefill ranks, such as "7000-7099"; by default, any free ones.
    """

    source: ClassVar[str]
    """Where a person writes the settings."""

    backend: str = "nixl"
    backend_options: dict[str, Any] = {}
    fingerprint: str | None = None
    timeouts: dict[str, float] = {}
    limits: dict[str, int] = {}
    staging_bytes: int | None = None
    admin: bool | str = True
    black_box: bool | str = False
    doctor: bool = False
    digest_every: int = 0
    proofs: dict[str, Any] = {}
    affinity: tuple[int, ...] | None = None
    keys: str | None = None
    plain: bool = False
    allowed_hosts: tuple[str, ...] = ()
    ports: str = "0"

    def bind_to(self, host: str, port: int = 0) -> str:
        """Return the address for a prefill rank to bind: this port, or any of `ports` if it is 0."""
        return join_address(host, port or self.ports)

    def for_rank(self, timeouts: Mapping[str, float], limits: Mapping[str, int]) -> dict[str, Any]:
        """Return arguments of `kvflow.PrefillConfig` and `kvflow.DecodeConfig`, over defaults of the adapter.

        Raises:
            ConfigError: A setting is unknown or out of range, or the keys cannot be read.
        """
        return {
            "backend": self.backend,
            "timeouts": self._make(Timeouts, "timeouts", {**timeouts, **self.timeouts}),
            "limits": self._make(Limits, "limits", {**limits, **self.limits}),
            "staging_bytes": self.staging_bytes,
            "admin": self.admin,
            "black_box": self.black_box,
            "trust": self.load_trust(),
        }

    def for_decode(self) -> dict[str, Any]:
        """Return further arguments of `kvflow.DecodeConfig`; raise ConfigError if a setting cannot be used."""
        return {
            "digest_every": self.digest_every,
            "proofs": self._make(Proofs, "proofs", self.proofs),
            "allowed_hosts": self.allowed_hosts,
        }

    def load_trust(self) -> Trust | None:
        """Return the trusted keys; None without `keys` and `plain`, ConfigError with both or with unreadable keys."""
        if self.keys is not None and self.plain:
            raise ConfigError("keys and plain transport are mutually exclusive", setting=f"{self.source}.plain")
        if self.keys is not None:
            return load_trust(self.keys)
        return Trust.none() if self.plain else None

    def _make(self, kind: Callable[..., Made], setting: str, values: Mapping[str, Any]) -> Made:
        try:
            return kind(**values)
        except TypeError as error:
            raise ConfigError("unknown setting", setting=f"{self.source}.{setting}", value=dict(values)) from error

"""What a check has found, and how checks are run."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from kvflow.errors import describe, shorten
from kvflow.trust import Trust

__all__ = [
    "UNKNOWN",
    "Check",
    "DoctorOptions",
    "Finding",
    "Status",
    "fail",
    "name_of",
    "ok",
    "run_checks",
    "unknown",
    "warn",
]

UNKNOWN: Final = "unknown"

Status = Literal["ok", "warn", "fail", "unknown"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What a check has found.

    Attributes:
        check: Name of the check.
        status: "ok"; "warn" if transfers work, but may be slow or fail under load; "fail" if they do not work;
            "unknown" if the check could not find out.
        cause: What was found, and what follows from it.
        fix: Command or setting that fixes it; empty if there is nothing to fix.
    """

    check: str = ""
    status: Status
    cause: str
    fix: str = ""

    @property
    def text(self) -> str:
        """The finding for people, in one line or two."""
        line = f"{self.status:<{len(UNKNOWN)}}  {self.check}: {self.cause}"
        return f"{line}\n{'':<{len(UNKNOWN)}}  fix: {self.fix}" if self.fix else line


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """What the checks of this host look at.

    Attributes:
        backend: Transport, as in `kvflow.RankConfig`.
        backend_options: Its options.
        keys: Key directory; None if there is none.
        instance: Instance that the key belongs to, for a probe.
        trust: Keys to connect with; `Trust.none()` for plain transport.
        socket: Where the sockets of running ranks are; by default, where ranks put them.
        timeout_s: How long a rank, or a peer, may take to answer.
        probe_s: How long a probe transfer may take; 0 for no probe.
        root: Root of the file system, to look at another one in tests.
    """

    backend: str = "nixl"
    backend_options: dict[str, Any] = field(default_factory=dict)
    keys: str | None = None
    instance: str = "kvflow-doctor"
    trust: Trust = field(default_factory=Trust.none)
    socket: Path | None = None
    timeout_s: float = 3.0
    probe_s: float = 60.0
    root: Path = Path("/")

    def read(self, path: str) -> str:
        """Return the text of a file, without spaces around it; empty if there is none or it cannot be read."""
        try:
            return (self.root / path).read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return ""

    def list_names(self, path: str) -> list[str]:
        """Return the names in a directory, sorted; none if it cannot be read."""
        try:
            return sorted(entry.name for entry in (self.root / path).iterdir())
        except OSError:
            return []


Check = Callable[[DoctorOptions], Finding | Iterable[Finding]]


def ok(cause: str) -> Finding:
    """Return that nothing is wrong."""
    return Finding(status="ok", cause=cause)


def warn(cause: str, fix: str) -> Finding:
    """Return that transfers work, but may be slow or fail under load."""
    return Finding(status="warn", cause=cause, fix=fix)


def fail(cause: str, fix: str) -> Finding:
    """Return that transfers do not work."""
    return Finding(status="fail", cause=cause, fix=fix)


def unknown(cause: str, fix: str = "") -> Finding:
    """Return that the check could not find out."""
    return Finding(status=UNKNOWN, cause=cause, fix=fix)


def run_checks(checks: Sequence[Check], options: DoctorOptions) -> list[Finding]:
    """Run checks in order, and return their findings under their names. A check that raises is "unknown"."""
    return [found for check in checks for found in _run(check, options)]


def name_of(check: Callable[..., object]) -> str:
    """Return the name of a check, for people."""
    return check.__name__.replace("_", " ")


def _run(check: Check, options: DoctorOptions) -> list[Finding]:
    name = name_of(check)
    try:
        found = check(options)
        findings = [found] if isinstance(found, Finding) else list(found)
    except Exception as error:  # noqa: BLE001 - one check that fails must not hide what the others find
        findings = [unknown(f"the check has failed: {shorten(describe(error))}")]
    return [msgspec.structs.replace(one, check=one.check or name) for one in findings]

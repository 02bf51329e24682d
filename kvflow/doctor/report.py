"""One archive to attach to an issue: what the doctor finds, what running ranks say, logs; no secrets."""

import io
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from kvflow.admin.client import ask_all, find_sockets
from kvflow.admin.incident_files import ENDING, find_directory
from kvflow.admin.messages import QuarantineRequest, Request, RoomsRequest, StatusRequest
from kvflow.doctor.checks import examine_host
from kvflow.doctor.findings import DoctorOptions
from kvflow.doctor.software import describe_versions

__all__ = ["without_secrets", "write_report"]

MAX_LOG_BYTES: Final = 4 * 2**20
"""How much of the end of a log is taken."""

MAX_INCIDENTS: Final = 4
"""How many files about incidents are taken, the newest; what they hold has no secrets (docs/security.md)."""

VARIABLES: Final = re.compile(r"UCX_|NIXL_|MC_|KVFLOW_|CUDA_VISIBLE_DEVICES$|LD_LIBRARY_PATH$|OMP_NUM_THREADS$")

SECRETS: Final = (
    re.compile(r"(?<![0-9a-fA-F])[0-9a-fA-F]{64}(?![0-9a-fA-F])()"),  # keys, and signatures of tickets
    re.compile(
        r"(?i)((?:api[_-]?key|authorization|bearer|capability|password|secret|signature|access_token|hf_token)"
        r"[\"']?\s*[=: ]\s*(?:bearer\s+)?[\"']?)[^\s\"',}]{8,}"
    ),
)
REMOVED: Final = r"\1[removed]"

REQUESTS: Final[dict[str, Request]] = {
    "status": StatusRequest(),
    "rooms": RoomsRequest(),
    "quarantine": QuarantineRequest(),
}


def without_secrets(text: str) -> str:
    """Return a text without keys, signatures, and values that are named like secrets."""
    for pattern in SECRETS:
        text = pattern.sub(REMOVED, text)
    return text


def write_report(
    path: Path, options: DoctorOptions, logs: Sequence[Path] = (), incidents: Path | None = None
) -> list[str]:
    """Write an archive that only its owner can read, and return the names of what is in it.

    Args:
        path: The archive to write, .tar.gz; it must not exist.
        options: As for the checks of this host.
        logs: Files to include, the ends of long ones.
        incidents: Directory of files about incidents; by default, where ranks put them.

    Raises:
        OSError: The archive cannot be written, or a log cannot be read.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            parts = dict(_parts(options, logs, incidents))
            for name, data in parts.items():
                entry = tarfile.TarInfo(f"kvflow-report/{name}")
                entry.size, entry.mode = len(data), 0o600
                archive.addfile(entry, io.BytesIO(data))
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return list(parts)


def _parts(options: DoctorOptions, logs: Sequence[Path], incidents: Path | None) -> Iterator[tuple[str, bytes]]:
    yield "doctor.json", _clean(examine_host(options))
    yield "versions.json", _clean(describe_versions())
    variables = {name: value for name, value in os.environ.items() if VARIABLES.match(name)}
    yield "environment.json", _clean(variables)
    paths = find_sockets(options.socket)
    for kind, request in REQUESTS.items():
        for reply in ask_all(paths, request, options.timeout_s):
            if reply.line or reply.problem:
                text = reply.line.decode() or reply.problem
                yield f"ranks/{reply.path.stem}-{kind}.json", without_secrets(text).encode()
    for number, log in enumerate(logs):
        with log.open("rb") as stream:
            stream.seek(max(0, log.stat().st_size - MAX_LOG_BYTES))
            yield f"logs/{number}-{log.name}", without_secrets(stream.read().decode(errors="replace")).encode()
    with suppress(OSError):  # there are none, or they cannot be read
        found = [entry for entry in (incidents or find_directory(None)).glob(f"*{ENDING}") if entry.is_file()]
        for entry in sorted(found, key=lambda one: one.stat().st_mtime)[-MAX_INCIDENTS:]:
            yield f"incidents/{entry.name}", entry.read_bytes()


def _clean(value: Any) -> bytes:
    return without_secrets(msgspec.json.format(msgspec.json.encode(value)).decode()).encode()

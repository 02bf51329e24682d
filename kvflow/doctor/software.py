"""What is installed, and the keys."""

import importlib.metadata
import importlib.util
import platform
from ctypes.util import find_library
from pathlib import Path
from typing import Final

from kvflow import __version__
from kvflow.backends import known_backends
from kvflow.doctor.findings import DoctorOptions, Finding, fail, ok, warn
from kvflow.errors import ConfigError
from kvflow.keys import load_trust

__all__ = ["describe_versions", "key_files", "transport_library", "versions"]

LIBRARIES: Final = {
    "nixl": (("nixl_cu12", "nixl_cu13"), "pip install 'kvflow[nixl-cu12]', or 'kvflow[nixl-cu13]' with CUDA 13"),
    "mooncake": (("mooncake",), "pip install 'kvflow[mooncake-cpu]', or the extra for the device, see docs/platforms"),
}
"""For each transport, the modules of which it needs one, and what installs one."""

INTERESTING: Final = (
    *("nixl-cu12", "nixl-cu13", "nixl", "mooncake-transfer-engine", "mooncake-transfer-engine-cuda13"),
    *("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine-npu", "torch", "vllm", "sglang", "transformers"),
    *("anyio", "msgspec", "numpy", "pyzmq", "prometheus-client"),
)


def describe_versions() -> dict[str, str]:
    """Return the versions of the system, of kvflow and of what it uses, as far as that is installed."""
    found = {"system": f"{platform.platform()}", "python": platform.python_version(), "kvflow": __version__}
    for name in INTERESTING:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def versions(_: DoctorOptions) -> Finding:
    """Versions of the system, of kvflow, and of the libraries and engines it may use."""
    found = {name: version for name, version in describe_versions().items() if name != "system"}
    return ok(", ".join(f"{name} {version}" for name, version in found.items()))


def transport_library(options: DoctorOptions) -> Finding:
    """Whether the library of the transport is installed, exactly once."""
    backend = options.backend
    if backend not in known_backends():
        return fail(f"there is no transport {backend!r}", f"choose one of {', '.join(known_backends())}")
    modules, install = LIBRARIES.get(backend, ((), ""))
    found = [name for name in modules if importlib.util.find_spec(name) is not None]
    if modules and not found:
        return fail(f"the library of the transport {backend!r} is not installed", install)
    builds = [name for name in describe_versions() if name.startswith("mooncake-transfer-engine")]
    if backend == "mooncake" and len(builds) > 1:
        fix = f"pip uninstall {' '.join(builds)}; then {install}"
        return fail(f"several builds of Mooncake overwrite each other: {', '.join(builds)}", fix)
    fabric = f"; libfabric: {find_library('fabric') or 'not installed, which only EFA needs'}"
    return ok(f"{backend}: {', '.join(found) or 'built in, or a plugin'}{fabric if backend == 'nixl' else ''}")


def key_files(options: DoctorOptions) -> Finding:
    """Whether the key directory can be read, and nobody else can read or replace what is secret."""
    if options.keys is None:
        return ok("no key directory was given (--keys): without keys, ranks talk over the loopback interface only")
    try:
        trust = load_trust(options.keys)
    except ConfigError as error:
        path = str(error.values.get("path", options.keys))
        command = error.message.partition("`")[2].partition("`")[0] or "kvflow keys new DIRECTORY"
        return fail(str(error), command.replace("PATH", path).replace("DIRECTORY", options.keys))
    if not trust.peers and not trust.registry:
        return warn(
            f"{Path(options.keys, 'peers')} lists no key: nobody can connect",
            f"kvflow keys trust {options.keys} PUBLIC-KEY INSTANCE",
        )
    return ok(f"own key, {len(trust.peers)} keys of peers, {len(trust.registry)} of the registry")

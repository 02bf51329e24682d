"""What is in the machine. Only a device that torch cannot use makes this fail; what is missing is told."""

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvflow.backends.mooncake.library import installed_builds
from tests.device.devices import needs_device

pytestmark = pytest.mark.device

DEVICE = needs_device()

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - its size is told

Record = Callable[[str, object], None]


def output_of(*command: str) -> str:
    """Return what a program prints, or why it does not."""
    try:
        done = subprocess.run(command, capture_output=True, check=True, text=True, timeout=15)
    except subprocess.CalledProcessError as error:
        return f"exit code {error.returncode} {error.stderr.strip()[-100:]}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"none ({type(error).__name__})"
    return done.stdout.strip()


def test_system(record_property: Record) -> None:
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = memlock == resource.RLIM_INFINITY
    record_property("commit", output_of("git", "rev-parse", "--short", "HEAD"))
    record_property("system", f"Python {platform.python_version()}, Linux {platform.release()}, {os.cpu_count()} CPUs")
    record_property("memlock", "unlimited" if unlimited else f"{memlock // 2**10} KiB")
    free = shutil.disk_usage(SHARED_MEMORY).free / 2**30
    record_property(SHARED_MEMORY, f"{free:.1f} GiB free")


def test_network_cards(record_property: Record) -> None:
    cards = sorted(path.name for path in Path("/sys/class/net").glob("*") if path.name != "lo")
    rdma = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    record_property("network", ", ".join(cards) or "none")
    record_property("RDMA", ", ".join(rdma) or "none")


def test_libraries(record_property: Record) -> None:
    found = {one.metadata["Name"]: one.version for one in importlib.metadata.distributions()}
    nixl = [f"{name} {version}" for name, version in found.items() if re.fullmatch(r"nixl[-_]cu\d+", name or "")]
    record_property("torch", str(torch.__version__))
    record_property("NIXL", ", ".join(nixl) or "none")
    record_property("Mooncake", ", ".join(f"{name} {found[name]}" for name in installed_builds()) or "none")


def test_transports_of_ucx(record_property: Record) -> None:
    printed = output_of(sys.executable, "-m", "tests.device.ucx_transports")
    transports = sorted(set(re.findall(r"-- (\w+)/", printed)))
    version = re.findall(r"^UCX \S+$", printed, re.MULTILINE)
    record_property("UCX", ", ".join([*version, *transports]) if transports else printed[-200:])


def test_device_works(record_property: Record) -> None:
    record_property("device", DEVICE.name)
    if DEVICE.has_events:
        query = "--query-gpu=name,memory.total,driver_version,compute_cap"
        record_property("driver", output_of("nvidia-smi", query, "--format=csv,noheader"))
        record_property("CUDA of torch", torch.version.cuda)
        assert torch.arange(4, device="cuda").sum().item() == 6

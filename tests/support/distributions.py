"""Build and install distributions that contain a transport, in folders of a test."""

import base64
import hashlib
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

__all__ = ["add_ascend", "build_wheel", "install", "unpack"]

ASCEND = Path(__file__).parents[2] / "examples/ascend"


def build_wheel(folder: Path, name: str, modules: dict[str, str], entry_points: dict[str, str]) -> Path:
    """Build a pure wheel, version 1.0.

    Args:
        folder: Folder for the wheel.
        name: Name of the distribution.
        modules: Source by file name.
        entry_points: Objects (`module:Class`) by name, in the group of backends.
    """
    info = f"{name}-1.0.dist-info"
    declared = "".join(f"{key} = {value}\n" for key, value in entry_points.items())
    files = {
        **modules,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: kvflow\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[kvflow.backends]\n{declared}",
    }
    record = "".join(f"{path},sha256={digest(text)},{len(text.encode())}\n" for path, text in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    wheel = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel


def digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def unpack(wheel: Path, site: Path) -> None:
    """Install a pure wheel into a folder by unpacking it."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)


def install(wheel: Path, site: Path) -> None:
    """Install a wheel into a folder with pip."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--target", str(site), str(wheel)], check=True, timeout=100)


def add_ascend(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the distribution in examples/ascend until the test ends."""
    project = tomllib.loads((ASCEND / "pyproject.toml").read_text())["project"]
    modules = {"kvflow_ascend.py": (ASCEND / "kvflow_ascend.py").read_text()}
    site = folder / "ascend-site"
    unpack(build_wheel(folder, "kvflow_ascend", modules, project["entry-points"]["kvflow.backends"]), site)
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, "kvflow_ascend", raising=False)

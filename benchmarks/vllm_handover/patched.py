"""A copy of vLLM with `first_token.patch`, which its connectors need to begin with the second token."""

import importlib.util
import shutil
import subprocess
from pathlib import Path
from typing import Final

from kvflow.errors import ConfigError

__all__ = ["make_patched_vllm"]

PATCH: Final = Path(__file__).with_name("first_token.patch")


def make_patched_vllm(place: Path) -> Path:
    """Copy vLLM to a directory and patch it there; return the directory, which belongs first on `PYTHONPATH`.

    Files are linked, except those that the patch changes. If the patch does not apply, this raises CalledProcessError
    after `patch` has printed why.
    """
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        raise ConfigError("vLLM is not installed")
    source = Path(found.origin).parent
    lines = PATCH.read_text().splitlines()
    changed = {source.parent / line.removeprefix("+++ b/") for line in lines if line.startswith("+++ ")}

    def link(found: str, copy: str) -> None:
        if Path(found) in changed:
            shutil.copyfile(found, copy)
        else:
            Path(copy).symlink_to(found)

    shutil.copytree(source, place / "vllm", copy_function=link, ignore=shutil.ignore_patterns("__pycache__"))
    command = ("patch", "-p1", "--fuzz=0", "-d", str(place), "-i", str(PATCH))
    subprocess.run(command, check=True)  # noqa: S603 - a command of this file
    return place

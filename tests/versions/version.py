"""The two versions, and how a process runs with one of them."""

import os
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["CHECKOUT", "NEWER", "WHEEL", "Version", "unpack_wheel"]

CHECKOUT: Final = Path(__file__).parents[2]
WHEEL: Final = next(Path(__file__).parent.glob("kvflow-*-older.whl"), None)
"""The older version; a source distribution does not have it."""


@dataclass(frozen=True)
class Version:
    """A version of kvflow.

    Attributes:
        name: "older" or "newer".
        place: The directory that has its package.
    """

    name: str
    place: Path

    @property
    def library(self) -> str:
        """The file that `import kvflow` loads."""
        return str(self.place / "kvflow" / "__init__.py")

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a process that runs tests of this checkout with this version, whatever its working directory."""
        places = os.pathsep.join([str(self.place), str(CHECKOUT)])
        return os.environ | {"PYTHONSAFEPATH": "1", "PYTHONPATH": places}

    def command(self, module: str, *arguments: str) -> list[str]:
        """Return the command line that runs a module."""
        return [sys.executable, "-m", module, *arguments]


NEWER: Final = Version("newer", CHECKOUT)


def unpack_wheel(wheel: Path, place: Path) -> Version:
    """Unpack the older version into a directory."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
    return Version("older", place)

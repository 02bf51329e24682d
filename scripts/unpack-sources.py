"""Unpack a package's Python sources from the wheel in a folder, and delete the wheel: unpack-sources.py FOLDER."""

import sys
import zipfile
from pathlib import Path

folder = Path(sys.argv[1])
(wheel,) = folder.glob("*.whl")
with zipfile.ZipFile(wheel) as packed:
    packed.extractall(folder, [name for name in packed.namelist() if name.endswith(".py")])
wheel.unlink()

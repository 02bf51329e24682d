"""Writes `messages.txt` with the wheel: `python -m tests.versions.record`, after the wheel has been replaced."""

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.versions.messages import FILE
from tests.versions.version import WHEEL, unpack_wheel


def main() -> int:
    if WHEEL is None:
        return 1
    with tempfile.TemporaryDirectory() as place:
        older = unpack_wheel(WHEEL, Path(place))
        command = older.command("tests.versions.messages", "record")
        FILE.write_bytes(subprocess.run(command, env=older.environment, check=True, stdout=subprocess.PIPE).stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())

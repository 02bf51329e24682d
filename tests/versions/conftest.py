"""The older version, unpacked once, and directories for sockets, whose paths have 107 bytes at most."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.versions.version import WHEEL, Version, unpack_wheel


@pytest.fixture(scope="session")
def older(tmp_path_factory: pytest.TempPathFactory) -> Version:
    """Return the older version."""
    if WHEEL is None:
        pytest.skip("there is no wheel of an older version in a source distribution")
    return unpack_wheel(WHEEL, tmp_path_factory.mktemp("older"))


@pytest.fixture
def sockets() -> Iterator[Path]:
    """Return a directory with a short path."""
    with tempfile.TemporaryDirectory(prefix="kv-") as place:
        yield Path(place)

"""The older version, unpacked once."""

import pytest

from tests.versions.version import WHEEL, Version, unpack_wheel


@pytest.fixture(scope="session")
def older(tmp_path_factory: pytest.TempPathFactory) -> Version:
    """Return the older version."""
    if WHEEL is None:
        pytest.skip("there is no wheel of an older version in a source distribution")
    return unpack_wheel(WHEEL, tmp_path_factory.mktemp("older"))

"""What tests of transports share."""

import importlib
from typing import Any

import pytest


@pytest.fixture
def api() -> Any:
    """The library as kvflow imports it."""
    return importlib.import_module("nixl_cu12._api")

"""Fixtures of the transport tests."""

import importlib
from typing import Any

import pytest


@pytest.fixture
def api() -> Any:
    """Return the module of NIXL that kvflow imports."""
    return importlib.import_module("nixl_cu12._api")

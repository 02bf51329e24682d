"""Fixtures of the tests with SGLang's own code."""

import importlib.util
from collections.abc import Iterator

import pytest

from tests.engines.sglang.processes import Deployment, deployment


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("sglang") is None:
        skip = pytest.mark.skip(reason="SGLang is not installed here; run `make test-sglang`")
        for item in items:
            if item.get_closest_marker("sglang"):
                item.add_marker(skip)


@pytest.fixture(scope="module")
def pair() -> Iterator[Deployment]:
    """Start a prefill and a decode process over NIXL."""
    with deployment({"backend": "nixl"}) as started:
        yield started

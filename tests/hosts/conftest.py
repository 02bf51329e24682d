"""Fixtures for tests on two hosts."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.deployment import Deployment
from tests.hosts.hosts import unavailable

Deploy = Callable[..., Deployment]

why_not = cache(unavailable)


@pytest.fixture(scope="session")
def two_hosts() -> None:
    """Skip the test if this machine cannot create two hosts."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def deploy(two_hosts: None, tmp_path: Path) -> Iterator[Deploy]:
    """Start deployments that end with the test. Print each, and check that it kept every promise about pages."""
    deployments: list[Deployment] = []
    with ExitStack() as stack:

        def start(**options: Any) -> Deployment:
            deployments.append(Deployment(tmp_path, **options))
            return stack.enter_context(deployments[-1])

        yield start
    for deployment in deployments:
        sys.stdout.write(deployment.table())  # pytest shows it if the test fails
        assert not deployment.wrong()

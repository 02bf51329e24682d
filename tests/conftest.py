"""Fixtures for every test."""

import asyncio
import atexit
import gc
import itertools
import os
import shutil
import socket
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import settings
from hypothesis.errors import StopTest

from kvflow.errors import ConfigError, PlanError
from kvflow.observe.logs import LOGGER
from tests.support.device import DEVICE
from tests.support.distributions import add_ascend
from tests.support.examples import QUICK, THOROUGH

os.environ.setdefault("OMP_NUM_THREADS", "1")  # test processes already keep all cores busy; torch's threads would spin

EARLY: Final = 0.8
"""Share of a run in which its longest tests begin."""

RUNTIME_DIRECTORY = tempfile.mkdtemp(prefix="kvflow-tests-")
"""For the sockets of ranks and files about incidents, so that tests neither see nor remove those of others."""
os.environ["XDG_RUNTIME_DIR"] = RUNTIME_DIRECTORY
os.environ["XDG_STATE_HOME"] = RUNTIME_DIRECTORY
atexit.register(shutil.rmtree, RUNTIME_DIRECTORY, ignore_errors=True)

settings.register_profile("quick", derandomize=True, deadline=None, max_examples=QUICK)
settings.register_profile("thorough", derandomize=True, deadline=None, max_examples=THOROUGH)
settings.register_profile("fuzz", deadline=None, max_examples=20_000)
settings.load_profile("quick")  # --hypothesis-profile selects another one


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude modules and tests, which stay to the end, from garbage collection: it would look at them all the time.

    What tests leave is collected more rarely than by default, too.
    """
    gc.disable()
    collected = yield
    gc.freeze()
    gc.set_threshold(5_000)
    gc.enable()
    return collected


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread tests on two hosts, which mostly wait, among modules that keep the cores busy meanwhile.

    Each process takes tests that follow each other. None of these comes late, when other processes would wait for it.
    """
    waiting = [item for item in items if item.get_closest_marker("hosts")]
    others = [item for item in items if not item.get_closest_marker("hosts")]
    items.clear()
    placed = 0
    for _, module in itertools.groupby(others, key=lambda item: item.path):
        due = int(len(waiting) * (len(items) - placed) / (EARLY * len(others)))
        items += waiting[placed:due]
        placed = max(placed, min(due, len(waiting)))
        items += module
    items += waiting[placed:]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Skip tests on a fake device that need to read its memory."""
    if DEVICE is not None and item.get_closest_marker("host_memory"):
        pytest.skip("about host memory")
    try:
        return (yield)
    except (ConfigError, PlanError) as error:
        if DEVICE is not None and "digests require host memory" in str(error):
            pytest.skip(str(error))
        raise


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def no_exception_reaches_an_event_loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail the test if an event loop, in any thread, had to report an exception that nobody handled.

    AnyIO has a handler that fails its tests. A test that provokes an exception sets its own.
    """
    reported: list[dict[str, Any]] = []
    original = asyncio.BaseEventLoop.default_exception_handler

    def report(self: asyncio.BaseEventLoop, context: dict[str, Any]) -> None:
        if not isinstance(context.get("exception"), StopTest):  # hypothesis abandons an example
            reported.append(context)
        original(self, context)

    monkeypatch.setattr(asyncio.BaseEventLoop, "default_exception_handler", report)
    yield
    assert not reported


@pytest.fixture
def ascend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the transport for Ascend NPUs, which is a distribution of its own."""
    add_ascend(tmp_path, monkeypatch)


@pytest.fixture
def free_port() -> Iterator[int]:
    """Return a port that stays unused while the test runs."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        yield port


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Restore the log configuration, which commands change for the whole process."""
    before = (list(LOGGER.handlers), LOGGER.level, LOGGER.propagate)
    yield
    LOGGER.handlers[:], LOGGER.propagate = before[0], before[2]
    LOGGER.setLevel(before[1])

"""Fixtures of the tests with real vLLM servers."""

import importlib
import importlib.util
import warnings
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is not None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from vLLM's own imports; in tests, warnings are errors
        importlib.import_module("vllm.v1.attention.backends.cpu_attn")

    import aiohttp

    from benchmarks.vllm_handover.client import open_client
    from tests.engines.vllm.deployment import GRANT_S, Deployment, Own
    from tests.engines.vllm.events import publish_to
    from tests.support.ports import unused_port


SLEEPING = ("--worker-extension-cls", "tests.engines.vllm.sleeping.SleepingWorker")
CALLABLE = {"VLLM_SERVER_DEV_MODE": "1"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("vllm") is None:
        skip = pytest.mark.skip(reason="vLLM is not installed here; run `make test-vllm`")
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(skip)


@pytest.fixture(scope="session")
def event_addresses() -> dict[str, str]:
    """Return addresses to which the two servers of `pair` publish events about their caches."""
    return {name: f"tcp://127.0.0.1:{unused_port()}" for name in ("prefill", "decode")}


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory, event_addresses: dict[str, str]) -> Iterator["Deployment"]:
    """Start two servers for all tests of the session; each test restores their state."""
    place: Path = tmp_path_factory.mktemp("vllm")
    with Deployment(
        place,
        extra_config={"timeouts": {"grant_s": GRANT_S, "open_s": 5.0}},
        arguments=("--max-num-batched-tokens", "512"),  # so that long prompts are computed in chunks
        own={
            name: Own(arguments=(*SLEEPING, *publish_to(address)), environment=CALLABLE)
            for name, address in event_addresses.items()
        },
    ) as deployment:
        yield deployment


@pytest.fixture
async def client() -> "AsyncIterator[aiohttp.ClientSession]":
    """Open an HTTP client for one test."""
    async with open_client() as session:
        yield session

"""The host under which peers reach this process."""

import threading

import anyio
import pytest

from kvflow.hosts import host_of, host_towards


@pytest.mark.parametrize(
    ("endpoint", "host"),
    [
        ("tcp://10.0.0.1:7100", "10.0.0.1"),
        ("tcp://[fd00::1]:0", "fd00::1"),
        ("tcp://node-7:80", "node-7"),
        ("tcp://[fd00::1],10.0.0.1:80", "fd00::1,10.0.0.1"),
    ],
)
def test_the_host_of_an_endpoint(endpoint: str, host: str) -> None:
    assert host_of(endpoint) == host


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("endpoint", "host"),
    [
        ("tcp://127.0.0.1:7100", "127.0.0.1"),
        ("tcp://127.0.0.9:1", "127.0.0.1"),
        ("tcp://[::1]:7100", "::1"),
        ("tcp://no-such-host.invalid:7100", None),
        ("tcp://no-such-host.invalid,127.0.0.1:7100", "127.0.0.1"),
    ],
)
async def test_the_own_address_on_the_way_to_an_endpoint(endpoint: str, host: str | None) -> None:
    assert await host_towards(endpoint) == host


def test_the_own_address_is_not_known_when_the_system_allows_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test uses its own event loop, which has no idle workers."""

    async def run() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            assert await host_towards("tcp://localhost:7100") is None
        assert await host_towards("tcp://localhost:7100") in {"127.0.0.1", "::1"}

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    anyio.run(run)

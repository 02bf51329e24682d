"""Transports receive the host under which peers reach their rank."""

from typing import Any

import pytest
from typing_extensions import override

import kvflow
from kvflow.backends.memory import MemoryBackend
from kvflow.control.channel import ZmqControl
from tests.support.instances import decode_config, make_pool, prefill_config

pytestmark = pytest.mark.anyio


class Attentive(MemoryBackend):
    """A transport that records the hosts that it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.hosts: list[str] = []

    @override
    def advertise(self, host: str) -> None:
        self.hosts.append(host)


@pytest.mark.parametrize(
    ("settings", "host"),
    [
        ({}, "127.0.0.1"),
        ({"bind": "tcp://127.0.0.2:0"}, "127.0.0.2"),
        ({"bind": "tcp://0.0.0.0:0", "trust": kvflow.Trust.none(), "advertise": "localhost"}, "localhost"),
        ({"bind": "tcp://0.0.0.0:0", "trust": kvflow.Trust.none(), "advertise": "::1"}, "::1"),
        ({"bind": "tcp://0.0.0.0:0", "trust": kvflow.Trust.none(), "advertise": "[::1]"}, "::1"),
    ],
    ids=str,
)
async def test_of_a_prefill_rank_it_is_the_one_that_decode_ranks_are_given(settings: dict[str, Any], host: str) -> None:
    backend = Attentive()
    async with kvflow.Registry() as registry:
        config = prefill_config(registry.endpoint, **settings)
        async with kvflow.PrefillRank(config, make_pool().layout, backend):
            assert backend.hosts == [host]


@pytest.mark.parametrize(
    ("settings", "host"),
    [({}, "of the default route"), ({"advertise": "localhost"}, "localhost"), ({"advertise": "[::1]"}, "::1")],
    ids=str,
)
async def test_of_a_decode_rank_without_a_registry_it_is_the_one_of_the_default_route_or_of_the_settings(
    settings: dict[str, Any], host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def towards(_: ZmqControl, endpoint: str) -> str | None:
        """Answer like a host with a default route for IPv6 only."""
        asked.append(endpoint)
        return "of the default route" if endpoint.startswith("tcp://[2001:db8:") else None

    monkeypatch.setattr(ZmqControl, "host_towards", towards)
    backend = Attentive()
    async with kvflow.DecodeRank(decode_config(None, **settings), make_pool().layout, backend):
        assert backend.hosts == [host]
    assert len(asked) == (0 if settings else 2)


async def test_of_a_decode_rank_it_is_the_one_on_the_way_to_the_registry() -> None:
    """A decode rank opens no port of its own, and its settings name no host."""
    backend = Attentive()
    async with (
        kvflow.Registry() as registry,
        kvflow.DecodeRank(decode_config(registry.endpoint), make_pool().layout, backend),
    ):
        assert backend.hosts == ["127.0.0.1"]

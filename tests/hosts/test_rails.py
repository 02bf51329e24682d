"""A prefill host with two addresses, of which one is cut off."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.hosts import lines
from tests.hosts.deployment import CONTROL_PORT, REGISTRY_PORT, Process
from tests.hosts.hosts import TwoHosts
from tests.hosts.worker import Settings

pytestmark = [pytest.mark.hosts, pytest.mark.slow]

RAILS = "kvflow-rails"


@pytest.fixture
def net(two_hosts: None) -> Iterator[TwoHosts]:
    with TwoHosts() as net:
        net.add_rail(RAILS)
        yield net


class Pair:
    """A prefill rank on host A that advertises both addresses, and a decode rank on host B."""

    def __init__(self, net: TwoHosts, logs: Path, advertise: str) -> None:
        self._net, self._logs = net, logs
        self._registry = f"tcp://{net.b.address}:{REGISTRY_PORT}"
        self._stack = ExitStack()
        self._start("b", Settings(role="registry", bind=self._registry))
        bind = f"tcp://*:{CONTROL_PORT}"
        self.prefill = self._start(
            "a", Settings(role="prefill", bind=bind, advertise=advertise, registry=self._registry)
        )
        self.decode = self._start("b", Settings(role="decode", registry=self._registry))

    def _start(self, side: str, settings: Settings) -> Process:
        log = self._logs / f"{settings.role}.log"
        process = Process(self._net.host(side), settings, log)
        self._stack.callback(process.kill)
        process.wait_for(lines.Opened)
        return process

    def hand_over(self, room: int) -> str:
        """Return how a room ended on decode."""
        for process in (self.prefill, self.decode):
            process.send(room)
        return self.decode.wait_for(lines.Ended, where=lambda ended: ended.room == room).reason

    def close(self) -> None:
        self._stack.close()


@pytest.mark.parametrize("is_name", [False, True])
@pytest.mark.parametrize("is_cut", [False, True])
def test_the_address_that_can_be_reached_is_used(net: TwoHosts, tmp_path: Path, is_cut: bool, is_name: bool) -> None:
    own, rail = net.a.address, f"{net.a.address[:-1]}3"
    if is_cut:
        net.cut_rail()
    with closing(Pair(net, tmp_path, RAILS if is_name else f"{rail},{own}")) as pair:
        assert pair.hand_over(1) == lines.SUCCESS
        connected = net.b.namespace.run("ss", "-Htn", "state", "established", "dport", f":{CONTROL_PORT}").split()
        assert f"{own if is_cut else rail}:{CONTROL_PORT}" in connected

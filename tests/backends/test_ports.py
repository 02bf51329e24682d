"""Which ports the transports listen on. Network policies can then open only those."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import anyio
import pytest

pytestmark = pytest.mark.anyio

LIST_PORTS = """
import sys
import anyio
from kvflow.backends.sockets import listening_ports
from tests.backends.endpoints import open_endpoints

async def main():
    async with open_endpoints(sys.argv[1]):
        print(*listening_ports())

anyio.run(main)
"""


@pytest.mark.parametrize(
    ("backend", "variables"),
    [
        ("nixl", {"UCX_TCP_PORT_RANGE": "17000-17099"}),
        ("mooncake", {"MC_MIN_RPC_PORT": "17000", "MC_MAX_RPC_PORT": "17099"}),
    ],
)
async def test_the_ports_of_tcp_can_be_chosen(backend: str, variables: Mapping[str, str]) -> None:
    """The libraries take others if they do not know the variables."""
    command = [sys.executable, "-c", LIST_PORTS, backend]
    ended = await anyio.run_process(command, cwd=Path(__file__).parents[2], env={**os.environ, **variables})
    ports = [int(port) for port in ended.stdout.split()]
    assert ports
    assert all(17000 <= port < 17100 for port in ports)

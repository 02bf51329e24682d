"""Pairs of servers whose addresses stay the same when one of them is replaced."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import aiohttp
import anyio
import msgspec

from benchmarks.vllm_handover.client import MODEL
from benchmarks.vllm_handover.plugin import Probe
from benchmarks.vllm_handover.servers import ENVIRONMENT, UNBOUND
from benchmarks.vllm_replaced.standing import Standing, standing_in
from kvflow.cli.serve.server import Server, ServerFailed
from kvflow.cli.serve.vllm import VllmServer, pair, vllm_server
from kvflow.cli.smollm2 import prepare_smollm2

__all__ = ["RUNNING", "WAYS", "Pair", "Side", "Way", "wait_until_healthy"]

Way = Literal["kvflow", "NixlConnector"]
Side = Literal["prefill", "decode"]
WAYS: Final[tuple[Way, ...]] = ("kvflow", "NixlConnector")

NIXL: Final[Mapping[str, Any]] = {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}
BLOCKS: Final = ("--no-enable-prefix-caching", "--kv-cache-memory-bytes", str(112 * 2**20))
"""19 blocks, so that two long prompts touch them all, and memory then grows no more because of them."""

RUNNING: Final = 2
"""Requests that decode runs at a time; others wait there, and prefill keeps their blocks."""

HEALTH_POLL_S: Final = 0.02
READY_S: Final = 240.0


class Pair:
    """A prefill and a decode server.

    Attributes:
        way: Name of the connector.
        prefill: URL.
        decode: URL.

    Args:
        way: Name of the connector.
        first_port: Port of prefill; decode has the next one. The connectors have those after them.
        place: Directory for logs and traces.
    """

    def __init__(self, way: Way, first_port: int, place: Path) -> None:
        self.way = way
        self._place = place
        self._ports: dict[Side, int] = {"prefill": first_port, "decode": first_port + 1}
        described = pair(
            model=str(prepare_smollm2()),
            served_name=MODEL,
            first_port=first_port,
            extra_config={},
            arguments=BLOCKS,
            is_cpu=True,
        )
        prefill, decode = (self._changed(one) for one in described)
        decode = msgspec.structs.replace(decode, arguments=(*decode.arguments, "--max-num-seqs", str(RUNNING)))
        self._servers: dict[Side, Server] = {
            "prefill": vllm_server(prefill, place),
            "decode": vllm_server(decode, place),
        }
        self.prefill, self.decode = (server.url for server in self.servers)

    def _changed(self, one: VllmServer) -> VllmServer:
        is_kvflow, side_port = self.way == "kvflow", one.port + 2
        probe = Probe(
            has_agents=True,
            trace=str(self._trace("prefill" if one.role == "kv_producer" else "decode")),
            eases_nixl=not is_kvflow,
        )
        environment = {**one.environment, **ENVIRONMENT, **UNBOUND, **probe.environment()}
        if is_kvflow:
            connector = {**one.connector, "kv_connector_extra_config": {"port": side_port}}
        else:
            connector, environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = dict(NIXL), str(side_port)
        name = f"{self.way}-{one.name}"
        return msgspec.structs.replace(one, name=name, connector=connector, cpus=None, environment=environment)

    def _trace(self, side: Side) -> Path:
        return self._place / f"{self.way}-{side}.trace"

    @property
    def servers(self) -> tuple[Server, Server]:
        """Prefill and decode."""
        return self._servers["prefill"], self._servers["decode"]

    def server(self, side: Side) -> Server:
        """Return one of the servers."""
        return self._servers[side]

    def look_at(self, side: Side) -> Standing:
        """Return what stands in one of the servers."""
        return standing_in(self._servers[side].pid, self._ports[side], self._trace(side))


async def wait_until_healthy(server: Server) -> float:
    """Wait until a server that was started is healthy; return when, in monotonic seconds.

    Raises:
        ServerFailed: It has ended, or is not healthy in time.
    """
    deadline = time.monotonic() + READY_S
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline and not server.has_ended():
            try:
                async with session.get(f"{server.url}/health") as answer:
                    if answer.status == 200:
                        return time.monotonic()
            except aiohttp.ClientError:
                pass
            await anyio.sleep(HEALTH_POLL_S)
    raise ServerFailed("server has ended, or was not ready in time", server)

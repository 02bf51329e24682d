"""Pairs of servers that take turns: with kvflow's connector, with vLLM's own, and without any.

`NixlConnector+sleep` is vLLM's own connector in processes that sleep where vLLM spins. kvflow's connector makes them
sleep while requests move, so this tells the gain of sleeping from that of the transport.
"""

import os
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec

from benchmarks.vllm_handover.client import MODEL
from benchmarks.vllm_handover.patched import make_patched_vllm
from benchmarks.vllm_handover.plugin import Probe
from kvflow.cli.serve.server import Server
from kvflow.cli.serve.vllm import CPU_ENVIRONMENT, VllmServer, pair, vllm_server
from kvflow.cli.smollm2 import prepare_smollm2

__all__ = ["ENVIRONMENT", "UNBOUND", "WAYS", "Pair", "Usage", "Way", "running", "started", "usage_of"]

Way = Literal["kvflow", "patched", "NixlConnector", "NixlConnector+sleep", "none"]
WAYS: Final[tuple[Way, ...]] = ("kvflow", "patched", "NixlConnector", "NixlConnector+sleep", "none")
SLEEPING: Final = "NixlConnector+sleep"

SEQUENCES: Final = 8
ROOM_BYTES: Final = 256 * 2**20
REQUEST_BYTES: Final = 18 * 2**20
"""Three blocks of 128 tokens of the small model are 17 MiB."""

NIXL_CONNECTOR: Final[dict[str, Any]] = {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}
UNBOUND: Final = {**CPU_ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
"""How more than two servers share two cores: vLLM would bind several workers to one, where those that spin hold up the
others for seconds."""

ENVIRONMENT: Final = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


class Pair:
    """Two servers with the same connector; decode has room for `at_once` requests of 384 tokens.

    Attributes:
        way: Name of the connector; "patched" for kvflow's with a vLLM that begins with the second token.
        servers: Prefill and decode.
        traces: Trace file of each server.
        wrong_page: While this file exists, prefill sends a wrong page; only in kvflow's pair.
    """

    def __init__(self, way: Way, first_port: int, place: Path, at_once: int) -> None:
        self.way = way
        self.wrong_page = place / f"{way}.wrong_page"
        self._vllm = make_patched_vllm(place / "patched") if way == "patched" else None
        described = pair(
            model=str(prepare_smollm2()),
            served_name=MODEL,
            first_port=first_port,
            extra_config={},
            arguments=("--no-enable-prefix-caching",),
            is_cpu=True,
        )
        self.traces = [place / f"{way}-{one.name}.trace" for one in described]
        self.servers = [
            vllm_server(_with_room(self._changed(one, trace, 5600 + first_port % 100), at_once), place)
            for one, trace in zip(described, self.traces, strict=True)
        ]

    def _changed(self, one: VllmServer, trace: Path, side_port: int) -> VllmServer:
        if self.way == "none":
            return msgspec.structs.replace(one, name=f"{self.way}-{one.name}", role=None, environment=ENVIRONMENT)
        is_kvflow = self.way in ("kvflow", "patched")
        wrong_page = str(self.wrong_page) if is_kvflow else ""
        probe = Probe(trace=str(trace), wrong_page=wrong_page, eases_nixl=not is_kvflow, sleeps=self.way == SLEEPING)
        environment = {**one.environment, **ENVIRONMENT, **probe.environment()}
        if self.way == "patched":
            environment["PYTHONPATH"] = os.pathsep.join((str(self._vllm), environment["PYTHONPATH"]))
        connector = one.connector
        if not is_kvflow:
            connector = NIXL_CONNECTOR
            environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(side_port + (one.role == "kv_consumer"))
        return msgspec.structs.replace(one, name=f"{self.way}-{one.name}", connector=connector, environment=environment)

    @property
    def urls(self) -> tuple[str, str]:
        """URLs of prefill and decode."""
        prefill, decode = self.servers
        return prefill.url, decode.url

    def usage(self) -> "Usage":
        """Return the resource usage of all processes of both servers."""
        return _sum(self.usage_by_server().values())

    def usage_by_server(self) -> "dict[str, Usage]":
        """Return the resource usage of all processes of each server, by `prefill` and `decode`."""
        return {name: usage_of(server.pid) for name, server in zip(("prefill", "decode"), self.servers, strict=True)}


def _with_room(one: VllmServer, at_once: int) -> VllmServer:
    """Let a server run `at_once` requests; as every server on CPUs is started, it runs 8.

    Prefill has room for half of them, because it keeps a request for a short time only.
    """
    if at_once <= SEQUENCES:
        return one
    room = REQUEST_BYTES * at_once // (1 if one.role == "kv_consumer" else 2)
    own = ("--max-num-seqs", str(at_once), "--kv-cache-memory-bytes", str(max(ROOM_BYTES, room)))
    return msgspec.structs.replace(one, arguments=(*one.arguments, *own))


class Usage(NamedTuple):
    """Resource usage of processes.

    Attributes:
        cpu_s: CPU time until now.
        resident: Resident memory in bytes; shared pages count once for each process.
        threads: Number of threads.
        files: Number of open file descriptors.
    """

    cpu_s: float
    resident: float
    threads: float
    files: float


def _sum(usages: Iterable[Usage]) -> Usage:
    return Usage(*(sum(values) for values in zip(*usages, strict=True)))


def usage_of(group: int) -> Usage:
    """Return the resource usage of all processes of a group."""
    return _sum(usage for place in Path("/proc").glob("[0-9]*") if (usage := _usage(place, group)) is not None)


def _usage(place: Path, group: int) -> Usage | None:
    try:
        fields = (place / "stat").read_text().rpartition(")")[2].split()
        if int(fields[2]) != group:
            return None
        files = len(list((place / "fd").iterdir()))
    except OSError:  # the process has exited
        return None
    cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return Usage(cpu_s, int(fields[21]) * os.sysconf("SC_PAGESIZE"), int(fields[17]), files)


@asynccontextmanager
async def started(ways: Sequence[Way], first_port: int, place: Path, at_once: int) -> AsyncIterator[list[Pair]]:
    """Start a pair for each way concurrently; stop them at the end of the block."""
    pairs = [Pair(way, first_port + 2 * number, place, at_once) for number, way in enumerate(ways)]
    async with running([server for each in pairs for server in each.servers]):
        yield pairs


@asynccontextmanager
async def running(servers: Sequence[Server]) -> AsyncIterator[None]:
    """Start servers concurrently; kill them at the end of the block."""
    try:
        for server in servers:
            server.start()
        for server in servers:
            await server.wait_until_ready()
        yield
    finally:
        for server in servers:
            server.kill()

"""Common routers, installed from wheels into environments of their own; see `make test-vllm`."""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest

from kvflow.cli.serve.server import Server
from tests.support.ports import unused_port

__all__ = ["smg", "vllm_router"]

CACHE: Final = Path(__file__).parents[3] / ".cache" / "routers"
ROUTER_READY_S: Final = 60.0
CHECKS: Final = ("--worker-startup-check-interval", "1", "--health-check-interval-secs", "2")


@asynccontextmanager
async def vllm_router(prefill: str, decode: str, logs: Path, *, mooncake_port: int | None = None) -> AsyncIterator[str]:
    """Run vLLM's own router with a static list of servers, and yield its URL.

    Args:
        prefill: URL of the prefill server.
        decode: URL of the decode server.
        logs: Directory for its files.
        mooncake_port: Use the `mooncake` dialect, and query this port for the id of prefill's engine.
    """
    connector = "nixl" if mooncake_port is None else "mooncake"
    command = ["--vllm-pd-disaggregation", "--kv-connector", connector, "--policy", "round_robin", "--prefill", prefill]
    command += [] if mooncake_port is None else [str(mooncake_port)]
    command += ["--decode", decode, "--prometheus-port", str(unused_port()), *CHECKS]
    async with _running("vllm-router", command, logs) as url:
        yield url


@asynccontextmanager
async def smg(servers: Mapping[str, str], logs: Path) -> AsyncIterator[str]:
    """Run SGLang's router with servers from a file, and yield its URL.

    Args:
        servers: "prefill" or "decode", by URL.
        logs: Directory for its files.
    """
    # The router requests the cache only if the prefill server has a connector of exactly this name.
    connectors = {"prefill": {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}}
    workers = [
        {"id": f"{kind}-{number}", "url": url, "worker_type": kind, **connectors.get(kind, {})}
        for number, (url, kind) in enumerate(servers.items())
    ]
    manifest = logs / "smg.json"
    manifest.write_text(json.dumps({"version": 1, "workers": workers}))
    command = ["launch", "--pd-disaggregation", "--disable-tokenizer-autoload", "--policy", "round_robin"]
    command += [
        "--discovery-provider",
        "file",
        "--discovery-file",
        str(manifest),
        "--discovery-check-interval-secs",
        "1",
    ]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(unused_port()), *CHECKS]
    async with _running("smg", command, logs) as url:
        yield url


@asynccontextmanager
async def _running(name: str, arguments: Sequence[str], logs: Path) -> AsyncIterator[str]:
    program = CACHE / name / "bin" / name
    if not program.exists():
        pytest.skip(f"{name} is not installed; run `make test-vllm`")
    port = unused_port()
    command = [str(program), *arguments, "--host", "127.0.0.1", "--port", str(port)]
    router = Server(name, command, {}, url=f"http://127.0.0.1:{port}", log=logs / f"{name}.log")
    router.start()
    try:
        await router.wait_until_ready(ROUTER_READY_S)
        yield router.url
    finally:
        router.kill()

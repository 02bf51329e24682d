"""Common routers, installed from wheels into environments of their own; see `make test-vllm`."""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import aiohttp
import anyio
import pytest

from kvflow.cli.serve.server import Server, ServerFailed
from tests.support.ports import unused_port

__all__ = ["empty_smg", "router_of_pods", "smg", "vllm_router", "vllm_router_of_announced", "workers_of"]

CACHE: Final = Path(__file__).parents[3] / ".cache" / "routers"
ROUTER_READY_S: Final = 60.0
POLL_S: Final = 0.1
CHECKS: Final = (
    *("--worker-startup-check-interval", "1", "--health-check-interval-secs", "2"),
    *("--cb-timeout-duration-secs", "2"),  # how long a server that has failed ten times is left alone
)


@asynccontextmanager
async def vllm_router(
    prefill: Sequence[str],
    decode: Sequence[str],
    logs: Path,
    *,
    mooncake_port: int | None = None,
    options: Sequence[str] = (),
) -> AsyncIterator[str]:
    """Run vLLM's own router with a static list of servers, and yield its URL.

    Args:
        prefill: URLs of prefill servers.
        decode: URLs of decode servers.
        logs: Directory for its files.
        mooncake_port: Use the `mooncake` dialect, and query this port for the id of prefill's engine.
        options: More of the command line.
    """
    port = [] if mooncake_port is None else [str(mooncake_port)]
    command = [word for url in prefill for word in ("--prefill", url, *port)]
    command += [word for url in decode for word in ("--decode", url)]
    command = [*_vllm_options("mooncake" if port else "nixl"), *command, *options]
    async with _running("vllm-router", command, logs, ready="/readiness") as url:
        yield url


@asynccontextmanager
async def vllm_router_of_announced(address: str, logs: Path) -> AsyncIterator[str]:
    """Run vLLM's own router with the servers that announce themselves at an address, "host:port"; yield its URL."""
    async with _running("vllm-router", [*_vllm_options("nixl"), "--vllm-discovery-address", address], logs) as url:
        yield url


@asynccontextmanager
async def router_of_pods(name: str, namespace: str, kubeconfig: Path, logs: Path) -> AsyncIterator[str]:
    """Run "vllm-router" or "smg" with the pods of a Kubernetes cluster, by their labels; yield its URL."""
    found = ["--service-discovery", "--service-discovery-namespace", namespace, "--service-discovery-port", "8000"]
    for role in ("prefill", "decode"):
        found += [f"--{role}-selector", f"kvflow.io/role={role}"]
    options = _vllm_options("nixl") if name == "vllm-router" else _smg_options()
    async with _running(name, [*options, *found], logs, environment={"KUBECONFIG": str(kubeconfig)}) as url:
        yield url


def _vllm_options(connector: str) -> list[str]:
    options = ["--vllm-pd-disaggregation", "--kv-connector", connector, "--policy", "round_robin"]
    return [*options, "--prometheus-port", str(unused_port()), *CHECKS]


@asynccontextmanager
async def smg(servers: Mapping[str, str], logs: Path, *, options: Sequence[str] = ()) -> AsyncIterator[str]:
    """Run SGLang's router with servers from a file, and yield its URL.

    Args:
        servers: "prefill" or "decode", by URL.
        logs: Directory for its files.
        options: More of the command line.
    """
    # The router requests the cache only if the prefill server has a connector of exactly this name.
    connectors = {"prefill": {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}}
    workers = [
        {"id": f"{kind}-{number}", "url": url, "worker_type": kind, **connectors.get(kind, {})}
        for number, (url, kind) in enumerate(servers.items())
    ]
    manifest = logs / "smg.json"
    manifest.write_text(json.dumps({"version": 1, "workers": workers}))
    found = ["--discovery-provider", "file", "--discovery-file", str(manifest), "--discovery-check-interval-secs", "1"]
    async with _running("smg", [*_smg_options(), *found, *options], logs) as url:
        yield url


@asynccontextmanager
async def empty_smg(logs: Path) -> AsyncIterator[str]:
    """Run SGLang's router without servers, which are added at `/workers`, and yield its URL."""
    async with _running("smg", _smg_options(), logs) as url:
        yield url


def _smg_options() -> list[str]:
    options = ["launch", "--pd-disaggregation", "--disable-tokenizer-autoload", "--policy", "round_robin"]
    return [*options, "--prometheus-host", "127.0.0.1", "--prometheus-port", str(unused_port()), *CHECKS]


async def workers_of(client: aiohttp.ClientSession, router: str) -> dict[str, dict[str, Any]]:
    """Return what a router, of either kind, says of its servers, by their URLs."""
    async with client.get(f"{router}/workers") as answer:
        return {worker["url"]: worker for worker in (await answer.json())["workers"]}


@asynccontextmanager
async def _running(
    name: str,
    arguments: Sequence[str],
    logs: Path,
    *,
    ready: str = "/health",
    environment: Mapping[str, str] = MappingProxyType({}),
) -> AsyncIterator[str]:
    program = CACHE / name / "bin" / name
    if not program.exists():
        pytest.skip(f"{name} is not installed; run `make test-vllm`")
    port = unused_port()
    command = [str(program), *arguments, "--host", "127.0.0.1", "--port", str(port)]
    router = Server(name, command, environment, url=f"http://127.0.0.1:{port}", log=logs / f"{name}.log")
    router.start()
    try:
        async with aiohttp.ClientSession() as client:
            with anyio.fail_after(ROUTER_READY_S):
                while not await _is_ready(client, router, ready):  # noqa: ASYNC110 - it depends on another process
                    await anyio.sleep(POLL_S)
        yield router.url
    finally:
        router.kill()


async def _is_ready(client: aiohttp.ClientSession, router: Server, path: str) -> bool:
    """Ask a router; the path matters, as vLLM's is not healthy while one of its servers is not."""
    if router.has_ended():
        raise ServerFailed("router has ended", router)
    with suppress(aiohttp.ClientError):
        async with client.get(f"{router.url}{path}") as answer:
            return answer.status == 200
    return False

"""The manifests on a Kubernetes control plane, and routers that find pods in it, under load."""

import os
import re
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

import aiohttp
import anyio
import msgspec
import pytest

from kvflow.addresses import DirectoryURL
from kvflow.directory.kubernetes import KubernetesDirectory
from kvflow.engines.vllm.options import read_options
from tests.directory.systems import watched
from tests.engines.vllm.routers import router_of_pods, workers_of
from tests.fleet.node import Node, Pod, opened_node
from tests.fleet.openai_server import CLOSED, ServerOptions, State
from tests.fleet.routed import Clients, http_client
from tests.hosts.hosts import Namespace
from tests.observe.lines import printed
from tests.support.cluster import NEEDS_CLUSTER, Cluster, opened_cluster
from tests.support.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(900), NEEDS_CLUSTER]

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = (ROOT / "docs/platforms/kubernetes.md").read_text()
NAMESPACE: Final = "inference"
DEPLOYMENTS: Final = ("deployment/prefill", "deployment/decode")
ADDRESSES: Final = [f"10.78.1.{number}" for number in range(1, 100)]
AT_ONCE: Final = 4
PREFILL, DECODE = "prefill", "decode"
FIRST: Final = ("kvflow keys new", "kubectl create namespace", "kubectl -n inference create serviceaccount router")
"""How the scripts of the page begin."""

API_DOWN_S: Final = 20.0
POLL_S: Final = 0.1


def command_of(pod: Pod) -> list[str]:
    """Return a server in place of vLLM, with the options that the manifest gives the connector."""
    values = {"POD_NAME": pod.name, "POD_IP": pod.address, "POD_NAMESPACE": pod.namespace}
    transfer = pod.manifest.read_transfer(**values)
    found = read_options(transfer["kv_connector_extra_config"])
    options = ServerOptions(
        role=pod.role,
        instance=transfer["engine_id"],
        port=8000,
        host=found.host,
        control_port=found.port,
        registry=found.registry,
        keys=str(pod.keys),
    )
    return [sys.executable, "-m", "tests.fleet.openai_server", msgspec.json.encode(options).decode()]


class Deployed(NamedTuple):
    """What the manifests make."""

    cluster: Cluster
    node: Node
    clients: Clients

    async def scale(self, replicas: int) -> None:
        """Have so many pods of each kind, and wait for them."""
        await self.cluster.run_kubectl("-n", NAMESPACE, "scale", f"--replicas={replicas}", *DEPLOYMENTS)
        await self.wait_for_rollouts()

    async def wait_for_rollouts(self) -> None:
        """Wait until the Deployments are as they should be."""
        for name in DEPLOYMENTS:
            await self.cluster.run_kubectl("-n", NAMESPACE, "rollout", "status", name)

    async def write_kubeconfig(self, path: Path, account: str) -> Path:
        """Write what a pod of a service account knows of the API server."""
        self.cluster.write_kubeconfig(path, await self.cluster.issue_token(NAMESPACE, account))
        return path

    async def until_used(self) -> None:
        """Wait until every pod has answered requests from now on."""
        async with anyio.create_task_group() as tasks:
            for pod in [*self.node.pods_of(PREFILL), *self.node.pods_of(DECODE)]:
                tasks.start_soon(self._until_used, pod)

    async def _until_used(self, pod: Pod) -> None:
        before: State | None = None
        while before is None or (await self.clients.state_of(pod.url)).answered == before.answered:
            with suppress(aiohttp.ClientConnectionError):  # its container may have been killed
                before = before or await self.clients.state_of(pod.url)
            await anyio.sleep(POLL_S)


@pytest.fixture
def place() -> Iterator[Path]:
    """Return a directory for sockets, whose paths have 107 bytes at most."""
    path = Path(tempfile.mkdtemp(prefix="kv-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def network() -> Iterator[None]:
    """Use a network of its own, which pods have addresses in."""
    namespace = Namespace()
    try:
        namespace.run("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth1")
        for address in ADDRESSES:
            namespace.run("ip", "address", "add", f"{address}/16", "dev", "eth0")
        for device in ("eth0", "eth1"):
            namespace.run("ip", "link", "set", device, "up")
        with namespace.entered():
            yield
    finally:
        namespace.close()


@asynccontextmanager
async def deployed(place: Path) -> AsyncIterator[Deployed]:
    """Follow docs/platforms/kubernetes.md, with a node that plays a cluster's."""
    async with opened_cluster(place) as cluster, http_client() as client:
        scripts = [re.findall(rf"```sh\n({first}.*?)```", PAGE, re.DOTALL)[0] for first in FIRST]
        (place / "deploy").symlink_to(ROOT / "deploy")
        environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "KUBECONFIG": str(cluster.kubeconfig),
        }
        (place / "pods").mkdir()
        async with opened_node(cluster, NAMESPACE, place / "pods", ADDRESSES, command_of) as node:
            done = await anyio.run_process(
                ["/bin/sh", "-e", "-c", "".join(scripts)], cwd=place, env=environment, check=False
            )
            assert (done.returncode, done.stderr) == (0, b""), done.stderr.decode()  # it warns of unknown fields
            yield Deployed(cluster, node, Clients(client))


@asynccontextmanager
async def loaded(fleet: Deployed, router: str, logs: Path) -> AsyncIterator[None]:
    """Keep asking a router in the block, and check the answers."""
    clients, over = fleet.clients, anyio.Event()
    account = await fleet.write_kubeconfig(logs / "router.kubeconfig", "router")
    async with (
        router_of_pods(router, NAMESPACE, account, logs) as clients.router,
        anyio.create_task_group() as tasks,
    ):
        async with http_client() as client:
            while len(await workers_of(client, clients.router)) < len(fleet.node.pods):  # noqa: ASYNC110
                await anyio.sleep(POLL_S)
        tasks.start_soon(clients.load, AT_ONCE, over)
        try:
            await fleet.until_used()
            yield
        finally:
            over.set()


@pytest.mark.parametrize("router", ["vllm-router", "smg"])
async def test_pods_come_and_go(place: Path, network: None, monkeypatch: pytest.MonkeyPatch, router: str) -> None:
    """Nothing that is done on purpose costs a request, nor does an API server that is down."""
    monkeypatch.setenv("KUBECONFIG", str(place / "kubeconfig"))
    directory = KubernetesDirectory(DirectoryURL.parse("registry", f"kubernetes://{NAMESPACE}/prefill"))
    async with deployed(place) as fleet:
        await fleet.scale(2)
        await fleet.write_kubeconfig(place / "kubeconfig", "kvflow-decode")
        with printed() as lines:
            async with watched(directory) as (subscription, changes), loaded(fleet, router, place):
                await change_on_purpose(fleet)
                assert [listing.draining for _, listing in changes if listing is not None].count(True) >= 3
                await kill(fleet)
                assert not lines.named("directory_down")
                await go_without_api(fleet, lambda: lines.named("directory_down"))
                await until(
                    lambda: {*(subscription._listings or {})} == {pod.name for pod in fleet.node.pods_of("prefill")}
                )
        assert len(lines.named("directory_down")) == len(lines.named("directory_back")) == 1
        for pod in fleet.node.pods.values():
            while (await fleet.clients.state_of(pod.url)).held:  # noqa: ASYNC110 - it depends on another process
                await anyio.sleep(POLL_S)
    logs = [log.read_text().splitlines() for log in (place / "pods").glob("*/log")]
    closed = [line for lines_of_pod in logs for line in lines_of_pod if line.startswith(CLOSED)]
    assert set(closed) == {f"{CLOSED} 0"}
    assert len(closed) >= 6


async def change_on_purpose(fleet: Deployed) -> None:
    """Replace, add and remove pods of both kinds."""
    before = fleet.clients.refusals.copy()
    await fleet.cluster.run_kubectl("-n", NAMESPACE, "rollout", "restart", *DEPLOYMENTS)
    await fleet.wait_for_rollouts()
    await fleet.until_used()
    await fleet.scale(3)
    await fleet.until_used()
    await fleet.scale(2)
    await until(lambda: len(fleet.node.pods) == 4)
    await fleet.until_used()
    assert fleet.clients.refusals == before
    tell("replaced, added and removed", fleet)


async def kill(fleet: Deployed) -> None:
    """Kill containers, which are started again, and delete pods at once, which are replaced."""
    for role in (PREFILL, DECODE):
        fleet.node.pods_of(role)[0].kill_container()
        await fleet.until_used()
        pod = fleet.node.pods_of(role)[0]
        await fleet.cluster.run_kubectl("-n", NAMESPACE, "delete", "pod", pod.name, "--force", "--grace-period=0")
        while pod in fleet.node.pods.values():  # noqa: ASYNC110 - it depends on other processes
            await anyio.sleep(POLL_S)
        await fleet.wait_for_rollouts()
        await fleet.until_used()
        tell(f"{role} killed", fleet)


async def go_without_api(fleet: Deployed, is_noticed: Callable[[], object]) -> None:
    """Kill the API server for a while."""
    before = fleet.clients.refusals.copy()
    fleet.cluster.kill_api()
    await until(is_noticed)
    await anyio.sleep(API_DOWN_S)
    await fleet.until_used()
    assert fleet.clients.refusals == before
    tell("API server down", fleet)
    fleet.cluster.start_api()
    await fleet.cluster.wait_until_ready()
    await fleet.scale(3)
    await fleet.until_used()
    assert fleet.clients.refusals == before


def tell(what: str, fleet: Deployed) -> None:
    """Print the answers so far, and what was refused before them."""
    sys.stdout.write(f"{what}: {fleet.clients.answered} answers, {dict(fleet.clients.refusals)}\n")
    sys.stdout.flush()

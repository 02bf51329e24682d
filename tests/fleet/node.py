"""Plays a Kubernetes node: runs the pods that are bound to it as kubelet does, but without images.

A pod has an address, a `/run` of its own, and the keys of its Secret. Its container is a process that the test chooses.
Probes and hooks are run as the manifest has them, when
https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle says so.
"""

import base64
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import aiohttp
import anyio
import anyio.to_thread
import httpx2
from anyio.abc import TaskGroup
from lightkube import ApiError, AsyncClient, KubeConfig
from lightkube.models.coordination_v1 import LeaseSpec
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.coordination_v1 import Lease
from lightkube.resources.core_v1 import Node as NodeResource
from lightkube.resources.core_v1 import Pod as PodResource
from lightkube.resources.core_v1 import Secret

from kvflow.cli.serve.server import Server
from tests.support.cluster import Cluster
from tests.support.manifests import Server as Manifest

__all__ = ["Node", "Pod", "opened_node"]

NAME: Final = "node-1"
LEASES: Final = "kube-node-lease"
REPORT_S: Final = 5.0
POLL_S: Final = 0.1
FAILURES: Final = 3
"""Default of `failureThreshold`."""

HAS: Final = {"cpu": "1000", "memory": "8Ti", "pods": "100", "nvidia.com/gpu": "100"}

OWN_RUN: Final = ("unshare", "--mount", "sh", "-c", 'mount --bind "$1" /run && shift && exec "$@"', "sh")

Command = Callable[["Pod"], list[str]]


class Pod:
    """A pod, from its start to its end.

    Args:
        client: Of the API server.
        resource: What the API server says of it.
        address: Its address.
        folder: For its files.

    Attributes:
        manifest: What it should be.
        is_leaving: It has been deleted, and ends.
    """

    def __init__(self, client: AsyncClient, resource: PodResource, address: str, folder: Path) -> None:
        described = resource.to_dict()
        metadata = described["metadata"]
        self.name, self.namespace, self.uid = metadata["name"], metadata["namespace"], metadata["uid"]
        self.manifest = Manifest("", "Pod", described)
        self.address = address
        self.folder = folder
        self.is_leaving = anyio.Event()
        self._client = client
        self._ending = anyio.CancelScope()
        self._grace_s = float(self.manifest.pod["terminationGracePeriodSeconds"])
        self._server: Server | None = None
        self._restarts = 0
        self._has_started = self._is_ready = False

    @property
    def role(self) -> str:
        """Its label."""
        return str(self.manifest.template["metadata"]["labels"]["kvflow.io/role"])

    @property
    def url(self) -> str:
        """Of its HTTP server."""
        return f"http://{self.address}:8000"

    @property
    def keys(self) -> Path:
        """Directory with the keys of its Secret."""
        return self.folder / "keys"

    @property
    def kubeconfig(self) -> Path:
        """With its token, if it has one."""
        return self.folder / "kubeconfig"

    def delete(self, grace_s: float | None) -> None:
        """End it in an orderly way."""
        self._grace_s = self._grace_s if grace_s is None else grace_s
        self.is_leaving.set()

    def kill(self) -> None:
        """End it at once, as nothing is known of it any more."""
        self._ending.cancel()

    def kill_container(self) -> None:
        """Kill its process, as the kernel does when memory is short."""
        if self._server is not None:
            self._server.kill()

    async def run(self, command: list[str]) -> None:
        """Run it until it has ended."""
        (self.folder / "run").mkdir()
        self._server = Server(
            self.name,
            [*self._in_container(), *command],
            self._environment(),
            url=self.url,
            log=self.folder / "log",
        )
        try:
            with self._ending:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._run_container)
                    tasks.start_soon(self._probe, "readinessProbe", self._note_readiness)
                    tasks.start_soon(self._probe, "livenessProbe", self._note_liveness)
                    await self.is_leaving.wait()
                    await self._end()
                    tasks.cancel_scope.cancel()
        finally:
            self._server.kill()
        if not self._ending.cancelled_caught:
            await self._report("Succeeded")
            await self._persist(lambda: self._client.delete(PodResource, self.name, grace_period=0))

    async def _run_container(self) -> None:
        """Start the process, and start it again when it has ended; what it serves is asked until it has started."""
        assert self._server is not None
        while not self.is_leaving.is_set():
            self._has_started = self._is_ready = False
            self._server.start()
            await self._report("Running")
            async with aiohttp.ClientSession() as session:
                while not self._server.has_ended():
                    if not self._has_started and await self._is_healthy(session):
                        self._has_started = True
                        await self._report("Running")
                    await anyio.sleep(POLL_S)
            self._restarts += 1

    async def _is_healthy(self, session: aiohttp.ClientSession) -> bool:
        assert self._server is not None
        with suppress(aiohttp.ClientError, TimeoutError):
            async with session.get(f"{self._server.url}/health") as answer:
                return answer.status == 200
        return False

    async def _probe(self, name: str, note: Callable[[bool], Awaitable[None]]) -> None:
        probe = self.manifest.container[name]
        failures = 0
        while True:
            while not self._has_started:  # noqa: ASYNC110 - it depends on another process
                await anyio.sleep(POLL_S)
            failures = 0 if await self._succeeds(probe["exec"]["command"], probe["timeoutSeconds"]) else failures + 1
            if failures in (0, probe.get("failureThreshold", FAILURES)):
                await note(failures == 0)
            await anyio.sleep(probe["periodSeconds"])

    async def _note_readiness(self, is_ready: bool) -> None:
        if is_ready != self._is_ready and self._has_started:
            self._is_ready = is_ready
            await self._report("Running")

    async def _note_liveness(self, is_alive: bool) -> None:
        if not is_alive and not self.is_leaving.is_set():
            self.kill_container()

    async def _succeeds(self, command: list[str], timeout_s: float) -> bool:
        """Run a command in the container."""
        with anyio.move_on_after(timeout_s):
            environment = {**os.environ, **self._environment()}
            done = await anyio.run_process([*self._in_container(), *command], check=False, env=environment)
            return done.returncode == 0
        return False

    async def _end(self) -> None:
        assert self._server is not None
        began = anyio.current_time()
        await self._succeeds(self.manifest.commands[-1], self._grace_s)
        left_s = max(2.0, self._grace_s - (anyio.current_time() - began))
        await anyio.to_thread.run_sync(self._server.stop, left_s)

    def _in_container(self) -> list[str]:
        return [*OWN_RUN, str(self.folder / "run")]

    def _environment(self) -> dict[str, str]:
        tools = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        own = {"TMPDIR": str(self.folder), "XDG_RUNTIME_DIR": "", "KUBECONFIG": str(self.kubeconfig)}
        return {"PATH": tools, **own}

    async def _report(self, phase: str) -> None:
        """Tell the API server how the pod is."""
        (spec,) = self.manifest.pod["containers"]
        now = timestamp()
        is_running = phase == "Running"
        state = {"running": {"startedAt": now}} if is_running else {"terminated": {"exitCode": 0}}
        container = {
            **{"name": spec["name"], "image": spec["image"], "imageID": spec["image"], "state": state},
            **{"ready": self._is_ready, "started": self._has_started, "restartCount": self._restarts},
        }
        met = {"Initialized": True, "PodReadyToStartContainers": True}
        met |= dict.fromkeys(["ContainersReady", "Ready"], self._is_ready and is_running)
        conditions = [{"type": kind, "status": str(is_met), "lastTransitionTime": now} for kind, is_met in met.items()]
        status = {
            **{"phase": phase, "conditions": conditions, "containerStatuses": [container], "startTime": now},
            **{"podIP": self.address, "podIPs": [{"ip": self.address}], "hostIP": self.address},
        }
        await self._persist(lambda: self._client.patch(PodResource.Status, self.name, {"status": status}))

    async def _persist(self, attempt: Callable[[], Awaitable[object]]) -> None:
        """Make an attempt until the API server has heard of it, or has said that there is no such pod."""
        while True:
            try:
                await attempt()
            except ApiError as error:
                if error.status.code == 404:
                    return
            except httpx2.HTTPError:  # nobody answers
                pass
            else:
                return
            await anyio.sleep(POLL_S)


class Node:
    """A node.

    Args:
        cluster: Where it registers.
        client: Of the cluster's API server, with the namespace of its pods.
        folder: For the files of its pods.
        addresses: For its pods.
        command: Returns what runs in the container of a pod.

    Attributes:
        pods: By name.
    """

    def __init__(
        self,
        cluster: Cluster,
        client: AsyncClient,
        folder: Path,
        addresses: Iterable[str],
        command: Command,
    ) -> None:
        self.pods: dict[str, Pod] = {}
        self._cluster = cluster
        self._client = client
        self._folder = folder
        self._addresses = iter(addresses)
        self._command = command

    def pods_of(self, role: str) -> list[Pod]:
        """Return the pods that are servers of a kind, and do not leave."""
        return [pod for pod in self.pods.values() if pod.role == role and not pod.is_leaving.is_set()]

    async def run(self) -> None:
        """Run pods until cancelled."""
        await self._register()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._report)
            while True:
                with suppress(ApiError, httpx2.HTTPError, httpx2.StreamError):
                    async for kind, pod in self._client.watch(PodResource, fields={"spec.nodeName": NAME}):
                        await self._follow(kind, pod, tasks)
                await anyio.sleep(POLL_S)

    async def _follow(self, kind: str, resource: PodResource, tasks: TaskGroup) -> None:
        assert resource.metadata is not None
        name = str(resource.metadata.name)
        pod = self.pods.get(name)
        if kind == "DELETED":
            if pod is not None:
                pod.kill()
        elif pod is None and resource.metadata.deletionTimestamp is None:
            folder = self._folder / name
            folder.mkdir()
            pod = self.pods[name] = Pod(self._client, resource, next(self._addresses), folder)
            tasks.start_soon(self._run, pod)
        elif pod is not None and resource.metadata.deletionTimestamp is not None:
            pod.delete(resource.metadata.deletionGracePeriodSeconds)

    async def _run(self, pod: Pod) -> None:
        await self._mount(pod)
        await pod.run(self._command(pod))
        del self.pods[pod.name]

    async def _mount(self, pod: Pod) -> None:
        """Lay out the keys and the token of a pod."""
        (name,) = [one["secret"]["secretName"] for one in pod.manifest.pod["volumes"] if "secret" in one]
        secret = await self._client.get(Secret, name)
        pod.keys.mkdir()
        for file, content in (secret.data or {}).items():
            (pod.keys / file).write_bytes(base64.b64decode(content))
            (pod.keys / file).chmod(0o400)
        if pod.manifest.pod.get("automountServiceAccountToken", True):
            token = await self._cluster.issue_token(pod.namespace, pod.manifest.pod["serviceAccountName"])
            self._cluster.write_kubeconfig(pod.kubeconfig, token)

    async def _register(self) -> None:
        labels = {"kubernetes.io/hostname": NAME}
        await self._client.create(NodeResource(metadata=ObjectMeta(name=NAME, labels=labels)))
        lease = Lease(metadata=ObjectMeta(name=NAME, namespace=LEASES), spec=LeaseSpec(holderIdentity=NAME))
        await self._client.create(lease)

    async def _report(self) -> None:
        """Tell the API server every few seconds that the node is ready, which it forgets if it hears nothing."""
        while True:
            now = timestamp()
            condition = {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": now}
            status = {"capacity": HAS, "allocatable": HAS, "conditions": [condition]}
            lease = {"leaseDurationSeconds": 40, "renewTime": now}
            with suppress(ApiError, httpx2.HTTPError):
                await self._client.patch(NodeResource.Status, NAME, {"status": status})
                await self._client.patch(Lease, NAME, {"spec": lease}, namespace=LEASES)
            await anyio.sleep(REPORT_S)


def timestamp() -> str:
    """Return the time as the API server reads it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


@asynccontextmanager
async def opened_node(
    cluster: Cluster, namespace: str, folder: Path, addresses: Iterable[str], command: Command
) -> AsyncIterator[Node]:
    """Add a node to a cluster, and kill what runs on it at the end of the block."""
    client = AsyncClient(KubeConfig.from_file(cluster.kubeconfig), namespace=namespace)
    node = Node(cluster, client, folder, addresses, command)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(node.run)
            yield node
            tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await client.close()

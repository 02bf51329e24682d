"""Systems that list instances, real ones where there are packages, and what happens to them."""

import signal
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec
import pytest
from typing_extensions import override

from kvflow.addresses import DirectoryURL
from kvflow.directory import etcd, open_directory
from kvflow.directory.following import Publication, Subscription
from kvflow.directory.listings import Directory, Listing
from kvflow.observe.logs import get_logger
from tests.support.cluster import Cluster
from tests.support.etcd_server import EtcdServer
from tests.support.kubernetes_api import KubernetesAPI, slice_of
from tests.support.waiting import until

__all__ = [
    "OTHER",
    "READY",
    "Etcd",
    "Files",
    "Kubernetes",
    "KubernetesCluster",
    "System",
    "is_listed",
    "opened",
    "published",
    "watched",
]

READY: Final = Listing(endpoint="tcp://192.0.2.1:7001", identity="first", lease_s=9.0)
OTHER: Final = Listing(endpoint="tcp://192.0.2.1:7002", identity="second", lease_s=9.0)


class System(ABC):
    """A system that lists instances, with its faults."""

    url = ""

    @abstractmethod
    async def list_instance(self, listing: Listing) -> None:
        """List the instance "a" as somebody else would."""

    @abstractmethod
    async def write_nonsense(self) -> None:
        """List "nonsense" in a way that says nothing."""

    @abstractmethod
    async def go_down(self) -> None:
        """Stop answering."""

    @abstractmethod
    async def come_back(self) -> None:
        """Answer again, with what was listed before."""

    async def close(self) -> None:
        """End it."""
        await self.go_down()

    def open(self) -> Directory:
        return open_directory(DirectoryURL.parse("registry", self.url))


class Files(System):
    def __init__(self, folder: Path) -> None:
        self._folder = folder / "instances"
        self._folder.mkdir()
        self.url = f"file://{self._folder}"

    @override
    async def list_instance(self, listing: Listing) -> None:
        (self._folder / "a.json").write_bytes(msgspec.json.encode(listing))

    @override
    async def write_nonsense(self) -> None:
        (self._folder / "nonsense.json").write_text('{"endpoint": "tcp://0.0.0.0:0"}')
        (self._folder / "README").write_text("not a listing")
        (self._folder / "folder.json").mkdir()

    @override
    async def go_down(self) -> None:
        self._folder.rename(self._folder.with_name("away"))
        self._folder.touch()

    @override
    async def close(self) -> None:
        pass

    @override
    async def come_back(self) -> None:
        self._folder.unlink()
        self._folder.with_name("away").rename(self._folder)


class Etcd(System):
    def __init__(self, folder: Path) -> None:
        self._server = EtcdServer(folder)
        self.url = self._server.url

    async def ask(self, method: str, **body: Any) -> dict[str, Any]:
        directory = self.open()
        assert isinstance(directory, etcd.EtcdDirectory)
        async with directory._connected() as server:
            return await server.ask(method, body)

    @override
    async def list_instance(self, listing: Listing) -> None:
        await self._put("a", msgspec.json.encode(listing))

    @override
    async def write_nonsense(self) -> None:
        await self._put("nonsense", b"\xff{")

    async def _put(self, name: str, value: bytes) -> None:
        await self.ask("kv/put", key=etcd._encoded(f"fleet/{name}".encode()), value=etcd._encoded(value))

    @override
    async def go_down(self) -> None:
        self._server.kill()

    def stop_server(self) -> None:
        self._server.send_signal(signal.SIGSTOP)

    def continue_server(self) -> None:
        self._server.send_signal(signal.SIGCONT)

    @override
    async def come_back(self) -> None:
        self._server.start()
        await self._server.wait_until_ready()


def pod_of(listing: Listing) -> tuple[int, dict[str, Any]]:
    """Return the port and the pod of a slice which says what a listing does."""
    host, _, port = listing.endpoint.removeprefix("tcp://").rpartition(":")
    conditions = {"ready": not listing.draining, "serving": True, "terminating": listing.draining}
    return int(port), {"name": "a", "uid": listing.identity, "address": host, "conditions": conditions}


class Kubernetes(System):
    url = "kubernetes://inference/prefill"

    def __init__(self, folder: Path) -> None:
        self.api = KubernetesAPI()
        self._folder = folder

    @override
    async def list_instance(self, listing: Listing) -> None:
        port, pod = pod_of(listing)
        self.api.put_slice("prefill-1", "prefill", port, pod)

    @override
    async def write_nonsense(self) -> None:
        self.api.put_slice("prefill-2", "prefill", 1, {"name": "nonsense", "address": "0.0.0.0"})  # noqa: S104
        self.api.put_slice("decode-1", "decode", 1, {"name": "another service"})
        self.api.put_slice("prefill-3", "prefill", 1, {"name": "no such port"}, port_name="other")

    @override
    async def go_down(self) -> None:
        await self.api.stop()

    @override
    async def come_back(self) -> None:
        await self.api.start()
        self.api.write_kubeconfig(self._folder)


class KubernetesCluster(System):
    """The API server itself."""

    url = "kubernetes://inference/prefill"

    def __init__(self, folder: Path) -> None:
        self._cluster = Cluster(folder)
        self._folder = folder
        self._has_started = False

    @override
    async def list_instance(self, listing: Listing) -> None:
        port, pod = pod_of(listing)
        await self._apply(slice_of("prefill-1", "prefill", port, pod))

    @override
    async def write_nonsense(self) -> None:
        await self._apply(slice_of("decode-1", "decode", 1, {"name": "another service"}))
        await self._apply(slice_of("prefill-3", "prefill", 1, {"name": "no such port"}, port_name="other"))

    async def _apply(self, described: dict[str, Any]) -> None:
        file = self._folder / "slice.json"
        file.write_bytes(msgspec.json.encode(described))
        await self._cluster.run_kubectl("apply", "--server-side", f"--filename={file}")

    @override
    async def go_down(self) -> None:
        self._cluster.kill_api()

    @override
    async def close(self) -> None:
        self._cluster.kill()

    @override
    async def come_back(self) -> None:
        if self._has_started:
            self._cluster.start_api()
            await self._cluster.wait_until_ready()
            return
        self._has_started = True
        await self._cluster.start()
        await self._cluster.run_kubectl("create", "namespace", "inference")
        (self._folder / "kubeconfig").symlink_to(self._cluster.kubeconfig)


@asynccontextmanager
async def opened(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[System]:
    kinds: dict[str, Callable[[Path], System]] = {
        "file": Files,
        "etcd": Etcd,
        "kubernetes": Kubernetes,
        "cluster": KubernetesCluster,
    }
    system = kinds[kind](folder)
    monkeypatch.setenv("KUBECONFIG", str(folder / "kubeconfig"))
    if not isinstance(system, Files):
        await system.come_back()
    try:
        yield system
    finally:
        await system.close()


Changes = list[tuple[str, Listing | None]]


@asynccontextmanager
async def watched(directory: Directory) -> AsyncIterator[tuple[Subscription, Changes]]:
    changes: Changes = []
    subscription = Subscription(directory, get_logger(), lambda name, _, listing: changes.append((name, listing)))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(subscription.run)
        await until(lambda: subscription._listings is not None)
        yield subscription, changes
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def published(directory: Directory, listing: Listing = READY) -> AsyncIterator[Callable[[], None]]:
    publication = Publication(directory, get_logger(), "a", listing)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(publication.run)
        yield publication.drain
        tasks.cancel_scope.cancel()


def is_listed(subscription: Subscription, listing: Listing) -> bool:
    found = subscription.find("a")
    return found is not None and (found.endpoint, found.identity) == (listing.endpoint, listing.identity)

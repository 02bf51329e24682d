"""Kubernetes as a directory: the endpoints of a service say which pods are ready, drain, or are gone."""

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final

import anyio
import httpx2
from lightkube import ApiError, AsyncClient
from lightkube.core.exceptions import ConfigError as ClusterUnknown
from lightkube.models.discovery_v1 import Endpoint
from lightkube.resources.discovery_v1 import EndpointSlice
from typing_extensions import override

from kvflow.addresses import DirectoryURL, check_endpoint, join_address
from kvflow.directory.listings import UNREADABLE, Directory, DirectoryDown, Listing, Listings
from kvflow.errors import ConfigError

__all__ = ["KubernetesDirectory"]

SERVICE: Final = "kubernetes.io/service-name"

PORT: Final = "kvflow"
"""Name of the port of control sockets, unless the URL names another."""

QUIET_S: Final = 20.0
"""Time without a change after which everything is listed again: a connection may be dead."""


class KubernetesDirectory(Directory):
    """Pods of a service, `kubernetes://NAMESPACE/SERVICE`, each an instance by the name of its pod.

    Nothing is written: a pod is listed while its readiness probe succeeds. While it terminates it drains. The pod's
    account must be allowed to list and watch `endpointslices` in the namespace.

    Raises:
        ConfigError: No cluster is known: this is no pod, and there is no kubeconfig.
    """

    def __init__(self, url: DirectoryURL) -> None:
        super().__init__(url)
        self._namespace, self._service = url.hosts[0], url.path
        self._port = url.options.get("port", PORT)

    @override
    async def watch(self) -> AsyncGenerator[Listings, None]:
        namespace, labels = self._namespace, dict[str, Any]({SERVICE: self._service})
        async with _client() as client:
            while True:
                found = client.list(EndpointSlice, namespace=namespace, labels=labels)
                slices = {_name_of(one): dict(self._read(one)) async for one in found}
                yield _joined(slices)
                changes = client.watch(
                    EndpointSlice, namespace=namespace, labels=labels, resource_version=found.resourceVersion
                )
                async with aclosing(_until_quiet(aiter(changes))) as watched:
                    async for kind, one in watched:
                        slices[_name_of(one)] = {} if kind == "DELETED" else dict(self._read(one))
                        yield _joined(slices)

    @override
    async def keep(self, instance: str, listing: Listing, may_replace: bool) -> AsyncGenerator[None, None]:
        yield
        await anyio.sleep_forever()

    @override
    async def remove(self, instance: str, listing: Listing) -> None:
        """Do nothing: the pod ends."""

    def _read(self, one: EndpointSlice) -> Iterator[tuple[str, Listing]]:
        ports = [port.port for port in one.ports or [] if port.name == self._port and port.port]
        for endpoint in one.endpoints or [] if ports else []:
            listing = _listing_of(endpoint, ports[0])
            if listing is not None and endpoint.targetRef is not None and endpoint.targetRef.name:
                yield endpoint.targetRef.name, listing


def _listing_of(endpoint: Endpoint, port: int) -> Listing | None:
    """Return the listing of a pod; None if it serves nothing. What is not said of it is as Kubernetes defines it."""
    is_ready = is_serving = True
    is_leaving = False
    if endpoint.conditions is not None:
        is_ready = endpoint.conditions.ready is not False
        is_serving = is_ready if endpoint.conditions.serving is None else endpoint.conditions.serving
        is_leaving = bool(endpoint.conditions.terminating)
    address = join_address(endpoint.addresses[0], port)
    try:
        check_endpoint("endpoint", address)
    except ConfigError:
        return None
    if not (is_ready or (is_leaving and is_serving)):
        return None
    identity = endpoint.targetRef.uid if endpoint.targetRef is not None else ""
    return Listing(endpoint=address, identity=identity or "", draining=is_leaving)


def _name_of(one: EndpointSlice) -> str:
    return str(one.metadata.name if one.metadata is not None else "")


def _joined(slices: dict[str, dict[str, Listing]]) -> Listings:
    return {name: listing for listed in slices.values() for name, listing in listed.items()}


async def _until_quiet(
    changes: AsyncIterator[tuple[str, EndpointSlice]],
) -> AsyncGenerator[tuple[str, EndpointSlice], None]:
    """Yield changes until there has been none for a while."""
    while True:
        change = None
        with anyio.move_on_after(QUIET_S):
            change = await anext(changes, None)
        if change is None:
            return
        yield change


@asynccontextmanager
async def _client() -> AsyncIterator[AsyncClient]:
    try:
        client = AsyncClient()
    except ClusterUnknown as error:
        raise DirectoryDown(f"no cluster is known: {error}") from error
    try:
        yield client
    except ApiError as error:  # 410: what has changed meanwhile is not kept any more
        raise DirectoryDown(f"{error.status.code} {error.status.reason}: {error.status.message}") from error
    except (httpx2.HTTPError, httpx2.StreamError, OSError, *UNREADABLE) as error:
        raise DirectoryDown(f"{type(error).__name__}: {error}") from error
    finally:
        with anyio.CancelScope(shield=True):
            await client.close()

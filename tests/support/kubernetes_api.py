"""The part of a Kubernetes API server that directories use: the endpoints of a service are listed, then watched.

It does what the real one does: versions, watches from a version on, 410 for versions that are not kept any more, and
watches that end after a while. There is no package of the real one that could be installed; where it is installed,
`tests.support.cluster` starts it.
"""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from aiohttp import web

__all__ = ["KubernetesAPI", "slice_of"]

PATH: Final = "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"


def slice_of(name: str, service: str, port: int, *pods: Mapping[str, Any], port_name: str = "kvflow") -> dict[str, Any]:
    """Return a slice with pods: name, uid, address, and conditions."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "namespace": "inference", "labels": {"kubernetes.io/service-name": service}},
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": 8000}, {"name": port_name, "port": port}],
        "endpoints": [
            {
                "addresses": [pod.get("address", "192.0.2.7")],
                "conditions": pod.get("conditions", {"ready": True}),
                "targetRef": {"kind": "Pod", "name": pod["name"], "uid": pod.get("uid", "1")},
            }
            for pod in pods
        ],
    }


class KubernetesAPI:
    """Endpoint slices of one namespace, by name.

    Attributes:
        slices: What is stored.
        version: Of what is stored.
        oldest: Version since which changes are kept.
        num_watches: Watches that have begun.
        asked: What clients have done, as a role permits it: verb, API group and resource.
    """

    def __init__(self) -> None:
        self.slices: dict[str, dict[str, Any]] = {}
        self.version = 100
        self.oldest = 100
        self.num_watches = 0
        self.asked: set[tuple[str, str, str]] = set()
        self._log: list[tuple[int, str, dict[str, Any]]] = []
        self._changed = asyncio.Event()
        self._ended = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self) -> None:
        """Serve, at the same port as before if there was one."""
        app = web.Application()
        app.router.add_get(PATH, self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Close everything; what is stored stays."""
        self.end_watches()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def write_kubeconfig(self, folder: Path) -> Path:
        """Write what a client needs to find this server."""
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
            "users": [{"name": "test", "user": {}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        }
        path = folder / "kubeconfig"
        path.write_text(json.dumps(config))
        return path

    def put_slice(
        self, name: str, service: str, port: int, *pods: Mapping[str, Any], port_name: str = "kvflow"
    ) -> None:
        """Store a slice, as `slice_of` makes it."""
        kind = "MODIFIED" if name in self.slices else "ADDED"
        self.slices[name] = slice_of(name, service, port, *pods, port_name=port_name)
        self._note(kind, self.slices[name])

    def remove_slice(self, name: str) -> None:
        """Remove a slice."""
        self._note("DELETED", self.slices.pop(name))

    def forget_changes(self) -> None:
        """Keep no changes: watches from earlier versions on get 410."""
        self.version += 1
        self.oldest = self.version
        self._log.clear()

    def end_watches(self) -> None:
        """End all watches, as the server does every few minutes."""
        self._ended.set()
        self._ended = asyncio.Event()

    def _note(self, kind: str, changed: dict[str, Any]) -> None:
        self.version += 1
        changed["metadata"]["resourceVersion"] = str(self.version)
        self._log.append((self.version, kind, json.loads(json.dumps(changed))))
        self._changed.set()
        self._changed = asyncio.Event()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        wanted = request.query.get("labelSelector", "").partition("=")[2]
        _, _, group, *_, resource = request.path.split("/")
        self.asked.add(("watch" if request.query.get("watch") else "list", group, resource))
        if not request.query.get("watch"):
            items = [it for it in self.slices.values() if it["metadata"]["labels"].get(LABEL) == wanted]
            return web.json_response({"metadata": {"resourceVersion": str(self.version)}, "items": items})
        return await self._watch(request, wanted, int(request.query["resourceVersion"]))

    async def _watch(self, request: web.Request, wanted: str, seen: int) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        self.num_watches += 1
        ended = self._ended
        if seen < self.oldest:
            status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
            await response.write(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")
            return response
        while not ended.is_set():
            changed = self._changed
            for version, kind, item in list(self._log):
                if version > seen and item["metadata"]["labels"].get(LABEL) == wanted:
                    await response.write(json.dumps({"type": kind, "object": item}).encode() + b"\n")
                seen = max(seen, version)
            waits = [asyncio.ensure_future(event.wait()) for event in (changed, ended)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        return response


LABEL: Final = "kubernetes.io/service-name"

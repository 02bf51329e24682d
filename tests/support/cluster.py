"""A Kubernetes control plane of released programs: etcd, the API server, the controllers and the scheduler.

Debian has only etcd 3.4, which the API server does not get along with, and there is no package of the others. So tests
need the programs on the PATH or in `.cache/kubernetes`. `tests.fleet.node` plays a node.
"""

import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import anyio
import msgspec
import pytest

from kvflow.cli.serve.server import Server
from tests.support.etcd_server import EtcdServer
from tests.support.ports import unused_port

__all__ = ["NEEDS_CLUSTER", "Cluster", "opened_cluster"]

PROGRAMS: Final = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
PLACES: Final = os.pathsep.join([str(Path(__file__).parents[2] / ".cache/kubernetes"), os.environ.get("PATH", "")])
MISSING: Final = [name for name in PROGRAMS if shutil.which(name, path=PLACES) is None]

NEEDS_CLUSTER: Final = pytest.mark.skipif(
    bool(MISSING), reason=f"{', '.join(MISSING)} not in .cache/kubernetes or on the PATH"
)

ADMIN: Final = "an-administrator"
READY_S: Final = 90.0
POLL_S: Final = 0.2
SERVICES: Final = "10.96.0.0/16"
ADVERTISED: Final = "192.0.2.1"
"""It must not be a loopback address; nobody here connects to it."""


class Cluster:
    """The programs, at 127.0.0.1.

    Args:
        folder: For their data, logs and keys.

    Attributes:
        kubeconfig: Of an administrator.
    """

    def __init__(self, folder: Path) -> None:
        self.kubeconfig = folder / "admin.kubeconfig"
        self._folder = folder
        self._url = f"https://127.0.0.1:{unused_port()}"
        self._authority = folder / "certificates" / "apiserver.crt"
        self._etcd = EtcdServer(folder, tools=PLACES)
        self._make_keys()
        self.write_kubeconfig(self.kubeconfig, ADMIN)
        admin = f"--kubeconfig={self.kubeconfig}"
        common = ("--leader-elect=false", "--secure-port=0", admin)
        self._api = self._program(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{self._etcd.port}",
            *("--bind-address=127.0.0.1", f"--secure-port={self._url.rpartition(':')[2]}"),
            *(f"--advertise-address={ADVERTISED}", f"--cert-dir={self._authority.parent}"),
            *(f"--service-cluster-ip-range={SERVICES}", "--authorization-mode=RBAC"),
            *(f"--token-auth-file={folder}/tokens", "--service-account-issuer=https://kubernetes.default.svc"),
            *(f"--service-account-key-file={folder}/sa.key", f"--service-account-signing-key-file={folder}/sa.key"),
        )
        self._others = [
            self._program(
                "kube-controller-manager",
                *common,
                *(f"--service-account-private-key-file={folder}/sa.key", f"--root-ca-file={self._authority}"),
            ),
            self._program("kube-scheduler", *common),
        ]

    async def start(self) -> None:
        """Start everything, and wait until every namespace has what it has by itself."""
        self._etcd.start()
        self.start_api()
        await self.wait_until_ready()
        for program in self._others:
            program.start()
        await self._until_done("get", "serviceaccount", "default")

    def start_api(self) -> None:
        """Start the API server, again after `kill_api`."""
        self._api.start()

    def kill_api(self) -> None:
        """Kill the API server."""
        self._api.kill()

    def kill(self) -> None:
        """Kill everything."""
        for program in (*self._others, self._api):
            program.kill()
        self._etcd.kill()

    async def wait_until_ready(self) -> None:
        """Wait until the API server is ready."""
        await self._until_done("get", "--raw", "/readyz")

    async def _until_done(self, *arguments: str) -> None:
        with anyio.fail_after(READY_S):
            while (await anyio.run_process([*self._kubectl(), *arguments], check=False)).returncode:  # noqa: ASYNC110
                await anyio.sleep(POLL_S)

    async def run_kubectl(self, *arguments: str, cwd: Path | None = None) -> str:
        """Run kubectl as an administrator, and return its output.

        Raises:
            AssertionError: It failed.
        """
        done = await anyio.run_process([*self._kubectl(), *arguments], check=False, cwd=cwd)
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr.decode()}"
        return done.stdout.decode()

    async def issue_token(self, namespace: str, account: str) -> str:
        """Return a token of a service account, as a pod gets it."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        request = self._folder / "token-request.json"
        request.write_text('{"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}')
        answer = msgspec.json.decode(await self.run_kubectl("create", "--raw", path, "--filename", str(request)))
        return str(answer["status"]["token"])

    def write_kubeconfig(self, path: Path, token: str) -> None:
        """Write what a client needs to find the API server, with its token."""
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [
                {"name": "test", "cluster": {"server": self._url, "certificate-authority": str(self._authority)}}
            ],
            "users": [{"name": "test", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        }
        path.write_bytes(msgspec.json.encode(config))

    def _kubectl(self) -> list[str]:
        return ["kubectl", f"--kubeconfig={self.kubeconfig}", "--request-timeout=60s"]

    def _program(self, name: str, *options: str) -> Server:
        found = shutil.which(name, path=PLACES)
        assert found is not None
        return Server(name, [found, *options], {}, url=self._url, log=self._folder / f"{name}.log")

    def _make_keys(self) -> None:
        key = ("openssl", "genrsa", "-out", str(self._folder / "sa.key"), "2048")
        subprocess.run(key, check=True, capture_output=True)
        (self._folder / "tokens").write_text(f'{ADMIN},admin,1,"system:masters"\n')


@asynccontextmanager
async def opened_cluster(folder: Path) -> AsyncIterator[Cluster]:
    """Start a control plane, and end it with the block."""
    cluster = Cluster(folder)
    try:
        await cluster.start()
        yield cluster
    finally:
        cluster.kill()

"""The faults of each directory of another system."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import anyio
import msgspec
import pytest
import trustme
from aiohttp import web

from kvflow.addresses import DirectoryURL
from kvflow.directory import etcd, file, kubernetes, open_directory
from kvflow.directory.following import Publication
from kvflow.directory.listings import DirectoryDown
from kvflow.observe.logs import get_logger
from tests.directory.systems import OTHER, READY, Etcd, Files, Kubernetes, is_listed, opened, published, watched
from tests.observe.lines import printed
from tests.support.etcd_server import NEEDS_ETCD, EtcdServer
from tests.support.kubernetes_api import KubernetesAPI
from tests.support.ports import unused_port
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


async def test_files_of_an_operator_need_no_lease(tmp_path: Path) -> None:
    files = Files(tmp_path)
    await files.list_instance(msgspec.structs.replace(READY, lease_s=None))
    async with watched(files.open()) as (subscription, changes):
        await anyio.sleep(2 * file.LOOK_S)
        assert is_listed(subscription, READY)
        assert len(changes) == 1


async def test_names_of_instances_may_contain_anything(tmp_path: Path) -> None:
    directory = Files(tmp_path).open()
    name = "../10.0.0.1:8000/0 %"
    publication = Publication(directory, get_logger(), name, READY)
    async with watched(directory) as (subscription, _), anyio.create_task_group() as tasks:
        tasks.start_soon(publication.run)
        await until(lambda: subscription.find(name))
        tasks.cancel_scope.cancel()
    assert not list((tmp_path / "instances").glob("*"))


@NEEDS_ETCD
class TestEtcd:
    @pytest.fixture
    async def system(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Etcd]:
        async with opened("etcd", tmp_path, monkeypatch) as system:
            assert isinstance(system, Etcd)
            yield system

    async def test_a_lost_lease_is_replaced(self, system: Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(etcd, "RENEW_S", 0.2)
        async with watched(system.open()) as (subscription, changes), published(system.open()):
            await until(lambda: is_listed(subscription, READY))
            for lease in (await system.ask("lease/leases"))["leases"]:
                await system.ask("lease/revoke", ID=lease["ID"])
            await until(lambda: [listing is None for _, listing in changes] == [False, True, False])

    async def test_a_removed_key_is_written_again(self, system: Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(etcd, "RENEW_S", 0.2)
        async with watched(system.open()) as (subscription, changes), published(system.open()):
            await until(lambda: is_listed(subscription, READY))
            await system.ask("kv/deleterange", key=etcd._encoded(b"fleet/a"))
            await until(lambda: [listing is None for _, listing in changes] == [False, True, False])

    async def test_a_compacted_watch_begins_with_all_listings(
        self, system: Etcd, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Changes elsewhere in etcd go on while a watch is quiet, and are compacted with those it has not seen."""
        monkeypatch.setattr(etcd, "QUIET_S", 0.5)
        await system.list_instance(READY)
        with printed() as lines:
            async with watched(system.open()) as (subscription, changes):
                for number in range(5):
                    await system.ask("kv/put", key=etcd._encoded(b"elsewhere"), value=etcd._encoded(bytes([number])))
                revision = (await system.ask("kv/range", key=etcd._encoded(b"elsewhere")))["header"]["revision"]
                await system.ask("kv/compaction", revision=revision)
                await until(lambda: lines.named("directory_down"))
                await system.list_instance(OTHER)
                await until(lambda: is_listed(subscription, OTHER))
        assert len(changes) == 2

    async def test_a_server_that_stands_still_is_given_up(self, system: Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
        """As one that is cut off from the others: its connections stay, and nothing comes."""
        monkeypatch.setattr(etcd, "QUIET_S", 0.3)
        monkeypatch.setattr(etcd, "ANSWER_S", 0.5)
        await system.list_instance(READY)
        with printed() as lines:
            async with watched(system.open()) as (subscription, _):
                system.stop_server()
                await until(lambda: lines.named("directory_down"))
                assert is_listed(subscription, READY)
                system.continue_server()
                await until(lambda: lines.named("directory_back"))
                await system.list_instance(OTHER)
                await until(lambda: is_listed(subscription, OTHER))

    async def test_another_server_is_asked_when_one_is_gone(self, system: Etcd, tmp_path: Path) -> None:
        url = system.url.replace("127.0.0.1", f"127.0.0.1:{unused_port()},127.0.0.1")
        directory = open_directory(DirectoryURL.parse("registry", url))
        await system.list_instance(READY)
        async with watched(directory) as (subscription, _):
            assert is_listed(subscription, READY)

    async def test_login_and_tls(self, tmp_path: Path) -> None:
        """A server that wants TLS, a certificate and a password gets them, and refuses who has none."""
        authority = trustme.CA()
        authority.cert_pem.write_to_path(tmp_path / "ca.pem")
        for name in ("server", "client"):
            issued = authority.issue_cert("127.0.0.1")  # a name in it cannot go with a password
            issued.private_key_pem.write_to_path(tmp_path / f"{name}.key")
            issued.cert_chain_pems[0].write_to_path(tmp_path / f"{name}.pem")
        server = EtcdServer(
            tmp_path,
            *(f"--cert-file={tmp_path}/server.pem", f"--key-file={tmp_path}/server.key"),
            *(f"--trusted-ca-file={tmp_path}/ca.pem", "--client-cert-auth"),
            scheme="https",
        )
        (tmp_path / "password").write_text("secret\n")
        tls = f"?ca={tmp_path}/ca.pem&cert={tmp_path}/client.pem&key={tmp_path}/client.key"
        login = f"&user=root&password_file={tmp_path}/password"
        server.start()
        try:
            await server.wait_until_ready(server.url + tls)
            admin = open_directory(DirectoryURL.parse("registry", server.url + tls))
            assert isinstance(admin, etcd.EtcdDirectory)
            async with admin._connected() as connection:
                await connection.ask("auth/user/add", {"name": "root", "password": "secret"})
                await connection.ask("auth/role/add", {"name": "root"})
                await connection.ask("auth/user/grant", {"user": "root", "role": "root"})
                await connection.ask("auth/enable", {})
            known = open_directory(DirectoryURL.parse("registry", server.url + tls + login))
            async with watched(known) as (subscription, _), published(known):
                await until(lambda: is_listed(subscription, READY))
            for url in (server.url, server.url + tls):
                with pytest.raises(DirectoryDown):
                    await anext(open_directory(DirectoryURL.parse("registry", url)).watch())
        finally:
            server.kill()


class TestKubernetes:
    @pytest.fixture
    async def system(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Kubernetes]:
        async with opened("kubernetes", tmp_path, monkeypatch) as system:
            assert isinstance(system, Kubernetes)
            yield system

    async def test_conditions_of_pods(self, system: Kubernetes) -> None:
        conditions = {
            "unsaid": {},
            "ready": {"ready": True},
            "not ready": {"ready": False, "serving": False},
            "drains": {"ready": False, "serving": True, "terminating": True},
            "ends": {"ready": False, "serving": False, "terminating": True},
        }
        pods = [{"name": name, "conditions": said} for name, said in conditions.items()]
        system.api.put_slice("prefill-1", "prefill", 7001, *pods)
        async with watched(system.open()) as (_, changes):
            assert dict(changes).keys() == {"unsaid", "ready", "drains"}
            assert [name for name, listing in changes if listing is not None and listing.draining] == ["drains"]

    async def test_a_service_may_have_many_slices(self, system: Kubernetes) -> None:
        system.api.put_slice("prefill-1", "prefill", 7001, {"name": "a"})
        system.api.put_slice("prefill-2", "prefill", 7002, {"name": "b", "address": "::1"})
        async with watched(system.open()) as (subscription, changes):
            system.api.remove_slice("prefill-1")
            await until(lambda: subscription.find("a") is None)
            found = subscription.find("b")
            assert found is not None
            assert found.endpoint == "tcp://[::1]:7002"
        assert len(changes) == 3

    async def test_watches_that_end_go_on(self, system: Kubernetes) -> None:
        await system.list_instance(READY)
        with printed() as lines:
            async with watched(system.open()) as (subscription, _):
                await until(lambda: system.api.num_watches == 1)
                system.api.end_watches()
                await until(lambda: system.api.num_watches == 2)
                await system.list_instance(OTHER)
                await until(lambda: is_listed(subscription, OTHER))
        assert not lines.named("directory_down")

    async def test_changes_that_are_not_kept_are_listed(self, system: Kubernetes) -> None:
        await system.list_instance(READY)
        with printed() as lines:
            async with watched(system.open()) as (subscription, _):
                await until(lambda: system.api.num_watches == 1)
                await system.list_instance(OTHER)
                system.api.forget_changes()
                system.api.end_watches()
                await until(lambda: is_listed(subscription, OTHER))
        assert all("410" in line["detail"] for line in lines.named("directory_down"))

    async def test_pods_that_flap_are_reported_each_time(self, system: Kubernetes) -> None:
        await system.list_instance(READY)
        async with watched(system.open()) as (_, changes):
            for _ in range(5):
                system.api.put_slice("prefill-1", "prefill", 7001, {"name": "a", "conditions": {"ready": False}})
                await until(lambda: changes[-1][1] is None)
                await system.list_instance(READY)
                await until(lambda: changes[-1][1] is not None)

    async def test_a_quiet_watch_is_listed_again(self, system: Kubernetes, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its connection may be dead."""
        monkeypatch.setattr(kubernetes, "QUIET_S", 0.2)
        await system.list_instance(READY)
        async with watched(system.open()):
            await until(lambda: system.api.num_watches > 2)


NONSENSE: Final = [
    *(
        b"",
        b"{",
        b"null",
        b"[]",
        b"7",
        b"\xff",
        b"{}",
        b"[" * 10_000,
        b'{"header": []}',
        b'{"items": 1}',
        b'{"items": [7]}',
    ),
    *(b'{"header": {"revision": "x"}}', b'{"header": {"revision": 1}, "kvs": [{}]}', b'{"items": [{"endpoints": 1}]}'),
    b'{"items": [{"metadata": {"name": "a"}, "ports": [{"name": "kvflow", "port": 1}], "endpoints": [{}]}]}',
]


@pytest.mark.parametrize("kind", ["etcd", "kubernetes"])
@pytest.mark.parametrize("answer", NONSENSE)
async def test_a_directory_may_answer_anything(
    kind: str, answer: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it says, it is down at most."""
    api = KubernetesAPI()
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))

    async def say_nonsense(_: web.Request) -> web.Response:
        return web.Response(body=answer, content_type="application/json")

    runner = web.ServerRunner(web.Server(say_nonsense))  # type: ignore[arg-type]
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        api.port = runner.addresses[0][1]
        api.write_kubeconfig(tmp_path)
        url = f"etcd://127.0.0.1:{api.port}/fleet" if kind == "etcd" else "kubernetes://inference/prefill"
        directory = open_directory(DirectoryURL.parse("registry", url))
        with pytest.raises(DirectoryDown):
            async for _ in directory.watch():
                pass
        if kind == "etcd":
            with pytest.raises(DirectoryDown):
                async for _ in directory.keep("a", READY, True):
                    pass
    finally:
        await runner.cleanup()

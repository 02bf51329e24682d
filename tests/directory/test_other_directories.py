"""What every directory of another system does: files, etcd and Kubernetes list instances."""

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import msgspec
import pytest

import kvflow
from kvflow.addresses import DirectoryURL
from kvflow.directory import etcd, file, open_directory
from kvflow.errors import ConfigError
from tests.directory.systems import OTHER, READY, System, is_listed, opened, published, watched
from tests.observe.lines import printed
from tests.support.cluster import NEEDS_CLUSTER
from tests.support.etcd_server import NEEDS_ETCD
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


@pytest.fixture(
    params=[
        "file",
        pytest.param("etcd", marks=NEEDS_ETCD),
        "kubernetes",
        pytest.param("cluster", marks=[NEEDS_CLUSTER, pytest.mark.slow]),
    ]
)
async def system(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[System]:
    async with opened(request.param, tmp_path, monkeypatch) as system:
        yield system


@pytest.fixture(params=["file", pytest.param("etcd", marks=NEEDS_ETCD)])
async def writable(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[System]:
    async with opened(request.param, tmp_path, monkeypatch) as system:
        yield system


# What every directory does --------------------------------------------------------------------------------------------


async def test_changes_reach_a_watcher(system: System) -> None:
    await system.write_nonsense()
    await system.list_instance(READY)
    async with watched(system.open()) as (subscription, changes):
        assert is_listed(subscription, READY)
        await system.list_instance(OTHER)
        await until(lambda: is_listed(subscription, OTHER))
        await system.list_instance(msgspec.structs.replace(OTHER, draining=True))
        await until(lambda: subscription.find("a") is None)
    assert {name for name, _ in changes} == {"a"}
    assert [listing is not None and listing.draining for _, listing in changes] == [False, False, True]


async def test_listings_stay_while_the_directory_is_down(system: System) -> None:
    await system.list_instance(READY)
    with printed() as lines:
        async with watched(system.open()) as (subscription, changes):
            await system.go_down()
            await until(lambda: lines.named("directory_down"))
            assert is_listed(subscription, READY)
            await system.come_back()
            await until(lambda: lines.named("directory_back"))
            await system.list_instance(OTHER)
            await until(lambda: is_listed(subscription, OTHER))
    assert len(lines.named("directory_down")) == len(lines.named("directory_back")) == 1
    assert [listing is not None for _, listing in changes] == [True, True]


# What is written ------------------------------------------------------------------------------------------------------


async def test_an_instance_is_listed_then_drains_then_is_gone(writable: System) -> None:
    async with watched(writable.open()) as (subscription, changes):
        async with published(writable.open()) as drain:
            await until(lambda: is_listed(subscription, READY))
            drain()
            await until(lambda: len(changes) == 2)
            assert subscription.find("a") is None
        await until(lambda: len(changes) == 3)
    assert [listing and listing.draining for _, listing in changes] == [False, True, None]


async def test_an_instance_that_ends_without_a_word_is_gone_after_its_lease(
    writable: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd, "LEASE_S", 2.0)
    listing = msgspec.structs.replace(READY, lease_s=1.5)
    async with watched(writable.open()) as (subscription, changes):
        keeping = writable.open().keep("a", listing, True)
        await anext(keeping)
        await until(lambda: is_listed(subscription, READY))
        await keeping.aclose()
        await until(lambda: subscription.find("a") is None)
    assert [entry is None for _, entry in changes] == [False, True]


async def test_an_instance_that_renews_its_lease_stays(writable: System, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (etcd, file):
        monkeypatch.setattr(module, "RENEW_S", 0.2)
    monkeypatch.setattr(etcd, "LEASE_S", 2.0)
    listing = msgspec.structs.replace(READY, lease_s=2.0)
    async with watched(writable.open()) as (subscription, changes):
        keeping = writable.open().keep("a", listing, True)
        started = anyio.current_time()
        async for _ in keeping:
            if anyio.current_time() > started + 6.0:
                break
        await keeping.aclose()
        assert is_listed(subscription, READY)
    assert len(changes) == 1


async def test_a_successor_replaces_its_predecessor_which_says_so(
    writable: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (etcd, file):
        monkeypatch.setattr(module, "RENEW_S", 0.2)
    with printed() as lines:
        async with watched(writable.open()) as (subscription, _), published(writable.open()):
            await until(lambda: is_listed(subscription, READY))
            async with published(writable.open(), OTHER):
                await until(lambda: lines.named("registration_conflict") and is_listed(subscription, OTHER))
            await until(lambda: is_listed(subscription, READY))
    assert [line["other_endpoint"] for line in lines.named("registration_conflict")] == [OTHER.endpoint]


async def test_an_instance_is_listed_again_after_the_directory_was_down(
    writable: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (etcd, file):
        monkeypatch.setattr(module, "RENEW_S", 0.2)
    with printed() as lines:
        async with published(writable.open()), watched(writable.open()) as (subscription, _):
            await until(lambda: is_listed(subscription, READY))
            await writable.go_down()
            await until(lambda: len(lines.named("directory_down")) == 2)
            await writable.come_back()
            await until(lambda: len(lines.named("directory_back")) == 2)
        async with watched(writable.open()) as (subscription, _):
            await until(lambda: not is_listed(subscription, READY))


# Addresses ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        *("file:instances", "file://host/instances", "etcd://", "etcd://host", "etcd://host:1/p?tls=1"),
        *("etcd://user:secret@host:1", "kubernetes://inference", "kubernetes:///prefill", "consul://host:1/p"),
        *("tcp://host", "etcd://host:port/p", "kubernetes://inference/prefill?ca=x"),
    ],
)
def test_urls_that_name_no_directory(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        kvflow.PrefillConfig(instance="p", registry=url, trust=kvflow.Trust.none())
    assert "secret" not in str(caught.value)


def test_only_the_first_rank_is_listed() -> None:
    with pytest.raises(ConfigError, match="only engine rank 0"):
        kvflow.PrefillConfig(instance="p", engine_rank=1, num_ranks=2, registry="file:///x")


@pytest.mark.parametrize("option", ["ca=/nowhere", "user=a&password_file=/nowhere", "user=a"])
def test_files_of_a_url_must_be_there(option: str) -> None:
    with pytest.raises(ConfigError, match="etcd cannot be"):
        open_directory(DirectoryURL.parse("registry", f"etcd://127.0.0.1:1/p?{option}"))

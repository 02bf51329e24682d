"""Ranks that find each other through a directory, whichever it is."""

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

import kvflow
from kvflow.directory.listings import Listing
from kvflow.errors import FailureReason, TransferFailed
from tests.observe.lines import printed
from tests.support.etcd_server import NEEDS_ETCD, EtcdServer
from tests.support.failures import catch
from tests.support.instances import PATIENT, QUICK, decode_config, make_pool, prefill_config
from tests.support.ports import unused_port
from tests.support.prefill_client import hand_over, prefill_process, receive
from tests.support.trusts import trusts
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["embedded", "file", pytest.param("etcd", marks=NEEDS_ETCD)])
async def registry(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    """The address of a directory that lists what registers."""
    if request.param == "embedded":
        async with kvflow.Registry() as embedded:
            yield embedded.endpoint
    elif request.param == "file":
        yield f"file://{tmp_path}"
    else:
        server = EtcdServer(tmp_path)
        server.start()
        try:
            await server.wait_until_ready()
            yield server.url
        finally:
            server.kill()


@asynccontextmanager
async def decode_at(registry: str, **settings: object) -> AsyncIterator[kvflow.DecodeRank]:
    changed: dict[str, object] = {"backend": "nixl", "timeouts": PATIENT, **settings}
    config = decode_config(registry, 0, 1, **changed)
    async with kvflow.DecodeRank(config, make_pool().layout) as rank:
        yield rank


def listed_address(decode: kvflow.DecodeRank) -> str | None:
    """Return where a directory has listed the prefill instance."""
    followed = decode._directories._listed
    listing = None if followed is None else followed._subscription.find("prefill")
    return None if listing is None else listing.endpoint


def finds_prefill(decode: kvflow.DecodeRank) -> bool:
    """Return whether a directory has listed the prefill instance."""
    return listed_address(decode) is not None


async def failure_of(decode: kvflow.DecodeRank, room: int) -> TransferFailed:
    return await catch(lambda: receive(decode, room))


@pytest.mark.parametrize("moves", [False, True])
async def test_a_killed_instance_is_replaced(registry: str, moves: bool) -> None:
    port = unused_port()
    async with decode_at(registry) as decode:
        async with prefill_process(registry, port) as first:
            await hand_over(decode, first, 1)
            first.send_signal(signal.SIGKILL)
        async with prefill_process(registry, unused_port() if moves else port) as second:
            await hand_over(decode, second, 2)
            assert decode.statistics().peers == 1


@pytest.mark.parametrize("registry", ["file", pytest.param("etcd", marks=NEEDS_ETCD)], indirect=True)
async def test_an_instance_that_stands_still_is_replaced(registry: str) -> None:
    """Its port still answers, so nothing but the directory says that another process has taken its place.

    The embedded registry prefers the older one of two that claim a name.
    """
    async with decode_at(registry) as decode, prefill_process(registry, unused_port()) as first:
        await hand_over(decode, first, 1)
        first.send_signal(signal.SIGSTOP)
        try:
            port = unused_port()
            async with prefill_process(registry, port) as second:
                await until(lambda: listed_address(decode) == f"tcp://127.0.0.1:{port}")
                await hand_over(decode, second, 2)  # an earlier one would have been asked of the first
        finally:
            first.send_signal(signal.SIGCONT)


async def test_an_instance_that_drains_is_not_found(registry: str) -> None:
    async with (
        kvflow.PrefillRank(prefill_config(registry), make_pool().layout) as prefill,
        decode_at(registry, backend="memory", timeouts=QUICK) as decode,
    ):
        if not registry.startswith("tcp"):
            await until(lambda: finds_prefill(decode))
        prefill.start_drain()
        await until(lambda: not finds_prefill(decode))
        error = await failure_of(decode, 1)
        for room in range(2, 100):
            if error.reason is FailureReason.UNREACHABLE:
                break
            # The embedded registry, which is asked for each request, does not know of the drain yet.
            assert registry.startswith("tcp")
            assert "prefill/0 is draining" in str(error)
            # The first one stays connected, and would not ask again.
            async with decode_at(registry, backend="memory", timeouts=QUICK) as other:
                error = await failure_of(other, room)
        assert error.reason is FailureReason.UNREACHABLE
        if not registry.startswith("tcp"):
            assert f"{registry} does not list it" in str(error)


@pytest.mark.parametrize("kind", ["file", pytest.param("etcd", marks=NEEDS_ETCD)])
async def test_a_directory_that_is_down_stops_nothing(kind: str, tmp_path: Path) -> None:
    server = EtcdServer(tmp_path) if kind == "etcd" else None
    (tmp_path / "instances").mkdir()
    url = f"file://{tmp_path}/instances" if server is None else server.url
    if server is not None:
        server.start()
        await server.wait_until_ready()
    with printed() as lines:
        async with (
            decode_at(url) as decode,
            decode_at(url, instance="another") as another,
            prefill_process(url, unused_port()) as prefill,
        ):
            await hand_over(decode, prefill, 1)
            await until(lambda: finds_prefill(another))
            if server is None:
                (tmp_path / "instances").rename(tmp_path / "away")
                (tmp_path / "instances").touch()
            else:
                server.kill()
            await until(lambda: len(lines.named("directory_down")) == 2)
            await hand_over(decode, prefill, 2)
            await hand_over(another, prefill, 3)  # the first contact
    assert len(lines.named("directory_down")) == 2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a directory that an operator writes."""
    return tmp_path


def write(folder: Path, endpoint: str) -> str:
    (folder / "prefill.json").write_bytes(msgspec.json.encode(Listing(endpoint=endpoint)))
    return f"file://{folder}"


async def test_a_healthy_instance_that_is_not_listed_any_more_goes_on(folder: Path) -> None:
    port = unused_port()
    url = write(folder, f"tcp://127.0.0.1:{port}")
    async with prefill_process(None, port) as prefill, decode_at(url) as decode:
        await hand_over(decode, prefill, 1)
        (folder / "prefill.json").unlink()
        await until(lambda: not finds_prefill(decode))
        await hand_over(decode, prefill, 2)
        assert decode.statistics().peers == 1


async def test_a_directory_that_names_somebody_else_is_not_believed(folder: Path) -> None:
    config = prefill_config(None, instance="other")
    async with kvflow.PrefillRank(config, make_pool().layout) as other:
        url = write(folder, other.endpoint)
        async with decode_at(url, backend="memory", timeouts=QUICK) as decode:
            assert (await failure_of(decode, 1)).reason is FailureReason.UNREACHABLE
            assert other.statistics().peers == 0


async def test_an_address_of_a_directory_needs_the_key_of_the_instance(folder: Path) -> None:
    _, keys = trusts("prefill", "decode", "other")
    config = prefill_config(None, instance="prefill", trust=keys["other"])
    async with kvflow.PrefillRank(config, make_pool().layout) as impostor:
        url = write(folder, impostor.endpoint)
        async with decode_at(url, backend="memory", timeouts=QUICK, trust=keys["decode"]) as decode:
            assert (await failure_of(decode, 1)).reason is FailureReason.UNREACHABLE
            assert impostor.statistics().peers == 0


@pytest.mark.parametrize(
    ("endpoint", "settings", "said"),
    [
        ("tcp://127.0.0.1:1", {"allowed_hosts": ["10.0.0.0/8"]}, "not in `allowed_hosts`"),
        ("tcp://10.0.0.1:1", {}, "set trust"),
    ],
)
async def test_an_address_of_a_directory_must_be_allowed(
    folder: Path, endpoint: str, settings: dict[str, object], said: str
) -> None:
    async with decode_at(write(folder, endpoint), backend="memory", timeouts=QUICK, **settings) as decode:
        assert said in str(await failure_of(decode, 1))

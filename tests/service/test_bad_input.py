"""Each bad input raises a typed error with its values, on the side that can act on it, without affecting others."""

import pickle  # noqa: TID251 - what others do to our errors
from collections.abc import AsyncIterator, Callable

import anyio
import numpy as np
import pytest
from msgspec.structs import replace

import kvflow
from kvflow.config import Timeouts
from kvflow.errors import (
    CapacityExceeded,
    ConfigError,
    FailureReason,
    LocalProtocolError,
    PlanError,
    Stage,
    TransferFailed,
)
from kvflow.geometry import Component
from kvflow.system import system_ports
from kvflow.wire.codec import encode
from kvflow.wire.messages import PeerId, RankId, RankRecord, Register
from tests.support.failures import catch, catch_into, undisturbed
from tests.support.instances import (
    NUM_PAGES,
    QUICK,
    Deployment,
    decode_config,
    deploy,
    make_pool,
    prefill_config,
)
from tests.support.pools import PagedShape, Pool
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def deployment() -> AsyncIterator[Deployment]:
    async with deploy(timeouts=QUICK) as opened:
        yield opened
        await undisturbed(opened)


BAD_TABLES = [
    ([NUM_PAGES, 1], "page index is out of range", {"page": NUM_PAGES, "num_pages": NUM_PAGES}),
    ([-1, 1], "page index is out of range", {"page": -1}),
    ([1], "page table has the wrong number of pages for its token range", {"pages": 1, "needed": 2}),
    ([1, 2, 3], "page table has the wrong number of pages for its token range", {"pages": 3, "needed": 2}),
    (np.array([1.0, 2.0]), "page table must be a flat list of integers", {"dtype": "float64"}),
]


@pytest.mark.parametrize(("pages", "message", "values"), BAD_TABLES)
async def test_wrong_page_table_on_decode(
    deployment: Deployment, pages: object, message: str, values: dict[str, object]
) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        deployment.decode[0].receive(1, prefill="prefill", tokens=(0, 8), pages={"kv": pages})  # type: ignore[dict-item]
    assert caught.value.values.items() >= values.items()


@pytest.mark.parametrize(("pages", "message", "values"), BAD_TABLES)
async def test_wrong_page_table_on_prefill_leaves_the_room_open(
    deployment: Deployment, pages: object, message: str, values: dict[str, object]
) -> None:
    request = deployment.request(1, 8)
    async with anyio.create_task_group() as tasks, deployment.prefill[0].send(1) as sender:
        tasks.start_soon(request.receive)
        with pytest.raises(PlanError, match=message) as caught:
            await sender.chunk((0, 8), {"kv": pages})  # type: ignore[dict-item]
        assert caught.value.values.items() >= values.items()
        request.compute(0, 8)
        await sender.finish((0, 8), request.src_pages(0, (0, 8)))
    request.assert_arrived()


async def test_same_destination_page_twice(deployment: Deployment) -> None:
    with pytest.raises(PlanError, match="twice") as caught:
        deployment.decode[0].receive(1, prefill="prefill", tokens=(0, 8), pages={"kv": [3, 3]})
    assert caught.value.values["page"] == 3


@pytest.mark.parametrize("tokens", [(8, 0), (-1, 8)])
async def test_impossible_token_range(deployment: Deployment, tokens: tuple[int, int]) -> None:
    with pytest.raises(PlanError) as caught:
        deployment.decode[0].receive(1, prefill="prefill", tokens=tokens, pages={"kv": [3]})
    assert caught.value.values["tokens"] == tokens


@pytest.mark.parametrize("pages", [{}, {"other": [1, 2]}, {"kv": [1, 2], "other": [1, 2]}, {"kv": [1], "x": None}])
async def test_tables_of_other_components(deployment: Deployment, pages: dict[str, list[int]]) -> None:
    with pytest.raises(PlanError, match="component"):
        deployment.decode[0].receive(1, prefill="prefill", tokens=(0, 8), pages=pages)


async def test_decode_wants_tokens_that_prefill_does_not_have(deployment: Deployment) -> None:
    short = deployment.request(1, 8)
    longer = deployment.request(1, 12)
    failures: dict[str, TransferFailed] = {}
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(catch_into, failures, "prefill", short.send)
        tasks.start_soon(catch_into, failures, "decode", longer.receive)
    for failure in failures.values():
        assert (failure.reason, failure.detected_by) == (FailureReason.TOKENS_NOT_SERVED, "prefill/0")
        assert failure.detail == "decode wants tokens 0:12 of component kv, but prefill does not serve 8:12"


async def test_room_that_prefill_never_opens() -> None:
    timeouts = Timeouts(open_s=0.2, drain_s=0.5, lease_s=2.0)
    async with deploy(timeouts=timeouts) as deployment:
        failure = await catch(deployment.request(1, 8).receive)
        assert (failure.reason, failure.room, failure.detected_by) == (FailureReason.UNKNOWN_ROOM, 1, "prefill/0")
        assert not failure.quarantined
        there = pickle.loads(pickle.dumps(failure))  # noqa: S301 - as it leaves an actor or a pool of processes
        assert (type(there), str(there), there.memory) == (TransferFailed, str(failure), failure.memory)
        assert (there.reason, there.stage, there.detail) == (failure.reason, failure.stage, failure.detail)
        await undisturbed(deployment)


async def test_room_that_decode_never_asks_for() -> None:
    timeouts = Timeouts(grant_s=0.2, drain_s=0.5, lease_s=2.0)
    async with deploy(timeouts=timeouts) as deployment:
        failure = await catch(deployment.request(1, 8).send)
        assert (failure.reason, failure.stage) == (FailureReason.NOT_GRANTED, Stage.ENQUEUE)
        request = deployment.request(2, 8)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(request.receive)
            # The first handshake may take longer than the prefill rank waits for a grant.
            await until(lambda: deployment.prefill[0].statistics().waiting_grants)
            await request.send()
        request.assert_arrived()


async def test_second_receive_of_a_room(deployment: Deployment) -> None:
    request, other = deployment.request(1, 8), deployment.request(1, 8)
    async with anyio.create_task_group() as tasks, request.receiver() as receiver:
        with pytest.raises(LocalProtocolError, match="already being received") as caught:
            await other.receive()
        assert caught.value.values["room"] == 1
        tasks.start_soon(request.send)
        await receiver.done()
    request.assert_arrived()
    other.assert_untouched(8)


async def test_second_send_of_a_room(deployment: Deployment) -> None:
    request = deployment.request(1, 8)
    async with anyio.create_task_group() as tasks, deployment.prefill[0].send(1) as sender:
        with pytest.raises(LocalProtocolError, match="room is in use") as caught:
            await request.send()
        assert caught.value.values["room"] == 1
        tasks.start_soon(request.receive)
        request.compute(0, 8)
        await sender.finish((0, 8), request.src_pages(0, (0, 8)))
    request.assert_arrived()


async def test_chunks_out_of_order(deployment: Deployment) -> None:
    request = deployment.request(1, 12)
    async with anyio.create_task_group() as tasks, deployment.prefill[0].send(1) as sender:
        tasks.start_soon(request.receive)
        request.compute(0, 12)
        await sender.chunk((0, 4), request.src_pages(0, (0, 4)))
        with pytest.raises(LocalProtocolError, match="must start where the previous one stopped") as caught:
            await sender.chunk((8, 12), request.src_pages(0, (8, 12)))
        assert caught.value.values == {"room": 1, "tokens": (8, 12), "before": (0, 4)}
        await sender.finish((4, 12), request.src_pages(0, (4, 12)))
    request.assert_arrived()


async def test_metadata_that_is_too_long(deployment: Deployment) -> None:
    request = deployment.request(1, 4)
    async with anyio.create_task_group() as tasks, deployment.prefill[0].send(1) as sender:
        tasks.start_soon(request.receive)
        request.compute(0, 4)
        with pytest.raises(PlanError, match="metadata is too long") as caught:
            await sender.finish((0, 4), request.src_pages(0, (0, 4)), metadata=bytes(65_537))
        assert caught.value.values["limit"] == 65_536
        await sender.finish((0, 4), request.src_pages(0, (0, 4)), metadata=bytes(65_536))


async def test_instance_that_is_not_registered(deployment: Deployment) -> None:
    receiver = deployment.decode[0].receive(1, prefill="nobody", tokens=(0, 4), pages={"kv": [1]})

    async def receive() -> None:
        async with receiver:
            await receiver.done()

    failure = await catch(receive)
    assert (failure.reason, failure.stage) == (FailureReason.UNREACHABLE, Stage.BOOTSTRAP)
    assert "nobody was not reached" in failure.detail


async def test_registry_that_is_not_there(free_port: int) -> None:
    config = decode_config(f"tcp://127.0.0.1:{free_port}", timeouts=Timeouts(handshake_s=0.3))
    async with kvflow.DecodeRank(config, make_pool().layout) as rank:
        failure = await catch(lambda: _receive(rank))
        assert (failure.reason, failure.stage) == (FailureReason.UNREACHABLE, Stage.BOOTSTRAP)
        assert f"the registry at tcp://127.0.0.1:{free_port} does not answer" in failure.detail


async def test_prefill_rank_that_registered_and_died(free_port: int) -> None:
    """Its record is still in the registry: only the Hello reveals that it is gone."""
    record = RankRecord(
        peer=PeerId(RankId("prefill", 0), 1),
        num_ranks=1,
        endpoint=f"tcp://127.0.0.1:{free_port}",
        backend="memory",
        layout=make_pool().layout,
    )
    async with kvflow.Registry() as registry:
        answered = anyio.Event()
        client = system_ports().control.connect(registry.endpoint, lambda _: answered.set(), lambda: None)
        client.send(encode(Register(record=record, lease_s=10.0)))
        await answered.wait()
        client.close()
        config = decode_config(registry.endpoint, timeouts=Timeouts(handshake_s=2.0))
        async with kvflow.DecodeRank(config, make_pool().layout) as rank:
            failure = await catch(lambda: _receive(rank))
    assert (failure.reason, failure.stage) == (FailureReason.UNREACHABLE, Stage.BOOTSTRAP)
    assert f"rank prefill/0 at tcp://127.0.0.1:{free_port}: connection refused" in failure.detail


def _other_model() -> Pool:
    return make_pool(fingerprint="other-model")


def _other_head() -> Pool:
    return make_pool(head_bytes=16)


def _other_dtype() -> Pool:
    pool = make_pool()
    regions = tuple(replace(region, dtype="float8_e4m3fn") for region in pool.layout.components[0].regions)
    pool.layout = replace(pool.layout, components=(Component("kv", regions),))
    return pool


def _more_layers() -> Pool:
    return Pool(PagedShape(NUM_PAGES, 4, (0, 6), 8, 3), 0)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (_other_model, ["fingerprint", "other-model", "test-model"]),
        (_other_head, ["head_bytes", "16", "8"]),
        (_other_dtype, ["dtype", "float8_e4m3fn", "uint8"]),
        (_more_layers, ["layer", "2"]),
    ],
)
async def test_pools_that_do_not_fit(deployment: Deployment, make: Callable[[], Pool], named: list[str]) -> None:
    pool = make()
    config = decode_config(deployment.registry.endpoint, instance="odd", timeouts=QUICK)
    async with kvflow.DecodeRank(config, pool.layout) as rank:
        failure = await catch(lambda: _receive(rank))
    assert (failure.reason, failure.stage) == (FailureReason.REFUSED, Stage.BOOTSTRAP)
    for word in named:
        assert word in failure.detail


async def test_transports_that_differ(deployment: Deployment) -> None:
    config = decode_config(deployment.registry.endpoint, instance="odd", backend="nixl", timeouts=QUICK)
    async with kvflow.DecodeRank(config, make_pool().layout) as rank:
        failure = await catch(lambda: _receive(rank))
    assert failure.reason is FailureReason.REFUSED
    assert "transports differ" in failure.detail
    assert "nixl" in failure.detail
    assert "memory" in failure.detail


async def test_more_rooms_than_allowed() -> None:
    async with deploy(limits=kvflow.Limits(transfers=1)) as deployment:
        request, other = deployment.request(1, 4), deployment.request(2, 4)
        async with anyio.create_task_group() as tasks, request.receiver() as receiver:
            with pytest.raises(CapacityExceeded) as caught:
                await other.receive()
            assert caught.value.values == {"limit": 1, "setting": "limits.transfers"}
            tasks.start_soon(request.send)
            await receiver.done()
        await undisturbed(deployment)


async def test_unknown_backend_names_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        kvflow.DecodeRank(decode_config("tcp://127.0.0.1:1", backend="carrier-pigeon"), make_pool().layout)
    assert caught.value.values == {"backend": "carrier-pigeon", "known": ["memory", "mooncake", "nixl"]}


async def test_backend_options_that_it_does_not_take() -> None:
    config = decode_config("tcp://127.0.0.1:1", backend_options={"wings": 2})
    with pytest.raises(ConfigError, match="backend has no such options") as caught:
        kvflow.DecodeRank(config, make_pool().layout)
    assert caught.value.values["unknown"] == ["wings"]


@pytest.mark.usefixtures("ascend")
async def test_backend_options_that_it_needs() -> None:
    config = decode_config("tcp://127.0.0.1:1", backend="ascend")
    with pytest.raises(ConfigError, match="backend needs more options") as caught:
        kvflow.DecodeRank(config, make_pool().layout)
    assert caught.value.values == {"backend": "ascend", "missing": ["store_url", "role"]}


async def test_control_address_that_is_taken(deployment: Deployment) -> None:
    taken = deployment.prefill[0].endpoint
    config = prefill_config(deployment.registry.endpoint, instance="second", bind=taken)
    with pytest.raises(ConfigError, match="cannot be bound") as caught:
        async with kvflow.PrefillRank(config, make_pool().layout):
            pass
    assert caught.value.values["bind"] == taken


@pytest.mark.parametrize(
    "address", ["", "127.0.0.1:7000", "ipc:///tmp/x", "tcp://127.0.0.1", "tcp://:7000", "tcp://host:99999", "tcp://h:x"]
)
def test_addresses_are_checked(address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decode_config(address)
    assert caught.value.values == {"setting": "registry", "value": address}
    with pytest.raises(ConfigError):
        kvflow.Registry(address)


async def test_rank_that_is_not_open() -> None:
    rank = kvflow.DecodeRank(decode_config("tcp://127.0.0.1:1", instance="d"), make_pool().layout)
    with pytest.raises(LocalProtocolError, match="not open"):
        await _receive(rank)


async def _receive(rank: kvflow.DecodeRank) -> None:
    async with rank.receive(1, prefill="prefill", tokens=(0, 4), pages={"kv": [1]}) as receiver:
        await receiver.done()


@pytest.mark.parametrize("room", ["", "x" * 257, "é" * 129, "\ud800", 2**63, -1, 1.5, True, b"req-1", None])
async def test_room_that_is_no_room(deployment: Deployment, room: object) -> None:
    with pytest.raises(LocalProtocolError, match="room must be"):
        deployment.prefill[0].send(room)  # type: ignore[arg-type]
    with pytest.raises(LocalProtocolError, match="room must be"):
        deployment.decode[0].receive(room, prefill="prefill", tokens=(0, 4), pages={"kv": [1]})  # type: ignore[arg-type]


async def test_integers_of_numpy_are_integers(deployment: Deployment) -> None:
    request = deployment.request(1, 8)
    eight = np.int64(8)
    async with anyio.create_task_group() as tasks, deployment.prefill[0].send(np.int64(1)) as sender:  # type: ignore[arg-type]

        async def receive() -> None:
            tokens = (np.uint32(0), eight)
            pages = request.dst_pages(0, (0, 8))
            receiver = deployment.decode[0].receive(
                np.int32(1),  # type: ignore[arg-type]
                prefill="prefill",
                tokens=tokens,  # type: ignore[arg-type]
                pages=pages,
                num_ranks=np.int64(1),  # type: ignore[arg-type]
                priority=np.int8(3),  # type: ignore[arg-type]
            )
            async with receiver:
                await receiver.done()

        tasks.start_soon(receive)
        request.compute(0, 8)
        await sender.finish((np.int64(0), eight), request.src_pages(0, (0, 8)), metadata=bytearray(b"m"))  # type: ignore[arg-type]
    request.assert_arrived()


@pytest.mark.parametrize(
    "changes",
    [
        {"timeout_s": float("nan")},
        {"timeout_s": 100_000},
        {"timeout_s": 0},
        {"num_ranks": 0},
        {"num_ranks": 2**33},
        {"num_ranks": "2"},
        {"priority": -1},
        {"priority": 8},
        {"priority": "1"},
        {"priority": 1.0},
    ],
)
async def test_odd_settings_of_a_receive(deployment: Deployment, changes: dict[str, object]) -> None:
    (name,) = changes
    with pytest.raises(ConfigError) as caught:
        deployment.decode[0].receive(1, prefill="prefill", tokens=(0, 4), pages={"kv": [1]}, **changes)  # type: ignore[arg-type]
    assert caught.value.values["setting"] == name


@pytest.mark.parametrize("name", [None, b"p", "", 3, "\ud800"], ids=ascii)
async def test_instance_that_is_no_name(deployment: Deployment, name: object) -> None:
    with pytest.raises(LocalProtocolError, match="an instance name"):
        deployment.decode[0].receive(1, prefill=name, tokens=(0, 4), pages={"kv": [1]})  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [("0", "4"), (0.0, 4.0), (0,), (0, 4, 8), None])
async def test_tokens_that_are_no_range(deployment: Deployment, tokens: object) -> None:
    with pytest.raises(PlanError, match="must be a pair of integers"):
        deployment.decode[0].receive(1, prefill="prefill", tokens=tokens, pages={"kv": [1]})  # type: ignore[arg-type]


@pytest.mark.parametrize("metadata", ["text", [1, 2], np.zeros(3), None])
async def test_metadata_that_is_no_bytes(deployment: Deployment, metadata: object) -> None:
    request = deployment.request(1, 4)
    async with anyio.create_task_group() as tasks, deployment.prefill[0].send(1) as sender:
        tasks.start_soon(request.receive)
        request.compute(0, 4)
        with pytest.raises(PlanError, match="metadata must be bytes"):
            await sender.finish((0, 4), request.src_pages(0, (0, 4)), metadata=metadata)  # type: ignore[arg-type]
        await sender.finish((0, 4), request.src_pages(0, (0, 4)))

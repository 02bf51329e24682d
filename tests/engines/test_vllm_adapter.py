"""Both sides of the vLLM connector over NIXL, driven step by step as vLLM drives them, without vLLM."""

import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import pytest
import torch

from kvflow import ConfigError, Endpoint, Outcome, TokenPages, ticket_for_room
from kvflow.backends import nixl
from kvflow.blocking import BlockingReceiver, BlockingSender, LoopThread
from kvflow.engines.vllm import bootstrap, shortage, worker
from kvflow.engines.vllm.bootstrap import serve_query
from kvflow.engines.vllm.dialect import NOTHING_KEPT, Reference, digest_of, reply, take_reference
from kvflow.engines.vllm.first_token import FirstTokens
from kvflow.engines.vllm.groups import describe_groups
from kvflow.engines.vllm.layout import describe_caches
from kvflow.engines.vllm.metadata import GroupBlocks, StepOrders, WorkerReport
from kvflow.engines.vllm.options import Options, read_options
from kvflow.engines.vllm.ranks import Place, open_ranks
from kvflow.engines.vllm.scheduler import ConnectorScheduler
from kvflow.engines.vllm.shortage import BlockShortage
from kvflow.engines.vllm.worker import ConnectorWorker, Results
from kvflow.errors import FailureReason, KvflowError, LayoutError
from kvflow.testing.device import FakeDevice, on_fake_device
from tests.support.device_tensors import device_tensor
from tests.support.ports import unused_port

BLOCK, BLOCKS, HEADS, LAYERS, CONTENT = 4, 32, 2, 3, 16
PROMPT = 10
PREFILL, DECODE = [7, 3, 12], [20, 21, 22]
TIMEOUTS = {"lease_s": 3.0, "grant_s": 30.0}


def group(kind: str = "FullAttentionSpec", layers: Sequence[int] = range(LAYERS), **values: object) -> Any:
    spec = type(kind, (), {"block_size": BLOCK, "num_kv_heads": HEADS, **values})()
    return SimpleNamespace(kv_cache_spec=spec, layer_names=[f"layer{number}" for number in layers])


def describe(tensors: Sequence[Any], *groups: Any, backend: str = "CPU_ATTN") -> Any:
    names = {f"layer{number}": number for number in range(len(tensors))}
    return describe_caches(
        dict(zip(names, tensors, strict=True)),
        describe_groups(groups or [group()]),
        backend=backend,
        layers=names,
        total_kv_heads=dict.fromkeys(names, HEADS),
        tp_size=1,
        tp_rank=0,
        fingerprint="model",
    )


class Pool:
    """The part of vLLM's block pool that the connector uses: how many references each block has."""

    def __init__(self) -> None:
        self.blocks = list(range(BLOCKS))
        self.holders = [0] * BLOCKS

    def get_num_free_blocks(self) -> int:
        return self.holders.count(0)

    def touch(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.holders[block] += 1

    def free_blocks(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.holders[block] -= 1


def scheduled(
    computed: Mapping[str, tuple[int, int, Sequence[Any]]], preempted: Sequence[str] = (), *, loads: bool = False
) -> Any:
    """Make vLLM's `SchedulerOutput` for one step; see `Server.step`."""
    return SimpleNamespace(
        has_sync_kv_loads=loads,
        preempted_req_ids=set(preempted),
        scheduled_new_reqs=[SimpleNamespace(req_id=it, num_computed_tokens=has[0]) for it, has in computed.items()],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        num_scheduled_tokens={it: has[1] for it, has in computed.items()},
        total_num_scheduled_tokens=sum(has[1] for has in computed.values()),
        kv_connector_block_state=SimpleNamespace(get_block_ids=lambda it: computed[it][2]),
    )


class DeviceEvent:
    """An event of a device that computes nothing before someone waits for it."""

    queued: ClassVar[list[Callable[[], None]]] = []
    event_id = 0

    def record(self) -> None:
        self.event_id = 1
        self._kernels = self.queued.copy()

    def synchronize(self) -> None:
        for kernel in self._kernels:
            kernel()


class Server:
    """A scheduler and a worker, with vLLM's step around them.

    Attributes:
        cells: The KV caches.
        ended: Transfers that have ended.
        told: Ids that the worker has reported to vLLM.
        awaited: Ids whose end vLLM waits for.
        num_held: Blocks that are held until they are safe, as metrics count them.
        num_shown: `num_held` when vLLM last asked for metrics: after `get_transfer_results`, before the report.
    """

    def __init__(
        self,
        options: Options,
        *groups: Any,
        is_prefill: bool,
        patience_s: float = 0.001,
        device: FakeDevice | None = None,
        first_tokens: FirstTokens | None = None,
        num_workers: int = 1,
        max_running: int = 8,
    ) -> None:
        has_both = options.keep_turns_s > 0
        shape = (LAYERS, BLOCKS, HEADS, BLOCK, CONTENT)
        tensors: Any = np.zeros(shape, np.uint8)
        self.cells = tensors
        if device is not None:
            memory = device.allocate(tensors.size)
            self.cells, tensors = memory.array.reshape(shape), device_tensor(memory, shape)
        self.groups = describe_groups(groups or [group()])
        caches = describe(list(tensors), *groups)
        place = Place("server", 0, 1, is_prefill or has_both, not is_prefill or has_both, str)
        self.caches = caches
        self.ranks = open_ranks(options, place, caches.layout)
        self.ended: list[BlockingSender | BlockingReceiver] = []
        self.worker = ConnectorWorker(
            caches,
            self.ranks,
            layerwise=options.layerwise,
            patience_s=patience_s,
            on_end=self.ended.append,
            on_blocks=self._count_blocks,
        )
        self.recomputed: list[tuple[str, int]] = []
        self.scheduler = ConnectorScheduler(
            self.groups,
            is_prefill=is_prefill or has_both,
            is_decode=not is_prefill or has_both,
            first_tokens=first_tokens,
            keep_turns_s=options.keep_turns_s,
            num_workers=num_workers,
            max_running=max_running,
            on_recomputed=lambda *it: self.recomputed.append(it),
        )
        self.first_tokens = first_tokens
        self.pool = Pool()
        self.scheduler.held.pool = self.pool
        self.told = Results()
        self.awaited: set[str] = set()
        self.num_held = self.num_shown = 0

    def _count_blocks(self, held: int, freed: int) -> None:
        self.num_held += held - freed

    def step(
        self,
        computed: Mapping[str, tuple[int, int, Sequence[Any]]] | None = None,
        *,
        finished: Sequence[str] = (),
        preempted: Sequence[str] = (),
        loads: bool = False,
    ) -> None:
        """Run one step of vLLM.

        Args:
            computed: For each request, its tokens computed before, those computed in this step, and its blocks (one
                list per group if there are several groups).
            finished: Requests that have finished.
            preempted: Requests that were preempted.
            loads: Another connector loads tokens in this step, before it computes.
        """
        computed = {it: (*has[:2], self._tables(has[2])) for it, has in (computed or {}).items()}
        orders: StepOrders = self.scheduler.step(scheduled(computed, preempted, loads=loads))
        self.awaited |= {*orders.awaited, *orders.granted}
        self.worker.preempt(orders)
        self.worker.begin(orders)
        for has in computed.values():
            for token in range(has[0], has[0] + has[1]):
                for kind, table in zip(self.groups, has[2], strict=True):
                    layers = [int(name.removeprefix("layer")) for name in kind.layers]
                    self._compute((layers, table[token // BLOCK], slice(None), token % BLOCK), token + 1)
        for layer in range(LAYERS):
            self.worker.layer_saved(f"layer{layer}")
        self.worker.receive(orders)
        self.worker.saved(orders)
        results = self.worker.take_results(finished)
        self.num_shown = self.num_held
        self._take(results, self.worker.take_report())

    def _compute(self, where: tuple[Any, ...], value: int) -> None:
        kernel = partial(self.cells.__setitem__, where, value)
        if self.caches.layout.is_on_host:
            kernel()
        else:
            DeviceEvent.queued.append(kernel)

    def _tables(self, blocks: Sequence[Any]) -> list[list[int]]:
        return [list(table) for table in (blocks if isinstance(blocks[0], list) else [blocks])]

    def _take(self, results: Results, report: WorkerReport | None) -> None:
        assert not self.told.sent & results.sent, "an id was told twice"
        assert not self.told.received & results.received, "an id was told twice"
        assert results.sent | results.received <= self.awaited, "an id was told that vLLM does not know any more"
        self.told.sent |= results.sent
        self.told.received |= results.received
        self.told.failed |= results.failed
        self.scheduler.sending.take_sent(results.sent)
        if report is not None:
            self.scheduler.take_report(report)
            if self.first_tokens is not None:
                self.first_tokens.keep(report.first_tokens)

    def until(self, is_so: Callable[[], bool], timeout_s: float = 20.0) -> None:
        """Run empty steps until a condition holds."""
        until = time.monotonic() + timeout_s
        while not is_so():
            assert time.monotonic() < until, "it never happened"
            self.step()
            time.sleep(0.001)  # as vLLM does

    def is_idle(self) -> bool:
        """Return whether nothing moves, and all blocks are free."""
        return not self.worker.is_moving and not any(self.pool.holders)

    def tokens(self, blocks: Sequence[int], layers: Sequence[int] = range(LAYERS)) -> list[int]:
        """Return the content of blocks, token by token; it must be the same in all `layers` and heads."""
        cells = self.cells[list(layers)][:, list(blocks)].swapaxes(2, 3).reshape(len(layers), -1, HEADS * CONTENT)
        assert all(len(set(cells[:, token].ravel())) == 1 for token in range(cells.shape[1]))
        return [int(value) for value in cells[0, :, 0]]


@contextmanager
def servers(
    *groups: Any,
    patience_s: float = 0.001,
    device: FakeDevice | None = None,
    first_tokens: Sequence[FirstTokens | None] = (None, None),
    **options: Any,
) -> Iterator[tuple[Server, Server]]:
    read = read_options({"backend": "memory", "timeouts": TIMEOUTS, **options})
    with ExitStack() as stack:
        made = []
        for is_prefill, kept in zip((True, False), first_tokens, strict=True):
            server = Server(
                read, *groups, is_prefill=is_prefill, patience_s=patience_s, device=device, first_tokens=kept
            )
            made.append(server)
            stack.callback(made[-1].worker.close)
        yield made[0], made[1]


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Server, Server]]:
    with servers(**getattr(request, "param", {})) as made:
        yield made


def asked(request_id: str, params: Mapping[str, Any] | None, num_tokens: int = PROMPT) -> Any:
    return SimpleNamespace(request_id=request_id, kv_transfer_params=params, prompt_token_ids=list(range(num_tokens)))


def prefill(server: Server, *cuts: int, **params_of_router: str) -> tuple[Any, dict[str, Any]]:
    """Compute a request in chunks, and return the reply."""
    request = asked("p", {"do_remote_decode": True, **params_of_router})
    server.scheduler.add(request)
    for start, stop in zip((0, *cuts), (*cuts, PROMPT), strict=True):
        server.step({"p": (start, stop - start, PREFILL)})
    delays, params = server.scheduler.finished(request, (), is_complete=True)
    assert delays
    assert params is not None
    server.step(finished=["p"])
    return request, params


def begin_decode(server: Server, params: Mapping[str, Any], num_local: int = 0) -> Any:
    request = asked("d", params)
    server.scheduler.add(request)
    server.step()
    num_elsewhere = server.scheduler.num_elsewhere(request, num_local)
    assert num_elsewhere is not None
    server.scheduler.allocated(request, [DECODE], num_elsewhere)
    server.step()
    return request


@pytest.mark.parametrize(
    "pair",
    [{"backend": "nixl"}, {"backend": "nixl", "layerwise": True}],
    ids=["after each step", "layer by layer"],
    indirect=True,
)
@pytest.mark.parametrize("num_local", [0, 4])
def test_decode_goes_on_where_prefill_ended(pair: tuple[Server, Server], num_local: int) -> None:
    source, target = pair
    _, params = prefill(source, 3, 8)
    begin_decode(target, params, num_local)
    target.until(lambda: "d" in target.told.received)
    source.until(lambda: "p" in source.told.sent)
    assert not target.told.failed
    assert not vars(source.scheduler.sending.shortage)["_asked"]
    skipped = num_local // BLOCK
    assert target.tokens(DECODE[skipped:])[: PROMPT - num_local] == list(range(num_local + 1, PROMPT + 1))
    assert not any(target.tokens(DECODE[:skipped]))
    target.until(lambda: not any(target.pool.holders))
    source.until(lambda: not any(source.pool.holders))


@pytest.mark.parametrize("layerwise", [False, True], ids=["after each step", "layer by layer"])
@pytest.mark.parametrize("is_high", [False, True], ids=["low", "high"])
def test_caches_on_a_device_are_read_after_its_events(
    monkeypatch: pytest.MonkeyPatch, *, is_high: bool, layerwise: bool
) -> None:
    monkeypatch.setattr(nixl, "NixlBackend", on_fake_device(nixl.NixlBackend))
    monkeypatch.setattr(torch, "Event", DeviceEvent)
    monkeypatch.setattr(DeviceEvent, "queued", [])
    device = FakeDevice(1, is_high=is_high)
    with servers(backend="nixl", layerwise=layerwise, device=device) as (source, target):
        _, params = prefill(source, 3, 8)
        begin_decode(target, params)
        target.until(lambda: "d" in target.told.received)
        assert not target.told.failed
        assert target.tokens(DECODE)[:PROMPT] == list(range(1, PROMPT + 1))


@pytest.mark.parametrize("pair", [{"patience_s": 600.0}], ids=["patient"], indirect=True)
def test_step_that_computes_nothing_waits_for_the_end_of_a_request(pair: tuple[Server, Server]) -> None:
    source, target = pair
    request = asked("p", {"do_remote_decode": True})
    source.scheduler.add(request)
    source.step({"p": (0, PROMPT, PREFILL)})  # this step computes, and so does not wait
    _, params = source.scheduler.finished(request, (), is_complete=True)
    taken_over = asked("d", params or {})
    target.scheduler.add(taken_over)
    target.scheduler.allocated(taken_over, [DECODE], PROMPT - 1)
    target.step()
    assert target.told.received == {"d"}
    assert not target.told.failed
    source.step(finished=["p"])
    assert source.told.sent == {"p"}
    for server in pair:  # nothing is in flight, so these return at once
        server.step()


def test_preempted_request_is_sent_from_its_new_blocks(
    pair: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "PREEMPTION_S", 20.0)  # on a busy machine, the event loop may need more than 10 ms
    source, target = pair
    request = asked("p", {"do_remote_decode": True, "transfer_id": "shared"})
    source.scheduler.add(request)
    source.step({"p": (0, 6, PREFILL)})
    source.step(preempted=["p"])
    source.cells[:, PREFILL] = 255  # the blocks belong to another request now
    source.step({"p": (0, PROMPT, [1, 2, 4])})
    _, params = source.scheduler.finished(request, (), is_complete=True)
    assert params is not None
    source.step(finished=["p"])
    begin_decode(target, params)
    target.until(lambda: "d" in target.told.received)
    assert target.tokens(DECODE)[:PROMPT] == list(range(1, PROMPT + 1))


@pytest.mark.parametrize("has_blocks", [False, True])
def test_decode_leaves(pair: tuple[Server, Server], has_blocks: bool) -> None:
    """Prefill gets its blocks back at once, and learns why."""
    source, target = pair
    request = asked("p", {"do_remote_decode": True})
    source.scheduler.add(request)
    source.step({"p": (0, 6, PREFILL)})
    source.step({"p": (6, 4, PREFILL)})
    _, params = source.scheduler.finished(request, (), is_complete=True)
    source.step(finished=["p"])
    asked_for = asked("d", params or {})
    target.scheduler.add(asked_for)
    target.step()
    if has_blocks:
        target.scheduler.allocated(asked_for, [DECODE], PROMPT - 1)
    assert target.scheduler.finished(asked_for, (), is_complete=False, status="FINISHED_ABORTED") == (False, None)
    target.step(finished=["d"])
    source.until(lambda: "p" in source.told.sent)
    assert "decode engine aborted the transfer: FINISHED_ABORTED" in why(source)
    if has_blocks:
        target.until(lambda: "d" in target.told.received)
        target.until(lambda: not any(target.pool.holders))
    else:
        assert not target.told.received


def test_prefill_leaves_in_the_middle(pair: tuple[Server, Server]) -> None:
    source, target = pair
    request = asked("p", {"do_remote_decode": True})
    source.scheduler.add(request)
    source.step({"p": (0, 6, PREFILL)})
    params = dict(reply_of(source))
    begin_decode(target, params)
    assert source.scheduler.finished(request, (), is_complete=False, status="FINISHED_ABORTED") == (True, None)
    source.step(finished=["p"])
    target.until(lambda: "d" in target.told.failed)
    assert "prefill engine aborted the transfer: FINISHED_ABORTED" in why(target)
    assert target.recomputed == [("aborted", PROMPT - 1)]
    source.until(lambda: "p" in source.told.sent)
    target.until(lambda: not any(target.pool.holders))


def why(server: Server) -> str:
    """Return why the last transfer has failed."""
    failure = server.ended[-1].failure
    assert failure is not None
    return failure.detail


@pytest.mark.parametrize(
    ("priority", "expected"), [(-9, 0), (-4, 0), (-1, 3), (0, 4), (1, 5), (3, 7), (4, 7), (10**9, 7)]
)
def test_priority_of_a_request_is_that_of_its_transfer(
    pair: tuple[Server, Server], priority: int, expected: int
) -> None:
    source, target = pair
    _, params = prefill(source)
    request = asked("d", params)
    request.priority = priority
    target.scheduler.receiving._is_by_priority = True
    target.scheduler.add(request)
    target.step()
    moving = target.worker._receiving["d"].transfer
    assert isinstance(moving, BlockingReceiver)
    assert moving._receiver._opened.priority == expected


def reply_of(server: Server) -> Mapping[str, Any]:
    """Return what the reply to request `p` will be."""
    assert server.ranks.ticket is not None
    return reply(server.ranks.ticket, "p", request_id="p", num_tokens=PROMPT, prompt=digest_of(asked("p", {})))


def test_request_that_never_had_blocks_is_not_told_of(pair: tuple[Server, Server]) -> None:
    source, _ = pair
    request = asked("p", {"do_remote_decode": True})
    source.scheduler.add(request)
    source.step()
    assert source.scheduler.finished(request, (), is_complete=False) == (False, None)
    source.step(finished=["p"])
    for _ in range(10):
        source.step()
    assert not source.told.sent


@pytest.mark.parametrize("is_complete", [False, True])
@pytest.mark.parametrize("kinds", [["window"], ["state"], ["full", "window"]], ids=" and ".join)
def test_every_request_that_vllm_waits_for_is_told(kinds: list[str], *, is_complete: bool) -> None:
    """This includes a request that ends before any of its blocks were offered, when only its last chunk has some."""
    made = {
        "window": group("SlidingWindowSpec", sliding_window=5),
        "state": SimpleNamespace(kv_cache_spec=mamba().kv_cache_spec, layer_names=["layer0", "layer1", "layer2"]),
        "full": group(layers=[0]),
    }
    groups = describe_groups([made[kind] for kind in kinds])
    scheduler = ConnectorScheduler(groups, is_prefill=True, is_decode=False)
    scheduler.held.pool = Pool()
    request = asked("p", {"do_remote_decode": True})
    request._all_token_ids, request.num_prompt_tokens = list(range(PROMPT)), PROMPT
    scheduler.add(request)
    scheduler.step(scheduled({"p": (0, PROMPT - 1 if is_complete else 6, [PREFILL] * len(kinds))}))
    delays, _ = scheduler.finished(request, (), is_complete=is_complete)
    assert delays == (scheduler.step(scheduled({})).awaited == ["p"]) is True


def test_prefill_of_a_window_ends_between_chunks() -> None:
    with servers(group("SlidingWindowSpec", sliding_window=5)) as (source, _):
        request = asked("p", {"do_remote_decode": True})
        source.scheduler.add(request)
        source.step({"p": (0, 6, PREFILL)})
        assert source.scheduler.finished(request, (), is_complete=False) == (True, None)
        source.step(finished=["p"])
        source.until(lambda: "p" in source.told.sent)


def test_preempted_when_all_of_it_was_sent(pair: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is recomputed; vLLM must receive its end although nothing is sent again."""
    source, target = pair
    request = asked("p", {"do_remote_decode": True})
    source.scheduler.add(request)
    source.step({"p": (0, PROMPT, PREFILL)})
    begin_decode(target, reply_of(source))
    target.until(lambda: "d" in target.told.received)
    quiesce = BlockingSender.quiesce

    def quiesced(sender: BlockingSender) -> None:
        quiesce(sender)
        assert sender.wait(20.0) is Outcome.SUCCESS  # the event loop finishes before vLLM's next step

    monkeypatch.setattr(BlockingSender, "quiesce", quiesced)
    source.step(preempted=["p"])
    source.step({"p": (0, PROMPT, [1, 2, 4])})
    delays, _ = source.scheduler.finished(request, (), is_complete=True)
    assert delays
    source.step(finished=["p"])
    source.until(lambda: "p" in source.told.sent)


def test_preempted_and_read_for_too_long_and_aborted(
    pair: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler of vLLM has forgotten the request, and would crash if its end were reported."""
    source, _ = pair
    request = asked("p", {"do_remote_decode": True})
    source.scheduler.add(request)
    source.step({"p": (0, 6, PREFILL)})
    with monkeypatch.context() as patch:
        patch.setattr(worker, "PREEMPTION_S", 0.0)
        patch.setattr(BlockingSender, "is_quiesced", False)
        patch.setattr(worker._Move, "is_safe", False)
        source.step(preempted=["p"])
    assert source.scheduler.finished(request, (), is_complete=False) == (False, None)
    source.step(finished=["p"])
    for _ in range(50):
        source.step()
    assert not source.told.sent


def test_preemption_waits_for_10_ms_at_most(pair: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop is busy, so nothing proves that the pages are quiet."""
    source, _ = pair
    source.scheduler.add(asked("p", {"do_remote_decode": True}))
    source.step({"p": (0, 6, PREFILL)})
    sender, may_go_on, waits = source.worker._sending["p"].transfer, threading.Event(), list[float]()
    assert isinstance(sender, BlockingSender)

    def wait_any(timeout_s: float) -> list[Any]:
        waits.append(timeout_s)
        return []

    blocked = sender._rank.ask(lambda _: may_go_on.wait(60))
    try:
        with monkeypatch.context() as patch:
            patch.setattr(source.ranks, "wait_any", wait_any)
            patch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: 1_000 + math.fsum(waits)))
            source.worker.preempt(StepOrders(preempted=["p"]))
        assert math.fsum(waits) == pytest.approx(0.01)
    finally:
        may_go_on.set()
    assert blocked.result()
    assert sender.wait(20.0) is Outcome.ABORTED


@pytest.mark.parametrize("pair", [{"timeouts": {**TIMEOUTS, "grant_s": 0.3}}], indirect=True)
def test_decode_never_comes(pair: tuple[Server, Server]) -> None:
    source, _ = pair
    prefill(source)
    source.until(lambda: "p" in source.told.sent)
    source.until(lambda: not any(source.pool.holders))


@pytest.mark.parametrize("pair", [{"timeouts": {**TIMEOUTS, "grant_s": 0.3}}], indirect=True)
def test_lease_starts_when_the_reply_leaves(pair: tuple[Server, Server]) -> None:
    """Between the last chunk and the reply, a worker may stall for minutes."""
    source, _ = pair
    request = asked("p", {"do_remote_decode": True})
    source.scheduler.add(request)
    source.step({"p": (0, PROMPT, PREFILL)})
    time.sleep(1.0)
    source.step()
    sender = source.worker._sending["p"].transfer
    assert sender is not None
    assert sender.outcome is Outcome.PENDING
    source.scheduler.finished(request, (), is_complete=True)
    source.step(finished=["p"])
    source.until(lambda: bool(source.ended))
    assert sender.failure is not None
    assert sender.failure.reason is FailureReason.NOT_GRANTED


def test_client_leaves_when_all_of_it_was_computed(pair: tuple[Server, Server]) -> None:
    """The reply is never sent, so nobody has the ticket."""
    source, _ = pair
    request = asked("p", {"do_remote_decode": True})
    source.scheduler.add(request)
    source.step({"p": (0, PROMPT, PREFILL)})
    assert source.scheduler.finished(request, (), is_complete=False) == (True, None)
    source.step(finished=["p"])
    source.until(lambda: "p" in source.told.sent)
    source.until(lambda: not any(source.pool.holders))
    assert source.num_held == 0


def test_ticket_of_a_room_that_is_gone_is_not_handed_out(pair: tuple[Server, Server]) -> None:
    source, target = pair
    request = asked("p", {"do_remote_decode": True})
    source.scheduler.add(request)
    source.step({"p": (0, 6, PREFILL)})
    taken_over = asked("d", reply_of(source))
    target.scheduler.add(taken_over)
    target.step()
    target.scheduler.finished(taken_over, (), is_complete=False)
    target.step(finished=["d"])
    source.until(lambda: source.scheduler.sending._requests["p"].is_lost)
    source.step({"p": (6, PROMPT - 6, PREFILL)})
    assert source.scheduler.finished(request, (), is_complete=True) == (True, NOTHING_KEPT)
    source.step(finished=["p"])
    source.until(lambda: "p" in source.told.sent)
    assert take_reference(NOTHING_KEPT) is None


@pytest.mark.parametrize("transfer", [{}, {"transfer_id": "of the router"}], ids=["nixl", "mooncake"])
def test_answers_to_one_prompt_have_one_ticket(
    pair: tuple[Server, Server], transfer: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM answers with any of them, after the last has ended; the lease starts then."""
    source, target = pair
    leased: list[BlockingSender] = []
    start_lease = BlockingSender.start_lease

    def note_lease(sender: BlockingSender) -> None:
        leased.append(sender)
        start_lease(sender)

    monkeypatch.setattr(BlockingSender, "start_lease", note_lease)
    first, second = (asked(f"{number}_cmpl-p", {"do_remote_decode": True, **transfer}) for number in range(2))
    for request in (first, second):
        source.scheduler.add(request)
    source.step({first.request_id: (0, PROMPT, PREFILL), second.request_id: (0, PROMPT, [9, 10, 11])})
    delays, params = source.scheduler.finished(first, (), is_complete=True)
    assert delays
    source.step(finished=[first.request_id])
    source.step()
    assert not leased
    assert not source.told.sent
    delays, others = source.scheduler.finished(second, (), is_complete=True)
    assert (delays, others) == (False, {**(params or {}), "remote_request_id": second.request_id})
    source.step(finished=[second.request_id])
    assert len(leased) == 1
    begin_decode(target, others or {})
    target.until(lambda: "d" in target.told.received)
    assert not target.told.failed
    source.until(lambda: source.told.sent == {first.request_id})
    assert [sender.outcome for sender in source.ended] == [Outcome.SUCCESS]


def test_only_the_first_prompt_of_a_batch_is_kept(pair: tuple[Server, Server]) -> None:
    """VLLM's answer to a batch contains the ticket of its first prompt alone."""
    source, _ = pair
    for number, is_kept in ((0, True), (1, False)):
        request = asked(f"cmpl-me-{number}-0123abcd", {"do_remote_decode": True})
        source.scheduler.add(request)
        source.step({request.request_id: (0, PROMPT, PREFILL)})
        assert source.scheduler.finished(request, (), is_complete=True)[0] is is_kept


@pytest.mark.parametrize("refusal", ["another model", "no tokens"])
def test_prefill_is_told_what_decode_refuses_itself(pair: tuple[Server, Server], refusal: str) -> None:
    source, target = pair
    _, params = prefill(source)
    request = asked("d", params)
    if refusal == "another model":
        params["kvflow_ticket"]["fingerprint"] = "other"
    else:
        request.prompt_token_ids = None
    target.scheduler.add(request)
    target.step()
    source.until(lambda: "p" in source.told.sent)
    target.step(finished=["d"])


def test_prefill_is_told_that_nobody_will_ask(pair: tuple[Server, Server]) -> None:
    source, _ = pair
    prefill(source, transfer_id="of the router")
    source.scheduler.add(asked("other", {"kvflow_withdrawn": "another"}))
    source.step()
    source.scheduler.add(asked("this", {"kvflow_withdrawn": "of the router"}))
    source.until(lambda: "p" in source.told.sent)


def test_two_servers_do_not_wait_for_blocks_of_each_other(
    pair: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode has blocks for the request that prefill cannot compute, and none for the one that prefill has computed."""
    monkeypatch.setattr(shortage, "RECLAIM_S", 0.0)
    source, target = pair
    first, second = (asked(f"p{number}", {"do_remote_decode": True}) for number in range(2))
    for request in (first, second):
        source.scheduler.add(request)
    source.step({"p0": (0, PROMPT, PREFILL)})
    _, params = source.scheduler.finished(first, (), is_complete=True)
    source.step(finished=["p0"])
    assert source.ranks.ticket is not None
    digest = digest_of(second)
    others = reply(source.ranks.ticket, "p1", request_id="p1", num_tokens=PROMPT, prompt=digest)
    waiting, ready = asked("d0", params or {}), asked("d1", others)
    for request in (waiting, ready):
        target.scheduler.add(request)
    target.scheduler.allocated(ready, [DECODE], PROMPT - 1)
    target.step()

    def is_given_up() -> bool:
        source.scheduler.num_elsewhere(second, 0)  # vLLM finds no blocks for it
        target.step()
        return "p0" in source.told.sent

    source.until(is_given_up)
    target.until(lambda: target.scheduler.num_elsewhere(waiting, 0) == 0)
    source.step({"p1": (0, PROMPT, PREFILL)})
    target.until(lambda: "d1" in target.told.received)
    assert not target.told.failed
    target.step(finished=["d0"])


def test_requests_that_no_decode_asks_for_have_a_share_of_the_pool() -> None:
    found = BlockShortage()
    for number in range(4):
        found.pin(f"old{number}", 25, now=0.0)
    assert found.reclaim(100, now=9.0) == {}  # nobody lacks blocks
    found.note_asked(["old0"])
    found.pin("new", 50, now=8.5)
    found.wants_blocks("other")
    assert found.reclaim(100, now=9.0) == {"old1": False, "old2": False, "old3": False}
    found.wants_blocks("other")
    assert found.reclaim(100, now=9.1) == {}  # each once; `new` may be asked for any moment
    found.forget(["old1", "old2", "old3"])
    found.wants_blocks("other")
    assert found.reclaim(100, now=19.0) == {}  # half of the pool


def test_groups_that_vllm_does_not_transfer_are_left_out() -> None:
    """As those of a draft model, which each server fills itself."""
    kept = SimpleNamespace(**vars(group(layers=[1, 2])), enable_kv_transfer=False)
    with servers(group(layers=[0]), kept) as (source, target):
        request = asked("p", {"do_remote_decode": True})
        source.scheduler.add(request)
        source.step({"p": (0, PROMPT, [PREFILL, PREFILL])})
        _, params = source.scheduler.finished(request, (), is_complete=True)
        source.step(finished=["p"])
        request = asked("d", params or {})
        target.scheduler.add(request)
        target.scheduler.allocated(request, [DECODE, DECODE], PROMPT - 1)
        target.step()
        target.until(lambda: "d" in target.told.received)
        assert target.tokens(DECODE, [0])[: PROMPT - 1] == list(range(1, PROMPT))
        assert not target.cells[1:].any()


def test_query_port_serves_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "MAX_CONNECTIONS", 2)
    port = unused_port()
    with LoopThread() as loop, serve_query("127.0.0.1", port, "tcp://127.0.0.1:1", loop), ExitStack() as stack:
        silent = [stack.enter_context(closing(socket.create_connection(("127.0.0.1", port), 10))) for _ in range(3)]
        with suppress(ConnectionResetError):
            assert silent[2].recv(1) == b""
        silent[0].sendall(b"GET /query HTTP/1.1\r\nX: " + b"x" * 100_000)
        with suppress(ConnectionResetError):
            assert silent[0].recv(1) == b""
        assert urlopen(f"http://127.0.0.1:{port}/query", timeout=10).status == 200


@pytest.mark.parametrize("pair", [{"timeouts": {**TIMEOUTS, "handshake_s": 1.0}}], indirect=True)
def test_prefill_is_gone_before_decode_has_blocks(pair: tuple[Server, Server]) -> None:
    source, target = pair
    _, params = prefill(source)
    source.worker.close()
    request = asked("d", params)
    target.scheduler.add(request)
    target.step()
    target.until(lambda: all(move.is_decided for move in target.worker._receiving.values()))
    target.scheduler.allocated(request, [DECODE], PROMPT - 1)
    target.step()
    assert target.told.received == target.told.failed == {"d"}
    assert not any(target.pool.holders)


def test_blocks_are_held_until_nothing_can_be_written_to_them(
    pair: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler sees the end at once, while the connector keeps a reference to the blocks."""
    source, target = pair
    request = asked("p", {"do_remote_decode": True})
    source.scheduler.add(request)
    source.step({"p": (0, 6, PREFILL)})
    begin_decode(target, reply_of(source))
    target.until(lambda: all(move.transfer and move.blocks for move in target.worker._receiving.values()))
    source.until(lambda: all(getattr(move.transfer, "wanted", None) for move in source.worker._sending.values()))
    monkeypatch.setattr(type(next(iter(target.worker._moves.values()))), "is_safe", property(lambda _: False))
    target.step(finished=["d"])
    target.until(lambda: "d" in target.told.received)
    assert [target.pool.holders[block] for block in DECODE] == [1, 1, 1]
    assert target.num_shown == len(DECODE)  # in the step that tells vLLM of the end
    assert target.scheduler.awaits_report  # keeps vLLM stepping although it has no request
    monkeypatch.undo()
    move = next(iter(target.worker._moves.values()))
    assert move.transfer is not None
    move.transfer.until_safe(10.0)
    target.worker._apply_updates([SimpleNamespace(transfer=move.transfer)])  # type: ignore[list-item] # as the rank tells it
    target.until(lambda: not target.scheduler.awaits_report)  # an idle server takes no other steps
    assert target.num_shown == 0
    assert not any(target.pool.holders)


def test_vllm_computes_it_after_all(pair: tuple[Server, Server]) -> None:
    """Decode asks for no tokens, and tells prefill so."""
    source, target = pair
    _, params = prefill(source)
    request = asked("d", params)
    target.scheduler.add(request)
    target.step()
    target.scheduler.allocated(request, [DECODE], 0)
    target.step()
    source.until(lambda: "p" in source.told.sent)
    assert "the decode server computes it" in why(source)
    target.step(finished=["d"])
    assert not target.told.received


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (None, "no_ticket"),
        ({"do_remote_prefill": False}, "not_kept"),
        ({"do_remote_prefill": True}, "unusable_ticket"),
        ({"do_remote_prefill": True, "kvflow_ticket": {}, "kvflow_prompt": "another"}, "another_prompt"),
    ],
)
def test_prompts_that_decode_computes_are_counted(
    pair: tuple[Server, Server], params: dict[str, Any] | None, reason: str
) -> None:
    """A router that does not pass tickets on is noticed by nothing else: the texts are right, only late."""
    _, target = pair
    target.scheduler.add(asked("d", params))
    assert target.recomputed == [(reason, PROMPT)]


@pytest.mark.parametrize(
    "params", [{"do_remote_prefill": True}, {"do_remote_prefill": True, "kvflow_ticket": {}, "kvflow_prompt": 5}]
)
def test_reply_of_another_connector_is_computed_here(params: dict[str, Any]) -> None:
    with pytest.raises(KvflowError, match="not prefilled by a server with kvflow"):
        take_reference(params)
    scheduler = ConnectorScheduler(describe_groups([group()]), is_prefill=False, is_decode=True)
    request = asked("d", params)
    scheduler.add(request)
    assert scheduler.num_elsewhere(request, 0) == 0


@pytest.mark.parametrize(
    ("request_id", "params"),
    [("p", {"transfer_id": "x" * 300}), ("p", {"transfer_id": "\ud800"}), ("p", {"transfer_id": {}}), ("x" * 300, {})],
    ids=["long", "no text", "no string", "long id of vLLM"],
)
def test_ids_of_any_kind_are_handed_over(pair: tuple[Server, Server], request_id: str, params: dict[str, Any]) -> None:
    """Clients choose these ids. An error in vLLM's scheduler would end the server."""
    source, target = pair
    request = asked(request_id, {"do_remote_decode": True, **params})
    source.scheduler.add(request)
    source.step({request_id: (0, PROMPT, PREFILL)})
    delays, reply_params = source.scheduler.finished(request, (), is_complete=True)
    assert delays
    taken_over = asked(f"decode {request_id}", reply_params or {})
    target.scheduler.add(taken_over)
    target.scheduler.allocated(taken_over, [DECODE], PROMPT - 1)
    target.until(lambda: taken_over.request_id in target.told.received)
    assert not target.told.failed


def test_requests_of_one_ticket_wait_for_the_first(pair: tuple[Server, Server]) -> None:
    """With `n=2`, vLLM asks again in its next step, and finds the first request's blocks in its prefix cache."""
    source, target = pair
    _, params = prefill(source)
    first, second = (asked(f"{number}_d", params) for number in range(2))
    for request in (first, second):
        target.scheduler.add(request)
    assert target.scheduler.num_elsewhere(first, 0) == PROMPT - 1
    assert target.scheduler.num_elsewhere(second, 0) is None
    target.scheduler.allocated(first, [DECODE], PROMPT - 1)
    target.until(lambda: first.request_id in target.told.received)
    assert target.scheduler.num_elsewhere(second, 0) is None
    target.scheduler.receiving.take_received(target.told.received)
    assert target.scheduler.num_elsewhere(second, 8) == 0
    target.scheduler.allocated(second, [DECODE], 0)
    target.step()
    assert target.told.received == {first.request_id}
    assert not target.told.failed


@pytest.mark.parametrize("ends", ["aborted", "computed here"])
def test_request_that_others_wait_for_is_not_received(pair: tuple[Server, Server], ends: str) -> None:
    source, target = pair
    _, params = prefill(source)
    first, second = (asked(f"{number}_d", params) for number in range(2))
    for request in (first, second):
        target.scheduler.add(request)
    if ends == "aborted":
        target.scheduler.finished(first, (), is_complete=False)
    else:
        target.scheduler.allocated(first, [DECODE], 0)
    assert target.scheduler.num_elsewhere(second, 0) == 0


def test_prefill_is_told_of_a_request_that_decode_has_refused(pair: tuple[Server, Server]) -> None:
    """For a refused request vLLM passes a stand-in with another prompt, and aborts it at once."""
    source, target = pair
    _, params = prefill(source)
    request = asked("d", params, num_tokens=1)
    request.abort_immediately = True
    target.scheduler.add(request)
    assert target.scheduler.finished(request, (), is_complete=False) == (False, None)
    target.step(finished=["d"])
    source.until(lambda: "p" in source.told.sent)


def test_prompt_that_is_given_as_embeddings_is_computed_here(pair: tuple[Server, Server]) -> None:
    source, target = pair
    params = {"do_remote_prefill": True, "transfer_id": "room", "remote_engine_id": "tcp://127.0.0.1:5"}
    for server, asked_for in ((source, {"do_remote_decode": True}), (target, params)):
        request = SimpleNamespace(request_id="embeddings", prompt_token_ids=None, kv_transfer_params=asked_for)
        server.scheduler.add(request)
        assert server.scheduler.num_elsewhere(request, 0) == 0
        server.step()
        assert server.scheduler.finished(request, (), is_complete=True) == (False, None)


def test_other_prompt_fails_where_the_router_makes_the_rooms(pair: tuple[Server, Server]) -> None:
    """Decode can compare prompts only once the cache has arrived; it then discards the cache."""
    source, target = pair
    prefill(source, transfer_id="shared")
    assert source.ranks.ticket is not None
    params = {"do_remote_prefill": True, "transfer_id": "shared", "remote_engine_id": source.ranks.ticket["address"]}
    request = asked("d", params)
    request.prompt_token_ids = [token + 1 for token in request.prompt_token_ids]
    target.scheduler.add(request)
    target.scheduler.allocated(request, [DECODE], PROMPT - 1)
    target.until(lambda: "d" in target.told.received)
    assert target.told.failed == {"d"}
    assert target.recomputed == [("another_prompt", PROMPT - 1)]


@pytest.mark.parametrize(
    "more",
    [{"lora_request": SimpleNamespace(lora_name="other")}, {"mm_features": [SimpleNamespace(identifier="image")]}],
)
def test_equal_tokens_are_not_all_of_a_prompt(more: dict[str, Any]) -> None:
    plain, other = asked("d", {}), asked("d", {})
    vars(other).update(more)
    assert digest_of(plain) != digest_of(other)


@pytest.mark.parametrize("pair", [{"timeouts": {**TIMEOUTS, "grant_s": 0.3}}], indirect=True)
def test_decode_may_wait_for_blocks_for_longer_than_prefill_for_decode(pair: tuple[Server, Server]) -> None:
    source, target = pair
    _, params = prefill(source)
    request = asked("d", params)
    target.scheduler.add(request)
    for _ in range(100):  # a second, in which decode's queue does not move
        target.step()
        source.step()
        time.sleep(0.01)
    assert not source.told.sent
    target.scheduler.allocated(request, [DECODE], PROMPT - 1)
    target.until(lambda: "d" in target.told.received)
    assert not target.told.failed


@pytest.mark.parametrize("prompt", [range(PROMPT + 1), range(1, PROMPT + 1)])
def test_other_prompt_is_computed_here(prompt: Sequence[int]) -> None:
    """A router that mixes up requests must not make a server answer the wrong one."""
    scheduler = ConnectorScheduler(describe_groups([group()]), is_prefill=False, is_decode=True)
    digest = digest_of(SimpleNamespace(prompt_token_ids=list(prompt)))
    request = asked("d", {"do_remote_prefill": True, "kvflow_ticket": {}, "kvflow_prompt": digest})
    scheduler.add(request)
    assert scheduler.num_elsewhere(request, 0) == 0


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([group("ChunkedLocalAttentionSpec")], "kind are not served"),
        ([group(num_head_slots=1)], "packed together"),
        ([group(tokens_per_state=4)], "compressed"),
        ([group(num_kv_heads=HEADS + 1)], "as many heads as the model"),
    ],
)
def test_unknown_caches_are_refused(groups: list[Any], message: str) -> None:
    tensors = list(np.zeros((LAYERS, BLOCKS, HEADS, BLOCK, CONTENT), np.uint8))
    with pytest.raises(ConfigError, match=message):
        describe(tensors, *groups)


@pytest.mark.parametrize(("backend", "tokens_per_cell"), [("CPU_ATTN", BLOCK), ("FLASH_ATTN", 1)])
def test_cells_of_the_cpu_backend_are_opaque(backend: str, tokens_per_cell: int) -> None:
    tensors = list(np.zeros((LAYERS, BLOCKS, HEADS, BLOCK, CONTENT), np.uint8))
    component = describe(tensors, backend=backend).layout.components[0]
    assert component.tokens_per_slot == BLOCK
    assert component.regions[0].tokens_per_cell == tokens_per_cell


def test_latents_are_the_same_on_every_worker() -> None:
    tensors = list(np.zeros((LAYERS, BLOCKS, 1, BLOCK, CONTENT), np.uint8))
    layout = describe(tensors, group("MLAAttentionSpec"), backend="MLA").layout
    assert layout.components[0].regions[0].heads == (0, 1)


def test_backend_that_answers_wrongly_is_refused() -> None:
    with pytest.raises(ConfigError, match="CPU_MLA"):
        describe(
            list(np.zeros((LAYERS, BLOCKS, 1, BLOCK, CONTENT), np.uint8)), group("MLAAttentionSpec"), backend="CPU_MLA"
        )


def test_tensor_of_another_shape_is_refused() -> None:
    with pytest.raises(ConfigError, match="blocks, heads, tokens and content"):
        describe([np.zeros((2, BLOCKS, BLOCK, HEADS, CONTENT), np.uint8)])
    with pytest.raises(LayoutError):
        describe([np.zeros((BLOCKS, HEADS + 1, BLOCK, CONTENT), np.uint8)])


@pytest.mark.parametrize("found", [{"unknown": 1}, {"port": "x"}, {"affinity": [0.5]}])
def test_unusable_options_are_refused(found: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="options cannot be read"):
        read_options(found)


def test_unknown_timeouts_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown setting"):
        read_options({"timeouts": {"unknown_s": 1.0}}).for_rank({}, {})
    with pytest.raises(ConfigError, match="unknown setting"):
        read_options({"limits": {"unknown": 1}}).for_rank({}, {})


def test_workers_without_a_port_of_their_own_take_one_of_the_range() -> None:
    assert read_options({"ports": "7000-7099"}).bind_to("fd00::1") == "tcp://[fd00::1]:7000-7099"
    assert read_options({"ports": "7000-7099"}).bind_to("10.0.0.1", 6_999) == "tcp://10.0.0.1:6999"
    assert read_options({}).bind_to("10.0.0.1") == "tcp://10.0.0.1:0"
    first = unused_port()
    with servers(ports=f"{first}-{first + 99}") as (source, _):
        ticket = source.ranks.ticket
        assert ticket is not None
        assert first <= Endpoint.parse(str(ticket["address"])).port <= first + 99
    with pytest.raises(ConfigError, match="range of ports"), servers(ports="7099-7000"):
        pass


def test_a_server_with_several_hosts_gives_all_of_them_and_listens_at_each() -> None:
    hosts, query = "127.0.0.2,127.0.0.3", unused_port()
    with servers(host=hosts, plain=True, port=unused_port(), mooncake_port=query) as (source, _):
        ticket = source.ranks.ticket
        assert ticket is not None
        endpoint = Endpoint.parse(str(ticket["address"]))
        assert endpoint.host == hosts
        for host in hosts.split(","):
            for port in (endpoint.port, query):
                socket.create_connection((host, port)).close()


def test_router_that_makes_the_rooms_and_knows_the_engine() -> None:
    """The dialect of vLLM's MooncakeConnector."""
    port = unused_port()
    with servers(mooncake_port=port) as (source, target):
        with urlopen(f"http://127.0.0.1:{port}/query", timeout=10) as answer:
            engine_id = json.load(answer)["0"]["engine_id"]
        with pytest.raises(HTTPError, match="404"):
            urlopen(f"http://127.0.0.1:{port}/register", timeout=10)
        prefill(source, transfer_id="xfer-1")
        begin_decode(target, {"do_remote_prefill": True, "transfer_id": "xfer-1", "remote_engine_id": engine_id})
        target.until(lambda: "d" in target.told.received)
        assert not target.told.failed
        assert target.tokens(DECODE)[:PROMPT] == list(range(1, PROMPT + 1))


def test_window_moves_as_far_as_the_last_token_sees() -> None:
    """Layer 0 keeps all tokens; vLLM frees the blocks of the other layers behind the window."""
    window = 5
    groups = [group(layers=[0]), group("SlidingWindowSpec", [1, 2], sliding_window=window)]
    full, sliding = [7, 3, 12], [9, 10, 11]
    with servers(*groups) as (source, target):
        request = asked("p", {"do_remote_decode": True})
        source.scheduler.add(request)
        source.step({"p": (0, 6, [full, sliding])})
        source.step({"p": (6, PROMPT - 6, [full, sliding])})
        _, params = source.scheduler.finished(request, (), is_complete=True)
        assert [source.pool.holders[block] for block in sliding] == [0, 1, 1]  # token 5 is the first that token 9 sees
        source.step(finished=["p"])
        assert params is not None
        request = asked("d", params)
        target.scheduler.add(request)
        target.step()
        assert target.scheduler.num_elsewhere(request, 0) == PROMPT - 1
        target.scheduler.allocated(request, [DECODE, [0, 24, 25]], PROMPT - 1)
        target.step()
        target.until(lambda: "d" in target.told.received)
        source.until(lambda: "p" in source.told.sent)
        source.scheduler.sending.take_sent(source.told.sent)
        assert not target.told.failed
        source.until(lambda: not any(source.pool.holders))
        assert target.tokens(DECODE, [0])[: PROMPT - 1] == list(range(1, PROMPT))
        assert target.tokens([24, 25], [1, 2])[1 : PROMPT - BLOCK - 1] == list(range(BLOCK + 2, PROMPT))
        assert not target.cells[1:, 0].any()


def test_query_port_in_use_is_refused() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        with (
            LoopThread() as loop,
            pytest.raises(ConfigError, match="cannot be bound"),
            serve_query("127.0.0.1", port, "tcp://127.0.0.1:1", loop),
        ):
            pass


def test_server_of_both_roles_takes_over_and_hands_on() -> None:
    """One server receives one request and sends another, over the same transport."""
    options = read_options({"timeouts": TIMEOUTS})
    caches = describe(list(np.zeros((LAYERS, BLOCKS, HEADS, BLOCK, CONTENT), np.uint8)))
    ranks = open_ranks(options, Place("both", 0, 1, is_prefill=True, is_decode=True, share=str), caches.layout)
    try:
        sender = ranks.send("room", "request")
        ticket = ranks.ticket
        assert ticket is not None
        receiver = ranks.announce(Reference(ticket_for_room(ticket, "room"), None, None), "request")
        receiver.grant(tokens=(0, BLOCK), pages=caches.pages([GroupBlocks(0, [5])], BLOCK))
        sender.finish((0, BLOCK), caches.pages([GroupBlocks(0, [4])], BLOCK))
        assert receiver.wait(20.0) is Outcome.SUCCESS
        assert {update.transfer for update in ranks.completed()} == {sender, receiver}
    finally:
        ranks.close()


@pytest.mark.parametrize("has_directory", [False, True])
def test_worker_answers_for_those_after_it(tmp_path: Path, *, has_directory: bool) -> None:
    """The second worker of a server registers with the first one, which alone is listed in a directory."""
    options = read_options({"timeouts": TIMEOUTS, "registry": f"file://{tmp_path}" if has_directory else None})
    shared: list[str] = []

    def share(value: str | None) -> str:
        shared.extend([] if value is None else [value])
        return shared[0]

    with ExitStack() as stack:
        found = []
        for number in range(2):
            caches = describe(list(np.zeros((LAYERS, BLOCKS, HEADS, BLOCK, CONTENT), np.uint8)))
            place = Place("server", number, 2, is_prefill=True, is_decode=False, share=share)
            found.append(open_ranks(options, place, caches.layout))
            stack.callback(found[-1].close)
        tickets = [ranks.ticket or {} for ranks in found]
        assert [ticket["engine_rank"] for ticket in tickets] == [0, 1]
        assert tickets[0]["address"] == tickets[1]["address"] == shared[0]


def mamba(**values: object) -> Any:
    """Return a group with layers 1 and 2: 3 inputs of 8 + 2 + 2 channels, and 4 heads of 2 x 3."""
    spec = {
        "mamba_type": SimpleNamespace(name="MAMBA2"),
        "mamba_cache_mode": "none",
        "num_speculative_blocks": 0,
        "tp_replicated": False,
        "shapes": ((3, 12), (4, 2, 3)),
        "dtypes": (torch.float32, torch.float32),
        **values,
    }
    return group("MambaSpec", [1, 2], **spec)


@pytest.mark.parametrize("channels_first", [False, True])
def test_parts_of_a_convolution_are_shared_one_by_one(*, channels_first: bool) -> None:
    """The second of two workers holds the second half of each block of channels, and of the heads."""
    shapes = ((12, 3) if channels_first else (3, 12), (4, 2, 3))
    groups = describe_groups([group(layers=[0]), mamba(shapes=shapes)], channels_first=channels_first)
    caches = {"layer0": torch.zeros(BLOCKS, HEADS, BLOCK, CONTENT, dtype=torch.uint8)}
    for name in ("layer1", "layer2"):
        pages = torch.arange(BLOCKS * 60, dtype=torch.float32).view(BLOCKS, 60)
        caches[name] = pages.view(torch.uint8).view(BLOCKS, 1, 1, 240)
    described = describe_caches(
        caches,
        groups,
        backend="CPU_ATTN",
        layers={name: int(name[-1]) for name in caches},
        total_kv_heads=dict.fromkeys(caches, 2 * HEADS),
        tp_size=2,
        tp_rank=1,
        fingerprint="model",
    )
    state = described.layout.components[1]
    assert (state.kind, state.tokens_per_slot) == ("slot", 3)
    regions = [region for region in state.regions if region.layer == 2]
    assert {region.tensor: region.heads for region in regions} == {
        "conv.0": (8, 16),
        "conv.1": (2, 4),
        "conv.2": (2, 4),
        "state": (4, 8),
    }
    offsets = {region.tensor: (region.address - pages.data_ptr()) // 4 for region in regions}
    per_channel = 3 if channels_first else 1
    assert offsets == {"conv.0": 0, "conv.1": 8 * per_channel, "conv.2": 10 * per_channel, "state": 36}
    table = described.pages([None, GroupBlocks(0, [7])], PROMPT)
    assert table == {"kv0": None, "kv1": TokenPages((0, 3), [7])}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mamba_type": SimpleNamespace(name="SHORT_CONV")}, "of this kind"),
        ({"mamba_cache_mode": "align"}, "--no-enable-prefix-caching"),
        ({"num_speculative_blocks": 1}, "like these"),
        ({"shapes": ((3, 8), (4, 2, 3))}, "too few channels"),
    ],
)
def test_other_states_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        describe_groups([mamba(**values)])


@pytest.mark.parametrize("num_tokens", [1, PROMPT])
def test_state_is_sent_as_it_is_before_the_last_token(num_tokens: int, pair: tuple[Server, Server]) -> None:
    """Decode recomputes the last token, which would otherwise enter the state twice."""
    prompt, digest = list(range(num_tokens)), digest_of(asked("p", {}, num_tokens))
    scheduler = ConnectorScheduler(describe_groups([group(layers=[0]), mamba()]), is_prefill=True, is_decode=False)
    ticket, pool = pair[0].ranks.ticket, Pool()
    assert ticket is not None
    scheduler.answers.ticket = ticket
    scheduler.held.pool = pool
    request = asked("p", {"do_remote_decode": True}, num_tokens)
    request._all_token_ids, request.num_prompt_tokens = list(prompt), num_tokens
    scheduler.add(request)
    computed = max(num_tokens - 1, 1)
    assert request.num_prompt_tokens == len(request.prompt_token_ids) == len(request._all_token_ids) == computed
    orders = scheduler.step(scheduled({"p": (0, computed, [PREFILL, [9]])}))
    assert orders.chunks["p"].is_last
    assert orders.chunks["p"].blocks[1] == GroupBlocks(0, [9])
    assert pool.holders[9] == 1
    _, params = scheduler.finished(request, (), is_complete=True)
    assert params is not None
    assert params["kvflow_prompt"] == digest


@pytest.mark.parametrize(
    "pair", [{"backend": "nixl"}, {"backend": "mooncake"}], ids=["nixl", "mooncake"], indirect=True
)
def test_servers_hand_over_again_after_they_slept(pair: tuple[Server, Server]) -> None:
    source, target = pair
    addresses = set()
    for sleeper in (source, target, None):
        _, params = prefill(source)
        addresses.add((params["remote_host"], params["remote_port"]))
        taken_over = begin_decode(target, params)
        target.until(lambda: "d" in target.told.received)
        assert not target.told.failed
        assert target.tokens(DECODE)[: PROMPT - 1] == list(range(1, PROMPT))
        target.scheduler.finished(taken_over, (), is_complete=True)
        target.cells[:] = 0
        for server in pair:
            server.until(server.is_idle)
            server.told, server.awaited = Results(), set()
        if sleeper is not None:
            sleeper.scheduler.reset()
            assert not sleeper.scheduler.awaits_report  # vLLM would step while it sleeps
            for step in (sleeper.worker.suspend, sleeper.step, sleeper.worker.resume):
                step()
                step()  # vLLM may repeat them
            sleeper.step()
    assert len(addresses) == 1


@pytest.mark.parametrize("sleeps", ["prefill", "decode"])
def test_what_moves_fails_when_a_server_goes_to_sleep(pair: tuple[Server, Server], sleeps: str) -> None:
    source, target = pair
    request = asked("p", {"do_remote_decode": True})
    source.scheduler.add(request)
    source.step({"p": (0, 6, PREFILL)})
    begin_decode(target, reply_of(source))
    source.until(lambda: all(move.is_asked for move in source.worker._moves.values()))
    sleeper = source if sleeps == "prefill" else target
    sleeper.worker.suspend()
    assert not sleeper.worker.is_moving
    target.until(lambda: "d" in target.told.failed)
    assert source.scheduler.finished(request, (), is_complete=False) == (True, None)
    source.step(finished=["p"])
    source.until(lambda: "p" in source.told.sent)
    for server in pair:
        server.until(server.is_idle)

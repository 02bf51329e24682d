"""Nothing that vLLM's objects do in one request touches another request."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from kvflow.engines.vllm.dialect import NOTHING_KEPT
from kvflow.engines.vllm.metadata import ChunkOrder, GrantOrder, GroupBlocks, StepOrders
from tests.engines.raising import ERRORS, Raising, name_of
from tests.engines.test_vllm_adapter import (
    DECODE,
    PROMPT,
    Server,
    asked,
    begin_decode,
    prefill,
    scheduled,
    servers,
)

pytestmark = pytest.mark.parametrize("error", ERRORS, ids=name_of)


def undisturbed(source: Server, target: Server) -> None:
    """Check that another request is handed over, and that all blocks come back."""
    _, params = prefill(source)
    begin_decode(target, params)
    target.until(lambda: "d" in target.told.received)
    source.until(lambda: "p" in source.told.sent)
    assert "d" not in target.told.failed
    assert target.tokens(DECODE)[: PROMPT - 1] == list(range(1, PROMPT))
    source.until(lambda: not any(source.pool.holders) and not source.worker.is_moving)
    target.until(lambda: not any(target.pool.holders) and not target.worker.is_moving)


def carry_out(server: Server, orders: StepOrders) -> None:
    server.awaited |= {*orders.awaited, *orders.granted}
    server.worker.preempt(orders)
    server.worker.begin(orders)
    server.worker.receive(orders)
    server.worker.saved(orders)
    server._take(server.worker.take_results(()), server.worker.take_report())


def request_of(tokens: object, params: Mapping[str, Any]) -> Any:
    return SimpleNamespace(request_id="bad", kv_transfer_params=params, prompt_token_ids=tokens)


def test_prompt(error: BaseException) -> None:
    with servers() as (source, target):
        bad = request_of(Raising(error), {"do_remote_decode": True})
        source.scheduler.add(bad)
        assert source.scheduler.finished(bad, (), is_complete=True) == (False, None)
        _, params = prefill(source)
        bad = request_of([Raising(error)], params)
        target.scheduler.add(bad)
        assert target.scheduler.num_elsewhere(bad, 0) == 0
        begin_decode(target, params)
        target.until(lambda: "d" in target.told.received)
        assert not target.told.failed


def test_prompt_that_raises_later(error: BaseException) -> None:
    with servers() as (source, target):
        _, params = prefill(source)
        bad = asked("bad", params)
        target.scheduler.add(bad)
        bad.prompt_token_ids = Raising(error)
        assert target.scheduler.num_elsewhere(bad, 0) == 0
        target.scheduler.allocated(bad, [DECODE], 0)
        target.step()
        source.until(lambda: "p" in source.told.sent)
        source.told.sent.clear()
        undisturbed(source, target)


def test_blocks_of_a_prompt_that_is_computed(error: BaseException) -> None:
    with servers() as (source, target):
        bad = asked("bad", {"do_remote_decode": True})
        source.scheduler.add(bad)
        orders = source.scheduler.step(scheduled({"bad": (0, PROMPT, [Raising(error)])}))
        assert name_of(error) in orders.abandoned["bad"]
        carry_out(source, orders)
        _, params = source.scheduler.finished(bad, (), is_complete=True)
        assert params == NOTHING_KEPT
        source.step(finished=["bad"])
        undisturbed(source, target)


def test_blocks_to_receive_into(error: BaseException) -> None:
    with servers() as (source, target):
        _, params = prefill(source)
        bad = asked("bad", params)
        target.scheduler.add(bad)
        target.step()
        assert target.scheduler.num_elsewhere(bad, 0) == PROMPT - 1
        target.scheduler.allocated(bad, [Raising(error)], PROMPT - 1)  # type: ignore[list-item]
        target.step()
        target.until(lambda: "bad" in target.told.failed)
        target.scheduler.receiving.take_received(["bad"])
        source.until(lambda: "p" in source.told.sent)
        source.told.sent.clear()
        undisturbed(source, target)


def test_blocks_that_workers_are_given(error: BaseException) -> None:
    with servers() as (source, target):
        _, params = prefill(source)
        bad = asked("bad", params)
        target.scheduler.add(bad)
        target.step()
        blocks = [GroupBlocks(0, Raising(error))]  # type: ignore[arg-type]
        carry_out(target, StepOrders(granted={"bad": GrantOrder(0, PROMPT - 1, blocks)}))
        target.until(lambda: "bad" in target.told.failed)
        target.scheduler.receiving.take_received(["bad"])
        source.until(lambda: "p" in source.told.sent)
        source.told.sent.clear()
        chunks = {"bad": ChunkOrder(0, PROMPT, blocks, is_last=True, metadata=b"")}
        carry_out(source, StepOrders(opened={"bad": "room"}, chunks=chunks, awaited=["bad"]))
        source.step(finished=["bad"])
        undisturbed(source, target)

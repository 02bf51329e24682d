"""Honest load over a budget is postponed: everything arrives, and nothing counts as an anomaly."""

from contextlib import AsyncExitStack
from types import ModuleType

import anyio
import numpy as np
import pytest

import kvflow
from kvflow.directory.server import RegistryStatistics
from kvflow.gate import rates, shares
from kvflow.gate.rates import Budget
from tests.support.instances import anomalies_of, decode_config, prefill_config
from tests.support.pools import PagedShape, Pool
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

NUM_RANKS = 4

LONG_HELLO = Pool(PagedShape(NUM_RANKS, 4, (0, 1), 8, num_layers=400), 0)
"""Its regions make a Hello of more than `LONG_BYTES`, which is parsed in a thread."""

BUDGETS: dict[str, list[tuple[ModuleType, str, object]]] = {
    "hello_over_budget": [(rates, "HELLOS", Budget(1, 1))],
    "lookup_over_share": [(shares, "MAX_LOOKUPS", 2)],
    "message_over_budget": [(rates, "MAX_QUEUED_BYTES", 100_000)],
}


def num_lookups(statistics: RegistryStatistics) -> int:
    """Return how many lookups wait, or were answered at once because too many do."""
    return statistics.waiting_lookups + statistics.postponed.get("lookup_over_share", 0)


@pytest.mark.parametrize("kind", BUDGETS)
async def test_honest_load_over_a_budget_is_postponed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, budget, value in BUDGETS[kind]:
        monkeypatch.setattr(module, budget, value)
    layout = LONG_HELLO.layout
    tokens, page = (0, 4), np.zeros(1, np.int64)
    async with kvflow.Registry() as registry, AsyncExitStack() as stack:
        prefill = kvflow.PrefillRank(prefill_config(registry.endpoint), layout)
        decode = [
            await stack.enter_async_context(
                kvflow.DecodeRank(decode_config(registry.endpoint, instance=f"decode-{number}"), layout)
            )
            for number in range(NUM_RANKS)
        ]

        async def receive(room: int) -> None:
            async with decode[room].receive(room, prefill="prefill", tokens=tokens, pages={"kv": page}) as receiver:
                await receiver.done()

        async def send(room: int) -> None:
            async with prefill.send(room) as sender:
                await sender.finish(tokens, {"kv": page})

        async with anyio.create_task_group() as tasks:
            for room in range(NUM_RANKS):
                tasks.start_soon(receive, room)
            await until(lambda: num_lookups(registry.statistics()) >= NUM_RANKS)
            await stack.enter_async_context(prefill)
            if kind == "message_over_budget":
                async with prefill._context.turn:  # the first Hello is not parsed yet
                    await until(lambda: prefill.statistics().postponed)
            for room in range(NUM_RANKS):
                tasks.start_soon(send, room)
        everyone = [prefill.statistics(), *(rank.statistics() for rank in decode)]
        assert [anomalies_of(statistics) for statistics in everyone] == [{}] * len(everyone)
        assert registry.statistics().anomalies == {}
        postponed = prefill.statistics().postponed | registry.statistics().postponed
        assert list(postponed) == [kind]

"""Messages of attackers to a prefill rank, and honest transfers in the background."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio

import kvflow
from kvflow.geometry.routes import Route
from kvflow.trust import ClientKeys
from kvflow.wire.messages import OLDEST_VERSION, PROTOCOL_VERSION, Hello, PeerId, RankId
from tests.attack.guarded import Attacker, Guarded, works
from tests.support.instances import Deployment, make_pool
from tests.support.waiting import until

__all__ = ["UnderWay", "hello_to", "insider", "num_hellos_rejected", "under_way"]


class UnderWay:
    """Counter of the successful background transfers."""

    count = 0

    async def go_on(self) -> None:
        """Wait until three more have succeeded."""
        enough = self.count + 3
        await until(lambda: self.count >= enough)


@asynccontextmanager
async def under_way(deployment: Deployment) -> AsyncIterator[UnderWay]:
    """Transfer and check rooms in the background; at the end, check that another transfer succeeds."""
    done = UnderWay()
    is_over = False

    async def hand_over() -> None:
        while not is_over:
            await works(deployment, 10_000 + done.count % 50_000)
            done.count += 1

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(hand_over)
        try:
            yield done
        finally:
            is_over = True
    await works(deployment, 9_999)


def insider(deployment: Guarded, name: str = "other") -> Attacker:
    """Return an attacker with a valid key of another instance."""
    keys = ClientKeys(deployment.keys[name], (deployment.keys["prefill"].public,))
    return Attacker(deployment.prefill[0].endpoint, keys)


def num_hellos_rejected(rank: kvflow.PrefillRank) -> int:
    """Count those over the budget and, if this machine reads too slowly for that, those that are refused."""
    counts = rank.statistics()
    return counts.postponed.get("hello_over_budget", 0) + counts.anomalies.get("hello_refused", 0)


def hello_to(deployment: Deployment, rank: int = 0, *, instance: str = "other", **changes: Any) -> Hello:
    """Return the Hello of a decode rank that wants nothing."""
    fields: dict[str, Any] = {
        "peer": PeerId(RankId(instance, rank), 99),
        "to": deployment.prefill[0].me,
        "attempt": 0,
        "versions": (OLDEST_VERSION, PROTOCOL_VERSION),
        "lease_s": 5.0,
        "backend": deployment.prefill[0].config.backend,
        "backend_metadata": b"",
        "layout": make_pool().layout,
        "route": Route(engine_rank=0, slices=()),
    }
    return Hello(**(fields | changes))

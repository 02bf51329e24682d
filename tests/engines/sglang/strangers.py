"""Decode ranks of kvflow without SGLang, which send grants that SGLang would never send."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll

import kvflow
import kvflow.blocking
from kvflow.engines.sglang.buffers import Shard
from kvflow.engines.sglang.memory import describe_pools
from kvflow.geometry import Location
from tests.engines.sglang import sides
from tests.engines.sglang.models import Rank

__all__ = ["ask_for"]

STEPS_S = 5.0


def ask_for(side: sides.Side, tables: list[dict[str, list[int] | None]], starts: list[int]) -> list[tuple[int, str]]:
    """Request rooms, numbered from 1 on, from a prefill side, and poll its senders until each has changed.

    Args:
        side: Prefill, over the `memory` transport.
        tables: Pages to ask for, by component.
        starts: First tokens to ask for.

    Returns:
        The status of each room's sender, and why it has failed.
    """
    manager = side.managers[0]
    ends = [side.end(0, room + 1) for room in range(len(tables))]
    with _stranger(side) as rank:
        prefill = kvflow.Endpoint(manager.local_ip, manager.rank_port)
        receivers = [rank.announce(room + 1, prefill=prefill) for room in range(len(tables))]
        for receiver, pages, start in zip(receivers, tables, starts, strict=True):
            receiver.grant(tokens=(start, start + 2 * side.model.page), pages=pages)
        deadline = time.monotonic() + STEPS_S
        while time.monotonic() < deadline and any(end.poll() == KVPoll.Bootstrapping for end in ends):
            time.sleep(1e-3)
        found = []
        for end in ends:
            status = end.poll()
            found.append((int(status), sides.reason_of(end) if status == KVPoll.Failed else ""))
            end.clear()
    return found


@contextlib.contextmanager
def _stranger(side: sides.Side) -> Iterator[Any]:
    model, rank = side.model, Rank(1, 0)
    args, _ = sides.describe(model.pool(rank), None, model, rank, "decode")
    fingerprint = side.managers[0].pools.layout.fingerprint
    shard = Shard(1 if model.is_mla else model.heads, is_mla=model.is_mla)
    pools = describe_pools(args, shard, fingerprint=fingerprint, location=Location("DRAM", 0))
    config = kvflow.DecodeConfig(instance="stranger", backend="memory")
    with kvflow.blocking.DecodeRank(config, pools.layout) as opened:
        yield opened

"""Both ends of a transfer, in one event loop; usually they are two processes.

Run it with `python examples/async_pair.py`; it needs `kvflow[nixl-cu12]`, or another backend.
"""

import anyio
import torch
from anyio.abc import TaskStatus

import kvflow


def new_pool() -> dict[str, list[torch.Tensor]]:  # 4 layers; 64 pages of 16 tokens, 8 heads, 128 elements
    """Return zeroed pages of keys and values."""
    return {name: [torch.zeros(64, 16, 8, 128) for _ in range(4)] for name in ("k", "v")}


def describe(pool: dict[str, list[torch.Tensor]]) -> kvflow.KVLayout:
    """Return the layout of a pool."""
    return kvflow.layout_from_tensors(pool, axes="page token head dim", heads=(0, 8), fingerprint="my-model")


async def prefill(pool: dict[str, list[torch.Tensor]], *, task_status: TaskStatus[dict[str, object]]) -> None:
    """Compute a prompt, and send its pages."""
    config = kvflow.PrefillConfig(instance="prefill-0", backend="nixl")
    async with kvflow.PrefillRank(config, describe(pool)) as rank, rank.send(room=7) as sender:
        task_status.started(rank.ticket(room=7))  # a small JSON-serialisable dict; the router passes it to decode
        await sender.chunk((0, 32), {"kv": [5, 9]})  # tokens 0 to 31 are computed, in pages 5 and 9
        await sender.finish((32, 40), {"kv": [2]}, metadata=b"first token")


async def decode(ticket: dict[str, object], pool: dict[str, list[torch.Tensor]]) -> None:
    """Receive the pages of the prompt."""
    config = kvflow.DecodeConfig(instance="decode-0", backend="nixl")
    async with (
        kvflow.DecodeRank(config, describe(pool)) as rank,
        rank.receive(prefill=ticket, tokens=(0, 40), pages={"kv": [1, 0, 3]}) as receiver,
    ):
        print(await receiver.done())  # or raises TransferFailed
    # from here on the pages are yours, unless kvflow says that they are quarantined


async def main() -> None:
    """Run both ends."""
    source, target = new_pool(), new_pool()  # a pool must outlive its rank
    async with anyio.create_task_group() as tasks:
        ticket = await tasks.start(prefill, source)
        tasks.start_soon(decode, ticket, target)


if __name__ == "__main__":
    anyio.run(main)

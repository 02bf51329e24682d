"""A synchronous scheduler with both ends in one process, without torch.

Run it with `python examples/numpy_only.py`.
"""

import numpy as np
from numpy.typing import NDArray

import kvflow
import kvflow.blocking
from kvflow.blocking import BlockingReceiver, LoopThread, Memory, Outcome

Pool = dict[str, list[NDArray[np.float32]]]


def describe(pool: Pool) -> kvflow.KVLayout:
    """Return the layout of a pool."""
    return kvflow.layout_from_tensors(pool, axes="page token head dim", heads=(0, 2), fingerprint="example")


def new_pool(value: float) -> Pool:
    """Return pages of keys and values."""
    return {name: [np.full((8, 4, 2, 16), value, np.float32) for _ in range(2)] for name in ("k", "v")}


source, target = new_pool(1.0), new_pool(0.0)
free_pages = list(range(8))

with LoopThread() as loop:
    of_prefill = kvflow.PrefillConfig(instance="prefill-0", backend="memory")
    of_decode = kvflow.DecodeConfig(instance="decode-0", backend="memory")
    with (
        kvflow.blocking.PrefillRank(of_prefill, describe(source), loop=loop) as prefill,
        kvflow.blocking.DecodeRank(of_decode, describe(target), loop=loop) as decode,
    ):
        pages = [free_pages.pop() for _ in range(3)]
        ticket = prefill.ticket(1)  # the router passes it from prefill to decode
        receiver = decode.receive(prefill=ticket, tokens=(0, 10), pages={"kv": pages})
        sender = prefill.send(1)
        sender.chunk((0, 8), {"kv": [4, 6]})
        sender.finish((8, 10), {"kv": [1]}, metadata=b"token")

        waiting = {receiver: pages}
        held: dict[BlockingReceiver, list[int]] = {}
        while waiting or held:  # the scheduler's loop: a step of the model would be here
            for update in decode.completed():
                one = update.transfer
                if one in waiting and update.outcome is not Outcome.PENDING:  # decided
                    pages = waiting.pop(one)
                    if update.outcome is Outcome.SUCCESS:
                        print("start decoding with", one.result().metadata)
                    else:
                        print("tell the client:", update.failure)  # at once
                        held[one] = pages  # until nobody can write to them
                if one in held and update.memory is Memory.SAFE:
                    free_pages.extend(held.pop(one))

        prefill.start_drain()  # on SIGTERM; go on with steps until `is_drained`
        while not prefill.is_drained:
            pass

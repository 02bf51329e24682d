"""A subscriber to vLLM's events about its KV cache, as routers have that know which server has which prefix."""

import json
from collections.abc import Callable
from typing import Any, Final, Self

import anyio
import msgspec
import zmq
import zmq.asyncio
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

__all__ = ["KVEvents", "publish_to"]

EVENT_S: Final = 20.0
SOON_MS: Final = 500


def publish_to(address: str) -> tuple[str, str]:
    """Return arguments with which a server publishes its events to a subscriber at an address."""
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": address}
    return ("--kv-events-config", json.dumps(config))


class KVEvents:
    """What a server has announced since a subscriber listens at an address.

    Attributes:
        stored: The last event about each stored block, by its hash, as one about this block alone.
        removed: Hashes of blocks that were removed.
    """

    def __init__(self, address: str) -> None:
        self.stored: dict[Any, BlockStored] = {}
        self.removed: set[Any] = set()
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self._socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
        self._socket.bind(address)
        self._socket.subscribe(b"")

    def close(self) -> None:
        """Stop listening."""
        self._socket.close(linger=0)

    async def until(self, is_so: Callable[[Self], bool]) -> None:
        """Take events until a condition holds."""
        with anyio.fail_after(EVENT_S):
            while not is_so(self):
                self._take(await self._socket.recv_multipart())

    async def some(self) -> bool:
        """Return whether there are any events, now or soon."""
        if await self._socket.poll(SOON_MS):
            self._take(await self._socket.recv_multipart())
        return bool(self.stored)

    def _take(self, frames: list[bytes]) -> None:
        for event in self._decoder.decode(frames[-1]).events:
            if isinstance(event, BlockRemoved):
                self.removed.update(event.block_hashes)
            elif isinstance(event, BlockStored):
                parents = [event.parent_block_hash, *event.block_hashes]
                for number, own in enumerate(event.block_hashes):
                    tokens = event.token_ids[number * event.block_size :][: event.block_size]
                    keys = event.extra_keys and event.extra_keys[number : number + 1]
                    self.stored[own] = msgspec.structs.replace(
                        event,
                        block_hashes=[own],
                        parent_block_hash=parents[number],
                        token_ids=tokens,
                        extra_keys=keys,
                    )

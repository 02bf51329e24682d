"""Lists that NIXL has prepared for a peer: each describes the right memory, and each is released."""

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from kvflow.geometry import BlockLists, Blocks
from tests.backends.endpoints import Endpoint, open_endpoints, same

pytestmark = pytest.mark.anyio

SLOT = 512
NUM_SLOTS = 12


class Lists:
    """Records lists that are prepared and not yet released: peer and kind of memory, by handle."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, api: Any) -> None:
        self.held: dict[int, tuple[str, str]] = {}
        self.wanted: list[tuple[str, str]] = []
        prepare, release = api.nixl_agent.prep_xfer_dlist, api.nixl_agent.release_dlist_handle

        def record(agent: Any, peer: str, runs: Any, kind: str) -> Any:
            self.wanted.append((peer, kind))
            handle = prepare(agent, peer, runs, kind)
            self.held[handle._handle] = (peer, kind)
            return handle

        def forget(agent: Any, handle: Any) -> None:
            del self.held[handle._handle]
            release(agent, handle)

        monkeypatch.setattr(api.nixl_agent, "prep_xfer_dlist", record)
        monkeypatch.setattr(api.nixl_agent, "release_dlist_handle", forget)


@pytest.fixture
def lists(monkeypatch: pytest.MonkeyPatch, api: Any) -> Lists:
    return Lists(monkeypatch, api)


def of_slots(source: Endpoint, target: Endpoint) -> BlockLists:
    rows = [[(side.address, SLOT, side.buffer.device_id, SLOT, NUM_SLOTS)] for side in (source, target)]
    return BlockLists(*(np.array(of_side, np.uint64) for of_side in rows))


async def write(source: Endpoint, target: Endpoint, slot: int) -> None:
    """Write a slot with block lists of its own."""
    position = np.array([slot], np.int32)
    source.post(slot, target, Blocks(of_slots(source, target), position, position, SLOT))
    await source.take_ends(slot + 1)


@pytest.mark.parametrize("mark", [None, "has_erred", "has_failed"], ids=["kept", "removed", "replaced"])
async def test_no_more_than_the_last_lists_of_a_peer_are_held(lists: Lists, mark: str | None) -> None:
    """Whether the peer's endpoint is kept, removed or replaced when the peer reconnects."""
    async with open_endpoints("nixl", NUM_SLOTS * SLOT) as (source, target):
        backend: Any = source.backend
        both = sorted([("NIXL_INIT_AGENT", "DRAM"), (target.name, "DRAM")])
        for slot in range(NUM_SLOTS):
            await write(source, target, slot)
            assert sorted(lists.held.values()) == both
            if slot % 2:
                if mark is not None:
                    setattr(backend._agent._endpoints.find(target.name), mark, True)
                await backend.disconnect(target.name)
                await source.connect(target)
                assert sorted(lists.held.values()) == (both if mark is None else [])
        assert {end.error for end in source.ends()} == {None}
        assert same(source, target)
        await source.close()
        assert not lists.held


async def test_lists_that_are_refused_end_the_post_and_no_later_one(lists: Lists) -> None:
    """A peer may declare the wrong kind of memory."""
    async with open_endpoints("nixl", NUM_SLOTS * SLOT) as (source, target):
        backend: Any = source.backend
        peer = backend._peers[target.name]
        honest = peer.memory
        peer.memory = replace(honest, memory_kind="VRAM")
        await write(source, target, 0)
        assert lists.wanted == [("NIXL_INIT_AGENT", "DRAM"), (target.name, "VRAM")]
        peer.memory = honest
        await write(source, target, 1)
        assert [end.error is None for end in source.ends()] == [False, True]
        assert sorted(lists.held.values()) == sorted([("NIXL_INIT_AGENT", "DRAM"), (target.name, "DRAM")])
        await source.close()
        assert not lists.held

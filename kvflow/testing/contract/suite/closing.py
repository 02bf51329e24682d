"""Closing of an endpoint, and of its peers."""

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from kvflow.errors import BackendError
from kvflow.testing.contract.base import ContractBase, write
from kvflow.testing.endpoints import Endpoint, copies, fresh_name, same

__all__ = ["ClosingContract"]

SLOT = 64 * 1024
NUM_SLOTS = 40


def post_every_slot(source: Endpoint, target: Endpoint, notice: bytes = b"") -> None:
    """Post one write for each slot, with the slot as its id."""
    for slot in range(NUM_SLOTS):
        source.post(slot, target, copies(source, target, (slot * SLOT,), SLOT), notice)


class ClosingContract(ContractBase):
    """`aclose`, on either side."""

    async def test_closing_gives_every_post_its_end(self) -> None:
        """Successful posts have arrived. Unless a write lingers, nothing lands after the fence."""
        async with self.open_some(NUM_SLOTS * SLOT) as (source, target):
            post_every_slot(source, target)
            await source.close()
            after = target.buffer.read()
            assert sorted(end.post_id for end in source.ends()) == list(range(NUM_SLOTS))
            for end in source.ends():
                start = end.post_id * SLOT
                assert end.error is not None or same(source, target, start, start + SLOT)
            if not any(end.lingers for end in source.ends()):
                assert np.array_equal(target.buffer.read(), after)

    async def test_closing_without_waiting_leaves_the_source_alone(self) -> None:
        """What is written to the pages after their posts have ended is never sent."""
        async with self.open_some(NUM_SLOTS * SLOT, count=3, impatient=True) as (source, target, other):
            post_every_slot(source, target)
            await source.close()
            source.buffer.write(0, np.zeros(NUM_SLOTS * SLOT, np.uint8))
            await write(other, target, 1)  # writes in flight may land first
            await anyio.lowlevel.checkpoint()
            assert target.buffer.read().all()

    @pytest.mark.parametrize("moment", ["before the post", "right after the post", "while posts run", "after its end"])
    async def test_posts_to_a_target_that_closes_end_once(self, moment: str) -> None:
        """A transport may not notice that the target is gone, so posts may end only when the source closes."""
        async with self.open_some(NUM_SLOTS * SLOT, impatient=True) as (source, target):
            if moment == "before the post":
                await target.close()
            post_every_slot(source, target, b"one")
            if moment == "while posts run":
                await source.take_ends()
            elif moment == "after its end":
                await source.take_ends(NUM_SLOTS)
            await target.close()
            source.post(NUM_SLOTS, target, copies(source, target))
            await source.close()
            assert sorted(end.post_id for end in source.ends()) == list(range(NUM_SLOTS + 1))
            assert len(target.notices()) <= NUM_SLOTS

    async def test_a_target_that_closes_does_not_hold_up_other_peers(self) -> None:
        async with self.open_some(NUM_SLOTS * SLOT, count=3, impatient=True) as (source, leaving, staying):
            post_every_slot(source, leaving)
            await leaving.close()
            await write(source, staying, NUM_SLOTS)
            await source.backend.disconnect(leaving.name)
            await write(source, staying, NUM_SLOTS + 1)

    async def test_both_sides_may_close_at_once(self) -> None:
        async with self.open_some(NUM_SLOTS * SLOT, impatient=True) as (one, other):
            post_every_slot(one, other)
            post_every_slot(other, one)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(one.close)
                tasks.start_soon(other.close)
            for endpoint in (one, other):
                assert sorted(end.post_id for end in endpoint.ends()) == list(range(NUM_SLOTS))

    async def test_everything_is_harmless_after_close(self) -> None:
        async with self.open_some() as (source, target):
            await write(source, target, 1)
            await source.close()
            source.backend.watch(active=True)
            source.backend.watch(active=False)
            await source.backend.disconnect(target.name)
            await source.backend.disconnect("nobody")
            with pytest.raises(BackendError):
                source.post(2, target, copies(source, target))
            num_events = len(source.events)
            await source.close()
            assert len(source.events) == num_events

    async def test_closing_without_opening_is_harmless(self) -> None:
        backend = self.new_backend()
        backend.watch(active=True)
        await backend.disconnect("nobody")
        await backend.aclose()
        async with backend:
            await Endpoint(fresh_name(), backend, self.new_buffer(64)).open()
        await backend.aclose()

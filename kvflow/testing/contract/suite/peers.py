"""Peers that connect, disconnect and return."""

import anyio
import pytest

from kvflow.errors import BackendError
from kvflow.testing.contract.base import ContractBase, write
from kvflow.testing.endpoints import Endpoint, copies, fresh_name, same

__all__ = ["PeerContract"]

SLOT = 64 * 1024


class PeerContract(ContractBase):
    """`connect` and `disconnect`."""

    async def test_connecting_twice_changes_nothing(self) -> None:
        async with self.open_some() as (source, target):
            await source.connect(target)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(source.connect, target)
                tasks.start_soon(source.connect, target)
            await write(source, target, 1)

    async def test_connecting_to_a_connected_peer_does_not_even_read_the_metadata(self) -> None:
        async with self.open_some() as (source, target):
            await source.backend.connect(target.name, b"damaged")
            await write(source, target, 1)

    async def test_a_peer_with_a_principal_is_connected_like_any_other(self) -> None:
        async with self.open_one() as source, self.open_one(seed=1) as target, self.open_one(seed=2) as third:
            with pytest.raises(BackendError):
                await source.backend.connect_authenticated(target.name, b"damaged", "one")
            await source.backend.connect_authenticated(target.name, target.backend.metadata(), "one")
            await source.backend.connect_authenticated(third.name, third.backend.metadata(), "two")
            await write(source, target, 1)
            await write(source, third, 2)
            await source.backend.connect_authenticated(target.name, b"damaged", "two")
            await write(source, target, 3)
            await source.backend.disconnect(target.name)
            with pytest.raises(BackendError):
                source.post(100, target, copies(source, target))

    async def test_one_side_alone_can_connect(self) -> None:
        """Peers write to a decode rank that has never connected to them."""
        async with self.open_one() as source, self.open_one(seed=1) as target:
            await source.connect(target)
            await write(source, target, 1)
            source.post(2, target, copies(source, target), b"noticed")
            await source.take_ends(2)
            await target.take_notices()

    async def test_a_peer_that_is_not_connected_cannot_be_written_to(self) -> None:
        async with self.open_some() as (source, target), self.open_one(seed=9) as third:
            with pytest.raises(BackendError):
                source.post(9, third, copies(source, third), b"bad")
            await write(source, target, 1)
            assert not same(source, third, 0, 64)

    async def test_a_peer_can_be_disconnected_and_connected_again(self) -> None:
        async with self.open_some() as (source, target):
            for post_id in range(3):
                await write(source, target, post_id)
                await source.backend.disconnect(target.name)
                await source.backend.disconnect(target.name)
                with pytest.raises(BackendError):
                    source.post(100, target, copies(source, target))
                await source.connect(target)
            await write(source, target, 9)

    async def test_disconnecting_an_unknown_peer_is_ignored(self) -> None:
        async with self.open_some() as (source, target):
            await source.backend.disconnect("nobody")
            await write(source, target, 1)

    async def test_disconnecting_lets_posts_end(self) -> None:
        async with self.open_some(8 * SLOT) as (source, target):
            for post_id in range(8):
                source.post(post_id, target, copies(source, target, (post_id * SLOT,), SLOT))
            await source.backend.disconnect(target.name)
            await source.connect(target)
            await source.backend.disconnect(target.name)
            await source.take_ends(8)
            assert {end.error for end in source.ends()} == {None}
            assert same(source, target)

    async def test_a_new_incarnation_of_a_peer_can_be_written_to(self) -> None:
        """It has another agent name; the old one is disconnected late or never."""
        async with self.open_one() as source:
            async with self.open_one(seed=1) as first:
                await source.connect(first)
                await write(source, first, 1)
            async with self.open_one(seed=2) as second:
                await source.connect(second)
                await write(source, second, 2)
                await source.backend.disconnect(first.name)
                await write(source, second, 3)
            async with self.open_one(seed=3) as third:
                await source.connect(third)
                await write(source, third, 4)

    async def test_live_peers_do_not_hold_up_the_wait_for_last_bytes_of_ended_ones(self) -> None:
        async with self.open_some() as (source, target):
            await write(source, target, 1)
            is_quiet = await target.backend.outlast(target.backend.domain())
            assert is_quiet or not target.backend.capabilities.ends_with_process
            await write(source, target, 2)

    async def test_a_peer_that_restarts_under_its_old_name_is_reached_once_it_is_connected_anew(self) -> None:
        """The pages of its earlier incarnations have no owner, and must not change any more."""
        name, earlier = fresh_name("restarted"), list[Endpoint]()  # keeps their memory allocated
        async with self.open_one() as source:
            for incarnation in range(3):
                async with self.open_one(seed=incarnation + 1, name=name) as target:
                    await source.connect(target)
                    await write(source, target, incarnation)
                    await target.close()
                    await source.backend.disconnect(name)
                    assert not any(same(source, other, 0, 64) for other in earlier)
                    earlier.append(target)

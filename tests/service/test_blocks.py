"""With equal pages on both sides, a transport with prepared lists receives blocks instead of addresses."""

import pytest

from kvflow.backends.nixl.posts import PostQueue, Write
from kvflow.geometry import Blocks
from tests.support.instances import deploy

pytestmark = pytest.mark.anyio


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """Types of the posted moves, in order."""
    kinds: list[type] = []
    put = PostQueue.add_write

    def record(self: PostQueue, write: Write) -> None:
        kinds.append(type(write.moves))
        put(self, write)

    monkeypatch.setattr(PostQueue, "add_write", record)
    return kinds


async def test_whole_and_partial_pages_go_as_blocks(posted: list[type]) -> None:
    async with deploy("nixl") as deployment:
        request = deployment.request(1, 30)
        await request.hand_over(chunk=7)
        request.assert_arrived()
    assert set(posted) == {Blocks}


async def test_pages_of_other_heads_go_by_address(posted: list[type]) -> None:
    async with deploy("nixl", prefill_tp=2) as deployment:
        request = deployment.request(1, 30)
        await request.hand_over(chunk=7)
        request.assert_arrived()
    assert Blocks not in posted
    assert posted

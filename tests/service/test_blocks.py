"""Where both sides keep their pages alike, a transport with prepared lists is told blocks, not addresses."""

import pytest

from kvflow.backends.nixl import NixlBackend
from kvflow.geometry import Blocks, Descriptors
from tests.support.instances import deploy

pytestmark = pytest.mark.anyio


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """What kind of moves has been posted, in order."""
    kinds: list[type] = []
    submit = NixlBackend._submit

    def record(
        self: NixlBackend, post_id: int, peer: str, kind: str, moves: Descriptors | Blocks, notice: bytes
    ) -> None:
        kinds.append(type(moves))
        submit(self, post_id, peer, kind, moves, notice)

    monkeypatch.setattr(NixlBackend, "_submit", record)
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

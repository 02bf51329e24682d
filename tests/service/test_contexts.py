"""Context parallelism in the whole service: token shards of ranks, over real transports and with digests."""

import pytest

from tests.service.test_any_layout import hand_over, transfer
from tests.support.contexts import PAIRS, context_world, split
from tests.support.worlds import Split

pytestmark = pytest.mark.anyio


@pytest.mark.host_memory
@pytest.mark.parametrize("model", ["gqa", "mla"])
@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
async def test_over_memory(model: str, prefill: Split, decode: Split) -> None:
    await hand_over(context_world(model, prefill, decode), "memory", digest_every=1)


@pytest.mark.parametrize("packing", ["auto", "always"])
@pytest.mark.parametrize(("prefill", "decode"), [PAIRS[0], PAIRS[4], PAIRS[6], PAIRS[11]])
async def test_over_nixl(prefill: Split, decode: Split, packing: str) -> None:
    await hand_over(context_world("gqa", prefill, decode), "nixl", digest_every=1, packing=packing)


@pytest.mark.host_memory
async def test_another_interleave_than_the_declared_one_gives_other_bytes() -> None:
    world = context_world("mla", split(1, 2, 1), split(1, 1, 1), declared=16)
    await transfer(world, "memory", digest_every=1)
    with pytest.raises(AssertionError, match="not equal"):
        world.assert_arrived()

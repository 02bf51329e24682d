"""Blocks that are shared, preempted, or scarce."""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("transformers")

from transformers.generation.continuous_batching.requests import RequestStatus

from tests.engines.transformers.models import prompt
from tests.engines.transformers.pair import Pair
from tests.support.slow import slow_except


@pytest.fixture
def pair() -> Iterator[Pair]:
    with Pair() as started:
        yield started


def test_prefix_that_decode_has_is_not_sent(pair: Pair) -> None:
    first, second = prompt(0, 64) + prompt(1, 30), prompt(0, 64) + prompt(2, 30)
    sizes = []
    for room, tokens in (("first", first), ("second", second)):
        pair.decode(tokens, pair.prefill(tokens, room))
        assert pair.result(room) == pair.reference(tokens)
        sizes.append(pair.receivers[room].result().num_bytes)
    token_bytes = sizes[0] // len(first)
    assert sizes == [94 * token_bytes, 30 * token_bytes]


@pytest.mark.parametrize("allow_block_sharing", slow_except([False], [True, False]))
def test_prompt_is_computed_again_behind_what_was_offered(allow_block_sharing: bool) -> None:
    """In other blocks, or in the held ones if the cache shares blocks."""
    with Pair(allow_block_sharing=allow_block_sharing) as pair:
        compute_twice(pair, prompt(0, 110))


def compute_twice(pair: Pair, tokens: list[int]) -> None:
    end = pair.prefill_end
    calls: list[str] = []
    offer = end._offer

    def offer_and_lose(room: str) -> None:
        offer(room)
        if end._offered[room]:
            calls.append(room)
        if len(calls) == 2:
            soft_reset(end.engine, room)

    end._offer = offer_and_lose  # type: ignore[method-assign]
    pair.decode(tokens, pair.prefill(tokens, "again"))
    assert pair.result("again") == pair.reference(tokens)
    assert len(calls) > 2
    assert pair.receivers["again"].result().num_bytes == 110 * 2 * 3 * 3 * 16 * 4  # nothing is sent twice
    end.engine.manager.get_result(timeout=20)
    assert not end.engine.blocks("again")["full_attention"]


def soft_reset(engine: Any, room: str) -> None:
    """Preempt a request, as the manager's offloading does when blocks run out."""
    state = engine.scheduler.active_requests[room]
    engine.cache.free_blocks(room, no_cache=True)
    again = state.create_equivalent_initial_request()
    state._status = RequestStatus.FINISHED
    engine.scheduler.finish_request(room)
    engine.scheduler.add_waiting_request(again)

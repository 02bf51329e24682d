"""Requests that move from one manager to another while they are running, compared with one that stays."""

import queue
from collections.abc import Iterator

import pytest

pytest.importorskip("transformers")

from kvflow import LocalProtocolError, Outcome
from kvflow.engines.transformers.prefill import Moved
from tests.engines.transformers.models import prompt
from tests.engines.transformers.pair import Pair

NUM_TOKENS = 24
"""What the managers generate by default."""


@pytest.fixture(scope="module", params=["full", "mixed"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with Pair(request.param) as started:
        yield started


def move(pair: Pair, tokens: list[int], room: str, after: int) -> Moved:
    """Let the first manager generate some tokens of its own request, and take it out; it cannot finish before."""
    manager = pair.prefill_end.engine.manager
    manager.add_request(tokens, request_id=room, max_new_tokens=10_000, streaming=True)
    outputs = manager.output_router.output_queue
    while len(outputs.get(timeout=20).generated_tokens) < after:
        pass
    moved = pair.prefill_end.move_request(room).result(20)
    assert moved.tokens[: len(tokens)] == tokens
    while True:
        try:
            outputs.get_nowait()
        except queue.Empty:
            return moved


@pytest.mark.parametrize(("length", "after"), [(45, 1), (16, 5), (70, 12)])
def test_the_text_goes_on_as_if_it_had_stayed(pair: Pair, length: int, after: int) -> None:
    tokens, room = prompt(length, length), f"{length} tokens"
    moved = move(pair, tokens, room, after)
    written = moved.tokens[length:]
    assert after <= len(written) < NUM_TOKENS
    pair.decode(moved.tokens[:-1], moved.ticket, max_tokens=NUM_TOKENS - len(written) + 1)
    rest = pair.result(room)
    assert isinstance(rest, list)
    assert [*written[:-1], *rest] == pair.reference(tokens)
    assert pair.receivers[room].result().num_bytes
    moved.sender.wait(20)
    assert moved.sender.outcome is Outcome.SUCCESS


def test_another_cache_gives_another_text(pair: Pair) -> None:
    """So the text comes from the cache that has moved."""
    tokens, room = prompt(45, 45), "spoiled"
    moved = move(pair, tokens, room, 1)
    written = moved.tokens[45:]
    pair.spoil()
    pair.decode(moved.tokens[:-1], moved.ticket, max_tokens=NUM_TOKENS - len(written) + 1)
    rest = pair.result(room)
    assert isinstance(rest, list)
    assert [*written[:-1], *rest] != pair.reference(tokens)


def test_all_blocks_come_back(pair: Pair) -> None:
    allocators = pair.prefill_end.engine.cache.cache_allocators.values()
    moved = move(pair, prompt(9, 45), "leaves", 3)
    pair.decode(moved.tokens[:-1], moved.ticket, max_tokens=3)
    assert isinstance(pair.result("leaves"), list)
    moved.sender.wait(20)
    with pair.prefill_end.engine.paused():
        pair.prefill_end.step()
        pair.prefill_end.engine._give_back_safe()
        assert not any("leaves" in one.block_table for one in allocators)
        assert not pair.prefill_end.engine._held


def test_what_does_not_run_does_not_move(pair: Pair) -> None:
    with pytest.raises(LocalProtocolError, match="not running"):
        pair.prefill_end.move_request("nobody").result(20)
    pair.prefill(prompt(1, 20), "is handed over")
    with pytest.raises(LocalProtocolError, match="not running"):
        pair.prefill_end.move_request("is handed over").result(20)
    pair.abort("prefill", "is handed over")


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_request_goes_on_where_it_was_if_the_other_manager_does_not_take_it(pair: Pair, *, has_begun: bool) -> None:
    tokens, room = prompt(30, 45), f"comes back {has_begun}"
    moved = move(pair, tokens, room, 3)
    assert len(moved.tokens) < 45 + NUM_TOKENS
    if has_begun:
        pair.decode_end.rank.announce(prefill=moved.ticket).abort("no blocks")
    else:
        pair.decode_end.rank.decline(prefill=moved.ticket, detail="no blocks")
    assert goes_on(pair, room) == pair.reference(tokens)


def test_a_request_that_moves_can_be_cancelled(pair: Pair) -> None:
    moved = move(pair, prompt(31, 45), "cancelled", 3)
    pair.abort("prefill", "cancelled")
    assert moved.sender.wait(20) is Outcome.ABORTED
    while pair.used_pages("prefill"):
        moved.sender.wait(0.01)


def test_a_request_goes_on_when_its_end_is_closed() -> None:
    with Pair() as pair:
        tokens = prompt(32, 45)
        move(pair, tokens, "stays", 3)
        pair.prefill_end.__exit__(None, None, None)
        assert goes_on(pair, "stays") == pair.reference(tokens)
        with pytest.raises(LocalProtocolError):
            pair.prefill_end.move_request("stays").result(20)


def test_a_request_that_moves_fails_with_its_manager() -> None:
    with Pair() as pair:
        moved = move(pair, prompt(33, 45), "lost", 3)
        with pair.prefill_end.engine.paused():
            pair.prefill_end.engine.processor.fail_all_requests(RuntimeError("on purpose"))
        output = pair.prefill_end.engine.manager.output_router.output_queue.get(timeout=20)
        assert (output.request_id, output.error) == ("lost", "on purpose")
        assert moved.sender.wait(20) is Outcome.ABORTED


def goes_on(pair: Pair, room: str) -> list[int]:
    """Return the first tokens of a request that goes on in the first manager, and cancel it."""
    outputs = pair.prefill_end.engine.manager.output_router.output_queue
    generated: list[int] = []
    while len(generated) < NUM_TOKENS:
        output = outputs.get(timeout=20)
        assert (output.request_id, output.error) == (room, None)
        generated = output.generated_tokens
    pair.abort("prefill", room)
    while pair.used_pages("prefill"):
        pair.prefill_end.engine.wake()
    while not outputs.empty():
        outputs.get()
    return generated[:NUM_TOKENS]

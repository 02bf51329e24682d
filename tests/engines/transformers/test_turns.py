"""Conversations: a finished turn goes back to the manager that computes the next one."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

pytest.importorskip("transformers")

from kvflow import LocalProtocolError, Outcome
from tests.engines.transformers.models import make_manager, prompt
from tests.engines.transformers.servers import Server

NUM_TURNS = 3
NUM_ASKED = 20
"""Tokens that a user adds in each turn."""


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Server, Server]]:
    """Yield a manager that computes prompts, and one that writes texts, with blocks of other sizes."""
    with ExitStack() as stack:
        yield Server("prefill", stack, page_size=16), Server("decode", stack, page_size=8)


def converse(servers: tuple[Server, Server], seed: int, *, hands_back: bool) -> tuple[list[int], int]:
    """Hold a conversation; return its tokens, and how many of them were computed by the manager for prompts."""
    prefill, decode = servers
    tokens: list[int] = []
    before = prefill.computed
    for turn in range(NUM_TURNS):
        tokens += prompt(seed + turn, NUM_ASKED)
        room = f"{seed}, turn {turn}, {hands_back}"
        decode.decode.add_request(tokens, prefill.prefill.add_request(tokens, room).ticket)
        back = decode.prefill.hand_back(room) if hands_back else None
        tokens += decode.output(room).generated_tokens
        prefill.output(room)
        if back is not None:
            receiver = prefill.decode.add_request(tokens[:-1], back, max_new_tokens=1)
            assert receiver.wait(20) is Outcome.SUCCESS
            prefill.outputs.pop(room)
            assert prefill.output(room).generated_tokens == tokens[-1:]
    return tokens, prefill.computed - before


def test_a_turn_that_comes_back_is_not_computed_again(servers: tuple[Server, Server]) -> None:
    kept, computed = converse(servers, 1, hands_back=True)
    num_asked = NUM_TURNS * NUM_ASKED
    num_blocks = 16 * (NUM_TURNS - 1)  # what is in blocks that are not full
    assert num_asked <= computed <= num_asked + num_blocks
    alone = make_manager()
    alone.start()
    wanted: list[int] = []
    for turn in range(NUM_TURNS):
        wanted += prompt(1 + turn, NUM_ASKED)
        alone.add_request(wanted)
        wanted += alone.get_result(timeout=20).generated_tokens
    alone.stop(hard_stop=True)
    assert kept == wanted


def test_without_that_the_text_of_every_turn_is_computed_again(servers: tuple[Server, Server]) -> None:
    kept, with_it = converse(servers, 11, hands_back=True)
    other, without = converse(servers, 21, hands_back=False)
    assert len(kept) == len(other)
    num_written = (len(kept) - NUM_TURNS * NUM_ASKED) // NUM_TURNS
    assert without - with_it > (NUM_TURNS - 1) * (num_written - 16)
    sys.stdout.write(f"tokens computed for prompts: {with_it} with, {without} without, of {len(kept)}\n")


def test_what_is_not_there_cannot_come_back(servers: tuple[Server, Server]) -> None:
    with pytest.raises(LocalProtocolError, match="not running"):
        servers[1].prefill.hand_back("nobody")
    assert servers[1].prefill._handed_back == set()


def test_a_request_that_is_cancelled_does_not_come_back(servers: tuple[Server, Server]) -> None:
    manager = servers[1].manager
    manager.add_request(prompt(40, 30), request_id="cancelled", max_new_tokens=10_000, streaming=True)
    servers[1].prefill.hand_back("cancelled")
    servers[1].output("cancelled", 2)
    manager.cancel_request("cancelled")
    while servers[1].prefill.engine.has("cancelled"):
        servers[1].prefill.engine.wake()
    assert not servers[1].prefill.has("cancelled")
    assert servers[1].prefill._handed_back == set()

"""Two managers of transformers connected by kvflow, compared with a single one."""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch

from kvflow.testing.adapter import (
    check_abort_frees_pages,
    check_first_token_is_last,
    check_more_than_fit,
    check_refusal_is_told,
    check_restart,
    check_same_output,
    check_wrong_pages_show,
)
from tests.engines.transformers.models import make_model, prompt
from tests.engines.transformers.pair import Pair

PROMPTS = [prompt(seed, length) for seed, length in enumerate((45, 100, 16, 7, 70))]


@pytest.fixture(scope="module", params=["full", "mixed", pytest.param("window", marks=pytest.mark.slow)])
def any_pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with Pair(request.param) as started:
        yield started


def test_same_output_in_other_blocks_of_another_size(any_pair: Pair) -> None:
    for number in range(3):  # so that block ids differ on the two sides
        manager = any_pair.decode_end.engine.manager
        manager.add_request(prompt(50 + number, 40), request_id=f"own-{number}", max_new_tokens=4)
    check_same_output(any_pair, PROMPTS)
    check_wrong_pages_show(any_pair, prompt(60, 45))


@pytest.mark.slow
def test_large_blocks_to_small_ones_and_back() -> None:
    with Pair(page_sizes=(8, 32)) as pair:
        check_same_output(pair, PROMPTS)


def test_half_precision() -> None:
    """Rounding depends on what else is in a batch, and may decide between tokens that are almost equally likely."""
    model, tokens = make_model("mixed bfloat16"), prompt(3, 70)
    with Pair("mixed bfloat16") as pair:
        pair.decode(tokens, pair.prefill(tokens, "half"))
        right = pair.result("half")
        pair.spoil()
        pair.decode(tokens, pair.prefill(tokens, "spoiled"))
        wrong = pair.result("spoiled")
    assert isinstance(right, list)
    assert isinstance(wrong, list)
    assert worst_choice(model, tokens, right) < 0.02
    assert worst_choice(model, tokens, wrong) > 0.2


def worst_choice(model: Any, tokens: list[int], output: list[int]) -> float:
    """Return how far below the best token one of the output was, as a share of the range of logits."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens + output])).logits[0, len(tokens) - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    highest, lowest = logits.max(1).values, logits.min(1).values
    return float(((highest - chosen) / (highest - lowest)).max())


def test_abort(any_pair: Pair) -> None:
    check_abort_frees_pages(any_pair, PROMPTS[1])


@pytest.mark.slow
def test_more_requests_than_fit_wait_on_both_sides() -> None:
    """Each side has twelve blocks, of 16 tokens on prefill and of 8 on decode, for seven prompts of 5 and 9 blocks."""
    with Pair(num_blocks=12) as pair:
        check_more_than_fit(pair, [prompt(seed, 65) for seed in range(7)])


def test_first_token_is_the_last(any_pair: Pair) -> None:
    check_first_token_is_last(any_pair, PROMPTS[0])


def test_request_that_prefill_refuses_when_its_ticket_is_out(any_pair: Pair) -> None:
    """The manager validates a request only when its loop takes it in."""
    check_refusal_is_told(any_pair, PROMPTS[0])


@pytest.mark.slow
def test_restart() -> None:
    with Pair(handshake_s=2) as pair:  # time until a stale ticket's address counts as dead
        check_restart(pair, PROMPTS[0])

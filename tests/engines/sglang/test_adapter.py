"""The checks for every adapter, over SGLang's own queues in two processes over NIXL."""

from collections.abc import Iterator

import pytest

from kvflow import FailureReason
from kvflow.testing.adapter import (
    check_abort_frees_pages,
    check_first_token_is_last,
    check_kill,
    check_more_than_fit,
    check_refusal_is_told,
    check_restart,
    check_same_output,
    check_wrong_pages_show,
)
from tests.engines.sglang.servers import Servers

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]


def prompt(seed: int, length: int) -> list[int]:
    return [seed, *range(length - 1)]


PROMPTS = [prompt(seed, length) for seed, length in enumerate((45, 100, 16, 7))]


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with Servers() as started:
        yield started


def test_same_output(servers: Servers) -> None:
    check_same_output(servers, PROMPTS)
    check_wrong_pages_show(servers, prompt(60, 45))


def test_more_requests_than_fit_wait_on_both_sides(servers: Servers) -> None:
    check_more_than_fit(servers, [prompt(seed, 70) for seed in range(7)])


def test_first_token_is_the_last(servers: Servers) -> None:
    check_first_token_is_last(servers, PROMPTS[0])


def test_abort(servers: Servers) -> None:
    check_abort_frees_pages(servers, PROMPTS[1])


def test_request_that_prefill_refuses(servers: Servers) -> None:
    """SGLang does not tell its backend about a prompt that is too long, so decode times out."""
    check_refusal_is_told(servers, PROMPTS[0], reasons=[FailureReason.DEADLINE])


def test_restart(servers: Servers) -> None:
    """A room names no process, so decode waits for a request that the new prefill process never received."""
    check_restart(servers, PROMPTS[0], reasons=[FailureReason.DEADLINE])


def test_either_side_is_killed(servers: Servers) -> None:
    check_kill(servers, PROMPTS[1])

"""KvflowConnector beside other connectors, as vLLM's MultiConnector drives them."""

import pytest

from kvflow.engines.vllm.dialect import NOTHING_KEPT
from tests.engines.test_vllm_adapter import (
    BLOCK,
    DECODE,
    PREFILL,
    PROMPT,
    asked,
    begin_decode,
    prefill,
    scheduled,
    servers,
)

OTHERS = {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2]], "remote_port": 5600}
"""What vLLM's NixlConnector answers, in part."""


def test_an_answer_leaves_room_for_that_of_another_connector() -> None:
    """VLLM ends the server if two connectors answer with the same key; it merges the rest into one answer."""
    with servers() as (source, target):
        source.scheduler.answers.is_shared = True
        _, params = prefill(source)
        assert not params.keys() & OTHERS.keys()
        begin_decode(target, {**OTHERS, **params})
        target.until(lambda: "d" in target.told.received)
        source.until(lambda: "p" in source.told.sent)
        assert not target.told.failed


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole prompt", "chunks"])
def test_what_another_connector_loads_is_sent_once_it_has_not_failed(*, is_whole: bool) -> None:
    """VLLM learns of a failed load after the step that has computed from it, and computes the tokens itself then."""
    with servers() as (source, target):
        request = asked("p", {"do_remote_decode": True})
        source.scheduler.add(request)
        assert source.scheduler.num_elsewhere(request, 0) == 0
        source.step({"p": (4, PROMPT - 4 if is_whole else 2, PREFILL)}, loads=True)
        assert not source.worker._sending["p"].blocks
        source.step({"p": (0, PROMPT, PREFILL)})  # it had failed
        _, params = source.scheduler.finished(request, [PREFILL], is_complete=True)
        assert params is not None
        begin_decode(target, params)
        target.until(lambda: "d" in target.told.received)
        assert target.tokens(DECODE)[: PROMPT - 1] == list(range(1, PROMPT))


def test_a_prompt_that_is_computed_in_the_step_that_loads_it() -> None:
    with servers() as (source, target):
        request = asked("p", {"do_remote_decode": True})
        source.scheduler.add(request)
        assert source.scheduler.num_elsewhere(request, 0) == 0
        for token in range(BLOCK):  # what the other connector loads
            source.cells[:, PREFILL[0], :, token] = token + 1
        source.step({"p": (BLOCK, PROMPT - BLOCK, PREFILL)}, loads=True)
        delays, params = source.scheduler.finished(request, [PREFILL], is_complete=True)
        assert delays
        assert params is not None
        source.step(finished=["p"])
        begin_decode(target, params)
        target.until(lambda: "d" in target.told.received)
        assert target.tokens(DECODE)[: PROMPT - 1] == list(range(1, PROMPT))
        source.until(lambda: "p" in source.told.sent and not any(source.pool.holders))


@pytest.mark.parametrize(("shares_answers", "answer"), [(False, NOTHING_KEPT), (True, None)])
def test_vllm_steps_until_the_ticket_is_known(*, shares_answers: bool, answer: dict[str, bool] | None) -> None:
    """Workers report it with their first step; a request that has ended before then is computed by decode."""
    with servers() as (source, target):
        source.scheduler.answers.is_shared = shares_answers
        assert source.scheduler.awaits_report
        assert not target.scheduler.awaits_report
        request = asked("p", {"do_remote_decode": True})
        source.scheduler.add(request)
        orders = source.scheduler.step(scheduled({"p": (0, PROMPT, [PREFILL])}))
        source.worker.begin(orders)
        source.worker.saved(orders)  # the report of this step comes after the end of the request
        assert source.scheduler.finished(request, (), is_complete=True) == (True, answer)
        source.step(finished=["p"])
        source.until(lambda: "p" in source.told.sent and not source.scheduler.awaits_report)


def test_the_ticket_is_that_of_the_first_worker() -> None:
    with servers() as (source, _):
        report = source.worker.take_report()
        assert report is not None
        (ticket,) = report.tickets
        report.tickets.insert(0, {**ticket, "engine_rank": 1})
        source.scheduler.take_report(report)
        assert source.scheduler.answers.ticket == ticket

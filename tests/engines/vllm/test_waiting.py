"""A worker of vLLM that waits for its next step, on vLLM's own queue."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("vllm")

from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue, SpinCondition

from kvflow.engines.vllm import waiting
from kvflow.engines.vllm.waiting import sleep_while

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(60)]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[MessageQueue, MessageQueue]]:
    """Open both ends of a queue."""
    monkeypatch.setattr(SpinCondition, "wait", SpinCondition.wait)  # makes monkeypatch restore it after the test
    monkeypatch.setattr(waiting, "_due", set())
    writer = MessageQueue(1, 1)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    with ThreadPoolExecutor() as executor:
        ready = executor.submit(writer.wait_until_ready)
        reader.wait_until_ready()
        ready.result()
    yield writer, reader
    reader.shutdown()
    writer.shutdown()


@pytest.mark.parametrize("is_moving", [False, True])
def test_it_sleeps_only_while_requests_move(
    *, is_moving: bool, steps: tuple[MessageQueue, MessageQueue], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = steps
    vllms_own = SpinCondition.wait
    turns: list[None] = []
    monkeypatch.setattr(shm_broadcast, "sched_yield", lambda: turns.append(None))
    asked: list[None] = []

    def asks() -> bool:
        asked.append(None)
        return is_moving

    sleep_while(asks)
    with ThreadPoolExecutor() as executor:
        step = executor.submit(reader.dequeue, timeout=30)
        while not (len(asked) > 3 if is_moving else turns) and not step.done():
            pass
        writer.enqueue("a step")
        assert step.result() == "a step"
    assert bool(turns) is not is_moving
    assert (SpinCondition.wait is vllms_own) is not is_moving


def test_it_hears_the_next_step_once_nothing_moves(steps: tuple[MessageQueue, MessageQueue]) -> None:
    writer, reader = steps
    vllms_own = SpinCondition.wait
    answers = iter([True, True, False])
    sleep_while(lambda: next(answers, False))
    with ThreadPoolExecutor() as executor:
        step = executor.submit(reader.dequeue, timeout=30)
        writer.enqueue("a step")
        assert step.result() == "a step"
        step = executor.submit(reader.dequeue, timeout=30)
        while SpinCondition.wait is not vllms_own and not step.done():
            pass
        writer.enqueue("another step")
        assert step.result() == "another step"
    assert SpinCondition.wait is vllms_own

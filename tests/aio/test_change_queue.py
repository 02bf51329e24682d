"""Changes on the event loop reach threads that check, wait or select."""

import os
import select
import threading
import time

import pytest

from kvflow.aio.change_queue import ChangeQueue

NUM_ITEMS = 20_000


def is_readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


def test_what_has_changed_is_taken_once_in_order() -> None:
    changes: ChangeQueue[int] = ChangeQueue()
    for number in range(3):
        changes.add(number)
    assert (changes.take_changes(), changes.take_changes()) == ([0, 1, 2], [])


def test_nothing_is_lost_or_doubled_between_threads() -> None:
    changes: ChangeQueue[int] = ChangeQueue()
    taken: list[list[int]] = [[], []]

    def look(into: list[int]) -> None:
        while len(taken[0]) + len(taken[1]) < NUM_ITEMS:
            into.extend(changes.take_changes())

    threads = [threading.Thread(target=look, args=(into,)) for into in taken]
    for thread in threads:
        thread.start()
    for number in range(NUM_ITEMS):
        changes.add(number)
    for thread in threads:
        thread.join()
    assert sorted(taken[0] + taken[1]) == list(range(NUM_ITEMS))


def test_a_thread_that_waits_is_woken_by_a_change_and_by_closing() -> None:
    changes: ChangeQueue[int] = ChangeQueue()
    woken: list[list[int]] = []

    def wait() -> None:
        for _ in range(2):
            changes.wait(lambda: changes._changed or changes.is_closed, None)
            woken.append(changes.take_changes())

    thread = threading.Thread(target=wait)
    thread.start()
    while not changes._num_waiting:
        time.sleep(1e-4)
    changes.add(7)
    while not (woken and changes._num_waiting):
        time.sleep(1e-4)
    changes.close()
    thread.join()
    assert woken == [[7], []]


def test_a_further_change_of_what_was_not_taken_wakes_too() -> None:
    changes: ChangeQueue[list[int]] = ChangeQueue()
    item: list[int] = []
    changes.add(item)
    thread = threading.Thread(target=changes.wait, args=(lambda: len(item) == 2, None))
    thread.start()
    for number in range(2):
        while not changes._num_waiting:
            time.sleep(1e-4)
        item.append(number)
        changes.notify()
    thread.join()
    assert changes.take_changes() == [[0, 1]]


def test_waiting_ends_in_time() -> None:
    changes: ChangeQueue[int] = ChangeQueue()
    changes.wait(lambda: False, 0.01)
    assert changes._num_waiting == 0


@pytest.mark.parametrize("is_early", [True, False], ids=["asked before", "asked after"])
def test_the_descriptor_is_readable_while_there_is_something_to_take(*, is_early: bool) -> None:
    changes: ChangeQueue[int] = ChangeQueue()
    if is_early:
        assert not is_readable(changes.fileno())
    changes.add(1)
    assert is_readable(changes.fileno())
    changes.add(2)
    assert changes.take_changes() == [1, 2]
    assert not is_readable(changes.fileno())
    for number in range(100_000):  # more than a pipe holds
        changes.add(number)
    assert len(changes.take_changes()) == 100_000
    changes.close()


def test_a_descriptor_that_was_told_late_is_cleared_by_a_look_that_finds_nothing() -> None:
    changes: ChangeQueue[int] = ChangeQueue()
    fd = changes.fileno()
    changes.notify()  # for a change that has been taken already
    assert is_readable(fd)
    assert changes.take_changes() == []
    assert not is_readable(fd)
    changes.close()


def test_closing_gives_the_descriptor_back_and_nobody_gets_another() -> None:
    changes: ChangeQueue[int] = ChangeQueue()
    fd = changes.fileno()
    changes.close()
    changes.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    with pytest.raises(ValueError, match="closed"):
        changes.fileno()
    changes.add(1)
    assert changes.take_changes() == [1]

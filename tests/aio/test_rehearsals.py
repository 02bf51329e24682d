"""Rehearsing what waits, now and then."""

import anyio
import pytest

from kvflow.aio.rehearsals import TRIES, Rehearsals
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

INTERVAL_S = 1e-3


async def test_items_are_rehearsed_in_turn_until_they_are_removed() -> None:
    seen: list[str] = []

    def rehearse(item: str) -> bool:
        seen.append(item)
        return True

    rehearsals = Rehearsals(rehearse, INTERVAL_S)
    for item in ("a", "b", "c"):
        rehearsals.add(item)
    rehearsals.remove("b")
    rehearsals.remove("b")
    await until(lambda: len(seen) >= 4)
    assert seen[:4] == ["a", "c", "a", "c"]
    rehearsals.remove("a")
    rehearsals.remove("c")
    seen.clear()
    await anyio.sleep(3 * INTERVAL_S)
    assert not seen
    rehearsals.add("d")
    await until(lambda: seen)
    rehearsals.close()
    rehearsals.close()


async def test_one_that_cannot_be_rehearsed_is_passed_over() -> None:
    seen: list[int] = []

    def rehearse(item: int) -> bool:
        seen.append(item)
        return item == TRIES - 1

    rehearsals = Rehearsals(rehearse, INTERVAL_S)
    for item in range(2 * TRIES):
        rehearsals.add(item)
    await until(lambda: len(seen) > TRIES)
    rehearsals.close()
    assert seen[: TRIES + 1] == list(range(TRIES + 1))


async def test_what_has_just_happened_is_not_rehearsed() -> None:
    seen: list[str] = []

    def rehearse(item: str) -> bool:
        seen.append(item)
        rehearsals.skip()
        return True

    ticks = 0
    rehearsals = Rehearsals(rehearse, INTERVAL_S)
    rehearsals.add("a")
    take_turn = rehearsals._take_turn

    def count() -> None:
        nonlocal ticks
        ticks += 1
        take_turn()

    rehearsals._take_turn = count  # type: ignore[method-assign]
    await until(lambda: len(seen) >= 3)
    rehearsals.close()
    assert ticks >= 4


async def test_nothing_is_rehearsed_without_an_interval() -> None:
    seen: list[str] = []

    def rehearse(item: str) -> bool:
        seen.append(item)
        return True

    rehearsals = Rehearsals(rehearse, None)
    rehearsals.add("a")
    await anyio.sleep(3 * INTERVAL_S)
    rehearsals.remove("a")
    assert not seen

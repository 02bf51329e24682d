"""Periodic warm-ups of idle items."""

import anyio
import pytest

from kvflow.aio.warm_ups import TRIES, WarmUps
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

INTERVAL_S = 1e-3


async def test_items_are_warmed_up_in_turn_until_they_are_removed() -> None:
    seen: list[str] = []

    def warm_up(item: str) -> bool:
        seen.append(item)
        return True

    warm_ups = WarmUps(warm_up, INTERVAL_S)
    for item in ("a", "b", "c"):
        warm_ups.add(item)
    warm_ups.remove("b")
    warm_ups.remove("b")
    await until(lambda: len(seen) >= 4)
    assert seen[:4] == ["a", "c", "a", "c"]
    warm_ups.remove("a")
    warm_ups.remove("c")
    seen.clear()
    await anyio.sleep(3 * INTERVAL_S)
    assert not seen
    warm_ups.add("d")
    await until(lambda: seen)
    warm_ups.close()
    warm_ups.close()


async def test_one_that_cannot_be_warmed_up_is_passed_over() -> None:
    seen: list[int] = []

    def warm_up(item: int) -> bool:
        seen.append(item)
        return item == TRIES - 1

    warm_ups = WarmUps(warm_up, INTERVAL_S)
    for item in range(2 * TRIES):
        warm_ups.add(item)
    await until(lambda: len(seen) > TRIES)
    warm_ups.close()
    assert seen[: TRIES + 1] == list(range(TRIES + 1))


async def test_what_has_just_happened_is_not_warmed_up() -> None:
    seen: list[str] = []

    def warm_up(item: str) -> bool:
        seen.append(item)
        warm_ups.skip()
        return True

    ticks = 0
    warm_ups = WarmUps(warm_up, INTERVAL_S)
    warm_ups.add("a")
    take_turn = warm_ups._take_turn

    def count() -> None:
        nonlocal ticks
        ticks += 1
        take_turn()

    warm_ups._take_turn = count  # type: ignore[method-assign]
    await until(lambda: len(seen) >= 3)
    warm_ups.close()
    assert ticks >= 4


async def test_nothing_is_warmed_up_without_an_interval() -> None:
    seen: list[str] = []

    def warm_up(item: str) -> bool:
        seen.append(item)
        return True

    warm_ups = WarmUps(warm_up, None)
    warm_ups.add("a")
    await anyio.sleep(3 * INTERVAL_S)
    warm_ups.remove("a")
    assert not seen

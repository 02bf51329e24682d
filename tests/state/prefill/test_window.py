"""The window bounds posts, bytes and descriptors, but never starves a post that is larger than the window."""

from collections.abc import Callable

import pytest

from kvflow.state.effects import Cost
from kvflow.state.prefill.queue import Window


@pytest.mark.parametrize("of", [lambda size: Cost(size, 0), lambda size: Cost(0, size)], ids=["bytes", "descriptors"])
def test_window_admits_until_bytes_or_descriptors_run_out(of: Callable[[int], Cost]) -> None:
    window = Window(max_posts=8, max_bytes=100, max_descriptors=100)
    window.begin(of(60))
    assert not window.admits(of(41))
    assert window.admits(of(40))
    window.begin(of(40))
    assert window.admits(of(0))
    assert not window.admits(of(1))
    window.end_post(of(60))
    assert window.admits(of(60))


def test_window_admits_until_posts_run_out() -> None:
    window = Window(max_posts=2, max_bytes=100, max_descriptors=100)
    window.begin(Cost(1, 1))
    assert window.admits(Cost(1, 1))
    window.begin(Cost(1, 1))
    assert not window.admits(Cost(0, 0))
    window.end_post(Cost(1, 1))
    assert window.admits(Cost(0, 0))


@pytest.mark.parametrize("large", [Cost(1000, 1), Cost(1, 1000), Cost(1000, 1000)], ids=str)
def test_an_oversized_post_goes_alone(large: Cost) -> None:
    window = Window(max_posts=8, max_bytes=100, max_descriptors=100)
    assert window.admits(large)
    window.begin(large)
    assert window.admits(Cost(0, 0)) is (large.num_bytes <= 100 and large.num_descriptors <= 100)
    assert not window.admits(Cost(100, 100))
    window.end_post(large)
    window.begin(Cost(1, 1))
    assert not window.admits(large)


def test_what_has_begun_and_ended_leaves_nothing() -> None:
    window = Window(max_posts=8, max_bytes=100, max_descriptors=100)
    costs = [Cost(5, 7), Cost(0, 3), Cost(9, 0)]
    for cost in costs:
        window.begin(cost)
    assert (window.num_posts, window.num_bytes, window.num_descriptors) == (3, 14, 10)
    for cost in reversed(costs):
        window.end_post(cost)
    assert (window.num_posts, window.num_bytes, window.num_descriptors) == (0, 0, 0)

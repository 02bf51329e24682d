"""The window bounds posts and bytes, but never starves a post that is larger than itself."""

from kvflow.state.window import Window


def test_window_admits_until_posts_or_bytes_run_out() -> None:
    window = Window(max_posts=2, max_bytes=100)
    assert window.admits(60)
    window.begin(60)
    assert not window.admits(41)
    assert window.admits(40)
    window.begin(40)
    assert not window.admits(0)
    window.end(60)
    assert window.admits(60)
    assert (window.num_posts, window.num_bytes) == (1, 40)


def test_an_oversized_post_goes_alone() -> None:
    window = Window(max_posts=8, max_bytes=100)
    assert window.admits(1000)
    window.begin(1000)
    assert not window.admits(1)
    window.end(1000)
    window.begin(1)
    assert not window.admits(1000)

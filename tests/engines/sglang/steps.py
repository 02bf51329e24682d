"""Steps of a request through the queues of both sides, and checks at its end."""

from tests.engines.sglang.processes import Deployment

__all__ = ["TOKENS", "announce", "begin", "check_arrived", "check_failed", "check_nothing_is_left", "send"]

TOKENS = 70


def announce(pair: Deployment, room: int, tokens: int = TOKENS) -> None:
    """Add a request on both sides."""
    for side in (pair.prefill, pair.decode):
        side.tell("ask", what="add", room=room, tokens=tokens)


def begin(pair: Deployment, tokens: int = TOKENS, room: int = 0) -> int:
    """Add a request on both sides, wait until prefill may compute it, and compute it."""
    room = room or pair.room()
    announce(pair, room, tokens)
    assert pair.decode.tell("until", what="is_asked_for", room=room)
    assert pair.prefill.tell("until", what="is_bootstrapped", room=room)
    pair.prefill.tell("ask", what="compute", room=room, tokens=tokens)
    return room


def send(pair: Deployment, room: int, end: int, *, last: bool = False) -> None:
    """Send a chunk."""
    pair.prefill.tell("ask", what="send", room=room, end=end, last=last)


def check_nothing_is_left(pair: Deployment) -> None:
    """Check that every page is free, and that no manager holds state of a request."""
    for side in (pair.prefill, pair.decode):
        assert side.tell("until", what="is_free"), side.tell("ask", what="leftovers")
        assert side.tell("until", what="has_forgotten"), side.tell("ask", what="leftovers")


def check_arrived(pair: Deployment, room: int, tokens: int = TOKENS) -> None:
    """Check that decode has what prefill sent, and that prefill is done."""
    assert pair.decode.tell("until", what="has_arrived", room=room), pair.decode.tell("ask", what="was_told", room=room)
    assert pair.decode.tell("ask", what="wrong", room=room, tokens=tokens) == []
    assert pair.prefill.tell("until", what="is_over", room=room)
    assert pair.prefill.tell("ask", what="was_told", room=room) == ""


def check_failed(pair: Deployment, room: int, reason: str) -> None:
    """Check that decode has failed a request, and got its pages back because nothing can write to them."""
    assert pair.decode.tell("until", what="was_told", room=room)
    assert reason in pair.decode.tell("ask", what="was_told", room=room)
    assert pair.decode.tell("until", what="is_over", room=room)
    assert pair.decode.tell("ask", what="outcomes") == ["drained"]

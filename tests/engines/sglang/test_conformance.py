"""What SGLang's own unit tests ask of a transfer backend, asked of kvflow's through SGLang's queues.

docs/sglang.md says which of SGLang's tests each of them stands for.
"""

from collections.abc import Iterator

import pytest

from tests.engines.sglang.processes import Deployment, deployment
from tests.engines.sglang.steps import begin, check_nothing_is_left, send

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(200)]

SETTINGS = {"backend": "nixl", "timeouts": {"lease_s": 2.0, "drain_s": 1.0}}


@pytest.fixture(scope="module")
def processes() -> Iterator[Deployment]:
    with deployment(SETTINGS) as started:
        yield started


@pytest.fixture
def pair(processes: Deployment) -> Deployment:
    processes.start()
    return processes


def test_chunk_of_a_request_that_has_ended(pair: Deployment) -> None:
    """SGLang computes on, and does not poll the request while it does, but polls others."""
    room = begin(pair)
    send(pair, room, 40)
    pair.decode.tell("ask", what="abort", room=room)
    assert pair.decode.tell("until", what="is_over", room=room)
    other = pair.room()
    pair.prefill.tell("ask", what="add", room=other, tokens=70)
    pair.prefill.tell("rest", seconds=0.3)  # takes what has changed, of all rooms
    send(pair, room, 50)
    send(pair, room, 70, last=True)
    assert pair.prefill.tell("until", what="is_over", room=room)
    assert "aborted" in pair.prefill.tell("ask", what="was_told", room=room)
    pair.prefill.tell("ask", what="abort", room=other)
    check_nothing_is_left(pair)

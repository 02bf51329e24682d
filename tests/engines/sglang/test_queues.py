"""Requests through SGLang's own queues, in two processes over NIXL: delivery, failures, and the release of pages."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.sglang.processes import Deployment, deployment
from tests.engines.sglang.steps import announce, begin, check_arrived, check_nothing_is_left, send

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(200)]

SETTINGS = {"backend": "nixl", "timeouts": {"lease_s": 2.0, "drain_s": 1.0}}
SGLANG_FREES_AFTER_S = 1


@pytest.fixture(scope="module")
def processes() -> Iterator[Deployment]:
    seconds = str(SGLANG_FREES_AFTER_S)
    with deployment(SETTINGS, SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT=seconds) as started:
        yield started


@pytest.fixture
def pair(processes: Deployment) -> Deployment:
    processes.start()
    return processes


def test_request_in_chunks(pair: Deployment) -> None:
    room = begin(pair)
    send(pair, room, 40)
    send(pair, room, 70, last=True)
    check_arrived(pair, room)
    pair.decode.tell("ask", what="finish", room=room)
    check_nothing_is_left(pair)


def test_decode_aborts_between_chunks(pair: Deployment) -> None:
    """Its pages come back with the proof, and prefill receives the abort."""
    room = begin(pair)
    send(pair, room, 40)
    pair.decode.tell("ask", what="abort", room=room)
    assert pair.decode.tell("until", what="was_told", room=room)
    assert "Aborted by AbortReq" in pair.decode.tell("ask", what="was_told", room=room)
    assert pair.decode.tell("until", what="is_over", room=room)
    assert pair.decode.tell("ask", what="outcomes") == ["drained"]
    send(pair, room, 70, last=True)
    assert pair.prefill.tell("until", what="is_over", room=room)
    assert "decode engine aborted the transfer: Aborted by AbortReq" in pair.prefill.tell(
        "ask", what="was_told", room=room
    )
    check_nothing_is_left(pair)


def test_prefill_aborts_between_chunks(pair: Deployment) -> None:
    room = begin(pair)
    send(pair, room, 40)
    pair.prefill.tell("ask", what="abort", room=room)
    assert pair.decode.tell("until", what="was_told", room=room, timeout_s=2)
    assert "aborted" in pair.decode.tell("ask", what="was_told", room=room)
    assert pair.decode.tell("until", what="is_over", room=room)
    assert pair.decode.tell("ask", what="outcomes") == ["drained"]
    send(pair, room, 70, last=True)
    assert pair.prefill.tell("until", what="is_over", room=room)
    check_nothing_is_left(pair)


def test_decode_aborts_before_it_has_pages(pair: Deployment) -> None:
    """Prefill receives the abort at once, instead of timing out."""
    first = begin(pair)
    send(pair, first, 70, last=True)
    check_arrived(pair, first)
    pair.decode.tell("ask", what="finish", room=first)
    room = pair.room()
    announce(pair, room)
    pair.decode.tell("ask", what="abort", room=room)
    assert pair.prefill.tell("until", what="was_told", room=room, timeout_s=2)
    assert "aborted" in pair.prefill.tell("ask", what="was_told", room=room)
    assert pair.decode.tell("until", what="was_told", room=room)
    check_nothing_is_left(pair)


def test_room_is_used_again(pair: Deployment) -> None:
    """Messages about the former request do not end the next one in its room."""
    room = begin(pair)
    pair.decode.tell("ask", what="abort", room=room)
    assert pair.decode.tell("until", what="is_over", room=room)
    send(pair, room, 70, last=True)
    assert pair.prefill.tell("until", what="is_over", room=room)
    check_nothing_is_left(pair)
    for side in (pair.prefill, pair.decode):
        side.tell("ask", what="forget", room=room)
        side.tell("ask", what="add", room=room, tokens=70)
    assert pair.decode.tell("until", what="is_asked_for", room=room)
    assert pair.prefill.tell("until", what="is_bootstrapped", room=room)
    pair.prefill.tell("ask", what="compute", room=room, tokens=70)
    send(pair, room, 70, last=True)
    check_arrived(pair, room)


def test_pages_without_a_proof_are_held_after_sglangs_deadline(pair: Deployment) -> None:
    """A stopped prefill process may resume, and write."""
    room = begin(pair)
    send(pair, room, 40)
    pair.prefill.stop()
    try:
        pair.decode.tell("ask", what="abort", room=room)
        assert pair.decode.tell("until", what="was_told", room=room, timeout_s=2)
        pair.decode.tell("rest", seconds=4 * SGLANG_FREES_AFTER_S)
        assert not pair.decode.tell("ask", what="is_over", room=room)
    finally:
        pair.prefill.signal(signal.SIGCONT)
    assert pair.decode.tell("until", what="is_over", room=room)
    assert pair.decode.tell("ask", what="outcomes") == ["drained"]
    next_room = begin(pair)
    send(pair, next_room, 70, last=True)
    check_arrived(pair, next_room)


def test_memory_is_released_and_used_again_while_a_write_lingers() -> None:
    """The port of the former rank stays taken; decode finds the new one after a failure."""
    with deployment(SETTINGS) as pair:
        pair.start()
        room = begin(pair)
        pair.prefill.tell("ask", what="slow_down")
        send(pair, room, 40)
        pair.prefill.tell("rest", seconds=0.3)
        assert pair.prefill.tell("ask", what="retire", room=room)
        pair.prefill.tell("ask", what="release_memory")
        pair.prefill.tell("ask", what="speed_up")
        pair.prefill.tell("ask", what="resume_memory")
        assert pair.decode.tell("until", what="was_told", room=room)
        lost = pair.room()
        announce(pair, lost)
        assert pair.decode.tell("until", what="was_told", room=lost)
        next_room = begin(pair)
        send(pair, next_room, 70, last=True)
        check_arrived(pair, next_room)


def test_prefill_is_killed() -> None:
    """Decode fails the request within the lease, and does not free its pages without a proof."""
    with deployment(SETTINGS, SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT="1") as pair:
        pair.start()
        room = begin(pair)
        send(pair, room, 40)
        pair.prefill.kill()
        assert pair.decode.tell("until", what="was_told", room=room, timeout_s=6)
        assert "peer" in pair.decode.tell("ask", what="was_told", room=room)
        pair.decode.tell("rest", seconds=4 * SGLANG_FREES_AFTER_S)
        assert pair.decode.tell("ask", what="outcomes") in ([], ["drained"])


def test_operator_releases_pages_without_a_proof(tmp_path: Path) -> None:
    """The operator touches a file after the pages are quarantined; a file that existed before does not count."""
    settings = SETTINGS | {"proofs": {"process_end": False}, "releases": str(tmp_path)}
    with deployment(settings) as pair:
        pair.start()
        room = begin(pair)
        send(pair, room, 40)
        named = tmp_path / str(room)
        named.touch()
        pair.prefill.kill()
        assert pair.decode.tell("until", what="has_noticed_quarantine")
        pair.decode.tell("rest", seconds=2.5)
        assert not pair.decode.tell("ask", what="is_over", room=room)
        (reminder,) = pair.decode.tell("ask", what="reminders")
        assert f"bytes of 1 requests are in quarantine; the oldest: room {room}: " in reminder
        assert "an operator must release the pages" in reminder
        named.touch()
        assert pair.decode.tell("until", what="is_over", room=room)
        assert pair.decode.tell("ask", what="outcomes") == ["drained"]


@pytest.mark.parametrize(
    ("is_low_first", "expected"),
    [(False, [0, 1, 3, 4, 5, 7]), (True, [7, 7, 5, 4, 3, 0])],
    ids=["high values first", "low values first"],
)
def test_priority_of_a_request_is_that_of_its_transfer(
    pair: Deployment, is_low_first: bool, expected: list[int]
) -> None:
    priorities = [9, 3, 1, 0, -1, -9]
    rooms = [pair.room() for _ in priorities]
    named = dict(zip(map(str, rooms), priorities, strict=True))
    pair.decode.tell("ask", what="prioritize", priorities=named, is_low_first=is_low_first)
    found = pair.decode.tell("ask", what="classes")
    assert [found[str(room)] for room in rooms] == expected


def test_priorities_that_sglang_ignores_are_ignored(pair: Deployment) -> None:
    room = pair.room()
    pair.decode.tell("ask", what="prioritize", priorities={str(room): -9}, is_low_first=False, is_on=False)
    assert pair.decode.tell("ask", what="classes") == {str(room): 0}


def test_indices_of_a_chunk_are_final_when_it_is_offered(pair: Deployment) -> None:
    """SGLang hands over indices that are still being copied, with an event, only to senders that say they can wait."""
    room = begin(pair)
    assert pair.prefill.tell("ask", what="offered", room=room, end=40) == ["ndarray", ["num_kv_tokens"]]

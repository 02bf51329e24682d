"""SGLang's own unit tests of transfer backends, restated for kvflow's backend through SGLang's queues.

docs/sglang.md lists the SGLang tests that each of them covers.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.engines.sglang.processes import Deployment, Process, deployment, free_port
from tests.engines.sglang.steps import TOKENS, announce, begin, check_arrived, check_failed, check_nothing_is_left, send

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(200)]

SETTINGS = {"backend": "nixl", "timeouts": {"lease_s": 2.0, "drain_s": 1.0}}
FAILED, WAITING, SUCCESS = 0, 2, 4
PAGE_BYTES = 4 * 2 * 16 * 8 * 64 * 2
"""Product of layers, K and V, tokens, heads, elements of a head and bytes of an element."""


@pytest.fixture(scope="module")
def processes() -> Iterator[Deployment]:
    with deployment(SETTINGS) as started:
        yield started


@pytest.fixture
def pair(processes: Deployment) -> Deployment:
    processes.start()
    return processes


# Senders


def test_success_outlives_the_request(pair: Deployment) -> None:
    room = begin(pair)
    send(pair, room, 40)
    send(pair, room, TOKENS, last=True)
    check_arrived(pair, room)
    pair.decode.tell("ask", what="finish", room=room)
    check_nothing_is_left(pair)
    assert pair.prefill.tell("ask", what="poll", room=room) == SUCCESS
    assert pair.prefill.tell("ask", what="leftovers") == {}
    seconds, num_bytes = pair.prefill.tell("ask", what="metric", room=room)
    assert 0 < seconds < 20
    assert num_bytes == 5 * PAGE_BYTES


def test_ranks_in_schedulers_answer(pair: Deployment) -> None:
    command = [sys.executable, "-m", "kvflow.cli", "status", "--json"]
    asked = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    ranks = [json.loads(line) for line in asked.stdout.splitlines()]
    assert {rank["role"] for rank in ranks} == {"prefill", "decode"}
    assert all(rank["health"]["transfer"] == "ok" for rank in ranks), ranks


def test_room_of_a_request_that_is_sent_again(pair: Deployment) -> None:
    """SGLang recomputes a retracted request, and sends it under its former room."""
    room = begin(pair)
    for _ in range(2):
        send(pair, room, TOKENS, last=True)
        check_arrived(pair, room)
        pair.decode.tell("ask", what="finish", room=room)
        for side in (pair.prefill, pair.decode):
            side.tell("ask", what="forget", room=room)
        pair.decode.tell("ask", what="blank")
        begin(pair, room=room)


@pytest.mark.parametrize("name", ["mha", "dsa", "gdn", "kimi"])
def test_last_chunk_without_pages(processes: Deployment, name: str) -> None:
    """States and metadata still arrive."""
    processes.open(name, {}, {})
    sent, received = processes.both("transfer", room=processes.room(), tokens=128, prefix=128, chunks=1)
    assert (sent["statuses"], sent["reasons"]) == ([SUCCESS], [])
    assert (received["statuses"], received["wrong"]) == ([SUCCESS], [])


def test_early_chunk_is_read_when_the_forward_pass_before_it_is_over(pair: Deployment) -> None:
    room = begin(pair)
    pair.prefill.tell("ask", what="spoil", room=room, tokens=TOKENS)
    pair.prefill.tell("ask", what="send_early", room=room, end=32)
    pair.prefill.tell("rest", seconds=0.3)
    pair.prefill.tell("ask", what="restore", room=room, tokens=TOKENS)
    pair.prefill.tell("ask", what="end_forward")
    send(pair, room, TOKENS, last=True)
    check_arrived(pair, room)


def test_chunk_after_an_abort_is_not_sent(pair: Deployment) -> None:
    room = begin(pair)
    send(pair, room, 40)
    pair.prefill.tell("ask", what="abort", room=room)
    send(pair, room, TOKENS, last=True)
    check_failed(pair, room, "aborted")
    assert pair.prefill.tell("until", what="is_over", room=room)
    assert "Aborted by AbortReq" in pair.prefill.tell("ask", what="was_told", room=room)
    assert pair.prefill.tell("ask", what="poll", room=room) == FAILED
    check_nothing_is_left(pair)


def test_chunk_of_a_request_that_has_ended(pair: Deployment) -> None:
    """SGLang goes on computing without polling the request, while it polls others."""
    room = begin(pair)
    send(pair, room, 40)
    pair.decode.tell("ask", what="abort", room=room)
    assert pair.decode.tell("until", what="is_over", room=room)
    other = pair.room()
    pair.prefill.tell("ask", what="add", room=other, tokens=TOKENS)
    pair.prefill.tell("rest", seconds=0.3)  # processes the changes of all rooms
    send(pair, room, 50)
    send(pair, room, TOKENS, last=True)
    assert pair.prefill.tell("until", what="is_over", room=room)
    assert "aborted" in pair.prefill.tell("ask", what="was_told", room=room)
    pair.prefill.tell("ask", what="abort", room=other)
    check_nothing_is_left(pair)


def test_status_that_has_gone_is_a_failure_of_another_rank(pair: Deployment) -> None:
    room = begin(pair)
    send(pair, room, 40)
    pair.prefill.tell("ask", what="lose", room=room)
    assert pair.prefill.tell("ask", what="poll", room=room) == FAILED
    reason, is_from_another_rank = pair.prefill.tell("ask", what="failure", room=room)
    assert (is_from_another_rank, "another rank" in reason) == (True, True)
    check_failed(pair, room, "aborted")
    assert pair.prefill.tell("until", what="has_forgotten"), pair.prefill.tell("ask", what="leftovers")
    assert pair.prefill.tell("ask", what="poll", room=room) == FAILED


# Prefill's queues


def test_result_of_an_aborted_request_frees_its_pages_at_once(pair: Deployment) -> None:
    """Decode does not use what is written to those pages afterwards."""
    room = begin(pair)
    send(pair, room, 40)
    assert pair.prefill.tell("ask", what="retire", room=room)
    pair.prefill.tell("ask", what="spoil", room=room, tokens=TOKENS)
    assert pair.prefill.tell("ask", what="is_over", room=room)
    check_failed(pair, room, "aborted")
    pair.prefill.tell("rest", seconds=0.3)
    assert pair.prefill.tell("ask", what="leftovers") == {"request_status": 1, "failure_records": 1}  # SGLang's own


def test_request_that_is_computed_before_decode_asks(pair: Deployment) -> None:
    room = pair.room()
    pair.prefill.tell("ask", what="add", room=room, tokens=TOKENS)
    pair.prefill.tell("ask", what="park", room=room, tokens=TOKENS)
    pair.prefill.tell("rest", seconds=0.2)
    pair.decode.tell("ask", what="add", room=room, tokens=TOKENS)
    assert pair.decode.tell("until", what="is_asked_for", room=room)
    assert pair.prefill.tell("until", what="is_over", room=room), pair.prefill.tell("ask", what="was_told", room=room)
    check_arrived(pair, room)


def test_room_that_another_request_has(pair: Deployment) -> None:
    """The second request fails on either side; the first does not, even if it has just ended."""
    room = begin(pair)
    send(pair, room, 40)
    check_twins_fail(pair, room)
    send(pair, room, TOKENS, last=True)
    assert poll_until(pair.prefill, room, SUCCESS)
    assert poll_until(pair.decode, room, SUCCESS)
    check_twins_fail(pair, room)
    check_arrived(pair, room)
    pair.decode.tell("ask", what="finish", room=room)
    check_nothing_is_left(pair)


def test_room_that_decode_still_holds_fails_on_prefill_as_well(pair: Deployment) -> None:
    """The pages of its last request are not safe yet. SGLang lets prefill wait for five minutes."""
    room = begin(pair)
    pair.prefill.stop()
    pair.decode.tell("ask", what="abort", room=room)
    assert pair.decode.tell("until", what="was_told", room=room)
    pair.decode.tell("ask", what="forget", room=room)
    pair.decode.tell("ask", what="add", room=room, tokens=TOKENS)
    assert pair.decode.tell("until", what="was_told", room=room)
    assert "already being received" in pair.decode.tell("ask", what="was_told", room=room)
    pair.prefill.signal(signal.SIGCONT)
    send(pair, room, TOKENS, last=True)
    assert pair.prefill.tell("until", what="is_over", room=room)
    assert "aborted" in pair.prefill.tell("ask", what="was_told", room=room)
    pair.prefill.tell("ask", what="forget", room=room)
    pair.prefill.tell("ask", what="add", room=room, tokens=TOKENS)
    assert pair.prefill.tell("until", what="was_told", room=room)
    assert "already being received" in pair.prefill.tell("ask", what="was_told", room=room)


def check_twins_fail(pair: Deployment, room: int) -> None:
    for side in (pair.prefill, pair.decode):
        side.tell("ask", what="add_twin", room=room, tokens=TOKENS)
    for side in (pair.prefill, pair.decode):
        assert side.tell("until", what="was_told", room=-room)
        assert "another request has this room" in side.tell("ask", what="was_told", room=-room)


def test_health_checks_move_nothing(pair: Deployment) -> None:
    """SGLang creates fake ends for health checks with kvflow's manager, and polls them with those of other requests."""
    room, fake = begin(pair), pair.room()
    for side in (pair.prefill, pair.decode):
        side.tell("ask", what="add", room=fake, tokens=TOKENS, fake=True)
    assert pair.prefill.tell("until", what="is_bootstrapped", room=fake)
    pair.prefill.tell("ask", what="compute", room=fake, tokens=TOKENS)
    for one in (fake, room):
        send(pair, one, TOKENS, last=True)
    assert pair.decode.tell("until", what="is_done", room=fake)
    assert pair.prefill.tell("until", what="is_over", room=fake)
    check_arrived(pair, room)
    for one in (fake, room):
        pair.decode.tell("ask", what="finish", room=one)
    check_nothing_is_left(pair)


def test_grant_that_sglang_cannot_serve_fails_its_room_alone() -> None:
    """A decode rank may ask for anything that fits the layout, and must not hurt requests of other ranks."""
    with deployment({"backend": "memory"}) as pair:
        pair.prefill.tell("open", name="dsa", port=free_port())
        no_pages, from_within, rightly = pair.prefill.tell(
            "strangers",
            tables=[{"kv": None, "dsa": [1, 2]}, {"kv": [1, 2, 3], "dsa": None}, {"kv": [4, 5], "dsa": [4, 5]}],
            starts=[0, 7, 0],
        )
    for status, reason in (no_pages, from_within):
        assert (status, "do not start at a page" in reason) == (FAILED, True)
    assert rightly == [WAITING, ""]


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_rank_that_is_broken_ends_its_scheduler(side: str) -> None:
    """Transfers in flight fail. All later ones would fail as well, so the scheduler must end."""
    with deployment(SETTINGS) as pair:
        pair.start()
        process = getattr(pair, side)
        room, next_room = pair.room(), pair.room()
        announce(pair, room)
        assert pair.decode.tell("until", what="is_asked_for", room=room)
        process.tell("ask", what="break_rank")
        assert process.tell("until", what="was_told", room=room)
        assert "on purpose" in process.tell("ask", what="was_told", room=room)
        process.tell("ask", what="add", room=next_room, tokens=TOKENS)
        with pytest.raises(AssertionError, match=r"RankBroken: rank has failed"):
            process.tell("until", what="was_told", room=next_room)


# Receivers and decode's queues


def test_aborts_beyond_the_first_change_nothing(pair: Deployment) -> None:
    room = begin(pair)
    send(pair, room, 40)
    for _ in range(3):
        pair.decode.tell("ask", what="abort", room=room)
    check_failed(pair, room, "Aborted by AbortReq")
    send(pair, room, TOKENS, last=True)
    assert pair.prefill.tell("until", what="is_over", room=room)
    check_nothing_is_left(pair)


def test_failure_of_another_rank_overrides_success(pair: Deployment) -> None:
    room = begin(pair)
    send(pair, room, TOKENS, last=True)
    assert poll_until(pair.decode, room, SUCCESS)
    reason, is_from_another_rank = pair.decode.tell("ask", what="failure", room=room)
    assert (is_from_another_rank, "another rank" in reason) == (True, True)
    assert pair.decode.tell("ask", what="poll", room=room) == FAILED
    assert pair.decode.tell("ask", what="is_safe", room=room)


def poll_until(side: Process, room: int, status: int) -> bool:
    """Poll one end directly, since a step of the queue would end the request."""
    return any(side.tell("ask", what="poll", room=room) == status for _ in range(20_000))


def test_request_that_is_let_go_unfinished_has_failed(pair: Deployment) -> None:
    room = begin(pair)
    send(pair, room, 40)
    for _ in range(2):
        pair.decode.tell("ask", what="clear", room=room)
    assert pair.decode.tell("ask", what="poll", room=room) == FAILED
    check_failed(pair, room, "another rank")
    send(pair, room, TOKENS, last=True)
    assert pair.prefill.tell("until", what="is_over", room=room)
    check_nothing_is_left(pair)


def test_pages_in_host_memory_are_refused(pair: Deployment) -> None:
    room = pair.room()
    announce(pair, room)
    assert pair.decode.tell("until", what="is_asked_for", room=room)
    assert "pool" in pair.decode.tell("ask", what="ask_for_host", room=room)


def test_every_decode_rank_gets_its_pages_back(processes: Deployment) -> None:
    processes.open("mha", {"tp_size": 1}, {"tp_size": 2})
    sent, received = processes.both("give_up", room=processes.room(), tokens=TOKENS)
    assert (sent, received) == ([FAILED], [FAILED, FAILED])


def test_prefill_server_that_comes_back_at_another_address() -> None:
    """The first request fails and drops the cached address; the next one looks up the new address.

    SGLang's heartbeats, which notice a server that starts slowly, are turned off.
    """
    with deployment(SETTINGS, SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL="600") as pair:
        pair.start()
        room = begin(pair)
        send(pair, room, 40)
        pair.replace_prefill(SETTINGS)
        check_failed(pair, room, "peer")
        next_room = begin(pair)
        send(pair, next_room, TOKENS, last=True)
        check_arrived(pair, next_room)


def test_bootstrap_server_is_gone_and_the_ranks_live() -> None:
    """SGLang fails all requests of that server. Its ranks may still write, and report when they no longer do."""
    heartbeat = {
        "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
        "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "1",
    }
    with deployment(SETTINGS, **heartbeat) as pair:
        pair.start()
        room = begin(pair)
        send(pair, room, 40)
        pair.prefill.tell("ask", what="stop_server")
        check_failed(pair, room, "Lost connection with prefill instance")
        send(pair, room, TOKENS, last=True)
        assert pair.prefill.tell("until", what="is_over", room=room)
        check_nothing_is_left(pair)
        pair.prefill.tell("ask", what="start_server")
        room = begin(pair)
        send(pair, room, TOKENS, last=True)
        check_arrived(pair, room)


@pytest.fixture(scope="module")
def impatient() -> Iterator[Deployment]:
    waits = {"SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "2", "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "2"}
    with deployment(SETTINGS, **waits) as started:
        yield started


def test_request_that_decode_never_asks_for(impatient: Deployment) -> None:
    impatient.start()
    room = impatient.room()
    impatient.prefill.tell("ask", what="add", room=room, tokens=TOKENS)
    assert impatient.prefill.tell("until", what="was_told", room=room, timeout_s=6)
    assert "timed out" in impatient.prefill.tell("ask", what="was_told", room=room)
    assert impatient.prefill.tell("ask", what="poll", room=room) == FAILED
    check_nothing_is_left(impatient)


def test_request_that_prefill_does_not_end(impatient: Deployment) -> None:
    """Decode times out, and gets its pages back by a proof.

    SGLang's own timer may be the first to expire there, or that of the transfer, or prefill's, before it is told why.
    """
    impatient.start()
    room = begin(impatient)
    send(impatient, room, 40)
    check_failed(impatient, room, "timed out")
    send(impatient, room, TOKENS, last=True)
    assert impatient.prefill.tell("until", what="is_over", room=room)
    told = impatient.prefill.tell("ask", what="was_told", room=room)
    assert "timed out" in told or "reason='deadline'" in told
    check_nothing_is_left(impatient)


def test_request_of_a_prefill_server_that_does_not_exist(impatient: Deployment) -> None:
    """No rank received the pages, so decode has nothing to wait for."""
    impatient.start()
    room = impatient.room()
    impatient.decode.tell("ask", what="add", room=room, tokens=TOKENS, port=9)
    assert impatient.decode.tell("until", what="was_told", room=room, timeout_s=60)
    check_nothing_is_left(impatient)
    assert impatient.decode.tell("ask", what="outcomes") == []


# Pools


@pytest.mark.parametrize("name", ["five layers", "five layers, draft on decode"])
def test_pipeline_stages_of_different_sizes(processes: Deployment, name: str) -> None:
    check_transfer(processes, name, {"pp_size": 2}, {})


@pytest.mark.parametrize(("name", "prefill", "decode"), [("mha", 2, 2), ("gqa", 1, 4), ("gqa", 4, 1)])
def test_heads(processes: Deployment, name: str, prefill: int, decode: int) -> None:
    check_transfer(processes, name, {"tp_size": prefill}, {"tp_size": decode})


def check_transfer(pair: Deployment, name: str, prefill: dict[str, int], decode: dict[str, int]) -> None:
    pair.open(name, prefill, decode)
    sent, received = pair.both("transfer", room=pair.room(), tokens=TOKENS)
    assert set(sent["statuses"]) == {SUCCESS}, (sent["reasons"], received["reasons"])
    assert set(received["statuses"]) == {SUCCESS}, received["reasons"]
    assert received["wrong"] == []

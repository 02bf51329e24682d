"""The blocking ranks, as a scheduler loop uses them: start, continue, poll."""

import os
import selectors
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvflow
from kvflow import blocking
from kvflow.blocking import LoopThread, Memory, Outcome, TransferUpdate
from kvflow.errors import (
    ConfigError,
    FailureReason,
    LocalProtocolError,
    PagesInUse,
    PlanError,
    RankDraining,
    TransferFailed,
)
from kvflow.room import RoomId
from kvflow.wire.messages import Grant
from tests.support.instances import BACKENDS, decode_config, make_pool, prefill_config
from tests.support.pools import Pool
from tests.support.registries import registry_in_thread
from tests.support.slow import slow_except

ROOT = Path(__file__).parents[2]
TOKENS = (0, 8)
PAGES = {"kv": [5, 2]}


@dataclass
class Pair:
    prefill: blocking.PrefillRank
    decode: blocking.DecodeRank
    source: Pool
    target: Pool

    def receive(self, room: int) -> blocking.BlockingReceiver:
        return self.decode.receive(room, prefill="prefill", tokens=TOKENS, pages=PAGES)


@contextmanager
def pair_of_ranks(backend: str = "memory", *, share_loop: bool = False) -> Iterator[Pair]:
    source, target = make_pool(), make_pool()
    source.randomize(np.random.default_rng(3))
    with ExitStack() as stack:
        endpoint = stack.enter_context(registry_in_thread())
        loop = stack.enter_context(LoopThread()) if share_loop else None
        yield Pair(
            stack.enter_context(
                blocking.PrefillRank(prefill_config(endpoint, backend=backend), source.layout, loop=loop)
            ),
            stack.enter_context(
                blocking.DecodeRank(decode_config(endpoint, backend=backend), target.layout, loop=loop)
            ),
            source,
            target,
        )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("share_loop", [False, True], ids=["own threads", "one thread"])
def test_scheduler_polls_until_the_pages_are_there(backend: str, share_loop: bool) -> None:
    with pair_of_ranks(backend, share_loop=share_loop) as pair:
        receiver, sender = pair.receive(1), pair.prefill.send(1)
        assert receiver.outcome is sender.outcome is Outcome.PENDING
        sender.chunk((0, 3), {"kv": [5]})
        sender.finish((3, 8), {"kv": [5, 2]}, metadata=b"token")
        while not (receiver.is_settled and sender.is_settled):
            time.sleep(1e-4)
        handover = receiver.result()
        sender.result()
        assert (handover.metadata, handover.num_notices) == (b"token", 2)
        assert (receiver.memory, sender.memory) == (Memory.SAFE, Memory.SAFE)
        for token in range(*TOKENS):
            for page_cell in [("k", 0, PAGES["kv"][token // 4], token % 4, head) for head in range(6)]:
                np.testing.assert_array_equal(pair.target.cell(*page_cell), pair.source.cell(*page_cell))
        assert pair.decode.statistics().rooms == 0


FORKED = """
import os
import sys

import pytest

from kvflow.blocking import Outcome
from kvflow.errors import LocalProtocolError
from tests.service.test_blocking import PAGES, TOKENS, pair_of_ranks

def move(pair, room):
    receiver, sender = pair.receive(room), pair.prefill.send(room)
    sender.finish(TOKENS, PAGES)
    assert receiver.wait(20) is Outcome.SUCCESS, receiver.failure
    assert sender.wait(20) is Outcome.SUCCESS, sender.failure

def use_in_child(pair, receiver):
    for rank in (pair.decode, pair.prefill):
        for call in (rank.statistics, rank.start_drain, lambda: rank.release(1)):
            with pytest.raises(LocalProtocolError, match="forked"):
                call()
        with pytest.raises(LocalProtocolError):
            rank.fileno()
        assert rank.completed() == rank.wait_any() == []
    with pytest.raises(LocalProtocolError, match="forked"):
        pair.receive(9)
    with pytest.raises(LocalProtocolError, match="forked"):
        pair.prefill.send(9)
    receiver.abort()
    assert receiver.wait() is Outcome.PENDING
    pair.decode.close()
    pair.prefill.close()

with pair_of_ranks(sys.argv[1], share_loop=True) as pair:
    move(pair, 1)
    pair.decode.fileno()
    receiver = pair.receive(2)
    child = os.fork()
    if child == 0:
        use_in_child(pair, receiver)
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    sender = pair.prefill.send(2)
    sender.finish(TOKENS, PAGES)
    assert receiver.wait(20) is Outcome.SUCCESS, receiver.failure
    assert sender.wait(20) is Outcome.SUCCESS, sender.failure
    move(pair, 3)
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_forked_child_leaves_the_ranks_to_its_parent(backend: str) -> None:
    """The child can neither use nor close them, and does not wait for a thread that it does not have."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED, backend]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_look_a_step_tells_of_everything(backend: str) -> None:
    with pair_of_ranks(backend) as pair:
        assert not pair.decode.completed()
        assert not pair.prefill.completed()
        receivers = {
            room: pair.decode.receive(room, prefill="prefill", tokens=(0, 4), pages={"kv": [room]}) for room in range(8)
        }
        senders = {room: pair.prefill.send(room) for room in range(8)}
        for room, sender in senders.items():
            sender.finish((0, 4), {"kv": [room]}, metadata=b"%d" % room)
        for rank, transfers in ((pair.decode, receivers), (pair.prefill, senders)):
            told: dict[RoomId, list[TransferUpdate[Any]]] = {room: [] for room in transfers}
            while not all(
                updates and updates[-1].memory is Memory.SAFE and updates[-1].outcome is Outcome.SUCCESS
                for updates in told.values()
            ):
                for update in rank.wait_any(10):
                    told[update.room].append(update)
            for room, transfer in transfers.items():
                updates = told[room]
                assert {update.transfer for update in updates} == {transfer}
                assert {update.failure for update in updates} == {None}
            assert rank.completed() == []
        assert [receiver.result().metadata for receiver in receivers.values()] == [b"%d" % room for room in range(8)]


def test_a_refused_sender_leaves_the_other_one_of_its_room_alone() -> None:
    with pair_of_ranks() as pair:
        first, second, third = (pair.prefill.send(1) for _ in range(3))
        second.finish(TOKENS, {"kv": [7, 8]}, metadata=b"second")
        third.abort()
        receiver = pair.receive(1)
        for refused in (second, third):
            assert (refused.wait(), refused.memory) == (Outcome.FAILED, Memory.SAFE)
            with pytest.raises(LocalProtocolError, match="in use"):
                refused.result()
        assert first.outcome is Outcome.PENDING
        first.finish(TOKENS, PAGES, metadata=b"first")
        assert (first.wait(), receiver.wait()) == (Outcome.SUCCESS, Outcome.SUCCESS)
        assert receiver.result().metadata == b"first"
        np.testing.assert_array_equal(pair.target.cell("k", 0, 5, 0, 0), pair.source.cell("k", 0, 5, 0, 0))


def test_a_refused_receiver_leaves_the_other_one_of_its_room_alone() -> None:
    with pair_of_ranks() as pair:
        first, second = pair.receive(1), pair.receive(1)
        second.abort()
        assert second.wait() is Outcome.FAILED
        sender = pair.prefill.send(1)
        sender.finish(TOKENS, PAGES)
        assert (first.wait(), sender.wait()) == (Outcome.SUCCESS, Outcome.SUCCESS)


def test_a_refusal_keeps_its_reason_although_chunks_follow() -> None:
    with pair_of_ranks() as pair:
        pair.prefill.start_drain()
        sender = pair.prefill.send(1)
        with suppress(RankDraining):  # if the rank has already noticed
            sender.chunk((0, 4), {"kv": [5]})
        assert sender.wait() is Outcome.FAILED
        assert sender.failure is not None
        assert sender.failure.reason is FailureReason.PEER_CLOSED
        assert sender.queued_chunks == 0
        for _ in range(3):
            with pytest.raises(RankDraining) as caught:
                sender.result()
        assert len(traceback.extract_tb(caught.value.__traceback__)) < 5


def test_what_ends_while_it_begins_is_told_as_it_stands() -> None:
    """Decode grants and aborts before the engine sends: the sender fails as it is opened."""
    with pair_of_ranks() as pair:
        receiver = pair.receive(1)
        while not pair.prefill.statistics().waiting_grants:
            time.sleep(1e-4)
        receiver.abort()
        while pair.prefill.statistics().waiting_grants:
            time.sleep(1e-4)
        sender = pair.prefill.send(1)
        updates = pair.prefill.wait_any()
        while updates[-1].memory is not Memory.SAFE:
            updates += pair.prefill.wait_any()
        assert (updates[-1].transfer, updates[-1].outcome) == (sender, Outcome.FAILED)


def block(rank: blocking.PrefillRank | blocking.DecodeRank, until: threading.Event) -> None:
    """Block the event loop until an event is set."""

    def wait() -> None:
        until.wait()

    rank._call_soon(wait)


def test_a_drain_does_not_overtake_what_was_asked_for_before() -> None:
    with pair_of_ranks() as pair:
        receiver = pair.receive(1)
        while not pair.prefill.statistics().waiting_grants:
            time.sleep(1e-4)
        go_on = threading.Event()
        block(pair.prefill, go_on)
        sender = pair.prefill.send(1)
        threading.Timer(0.05, go_on.set).start()
        pair.prefill.start_drain()
        sender.finish(TOKENS, PAGES)
        assert (sender.wait(), receiver.wait()) == (Outcome.SUCCESS, Outcome.SUCCESS)
        assert pair.prefill.is_drained


def test_a_sender_tells_what_decode_wants() -> None:
    with pair_of_ranks() as pair:
        sender = pair.prefill.send(1)
        assert not sender.wanted
        receiver = pair.decode.receive(1, prefill="prefill", tokens=(3, 8), pages=PAGES)
        (update,) = pair.prefill.wait_any()
        assert (update.transfer, update.outcome, update.memory) == (sender, Outcome.PENDING, Memory.HELD)
        assert sender.wanted == {"kv": (3, 8)}
        sender.finish(TOKENS, PAGES)
        assert (sender.wait(), receiver.wait()) == (Outcome.SUCCESS, Outcome.SUCCESS)


def test_the_caller_sees_how_many_chunks_wait() -> None:
    with pair_of_ranks() as pair:
        sender = pair.prefill.send(1)
        go_on = threading.Event()
        block(pair.prefill, go_on)
        sender.chunk((0, 4), {"kv": [5]})
        sender.chunk((4, 8), {"kv": [2]})
        counts = [sender.queued_chunks]
        go_on.set()
        while counts[-1]:
            counts.append(sender.queued_chunks)
        assert counts[0] == 2


def test_a_loop_thread_is_entered_once_and_left_last() -> None:
    loop = LoopThread()
    with pytest.raises(LocalProtocolError, match="LoopThread must be entered before its"):
        blocking.DecodeRank(decode_config("tcp://127.0.0.1:1"), make_pool().layout, loop=loop).open()
    with loop:
        with pytest.raises(LocalProtocolError, match="only once"):
            loop.__enter__()
        registry = blocking.Registry(loop=loop)
        with registry:
            with pytest.raises(LocalProtocolError, match="LoopThread still has open ranks"):
                loop.__exit__(None, None, None)
            assert registry.endpoint


@pytest.mark.parametrize("act", ["statistics", "quarantined", "start_drain", "wait_any"])
def test_a_rank_that_was_never_opened_says_so(act: str) -> None:
    rank = blocking.PrefillRank(prefill_config("tcp://127.0.0.1:1"), make_pool().layout)
    with pytest.raises(LocalProtocolError, match="not open"):
        getattr(rank, act)()
    with pytest.raises(LocalProtocolError, match="not open"):
        _ = rank.endpoint


@pytest.mark.parametrize("pages", [[5, 2], {"kv": [[5], [2, 3]]}], ids=["no mapping", "ragged"])
def test_pages_of_another_form_are_refused(pages: Any) -> None:
    with pair_of_ranks() as pair, pytest.raises(PlanError, match="page"):
        pair.decode.receive(1, prefill="prefill", tokens=TOKENS, pages=pages)


def test_a_numpy_bool_is_a_bool_and_a_number_is_none() -> None:
    with pair_of_ranks() as pair:
        receiver = pair.decode.receive(1, prefill="prefill", tokens=TOKENS, pages=PAGES, digest=np.True_)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="digest"):
            pair.decode.receive(2, prefill="prefill", tokens=TOKENS, pages=PAGES, digest=1)  # type: ignore[arg-type]
        sender = pair.prefill.send(1)
        with pytest.raises(PlanError, match="synchronize"):
            sender.chunk((0, 4), {"kv": [5]}, ready=5)  # type: ignore[arg-type]
        sender.finish(TOKENS, PAGES)
        assert (sender.wait(), receiver.wait()) == (Outcome.SUCCESS, Outcome.SUCCESS)


def test_what_could_not_begin_is_told_like_any_failure() -> None:
    with pair_of_ranks() as pair:
        first, second = pair.receive(1), pair.receive(1)
        (update,) = pair.decode.wait_any(10)
        assert update.transfer is second
        assert (update.room, update.outcome, update.failure, update.memory) == (
            1,
            Outcome.FAILED,
            second.failure,
            Memory.SAFE,
        )
        first.abort()
        (update,) = pair.decode.wait_any(10)
        assert (update.transfer, update.outcome) == (first, Outcome.ABORTED)


def test_a_queued_transfer_holds_its_pages() -> None:
    with pair_of_ranks() as pair:
        go_on = threading.Event()
        block(pair.decode, go_on)
        receiver = pair.receive(1)  # returns while the event loop is blocked
        assert (receiver.outcome, receiver.memory, receiver.is_settled) == (Outcome.PENDING, Memory.HELD, False)
        receiver.abort()
        go_on.set()
        assert receiver.wait(10) is Outcome.ABORTED
        assert receiver.memory is Memory.SAFE


def test_an_engine_may_select() -> None:
    with pair_of_ranks() as pair, selectors.DefaultSelector() as selector:
        selector.register(pair.decode, selectors.EVENT_READ, pair.decode)
        selector.register(pair.prefill, selectors.EVENT_READ, pair.prefill)
        assert selector.select(0) == []
        receiver, sender = pair.receive(1), pair.prefill.send(1)
        sender.finish(TOKENS, PAGES)
        ended: set[blocking.BlockingSender | blocking.BlockingReceiver] = set()
        while ended != {receiver, sender}:
            ready = selector.select(10)
            assert ready
            for key, _ in ready:  # it may find nothing: a change is taken before its wake-up is written
                updates = key.data.completed()
                ended |= {
                    one.transfer for one in updates if (one.outcome, one.memory) == (Outcome.SUCCESS, Memory.SAFE)
                }
        while ready := selector.select(0):  # at most one wake-up of each rank is left, with nothing to report
            assert [key.data.completed() for key, _ in ready] == [[]] * len(ready)
    with pytest.raises(LocalProtocolError, match="not open"):
        pair.decode.fileno()


def test_ranks_are_opened_and_closed_like_files() -> None:
    with registry_in_thread() as endpoint:
        rank = blocking.DecodeRank(decode_config(endpoint), make_pool().layout)
        assert rank.completed() == []
        with pytest.raises(LocalProtocolError, match="not open"):
            rank.receive(1, prefill="prefill", tokens=TOKENS, pages=PAGES)
        assert rank.open() is rank
        with pytest.raises(LocalProtocolError, match="rank can be opened only once"):
            rank.open()
        receiver = rank.receive(1, prefill="prefill", tokens=TOKENS, pages=PAGES)
        rank.close()
        rank.close()
        (update,) = rank.completed()
        assert (update.transfer, update.outcome, update.memory) == (receiver, Outcome.ABORTED, Memory.SAFE)
        assert rank.wait_any() == []
        with pytest.raises(LocalProtocolError, match="rank can be opened only once"):
            rank.open()


def cpus_of_threads() -> dict[int, set[int]]:
    return {int(task.name): os.sched_getaffinity(int(task.name)) for task in Path("/proc/self/task").iterdir()}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
@pytest.mark.parametrize("backend", BACKENDS)
def test_threads_do_not_share_the_cpu_that_an_engine_is_pinned_to(backend: str) -> None:
    mine = os.sched_getaffinity(0)
    with registry_in_thread() as endpoint:
        os.sched_setaffinity(0, {min(mine)})
        try:
            before = cpus_of_threads()
            with blocking.DecodeRank(
                decode_config(endpoint, backend=backend), make_pool().layout, affinity=mine
            ) as rank:
                started = [cpus for thread, cpus in cpus_of_threads().items() if thread not in before]
                assert started
                assert all(cpus == mine for cpus in started)
                assert rank.statistics().loop_lag.count >= 0
        finally:
            os.sched_setaffinity(0, mine)


@pytest.mark.parametrize("affinity", [{100_000}, {-1}, "0", [None], set()], ids=repr)
def test_cpus_that_are_none_are_refused(affinity: Any) -> None:
    with pytest.raises(ConfigError, match="affinity"):
        LoopThread(affinity).__enter__()


def test_a_shared_loop_has_its_own_affinity() -> None:
    with LoopThread() as loop, pytest.raises(ConfigError, match="LoopThread"):
        blocking.DecodeRank(decode_config("tcp://127.0.0.1:1"), make_pool().layout, loop=loop, affinity={0})


def test_a_registry_is_opened_once_and_again_after_closing() -> None:
    registry = blocking.Registry()
    for _ in range(2):
        with registry:
            assert registry.endpoint.startswith("tcp://127.0.0.1:")
            assert registry.statistics() == (0, 0, {}, {})
            with pytest.raises(LocalProtocolError, match="registry is already open"):
                registry.__enter__()
        with pytest.raises(LocalProtocolError, match="not open"):
            registry.statistics()


def test_many_at_once_from_one_scheduler() -> None:
    with pair_of_ranks() as pair:
        receivers = [
            pair.decode.receive(room, prefill="prefill", tokens=(0, 4), pages={"kv": [room]}) for room in range(50)
        ]
        senders = [pair.prefill.send(room) for room in range(50)]
        for room, sender in enumerate(senders):
            sender.finish((0, 4), {"kv": [room]})
        assert {receiver.wait() for receiver in receivers} == {Outcome.SUCCESS}
        assert {sender.wait() for sender in senders} == {Outcome.SUCCESS}


def test_priority_travels_with_the_grant() -> None:
    with pair_of_ranks() as pair:
        with pytest.raises(ConfigError, match="priority"):
            pair.decode.receive(1, prefill="prefill", tokens=TOKENS, pages=PAGES, priority=8)
        receiver = pair.decode.receive(1, prefill="prefill", tokens=TOKENS, pages=PAGES, priority=5)
        while not pair.prefill.statistics().waiting_grants:
            time.sleep(1e-4)
        waiting = pair.prefill._opened._core.requests.waiting.find(1, pair.decode._opened.me)
        assert isinstance(waiting, Grant)
        assert waiting.priority == 5
        receiver.abort()
        assert receiver.wait() is Outcome.ABORTED


@pytest.mark.parametrize("detail", ["", "its client has left"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_abort_ends_both_sides(side: str, detail: str) -> None:
    with pair_of_ranks() as pair:
        receiver, sender = pair.receive(1), pair.prefill.send(1)
        sender.chunk((0, 4), {"kv": [5]})
        while not np.array_equal(pair.target.cell("k", 0, 5, 0, 0), pair.source.cell("k", 0, 5, 0, 0)):
            time.sleep(1e-4)
        aborted, other = (sender, receiver) if side == "prefill" else (receiver, sender)
        aborted.abort(detail)
        assert aborted.wait() is Outcome.ABORTED
        assert other.wait() is Outcome.FAILED
        expected = f"the {side} engine aborted the transfer" + (f": {detail}" if detail else "")
        for transfer in (aborted, other):
            with pytest.raises(TransferFailed) as caught:
                transfer.result()
            assert (caught.value.reason, caught.value.detected_by) == (FailureReason.ABORTED, f"{side}/0")
            assert caught.value.detail == expected
            assert not caught.value.quarantined
            assert transfer.memory is Memory.SAFE


def test_result_before_the_end_is_refused() -> None:
    with pair_of_ranks() as pair:
        receiver = pair.receive(1)
        with pytest.raises(LocalProtocolError, match="has not ended"):
            receiver.result()
        receiver.abort()
        assert receiver.wait() is Outcome.ABORTED


def test_bad_pages_are_refused_where_they_are_given() -> None:
    with pair_of_ranks() as pair:
        with pytest.raises(PlanError, match="page index is out of range"):
            pair.decode.receive(1, prefill="prefill", tokens=TOKENS, pages={"kv": [1, 64]})
        sender = pair.prefill.send(1)
        with pytest.raises(PlanError, match="page index is out of range"):
            sender.finish(TOKENS, {"kv": [1, 64]})
        receiver = pair.receive(1)
        sender.finish(TOKENS, PAGES)
        assert (sender.wait(), receiver.wait()) == (Outcome.SUCCESS, Outcome.SUCCESS)


def test_room_in_use_shows_in_the_outcome() -> None:
    with pair_of_ranks() as pair:
        first, second = pair.receive(1), pair.receive(1)
        assert second.wait() is Outcome.FAILED
        assert second.failure is not None
        assert (second.failure.reason, second.failure.detected_by) == (FailureReason.PROTOCOL, "decode/0")
        assert "already being received" in second.failure.detail
        with pytest.raises(LocalProtocolError, match="already being received"):
            second.result()
        assert first.outcome is Outcome.PENDING
        first.abort()
        assert first.wait() is Outcome.ABORTED


def test_pages_that_another_transfer_holds_are_never_accepted_in_silence() -> None:
    with pair_of_ranks() as pair:
        first, second = pair.receive(1), pair.receive(2)
        assert second.wait() is Outcome.FAILED
        assert second.failure is not None
        assert second.failure.reason is FailureReason.PAGES_IN_USE
        with pytest.raises(PagesInUse) as refused:
            second.result()
        assert refused.value.values["held_by"] == 1
        first.abort()
        assert first.until_safe() is Memory.SAFE
        third = pair.receive(3)
        pair.prefill.send(3).finish(TOKENS, PAGES)
        assert third.wait() is Outcome.SUCCESS


def test_a_quarantine_is_told_and_released_by_record_or_room() -> None:
    with pair_of_ranks() as pair:
        assert pair.decode.quarantined() == []
        with pytest.raises(LocalProtocolError, match="not in quarantine"):
            pair.decode.release(1)
        assert pair.receive(1).until_safe(0.01) is Memory.HELD
    with pytest.raises(LocalProtocolError, match="not open"):
        pair.decode.release(1)


def test_what_is_asked_of_a_rank_raises_to_its_caller_alone() -> None:
    def leave(_: object) -> None:
        raise SystemExit("engine's own")

    with pair_of_ranks() as pair:
        with pytest.raises(SystemExit):
            pair.decode.ask(leave).result()
        assert pair.decode.ask(lambda rank: rank.quarantined()).result() == []


def test_room_of_a_rank_that_drains_shows_in_the_outcome() -> None:
    with pair_of_ranks() as pair:
        pair.prefill.start_drain()
        sender = pair.prefill.send(1)
        assert (sender.wait(10), sender.memory) == (Outcome.FAILED, Memory.SAFE)
        assert sender.failure is not None
        assert sender.failure.reason is FailureReason.PEER_CLOSED
        with pytest.raises(RankDraining):
            sender.result()


def test_chunks_out_of_order_show_in_the_outcome() -> None:
    with pair_of_ranks() as pair:
        sender, receiver = pair.prefill.send(1), pair.receive(1)
        sender.chunk((0, 4), {"kv": [5]})
        sender.chunk((6, 8), {"kv": [2]})
        assert (sender.wait(), receiver.wait()) == (Outcome.FAILED, Outcome.FAILED)
        with pytest.raises(TransferFailed) as caught:
            sender.result()
        assert isinstance(caught.value.__cause__, LocalProtocolError)
        assert caught.value.__cause__.values["tokens"] == (6, 8)
        assert sender.failure is not None
        assert sender.failure.reason is caught.value.reason is FailureReason.ABORTED


def test_closing_with_transfers_open_ends_them() -> None:
    with pair_of_ranks() as pair:
        receiver, sender = pair.receive(1), pair.prefill.send(1)
    assert receiver.wait() is not Outcome.PENDING
    assert sender.wait() is not Outcome.PENDING
    with pytest.raises(TransferFailed):
        receiver.result()


def test_rank_that_cannot_open_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    config = prefill_config(
        "tcp://127.0.0.1:1", bind="tcp://192.0.2.1:7000", trust=kvflow.Trust.none()
    )  # a documentation address (RFC 5737)
    rank = blocking.PrefillRank(config, make_pool().layout)
    with pytest.raises(ConfigError, match="cannot be bound"):
        rank.__enter__()
    assert set(threading.enumerate()) <= before  # threads of an earlier test may end meanwhile


def test_after_closing_nothing_hangs() -> None:
    with pair_of_ranks() as pair:
        receiver, sender = pair.receive(1), pair.prefill.send(1)
        assert pair.prefill.endpoint.startswith("tcp://")
        assert pair.decode.quarantined() == []
    for transfer in (receiver, sender):
        assert transfer.wait() is not Outcome.PENDING
        transfer.abort()
    for offer in (sender.chunk, sender.finish):
        with pytest.raises(TransferFailed) as caught:
            offer(TOKENS, PAGES)
        assert caught.value.reason is FailureReason.PEER_CLOSED
    for act in (
        lambda: pair.prefill.send(2),
        lambda: pair.receive(2),
        pair.decode.statistics,
        pair.prefill.quarantined,
    ):
        with pytest.raises(LocalProtocolError, match="not open"):
            act()


def test_pages_of_a_refused_transfer_are_safe() -> None:
    with pair_of_ranks() as pair:
        first, second = pair.receive(1), pair.receive(1)
        assert second.wait() is Outcome.FAILED
        assert second.memory is Memory.SAFE
        first.abort()
        assert first.wait() is Outcome.ABORTED


PROGRAM = """
import atexit, sys
from contextlib import ExitStack
from kvflow import blocking
from kvflow.room import RoomId
from kvflow.wire.messages import Grant
from tests.support.instances import make_pool, prefill_config

stack, pool = ExitStack(), make_pool()
stack.callback(print, "closed")
{begin}
rank = stack.enter_context(blocking.PrefillRank(prefill_config({endpoint!r}, backend={backend!r}), pool.layout))
rank.send(1).abort()
{end}
sys.exit(3)
"""
CLOSE = "atexit.register(stack.close)"
LEFT_OPEN = ("", "", b"")
CLOSED_LATE = (CLOSE, "", b"closed\n")
CLOSED_FIRST = ("", CLOSE, b"closed\n")
"""What a program does before and after it opens a rank, and what it prints."""


@pytest.mark.parametrize(
    ("backend", "begin", "end", "printed"),
    slow_except(
        [("memory", *LEFT_OPEN), ("memory", *CLOSED_FIRST), ("nixl", *CLOSED_LATE), ("mooncake", *CLOSED_LATE)],
        [(backend, *way) for backend in BACKENDS for way in (LEFT_OPEN, CLOSED_LATE, CLOSED_FIRST)],
    ),
)
def test_a_process_ends_although_its_ranks_are_open(backend: str, begin: str, end: str, printed: bytes) -> None:
    with registry_in_thread() as endpoint:
        program = PROGRAM.format(backend=backend, endpoint=endpoint, begin=begin, end=end)
        ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=100, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, printed, b"")


@pytest.mark.parametrize("interval_s", [1e-4, None])
def test_threads_are_switched_sooner_while_a_transfer_is_open(interval_s: float | None) -> None:
    before, shorter = sys.getswitchinterval(), interval_s or sys.getswitchinterval()
    with (
        registry_in_thread() as endpoint,
        LoopThread(switch_interval_s=None) as other,
        LoopThread(switch_interval_s=interval_s) as loop,
        blocking.PrefillRank(prefill_config(endpoint, backend="memory"), make_pool().layout, loop=other),
    ):
        with blocking.DecodeRank(decode_config(endpoint, backend="memory"), make_pool().layout, loop=loop) as rank:
            tables = ([0, 1], [3, 4])
            receivers = [
                rank.receive(room, prefill="prefill", tokens=TOKENS, pages={"kv": table})
                for room, table in enumerate(tables)
            ]
            rank.statistics()  # they have begun
            assert sys.getswitchinterval() == pytest.approx(shorter)
            receivers[0].abort()
            receivers[0].wait()
            assert sys.getswitchinterval() == pytest.approx(shorter)
            receivers[1].abort()
            receivers[1].wait()
            rank.statistics()
            assert sys.getswitchinterval() == pytest.approx(before)
            rank.receive(3, prefill="prefill", tokens=TOKENS, pages=PAGES)
        assert sys.getswitchinterval() == pytest.approx(before)


@pytest.mark.parametrize("interval_s", [0, -1.0, float("nan"), "soon"])
def test_the_interval_of_a_loop_thread_is_a_duration(interval_s: Any) -> None:
    with pytest.raises(ConfigError, match="switch_interval_s"):
        LoopThread(switch_interval_s=interval_s)


KILLED = """
import signal, sys
from contextlib import ExitStack
from kvflow import blocking
from tests.support.instances import make_pool, prefill_config

stack, pool = ExitStack(), make_pool()
rank = stack.enter_context(blocking.PrefillRank(prefill_config({endpoint!r}, backend={backend!r}), pool.layout))
senders = [rank.send(room) for room in range(4)]

def leave(*_):
    stack.close()
    print(*(sender.outcome.value for sender in senders), flush=True)
    sys.exit(3)

signal.signal(signal.SIGTERM, leave)
signal.raise_signal(signal.SIGTERM)
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_signal_handler_closes_ranks_with_open_transfers(backend: str) -> None:
    with registry_in_thread() as endpoint:
        program = KILLED.format(backend=backend, endpoint=endpoint)
        ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=100, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, b"aborted aborted aborted aborted\n", b"")

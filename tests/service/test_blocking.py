"""The blocking ranks, as a scheduler loop uses them: start, go on, poll."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from kvflow import blocking
from kvflow.blocking import LoopThread, Memory, Outcome
from kvflow.errors import ConfigError, FailureReason, LocalProtocolError, PlanError, RankDraining, TransferFailed
from tests.support.instances import BACKENDS, decode_config, make_pool, prefill_config
from tests.support.pools import Pool
from tests.support.registries import registry_in_thread

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
        waiting = pair.prefill._rank._core.rooms._waiting[1][pair.decode._rank.me]
        assert waiting.priority == 5
        receiver.abort()
        assert receiver.wait() is Outcome.ABORTED


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_abort_ends_both_sides(side: str) -> None:
    with pair_of_ranks() as pair:
        receiver, sender = pair.receive(1), pair.prefill.send(1)
        sender.chunk((0, 4), {"kv": [5]})
        while not np.array_equal(pair.target.cell("k", 0, 5, 0, 0), pair.source.cell("k", 0, 5, 0, 0)):
            time.sleep(1e-4)
        aborted, other = (sender, receiver) if side == "prefill" else (receiver, sender)
        aborted.abort()
        assert aborted.wait() is Outcome.ABORTED
        assert other.wait() is Outcome.FAILED
        for transfer in (aborted, other):
            with pytest.raises(TransferFailed) as caught:
                transfer.result()
            assert (caught.value.reason, caught.value.rank) == (FailureReason.ABORTED, f"{side}/0")
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
        with pytest.raises(PlanError, match="outside the pool"):
            pair.decode.receive(1, prefill="prefill", tokens=TOKENS, pages={"kv": [1, 64]})
        sender = pair.prefill.send(1)
        with pytest.raises(PlanError, match="outside the pool"):
            sender.finish(TOKENS, {"kv": [1, 64]})
        receiver = pair.receive(1)
        sender.finish(TOKENS, PAGES)
        assert (sender.wait(), receiver.wait()) == (Outcome.SUCCESS, Outcome.SUCCESS)


def test_room_in_use_shows_in_the_outcome() -> None:
    with pair_of_ranks() as pair:
        first, second = pair.receive(1), pair.receive(1)
        assert second.wait() is Outcome.FAILED
        assert second.failure is not None
        assert (second.failure.reason, second.failure.rank) == (FailureReason.PROTOCOL, "decode/0")
        assert "being received already" in second.failure.detail
        with pytest.raises(LocalProtocolError, match="being received already"):
            second.result()
        assert first.outcome is Outcome.PENDING
        first.abort()
        assert first.wait() is Outcome.ABORTED


def test_room_of_a_rank_that_drains_shows_in_the_outcome() -> None:
    with pair_of_ranks() as pair:
        pair.prefill.start_drain()
        sender = pair.prefill.send(1)
        assert (sender.outcome, sender.memory) == (Outcome.FAILED, Memory.SAFE)
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
    config = prefill_config("tcp://127.0.0.1:1", bind="tcp://192.0.2.1:7000")  # an address of nobody (RFC 5737)
    rank = blocking.PrefillRank(config, make_pool().layout)
    with pytest.raises(ConfigError, match="cannot be bound"):
        rank.__enter__()
    assert set(threading.enumerate()) <= before  # some of an earlier test may end meanwhile


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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("begin", "end", "printed"),
    [
        ("", "", b""),
        (CLOSE, "", b"closed\n"),
        ("", CLOSE, b"closed\n"),
    ],
    ids=["left open", "closed late at exit", "closed first at exit"],
)
def test_a_process_ends_although_its_ranks_are_open(backend: str, begin: str, end: str, printed: bytes) -> None:
    with registry_in_thread() as endpoint:
        program = PROGRAM.format(backend=backend, endpoint=endpoint, begin=begin, end=end)
        ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, printed, b"")

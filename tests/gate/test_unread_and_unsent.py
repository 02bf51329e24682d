"""Which connections are cut: an oracle that keeps every number agrees, and a recorded sequence replays alike."""

from typing import Final

from hypothesis import given
from hypothesis import strategies as st

from kvflow.gate.connections import (
    MAX_UNSENT_BYTES,
    MAX_UNSENT_IN_ALL_BYTES,
    MAX_WAITING_BYTES,
    MAX_WAITING_IN_ALL_BYTES,
    UnreadBytes,
    UnsentBytes,
)
from kvflow.gate.verdict import Cut

MIB: Final = 2**20
FDS: Final = range(8)

reads = st.tuples(st.sampled_from(FDS), st.integers(0, 3), st.integers(0, 20))
"""A connection, and how many MiB of it are read and received."""


def check_all(events: list[list[tuple[int, int, int]]]) -> list[list[Cut]]:
    """Return what is cut at each check; what is cut is watched anew, as if its peer had connected again."""
    unread, verdicts = UnreadBytes(is_listener=True), []
    received = dict.fromkeys(FDS, 0)
    for fd in FDS:
        unread.watch(fd)
    for event in events:
        for fd, num_read, num_received in event:
            received[fd] += num_received * MIB
            unread.note_read(fd, num_read * MIB)
        for fd in FDS:
            unread.note_received(fd, received[fd], 0)
        cuts = unread.excessive()
        for one, _ in cuts:
            assert isinstance(one, int)
            unread.forget(one)
            unread.watch(one)
            received[one] = 0
        verdicts.append(cuts)
    return verdicts


@given(st.lists(st.lists(reads, max_size=8), max_size=8))
def test_who_is_over_the_limits_twice_is_cut_and_nobody_else(events: list[list[tuple[int, int, int]]]) -> None:
    verdicts = check_all(events)
    assert verdicts == check_all(events), "a recorded sequence gives the same verdicts"
    read, received, over_before = dict.fromkeys(FDS, 0), dict.fromkeys(FDS, 0), set[int]()
    for one, cuts in zip(events, verdicts, strict=True):
        for fd, num_read, num_received in one:
            received[fd] += num_received * MIB
            read[fd] += num_read * MIB
        read = {fd: min(read[fd], received[fd]) for fd in FDS}
        left = {fd: received[fd] - read[fd] for fd in FDS}
        over, in_all = set(), sum(left.values())
        for fd in sorted(FDS, key=lambda fd: -left[fd]):
            if left[fd] > MAX_WAITING_BYTES or in_all > MAX_WAITING_IN_ALL_BYTES:
                over.add(fd)
                in_all -= left[fd]
        assert {fd for fd, _ in cuts} == over & over_before
        over_before = over - {fd for fd, _ in cuts}
        for cut, _ in cuts:
            assert isinstance(cut, int)
            read[cut] = received[cut] = 0


def test_what_is_left_of_connections_that_ended_goes_first() -> None:
    unread = UnreadBytes(is_listener=True)
    unread.watch(1)
    unread.note_received(1, MAX_WAITING_BYTES, 0)
    unread.ended = {b"small": 1, b"large": MAX_WAITING_IN_ALL_BYTES - MAX_WAITING_BYTES}
    assert unread.excessive() == []
    assert [one for one, _ in unread.excessive()] == [b"large"]


def test_silence_counts_after_the_first_message() -> None:
    unread = UnreadBytes(is_listener=True)
    unread.watch(1)
    assert not unread.note_received(1, 100, 10_000)
    unread.note_read(1, 100)
    assert unread.note_received(1, 100, 10_000)
    assert not unread.note_received(1, 100, 1_600)
    dialed = UnreadBytes(is_listener=False)
    dialed.watch(1)
    dialed.note_read(1, 100)
    assert not dialed.note_received(1, 100, 10_000), "listeners send no heartbeats"


sends = st.tuples(st.sampled_from(FDS), st.integers(1, 64), st.integers(0, 64))
"""A connection, how many MiB its peer reads, and how many are sent to it then."""


@given(st.lists(sends, max_size=60))
def test_who_does_not_read_is_cut_before_more_is_sent_to_it(events: list[tuple[int, int, int]]) -> None:
    sent, acked = dict.fromkeys(FDS, 0), dict.fromkeys(FDS, 0)
    unsent = UnsentBytes(acked.get)
    for fd in FDS:
        unsent.watch(fd)
    for fd, num_sent, num_read in events:
        acked[fd] = min(sent[fd], acked[fd] + num_read * MIB)
        waiting = {one: sent[one] - acked[one] for one in FDS if one in unsent.waiting}
        cuts = unsent.excessive(fd)
        assert (waiting.get(fd, 0) > MAX_UNSENT_BYTES) <= (fd not in unsent.waiting)
        assert sum(waiting[one] for one in waiting if one in unsent.waiting) <= MAX_UNSENT_IN_ALL_BYTES
        assert {fd for fd, _ in cuts} == {one for one in waiting if one not in unsent.waiting}
        kept = [waiting[one] for one in waiting if one in unsent.waiting and one != fd]
        cut_for_all = [waiting[one] for one in waiting if one not in unsent.waiting and one != fd]
        assert not cut_for_all or not kept or min(cut_for_all) >= max(kept), "those with most are cut"
        if fd in unsent.waiting:
            unsent.note_sent(fd, num_sent * MIB)
            sent[fd] += num_sent * MIB


def test_where_the_kernel_does_not_say_nothing_is_cut() -> None:
    unsent = UnsentBytes(lambda _: None)
    unsent.watch(1)
    for _ in range(20):
        assert unsent.excessive(1) == []
        unsent.note_sent(1, MAX_UNSENT_BYTES)

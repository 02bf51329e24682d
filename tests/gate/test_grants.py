"""The gate for page tables: every honest grant gets through, whatever waits; what nobody asked for is a violation."""

from collections import deque
from collections.abc import Callable, Container, Iterator
from typing import Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvflow.bounds import Bounds
from kvflow.errors import RemoteProtocolError
from kvflow.gate.grants import OVERDUE_S, PARTS_IN_ALL, PARTS_OF_ONE, PARTS_OF_SILENT, GrantGate, GrantId
from kvflow.room import RoomId
from kvflow.wire import messages
from kvflow.wire.messages import PAGE_BYTES, PARTS_PER_QUERY, Grant, GrantedPages, PagesQuery, PeerId
from tests.support.cores import grant, peer

ROOMY: Final = Bounds()
MAX_PAGES: Final = 2**25
PART: Final = 64


@pytest.fixture(autouse=True, scope="module")
def small_parts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages.rooms, "PAGES_PER_PART", PART)
        yield


def gate_of(
    limits: Bounds = ROOMY,
    has_place: Callable[[PeerId, int], bool] = lambda _peer, _size: True,
    open_rooms: Container[RoomId] = (),
) -> GrantGate:
    return GrantGate(limits, MAX_PAGES, has_place, lambda room: room in open_rooms)


def head(room: int, num_pages: int, **changes: object) -> Grant:
    return grant(room, room, tokens=(0, num_pages), pages={}, num_pages={"kv": num_pages}, **changes)


class Decode:
    """An honest decode rank."""

    def __init__(self, number: int) -> None:
        self.peer = peer("decode", number)
        self.connection = b"%d" % number
        self.tables: dict[int, bytes] = {}

    def id(self, room: int) -> GrantId:
        return GrantId(self.peer, room, room)

    def say(self, to: GrantGate, room: int, num_pages: int, now: float = 0.0) -> bool:
        self.tables[room] = np.random.default_rng(room).permutation(num_pages).astype("<u4").tobytes()
        return to.receive(self.connection, "principal", self.id(room), head(room, num_pages), now)

    def answers(self, query: PagesQuery) -> list[GrantedPages]:
        size = PAGE_BYTES * PART
        table = self.tables[int(query.room)]
        return [
            GrantedPages(room=query.room, generation=query.generation, part=part, pages=table[part * size :][:size])
            for part in range(query.start, query.stop)
        ]


def ask(of: GrantGate, *asked: Decode, now: float = 0.0) -> list[tuple[bytes, PagesQuery]]:
    peers = {decode.connection: decode.peer for decode in asked}
    return of.ask(now, peers.get)


def num_parts(queries: list[tuple[bytes, PagesQuery]]) -> int:
    return sum(query.stop - query.start for _, query in queries)


def test_a_grant_is_admitted_when_its_last_part_has_arrived() -> None:
    one, decode = gate_of(), Decode(0)
    assert decode.say(one, 7, 2 * PART + 1)
    ((connection, query),) = ask(one, decode)
    assert (connection, query.start, query.stop) == (b"0", 0, 3)
    first, second, third = decode.answers(query)
    assert one.store_part(decode.id(7), third, 1.0) is None
    assert one.store_part(decode.id(7), third, 1.0) is None
    assert one.store_part(decode.id(7), first, 1.0) is None
    admitted = one.store_part(decode.id(7), second, 1.5)
    assert admitted is not None
    assert admitted[1].pages == {"kv": decode.tables[7]}
    assert admitted[1].num_pages == {}
    assert admitted[1].timeout_s == head(7, 1).timeout_s - 1.5
    assert len(one.incoming) == 0


def test_parts_under_way_are_bounded_and_decode_ranks_take_turns() -> None:
    one, ranks = gate_of(), [Decode(number) for number in range(20)]
    for decode in ranks:
        for room in range(3):
            decode.say(one, room, 5 * PART)
    queries = ask(one, *ranks)
    assert num_parts(queries) == PARTS_IN_ALL
    of_each = [num_parts([query for query in queries if query[0] == decode.connection]) for decode in ranks]
    assert max(of_each) <= PARTS_OF_ONE
    assert min(of_each[: PARTS_IN_ALL // PARTS_PER_QUERY]) >= 1
    assert ask(one, *ranks) == []


def test_silent_decode_ranks_hold_up_nobody_for_long() -> None:
    one = gate_of()
    silent = [Decode(number) for number in range(PARTS_IN_ALL // PARTS_OF_ONE)]
    for decode in silent:
        decode.say(one, 1, 100 * PART)
    assert num_parts(ask(one, *silent)) == PARTS_IN_ALL
    honest = Decode(99)
    honest.say(one, 2, 10)
    assert ask(one, *silent, honest) == []
    assert b"99" in [connection for connection, _ in ask(one, *silent, honest, now=OVERDUE_S)]


def test_a_repeated_grant_asks_again_for_what_is_overdue() -> None:
    one, decode = gate_of(), Decode(0)
    decode.say(one, 1, PART)
    assert len(ask(one, decode)) == 1
    decode.say(one, 1, PART, now=1.0)
    assert ask(one, decode, now=1.0) == []
    decode.say(one, 1, PART, now=OVERDUE_S)
    ((_, query),) = ask(one, decode, now=OVERDUE_S)
    (part,) = decode.answers(query)
    assert one.store_part(decode.id(1), part, 3.0)


def test_grants_wait_for_memory_and_are_not_refused() -> None:
    one, decode = gate_of(Bounds(pending_grant_bytes=4 * PART * PAGE_BYTES)), Decode(0)
    decode.say(one, 1, 2 * PART)
    decode.say(one, 2, 2 * PART)
    ((_, query),) = ask(one, decode)
    assert query.room == 1
    for part in decode.answers(query):
        one.store_part(decode.id(1), part, 0.0)
    ((_, query),) = ask(one, decode)
    assert query.room == 2


def test_grants_wait_until_they_could_be_kept() -> None:
    free = [0]
    one, decode = gate_of(has_place=lambda _peer, size: size <= free[0]), Decode(0)
    decode.say(one, 1, PART)
    assert ask(one, decode) == []
    free[0] = PART * PAGE_BYTES
    assert len(ask(one, decode)) == 1


def test_what_was_not_asked_for_is_a_violation() -> None:
    one, decode = gate_of(), Decode(0)
    decode.say(one, 1, PART + 5)
    part = GrantedPages(room=1, generation=1, part=0, pages=bytes(PART * PAGE_BYTES))
    with pytest.raises(RemoteProtocolError, match="not asked for"):
        one.store_part(decode.id(1), part, 0.0)
    with pytest.raises(RemoteProtocolError, match="not asked for"):
        one.store_part(decode.id(2), part, 0.0)
    ask(one, decode)
    wrong = GrantedPages(room=1, generation=1, part=1, pages=bytes(6 * PAGE_BYTES))
    with pytest.raises(RemoteProtocolError, match="wrong size"):
        one.store_part(decode.id(1), wrong, 0.0)


@pytest.mark.parametrize(
    "wrong",
    [
        head(1, MAX_PAGES + 1),
        head(1, 0),
        grant(1, 1, pages={}, num_pages={"other": 1}),
        grant(1, 1, pages={}, num_pages={"kv": 1, "other": 1}),
    ],
    ids=["too many pages", "none", "another component", "one more component"],
)
def test_a_grant_that_no_honest_peer_sends_is_a_violation(wrong: Grant) -> None:
    with pytest.raises(RemoteProtocolError, match="number of pages"):
        gate_of().receive(b"", "", GrantId(peer("decode"), 1, 1), wrong, 0.0)


def test_the_largest_grant_is_received() -> None:
    assert gate_of().receive(b"", "", GrantId(peer("decode"), 1, 1), head(1, MAX_PAGES), 0.0)


def test_grants_of_others_and_late_ones_are_forgotten() -> None:
    one, decode = gate_of(), Decode(0)
    decode.say(one, 1, 9)
    assert ask(one) == []
    assert len(one.incoming) == 0
    decode.say(one, 1, 9)
    assert ask(one, decode, now=1e6) == []
    assert len(one.incoming) == 0


def test_what_a_decode_rank_has_taken_is_free_once_it_leaves() -> None:
    one, gone, other = gate_of(Bounds(pending_grant_bytes=4 * PART * PAGE_BYTES)), Decode(0), Decode(1)
    gone.say(one, 1, 2 * PART)
    assert num_parts(ask(one, gone)) == 2
    other.say(one, 2, 2 * PART)
    assert ask(one, other) == []
    one.drop_peer(gone.peer)
    assert num_parts(ask(one, other)) == 2
    assert len(one.incoming) == 1


def test_a_grant_that_is_never_answered_ends_by_its_deadline() -> None:
    one, silent, other = gate_of(Bounds(pending_grant_bytes=4 * PART * PAGE_BYTES)), Decode(0), Decode(1)
    silent.say(one, 1, 2 * PART)
    ask(one, silent)
    late = head(1, 1).timeout_s + OVERDUE_S + 1.0
    other.say(one, 2, 2 * PART, late)
    assert num_parts(ask(one, silent, other, now=late)) == 2
    assert len(one.incoming) == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_rooms_that_are_not_open_do_not_hold_up_those_that_are(when: str) -> None:
    one, decode = gate_of(has_place=lambda _peer, _size: False, open_rooms=[3] if when == "before" else []), Decode(0)
    for room in (1, 2, 3):
        decode.say(one, room, PART)
    if when == "after":
        assert ask(one, decode) == []
        one.open(3)
    assert [int(query.room) for _, query in ask(one, decode)] == [3]


def test_decode_ranks_that_do_not_answer_leave_the_turns_to_others() -> None:
    one, silent, honest = gate_of(), [Decode(number) for number in range(1, 40)], Decode(0)
    now = 0.0
    for _ in range(10):  # until each was asked once
        for decode in silent:
            decode.say(one, 1, 9 * PART, now)
        ask(one, *silent, now=now)
        now += OVERDUE_S
    for decode in silent:
        decode.say(one, 1, 9 * PART, now)
    assert num_parts(ask(one, *silent, now=now)) == PARTS_OF_SILENT
    honest.say(one, 1, 2 * PARTS_OF_ONE * PART, now)
    assert num_parts(ask(one, *silent, honest, now=now)) > 1
    (again, query), *_ = ask(one, *silent, honest, now=now + OVERDUE_S)
    answering = silent[int(again) - 1]
    one.store_part(answering.id(1), answering.answers(query)[0], now + OVERDUE_S)
    answering.say(one, 1, 9 * PART, now + OVERDUE_S)
    queries = ask(one, answering, now=now + OVERDUE_S)
    assert num_parts(queries) > 1, "it answers again"


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_honest_grant_gets_through(data: st.DataObject) -> None:
    """Grants of several ranks, dropped ones included, with lost messages and little memory."""
    most_bytes = 6 * PART * PAGE_BYTES
    one = gate_of(Bounds(pending_grant_bytes=most_bytes, pending_grants=6))
    ranks = [Decode(number) for number in range(3)]
    sizes = st.sampled_from([1, PART + 1, 3 * PART])
    open_grants = {
        (number, room): data.draw(sizes) for number in range(3) for room in range(data.draw(st.integers(1, 3)))
    }
    admitted: dict[tuple[int, int], tuple[bytes, Grant]] = {}
    now = 0.0
    for attempt in range(60):
        now += OVERDUE_S
        for (number, room), num_pages in open_grants.items():
            if (number, room) not in admitted:
                ranks[number].say(one, room, num_pages, now)
        under_way = deque(ask(one, *ranks, now=now))
        while under_way:
            connection, query = under_way.popleft()
            decode = ranks[int(connection)]
            for part in decode.answers(query):
                if attempt < 5 and data.draw(st.integers(0, 3)) == 0:
                    continue  # lost
                whole = one.store_part(decode.id(int(query.room)), part, now)
                if whole is not None:
                    admitted[int(connection), int(query.room)] = whole
            under_way.extend(ask(one, *ranks, now=now))
            assert num_parts(list(under_way)) <= PARTS_IN_ALL
        if len(admitted) == len(open_grants):
            break
    assert admitted.keys() == open_grants.keys()
    for (number, room), whole in admitted.items():
        assert whole[1].pages == {"kv": ranks[number].tables[room]}
    assert len(one.incoming) == 0

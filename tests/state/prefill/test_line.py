"""Calls of `chunk()` that wait for capacity."""

import itertools
from typing import Final

import pytest

from kvflow.room import RoomId
from kvflow.state.effects import AdmitChunk
from kvflow.state.prefill.line import CapacityLine
from kvflow.wire.messages import PeerId
from tests.support.cores import peer

A, B, C = (peer("decode", rank) for rank in range(3))
NAMES: Final = {"a": A, "b": B, "c": C}


class Engine:
    """Offers chunks through a line.

    Attributes:
        rooms: Decode ranks of each room.
        capacity: Number of chunks that each decode rank still accepts.
        gone: Rooms that have offered a chunk, in order.
        asked: Rooms whose decode ranks the line has queried, in order.
    """

    def __init__(self, rooms: dict[RoomId, list[PeerId]], **capacity: int) -> None:
        self.rooms = rooms
        self.capacity = {one: capacity.get(name, 0) for name, one in NAMES.items()}
        self.full = {one for one, count in self.capacity.items() if not count}
        self.gone: list[RoomId] = []
        self.asked: list[RoomId] = []
        self.line = CapacityLine(self.full, self._peers_of)
        self._numbers = itertools.count()

    def _peers_of(self, room: RoomId) -> list[PeerId]:
        self.asked.append(room)
        return self.rooms[room]

    def offer(self, *rooms: RoomId) -> list[int]:
        """Offer a chunk of each room, and return the calls that wait."""
        waiting = []
        for room in rooms:
            if self.line.is_open(room):
                self._go(room)
            else:
                waiting.append(number := next(self._numbers))
                self.line.add_call(number, room)
        return waiting

    def free(self, *peers: PeerId) -> None:
        """Let each decode rank accept one more chunk."""
        for one in peers:
            self._add(one, 1)
        self.go_on(self.line.admit())

    def go_on(self, admitted: list[AdmitChunk]) -> None:
        """Let admitted calls go on, one after another."""
        while admitted:
            (effect,) = admitted
            self._go(effect.room)
            admitted = self.line.remove_call(effect.call)

    def _go(self, room: RoomId) -> None:
        self.gone.append(room)
        for one in self.rooms[room]:
            self._add(one, -1)

    def _add(self, one: PeerId, count: int) -> None:
        self.capacity[one] += count
        (self.full.discard if self.capacity[one] else self.full.add)(one)


def test_who_has_capacity_does_not_wait() -> None:
    engine = Engine({1: [A]}, a=1)
    assert engine.offer(1) == []
    assert engine.gone == [1]


def test_rooms_go_in_the_order_in_which_they_came_one_for_each_chunk_that_left() -> None:
    engine = Engine({5: [A], 3: [A], 4: [A]})
    engine.offer(5, 3, 4)
    assert engine.gone == []
    for expected in ([5], [5, 3], [5, 3, 4]):
        engine.free(A)
        assert engine.gone == expected


def test_capacity_that_comes_at_once_lets_several_go() -> None:
    engine = Engine({1: [A], 2: [A], 3: [A]})
    engine.offer(1, 2, 3)
    engine.free(A, A)
    assert engine.gone == [1, 2]


def test_who_comes_later_waits_behind_those_who_wait_for_the_same_decode_rank() -> None:
    engine = Engine({1: [A, B], 2: [A], 3: [C]}, a=1, c=1)
    engine.offer(1, 2, 3)  # A has capacity, but the first room needs B too
    assert engine.gone == [3]
    engine.free(B)
    assert engine.gone == [3, 1]
    engine.free(A)
    assert engine.gone == [3, 1, 2]


def test_a_room_waits_until_every_decode_rank_of_it_has_capacity() -> None:
    engine = Engine({1: [A, B]})
    engine.offer(1)
    engine.free(A)
    assert engine.gone == []
    engine.free(B)
    assert engine.gone == [1]


@pytest.mark.parametrize("has_turn", [False, True], ids=["waiting", "admitted"])
def test_who_is_cancelled_gives_its_turn_to_the_next(has_turn: bool) -> None:
    engine = Engine({1: [A], 2: [A]})
    first, second = engine.offer(1, 2)
    if has_turn:
        engine.full.discard(A)
        engine.capacity[A] = 1
        assert engine.line.admit() == [AdmitChunk(1, first)]
        assert engine.line.admit() == [], "one after another"
        assert engine.line.remove_call(first) == [AdmitChunk(2, second)]
    else:
        assert engine.line.remove_call(first) == []
        engine.free(A)
        assert engine.gone == [2]


def test_who_has_failed_holds_nobody_up() -> None:
    engine = Engine({1: [A, B], 2: [A]}, a=2)
    first, _ = engine.offer(1, 2)
    engine.go_on(engine.line.remove_call(first))
    assert engine.gone == [2]


def test_nothing_is_kept_of_who_has_gone() -> None:
    engine = Engine({1: [A], 2: [A]})
    first, _ = engine.offer(1, 2)
    engine.line.remove_call(first)
    engine.free(A, A)
    assert not len(engine.line)
    assert not engine.line._num_waiting


def test_whether_a_room_must_wait_is_seen_without_looking_at_everybody_who_waits() -> None:
    many: dict[RoomId, list[PeerId]] = {room: [A] for room in range(100)}
    engine = Engine({**many, 100: [A, B], 101: [B]}, b=1)
    engine.offer(*many)
    engine.asked.clear()
    assert engine.line.is_open(101)
    engine.full.discard(A)
    assert not engine.line.is_open(100)
    assert engine.asked == [101, 100]


def test_who_asks_for_a_waiting_room_meanwhile_is_kept_for_it() -> None:
    engine = Engine({1: [A], 2: [B]}, b=1)
    engine.offer(1)
    engine.rooms[1] = [A, B]
    engine.free()
    engine.offer(2)  # there is capacity, but the first room waits for this decode rank too
    assert engine.gone == []
    engine.rooms[1] = [A, C]
    engine.free(A, C)
    assert engine.gone == [1, 2]

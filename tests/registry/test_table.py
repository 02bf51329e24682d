"""The registry's rules, with time as a plain number."""

import tracemalloc
from typing import Final

import pytest

from kvflow.errors import RemoteProtocolError
from kvflow.registry.table import Answer, RegistryTable, is_complete
from kvflow.wire.messages import Card
from tests.registry.cards import card

LEASE_S: Final = 9.0

Brief = tuple[bytes, str, list[tuple[int, int]]]
"""Who is answered about which instance, and each rank with its life."""


def brief(answers: list[Answer]) -> list[Brief]:
    return [(answer.connection, answer.cards.instance, lives(answer.cards.cards)) for answer in answers]


def lives(cards: tuple[Card, ...]) -> list[tuple[int, int]]:
    return [(card.peer.rank.engine_rank, card.peer.incarnation) for card in cards]


def ask(table: RegistryTable, now: float, instance: str = "prefill", connection: bytes = b"a") -> list[Brief]:
    return brief(table.lookup(instance, 1.0, connection, now))


def test_lookup_of_a_complete_instance_is_answered_at_once() -> None:
    table = RegistryTable()
    for rank in (2, 0, 1):
        assert table.register(card(engine_rank=rank, num_ranks=3), LEASE_S, 0.0) == []
    assert ask(table, 1.0) == [(b"a", "prefill", [(0, 1), (1, 1), (2, 1)])]
    assert table.expire(2.0) == []


def test_lookup_waits_until_the_instance_is_complete() -> None:
    table = RegistryTable()
    assert ask(table, 0.0) == []
    assert ask(table, 0.0, connection=b"b") == []
    assert table.register(card(engine_rank=1, num_ranks=2), LEASE_S, 0.1) == []
    everyone = [(0, 1), (1, 1)]
    answers = table.register(card(engine_rank=0, num_ranks=2), LEASE_S, 0.2)
    assert brief(answers) == [(b"a", "prefill", everyone), (b"b", "prefill", everyone)]
    assert table.expire(2.0) == []


def test_lookup_is_answered_with_what_there_is_when_its_time_is_up() -> None:
    table = RegistryTable()
    table.register(card(engine_rank=1, num_ranks=2), LEASE_S, 0.0)
    assert ask(table, 0.0) == []
    assert ask(table, 0.0, instance="unknown", connection=b"b") == []
    assert table.deadlines.next() == 1.0
    assert table.expire(0.9) == []
    assert brief(table.expire(1.0)) == [(b"a", "prefill", [(1, 1)]), (b"b", "unknown", [])]
    assert table.expire(2.0) == []


def test_repeated_lookup_counts_once_and_waits_anew() -> None:
    table = RegistryTable()
    assert ask(table, 0.0) == ask(table, 0.5) == []
    assert table.expire(1.0) == []
    assert brief(table.expire(1.5)) == [(b"a", "prefill", [])]


def test_one_connection_may_wait_for_several_instances() -> None:
    table = RegistryTable()
    for instance in ("x", "y"):
        ask(table, 0.0, instance=instance)
    assert brief(table.register(card("y"), LEASE_S, 0.1)) == [(b"a", "y", [(0, 1)])]
    assert brief(table.expire(1.0)) == [(b"a", "x", [])]


def test_instances_do_not_mix() -> None:
    table = RegistryTable()
    table.register(card("x", life=1), LEASE_S, 0.0)
    table.register(card("y", life=2), LEASE_S, 0.0)
    assert ask(table, 0.0, instance="x") == [(b"a", "x", [(0, 1)])]


def test_rank_is_forgotten_when_its_lease_is_over() -> None:
    table = RegistryTable()
    table.register(card(), LEASE_S, 0.0)
    table.expire(LEASE_S - 0.1)
    assert table.num_ranks == 1
    table.expire(LEASE_S)
    assert table.num_ranks == 0
    assert ask(table, LEASE_S) == []


def test_lease_is_renewed() -> None:
    table = RegistryTable()
    table.register(card(), LEASE_S, 0.0)
    table.register(card(), LEASE_S, 5.0)
    table.expire(LEASE_S)
    assert table.num_ranks == 1
    table.expire(5.0 + LEASE_S)
    assert table.num_ranks == 0


def test_later_life_replaces_the_earlier_and_its_lease() -> None:
    table = RegistryTable()
    table.register(card(life=7), LEASE_S, 0.0)
    table.register(card(life=3), LEASE_S, 5.0)
    table.expire(LEASE_S)
    assert ask(table, LEASE_S) == [(b"a", "prefill", [(0, 3)])]


def test_unregister_of_an_older_life_is_ignored() -> None:
    table = RegistryTable()
    older, later = card(life=1), card(life=2)
    table.register(older, LEASE_S, 0.0)
    table.register(later, LEASE_S, 1.0)
    table.unregister(older.peer)
    assert table.num_ranks == 1
    table.unregister(later.peer)
    assert (table.num_ranks, len(table.deadlines)) == (0, 0)


def test_unregister_of_nobody_is_ignored() -> None:
    table = RegistryTable()
    table.unregister(card().peer)
    assert table.num_ranks == 0


@pytest.mark.parametrize(
    ("ranks", "num_ranks", "complete"),
    [([], 1, False), ([0], 1, True), ([0, 1], 2, True), ([0], 2, False), ([1], 2, False), ([0, 2], 3, False)],
)
def test_complete_means_every_rank(ranks: list[int], num_ranks: int, complete: bool) -> None:
    assert is_complete(tuple(card(engine_rank=rank, num_ranks=num_ranks) for rank in ranks)) is complete


def test_claim_of_a_huge_instance_costs_nothing() -> None:
    """`num_ranks` comes from the network and may be anything below 2**32."""
    table = RegistryTable()
    claim = card(num_ranks=500_000)
    tracemalloc.start()
    try:
        table.register(claim, LEASE_S, 0.0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000


def test_card_of_a_rank_outside_its_instance_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="outside its instance") as caught:
        card(engine_rank=2, num_ranks=2)
    assert caught.value.values == {"engine_rank": 2, "num_ranks": 2}

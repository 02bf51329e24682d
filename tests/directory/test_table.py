"""Rules of the registry, with time as a plain number."""

import tracemalloc
from functools import partial
from typing import Final

import pytest

from kvflow.directory.table import RegistryTable
from kvflow.errors import RemoteProtocolError
from kvflow.state.decode.instances import is_complete
from kvflow.wire.messages import MAX_LISTED, RegistrationConflict, SealedRecord, SealedRecords
from tests.directory.answers import Brief, brief
from tests.directory.records import sealed
from tests.support.steps import num_steps

LEASE_S: Final = 9.0


def register(table: RegistryTable, new: SealedRecord, now: float = 0.0, connection: bytes = b"r") -> list[Brief]:
    """Register a rank with a working connection; return all answers."""
    return brief([table.answer_to(new, connection), *table.register(new, LEASE_S, connection, now)])


def ask(table: RegistryTable, now: float, instance: str = "prefill", connection: bytes = b"a") -> list[Brief]:
    return brief(table.lookup(instance, 1.0, connection, now))


def holder(table: RegistryTable, now: float) -> int:
    """Return the incarnation that decode ranks find."""
    (answer,) = table.lookup("prefill", 1.0, b"a", now)
    assert isinstance(answer.message, SealedRecords)
    (held,) = answer.message.records
    return held.peer.incarnation


def test_lookup_of_a_complete_instance_is_answered_at_once() -> None:
    table = RegistryTable()
    for rank in (2, 0, 1):
        assert register(table, sealed(engine_rank=rank, num_ranks=3)) == [(b"r", "registered", 1)]
    assert ask(table, 1.0) == [(b"a", "records", "prefill", [(0, 1), (1, 1), (2, 1)])]
    assert table.expire(2.0) == []


def test_lookup_waits_until_the_instance_is_complete() -> None:
    table = RegistryTable()
    assert ask(table, 0.0) == []
    assert ask(table, 0.0, connection=b"b") == []
    assert len(register(table, sealed(engine_rank=1, num_ranks=2), 0.1)) == 1
    everyone = [(0, 1), (1, 1)]
    assert register(table, sealed(engine_rank=0, num_ranks=2), 0.2)[1:] == [
        (b"a", "records", "prefill", everyone),
        (b"b", "records", "prefill", everyone),
    ]
    assert table.expire(2.0) == []


def test_lookup_is_answered_with_what_there_is_when_its_time_is_up() -> None:
    table = RegistryTable()
    register(table, sealed(engine_rank=1, num_ranks=2))
    assert ask(table, 0.0) == []
    assert ask(table, 0.0, instance="unknown", connection=b"b") == []
    assert (table.timers.next(), table.num_waiting) == (1.0, 2)
    assert table.expire(0.9) == []
    assert brief(table.expire(1.0)) == [(b"a", "records", "prefill", [(1, 1)]), (b"b", "records", "unknown", [])]
    assert table.expire(2.0) == []
    assert table.num_waiting == 0


def test_repeated_lookup_counts_once_and_waits_no_longer() -> None:
    """A decode rank repeats its lookup; a repetition must not postpone the answer."""
    table = RegistryTable()
    assert ask(table, 0.0) == ask(table, 0.5) == []
    assert brief(table.expire(1.0)) == [(b"a", "records", "prefill", [])]
    assert table.expire(1.5) == []


def test_one_connection_may_wait_for_several_instances() -> None:
    table = RegistryTable()
    for instance in ("x", "y"):
        ask(table, 0.0, instance=instance)
    assert register(table, sealed("y"), 0.1)[1:] == [(b"a", "records", "y", [(0, 1)])]
    assert brief(table.expire(1.0)) == [(b"a", "records", "x", [])]


def test_instances_do_not_mix() -> None:
    table = RegistryTable()
    register(table, sealed("x", incarnation=1))
    register(table, sealed("y", incarnation=2))
    assert ask(table, 0.0, instance="x") == [(b"a", "records", "x", [(0, 1)])]


def test_rank_is_forgotten_when_its_lease_is_over() -> None:
    table = RegistryTable()
    register(table, sealed())
    table.expire(LEASE_S - 0.1)
    assert table.num_ranks == 1
    table.expire(LEASE_S)
    assert table.num_ranks == 0
    assert ask(table, LEASE_S) == []


def test_lease_is_renewed() -> None:
    table = RegistryTable()
    register(table, sealed())
    register(table, sealed(), 5.0)
    table.expire(LEASE_S)
    assert table.num_ranks == 1
    table.expire(5.0 + LEASE_S)
    assert table.num_ranks == 0


def test_restart_replaces_the_incarnation_before_it_and_its_lease() -> None:
    table = RegistryTable()
    register(table, sealed(incarnation=7))
    assert register(table, sealed(incarnation=3), 5.0) == [(b"r", "registered", 3)]
    table.expire(LEASE_S)
    assert holder(table, LEASE_S) == 3


def test_unregister_of_an_older_incarnation_is_ignored() -> None:
    table = RegistryTable()
    older, later = sealed(incarnation=1), sealed(incarnation=2)
    register(table, older)
    register(table, later, 1.0)
    table.unregister(older.peer)
    assert table.num_ranks == 1
    table.unregister(later.peer)
    assert (table.num_ranks, len(table.timers), table._instances) == (0, 0, {})


def test_unregister_of_nobody_is_ignored() -> None:
    table = RegistryTable()
    table.unregister(sealed().peer)
    assert table.num_ranks == 0


def conflict() -> RegistryTable:
    """Return a table in which incarnation 2 registered after 1, and then 1 twice more: both are alive."""
    table = RegistryTable()
    register(table, sealed(incarnation=1), 0.0, b"one")
    register(table, sealed(incarnation=2), 1.0, b"two")
    assert register(table, sealed(incarnation=1), 2.0, b"one") == [(b"one", "registered", 1)]
    assert holder(table, 2.0) == 2
    assert register(table, sealed(incarnation=1), 3.0, b"one") == [
        (b"one", "registered", 1),
        (b"two", "refused", 2, 1),
        (b"one", "disputed", 1, 2),
    ]
    assert holder(table, 3.0) == 1
    return table


def test_of_two_processes_with_one_name_the_first_wins_and_both_are_told() -> None:
    table = conflict()
    for now in (4.0, 7.0, 10.0):
        told = [(b"two", "refused", 2, 1), (b"one", "disputed", 1, 2)]
        assert register(table, sealed(incarnation=2), now, b"two") == told
        assert register(table, sealed(incarnation=1), now, b"one") == [(b"one", "registered", 1), *told]
        assert (holder(table, now), table.num_ranks) == (1, 1)


def test_conflict_names_the_endpoint_of_the_other() -> None:
    table = RegistryTable()
    for incarnation in (1, 2, 1, 1):
        answers = table.register(sealed(incarnation=incarnation), LEASE_S, b"r", 0.0)
    (answer,) = answers
    assert answer.then is not None
    refused, disputed = answer.message, answer.then.message
    assert isinstance(refused, RegistrationConflict)
    assert isinstance(disputed, RegistrationConflict)
    assert (disputed.other_endpoint, refused.other_endpoint) == ("tcp://10.0.0.2:1", "tcp://10.0.0.1:1")


@pytest.mark.parametrize("leaves", ["says so", "falls silent"])
def test_who_was_refused_takes_over_when_the_first_leaves(leaves: str) -> None:
    table = conflict()
    register(table, sealed(incarnation=2), 5.0, b"two")
    if leaves == "says so":
        table.unregister(sealed(incarnation=1).peer)
    else:
        table.expire(3.0 + LEASE_S)
    assert holder(table, 12.0) == 2
    assert register(table, sealed(incarnation=2), 12.0, b"two") == [(b"two", "registered", 2)]


@pytest.mark.parametrize("leaves", ["says so", "falls silent"])
def test_conflict_ends_when_the_newcomer_leaves(leaves: str) -> None:
    table = conflict()
    register(table, sealed(incarnation=1), 9.0, b"one")
    if leaves == "says so":
        table.unregister(sealed(incarnation=2).peer)
    else:
        table.expire(1.0 + LEASE_S)
    assert register(table, sealed(incarnation=1), 11.0, b"one") == [(b"one", "registered", 1)]
    assert holder(table, 11.0) == 1


def test_a_third_newcomer_is_refused_too() -> None:
    table = conflict()
    assert register(table, sealed(incarnation=3), 4.0, b"three") == [
        (b"three", "refused", 3, 1),
        (b"one", "disputed", 1, 3),
    ]
    assert (holder(table, 4.0), len(table.timers)) == (1, 2)


def test_incarnation_that_was_replaced_is_forgotten_with_its_lease() -> None:
    table = RegistryTable()
    register(table, sealed(incarnation=1), 0.0)
    register(table, sealed(incarnation=2), 5.0)
    table.expire(LEASE_S)
    assert register(table, sealed(incarnation=1), 10.0) == [(b"r", "registered", 1)]
    assert holder(table, 10.0) == 1
    register(table, sealed(incarnation=2), 11.0)
    assert register(table, sealed(incarnation=2), 12.0)[1:] == [(b"r", "refused", 1, 2), (b"r", "disputed", 2, 1)]


def test_one_late_registration_of_a_killed_process_is_no_conflict() -> None:
    """It was in flight when the successor registered, and its connection still seemed to exist."""
    table = RegistryTable()
    register(table, sealed(incarnation=1), 0.0)
    register(table, sealed(incarnation=2), 1.0)
    register(table, sealed(incarnation=1), 1.1)
    for now in (4.0, 7.0, 10.0):
        assert register(table, sealed(incarnation=2), now) == [(b"r", "registered", 2)]
        assert holder(table, now) == 2
    table.expire(1.1 + LEASE_S)
    assert len(table.timers) == 1


def test_who_cannot_be_answered_changes_nothing() -> None:
    """The table is the same with and without registrations that cannot be answered."""
    for is_refused in (False, True):
        told, untold = (conflict() if is_refused else RegistryTable() for _ in range(2))
        for incarnation in (1, 2, 3):
            for _ in range(3):
                told.answer_to(sealed(incarnation=incarnation), b"gone")
        for incarnation in (2, 1, 3):
            new = sealed(incarnation=incarnation)
            assert register(told, new, 5.0) == register(untold, new, 5.0)
        assert (told.num_ranks, len(told.timers)) == (untold.num_ranks, len(untold.timers))


def test_once_more_counts_anew_for_each_newcomer() -> None:
    table = RegistryTable()
    for incarnation in (1, 2, 1, 3, 2):
        assert register(table, sealed(incarnation=incarnation)) == [(b"r", "registered", incarnation)]
    assert holder(table, 0.0) == 3


@pytest.mark.parametrize(
    ("ranks", "num_ranks", "complete"),
    [([], 1, False), ([0], 1, True), ([0, 1], 2, True), ([0], 2, False), ([1], 2, False), ([0, 2], 3, False)],
)
def test_complete_means_every_rank(ranks: list[int], num_ranks: int, complete: bool) -> None:
    records = [sealed(engine_rank=rank, num_ranks=num_ranks) for rank in ranks]
    assert is_complete(tuple(records)) is complete
    table = RegistryTable()
    for new in records:
        register(table, new)
    assert bool(ask(table, 0.0)) is complete


def test_ranks_that_claim_different_sizes_are_not_complete() -> None:
    table = RegistryTable()
    register(table, sealed(engine_rank=0, num_ranks=2))
    register(table, sealed(engine_rank=5, num_ranks=6))
    assert ask(table, 0.0) == []


def test_claim_of_a_huge_instance_costs_nothing() -> None:
    """`num_ranks` comes from the network and may be anything below 2**32."""
    table = RegistryTable()
    claim = sealed(num_ranks=500_000)
    tracemalloc.start()
    try:
        register(table, claim)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000


def test_registering_looks_at_no_other_rank() -> None:
    costs = []
    for others in (10, 1_000):
        table = RegistryTable()
        for number in range(others):
            table.register(sealed(f"other-{number}"), LEASE_S, b"r", 0.0)
            table.register(sealed(engine_rank=number, num_ranks=5_000), LEASE_S, b"r", 0.0)
        table.lookup("prefill", 1.0, b"a", 0.0)
        new = sealed(engine_rank=others, num_ranks=5_000)
        costs.append(num_steps(partial(table.register, new, LEASE_S, b"r", 0.0)))
    assert costs[0] == costs[1]


def test_record_of_a_rank_outside_its_instance_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="outside its instance") as caught:
        sealed(engine_rank=2, num_ranks=2)
    assert caught.value.values == {"engine_rank": 2, "num_ranks": 2}


def test_a_list_of_all_ranks_has_no_layouts_and_is_bounded() -> None:
    table = RegistryTable()
    for number in range(MAX_LISTED + 1):
        one = sealed(f"instance-{number}", incarnation=number + 1)
        assert table.has_place(one)
        table.register(one, 9.0, b"", 0.0)
    listed = table.list_ranks()
    assert len(listed) == MAX_LISTED
    assert [record.peer.rank.instance for record in listed[:2]] == ["instance-0", "instance-1"]
    assert {bytes(record.layout) for record in listed} == {b"\xc0"}
    assert table.num_ranks == MAX_LISTED + 1

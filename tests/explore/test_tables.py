"""Exploration finds a wrong value in every table row that it reaches, unless the value makes no difference."""

import enum
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import pytest

from kvflow.state import peers, tables
from kvflow.state.decode import instances, progress
from kvflow.state.prefill import room
from simulation.explore import Setup, explore
from tests.explore.worlds import WORLDS
from tests.support.slow import slow_except

Table = Mapping[tuple[Any, Any], Any]

USED_BY: Final = MappingProxyType(
    {
        "OUTCOME": (tables,),
        "MEMORY": (tables,),
        "FEED": (tables, room),
        "RANK": (tables, progress),
        "PEER": (tables, peers),
        "INSTANCE": (tables, instances),
    }
)
"""Modules that import a table by name."""

TABLES: Final[Mapping[str, Table]] = MappingProxyType({name: getattr(tables, name) for name in USED_BY})

TRANSFERS: Final = (WORLDS["one fault"],)
QUIESCED: Final = (WORLDS["two writes that are quiesced"],)
ANY: Final = (
    WORLDS["handshake without faults"],
    *TRANSFERS,
    *QUIESCED,
    WORLDS["one fault with the handshake"],
)

SEARCHED: Final[Mapping[str, tuple[Setup, ...]]] = MappingProxyType(
    {
        "OUTCOME": TRANSFERS,
        "MEMORY": TRANSFERS,
        "FEED": QUIESCED,
        "RANK": (*TRANSFERS, *QUIESCED),
        "PEER": ANY,
        "INSTANCE": ANY,
    }
)

TWO_FAULTS: Final = (Setup(max_faults=2),)
"""Worlds of thousands of states, searched only for rows that no run with one fault reads."""

REACHED: Final = MappingProxyType(
    {
        "OUTCOME": (
            "PENDING WRITTEN, PENDING COMPLETED, PENDING FAILED, PENDING ABORTED, SUCCESS QUIET, FAILED WRITTEN, "
            "FAILED COMPLETED, FAILED QUIET, FAILED IN_DOUBT, ABORTED WRITTEN, ABORTED COMPLETED, ABORTED QUIET"
        ),
        "MEMORY": (
            "HELD WRITTEN, HELD COMPLETED, HELD FAILED, HELD ABORTED, DRAINING WRITTEN, DRAINING COMPLETED, "
            "DRAINING QUIET, DRAINING IN_DOUBT, SAFE WRITTEN, SAFE COMPLETED, SAFE FAILED, SAFE ABORTED, SAFE QUIET"
        ),
        "FEED": "OPEN LAST_CHUNK, FINISHED ROLLED_BACK, FINISHED KEPT, QUIESCING QUIET, SETTLING QUIET",
        "RANK": "WRITING NOTICED, WRITING COMPLETED, WRITING DRAINED, WRITING FENCED",
        "PEER": "CONNECTED DISCONNECTED, SUSPECT LEFT, LOST CONNECTED",
        "INSTANCE": ("LOOKING_UP FOUND, COMPILING COMPILED, CONNECTING CONNECTED, CONNECTING FOUND, CONNECTED LOST"),
    }
)
"""Rows that `SEARCHED` reads, as state and signal."""

REACHED_BY_TWO: Final = MappingProxyType(
    {
        "OUTCOME": "ABORTED IN_DOUBT",
        "MEMORY": "QUARANTINED WRITTEN, QUARANTINED COMPLETED, QUARANTINED QUIET, QUARANTINED IN_DOUBT",
    }
)
"""Further rows of the same tables that `TWO_FAULTS` reads."""


class Wrong(NamedTuple):
    """A row with a wrong value."""

    table: str
    row: tuple[enum.Enum, enum.Enum]
    value: enum.Enum
    worlds: tuple[Setup, ...]

    def __str__(self) -> str:
        return f"{self.table} {self.row[0].name} {self.row[1].name} is {self.value.name}"


QUIET_FOLLOWS: Final = "the proof follows within the same event"
DEATH_ONLY: Final = "a rank is lost by its death alone here, and then another incarnation is found in any state"
PROBE_FOLLOWS: Final = "a connection breaks by a death alone here, and the probe that follows forgets the peer"
FAILED_ALREADY: Final = "the transfer fails in the same event, and both states are quiet"
FORGOTTEN: Final = "a peer that has left is forgotten"
RESENT: Final = "the engine is told to offer everything once more, and it is sent once more"

EQUIVALENT: Final = MappingProxyType(
    {
        "MEMORY DRAINING WRITTEN is DRAINING": QUIET_FOLLOWS,
        "MEMORY DRAINING WRITTEN is QUARANTINED": QUIET_FOLLOWS,
        "MEMORY SAFE COMPLETED is DRAINING": QUIET_FOLLOWS,
        "MEMORY SAFE COMPLETED is QUARANTINED": QUIET_FOLLOWS,
        "MEMORY QUARANTINED WRITTEN is DRAINING": QUIET_FOLLOWS,
        "MEMORY QUARANTINED WRITTEN is QUARANTINED": QUIET_FOLLOWS,
        "RANK WRITING DRAINED is COMPLETE": FAILED_ALREADY,
        "RANK WRITING FENCED is COMPLETE": FAILED_ALREADY,
        "FEED FINISHED KEPT is QUIESCING": RESENT,
        "FEED SETTLING QUIET is OPEN": RESENT,
        "FEED SETTLING QUIET is SETTLING": "all that follows is the Ack, which ends the room",
        "RANK WRITING NOTICED is LOST": "its last notice proves as much as that of another rank",
        "PEER CONNECTED DISCONNECTED is CONNECTED": PROBE_FOLLOWS,
        "PEER CONNECTED DISCONNECTED is LOST": PROBE_FOLLOWS,
        "PEER CONNECTED DISCONNECTED is LEFT": PROBE_FOLLOWS,
        "PEER SUSPECT LEFT is CONNECTED": FORGOTTEN,
        "PEER SUSPECT LEFT is SUSPECT": FORGOTTEN,
        "PEER SUSPECT LEFT is LOST": FORGOTTEN,
        "INSTANCE COMPILING COMPILED is CONNECTED": "no grant goes out before every rank has answered, too",
        "INSTANCE CONNECTING FOUND is LOOKING_UP": "the next answer of the directory begins the handshake anew",
        "INSTANCE CONNECTED LOST is COMPILING": DEATH_ONLY,
        "INSTANCE CONNECTED LOST is CONNECTING": DEATH_ONLY,
        "INSTANCE CONNECTED LOST is CONNECTED": DEATH_ONLY,
    }
)
"""Wrong values that break no promise in these worlds, with the reason."""

QUICK: Final = {
    "OUTCOME FAILED QUIET is ABORTED",
    "OUTCOME PENDING WRITTEN is SUCCESS",
    "MEMORY DRAINING QUIET is DRAINING",
    "MEMORY HELD ABORTED is SAFE",
    "RANK WRITING COMPLETED is LOST",
    "INSTANCE COMPILING COMPILED is LOOKING_UP",
}


def every_wrong() -> Iterator[Wrong]:
    for name, rows in REACHED.items():
        for text in rows.split(", "):
            yield from wrong_values(name, text, SEARCHED[name])
    for name, rows in REACHED_BY_TWO.items():
        for text in rows.split(", "):
            yield from wrong_values(name, text, TWO_FAULTS)


def wrong_values(name: str, text: str, worlds: tuple[Setup, ...]) -> Iterator[Wrong]:
    row = next(row for row in TABLES[name] if f"{row[0].name} {row[1].name}" == text)
    right = TABLES[name][row]
    for value in type(right):
        if value is not right:
            yield Wrong(name, row, value, worlds)


WRONG: Final = {str(wrong): wrong for wrong in every_wrong()}


def replace(monkeypatch: pytest.MonkeyPatch, name: str, table: Table) -> None:
    for module in USED_BY[name]:
        monkeypatch.setattr(module, name, table)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", slow_except(QUICK, [name for name in WRONG if name not in EQUIVALENT]))
def test_a_wrong_value_breaks_a_promise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = WRONG[name]
    replace(monkeypatch, wrong.table, {**TABLES[wrong.table], wrong.row: wrong.value})
    assert any(explore(setup, max_states=10_000).violation for setup in wrong.worlds)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", EQUIVALENT)
def test_what_is_said_to_make_no_difference_makes_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that does make a difference must be found instead, and its reason here is wrong."""
    wrong = WRONG[name]
    replace(monkeypatch, wrong.table, {**TABLES[wrong.table], wrong.row: wrong.value})
    for setup in wrong.worlds:
        found = explore(setup, max_states=10_000)
        assert (found.violation, found.is_complete) == (None, True)


class Noting(dict[tuple[Any, Any], Any]):
    """A table that records which rows are read."""

    def __init__(self, table: Table) -> None:
        super().__init__(table)
        self.read: set[str] = set()

    def __getitem__(self, row: tuple[Any, Any]) -> Any:
        self.read.add(f"{row[0].name} {row[1].name}")
        return super().__getitem__(row)


def rows_read(worlds: tuple[Setup, ...], monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    noting = {name: Noting(table) for name, table in TABLES.items()}
    for name, table in noting.items():
        replace(monkeypatch, name, table)
    for setup in worlds:
        assert explore(setup).violation is None
    return {name: table.read for name, table in noting.items()}


@pytest.mark.slow
def test_rows_that_are_tried_are_those_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rows_read(ANY, monkeypatch) == {name: set(rows.split(", ")) for name, rows in REACHED.items()}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rows_that_two_faults_add_are_tried_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    read = rows_read(TWO_FAULTS, monkeypatch)
    added = {name: rows - set(REACHED[name].split(", ")) for name, rows in read.items()}
    assert {name: rows for name, rows in added.items() if rows} == {
        name: set(rows.split(", ")) for name, rows in REACHED_BY_TWO.items()
    }

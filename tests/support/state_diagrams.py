"""Generator of the table-based parts of docs/state-machines.md. `make docs` runs it."""

import ast
import enum
import inspect
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from kvflow.state.tables import FEED, INSTANCE, MEMORY, OUTCOME, PEER, RANK, REQUEST

__all__ = ["PAGE", "fill_in", "main"]

PAGE: Final = Path(__file__).parents[2] / "docs" / "state-machines.md"

Table = Mapping[Any, enum.Enum]
"""Map from (state, signal) to state. The keys are Any because Mapping is invariant in its key type."""

MACHINES: Final[Mapping[str, Table]] = {
    "OUTCOME": OUTCOME,
    "MEMORY": MEMORY,
    "FEED": FEED,
    "REQUEST": REQUEST,
    "RANK": RANK,
    "PEER": PEER,
    "INSTANCE": INSTANCE,
}
"""Machines by name; each starts in the first state of its enumeration."""

MARKED: Final = re.compile(r"(<!-- generated: (\w+) of (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill_in(page: str) -> str:
    """Replace the text between the markers by that of the tables.

    Raises:
        KeyError: A marker has an unknown name.
    """
    return MARKED.sub(lambda found: f"{found[1]}\n{PARTS[found[2]](MACHINES[found[3]])}\n{found[4]}", page)


def main() -> None:
    """Rewrite the generated parts of the page."""
    PAGE.write_text(fill_in(PAGE.read_text("utf-8")), "utf-8")


def diagram(table: Table) -> str:
    """Return a Mermaid diagram of the states and transitions, without signals that change nothing."""
    edges: dict[tuple[str, str], list[str]] = {}
    for (before, signal), after in table.items():
        if after is not before:
            edges.setdefault((before.value, after.value), []).append(signal.value)
    arrows = [f"{before} --> {after}: {', '.join(signals)}" for (before, after), signals in edges.items()]
    first = states(table)[0].value
    lines = ["stateDiagram-v2", "    direction LR", *(f"    {line}" for line in [f"[*] --> {first}", *arrows])]
    return "\n".join(["```mermaid", *lines, "```", ""])


def changes(table: Table) -> str:
    """Return the whole table: a row for each state, a column for each signal, empty where nothing changes."""
    columns = signals(table)
    rows = [["state", *(signal.value for signal in columns)]]
    rows.append(["---"] * len(rows[0]))
    for state in states(table):
        after = [table[state, signal] for signal in columns]
        rows.append([f"**{state.value}**", *("" if then is state else then.value for then in after)])
    return _grid(rows)


def meanings(table: Table) -> str:
    """Return a table with the meaning of each state."""
    return _explain("state", states(table))


def causes(table: Table) -> str:
    """Return a table with the meaning of each signal."""
    return _explain("signal", signals(table))


PARTS: Final = {"diagram": diagram, "changes": changes, "states": meanings, "signals": causes}


def states(table: Table) -> list[enum.Enum]:
    """Return the states in the order of their definition."""
    return _members(state for state, _ in table)


def signals(table: Table) -> list[enum.Enum]:
    """Return the signals in the order of their definition."""
    return _members(signal for _, signal in table)


def _members(some: Iterable[enum.Enum]) -> list[enum.Enum]:
    return list(type(next(iter(some))))


def _explain(kind: str, members: Iterable[enum.Enum]) -> str:
    known = list(members)
    said = _docstrings(type(known[0]))
    return _grid([[kind, "meaning"], ["---", "---"], *([f"**{member.value}**", said[member.name]] for member in known)])


def _docstrings(members: type[enum.Enum]) -> dict[str, str]:
    """Return the string below each enum member, parsed from the source: Python drops it at run time."""
    body = ast.parse(inspect.getsource(members)).body[0]
    said = {}
    if isinstance(body, ast.ClassDef):
        for assignment, below in zip(body.body, body.body[1:], strict=False):
            match assignment, below:
                case ast.Assign(targets=[ast.Name(id=name)]), ast.Expr(value=ast.Constant(value=str(text))):
                    said[name] = " ".join(text.split())
    return said


def _grid(rows: Iterable[Iterable[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    main()

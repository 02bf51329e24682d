"""Rows, the results of a comparison, which are printed as JSON or as a table, or drawn.

A row is one quantity of one case, measured for kvflow and for the transport that it is compared with, in alternating
rounds of one run. On a machine that others use, times and rates vary by half; the ratio of two sides measured in
alternation does not, so compare ratios. A ratio is always kvflow's value divided by the other one: for a rate (`better`
is "higher") a ratio above 1 is good, for a time (`better` is "lower") a ratio below 1 is.
"""

import math
import statistics
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal, TypeVar

import anyio
import msgspec

from benchmarks.pair.loads import BARE_WAYS, Way

__all__ = [
    "Measure",
    "Measured",
    "Row",
    "Tail",
    "best_bare",
    "compare",
    "grouped",
    "percentile",
    "print_rows",
    "rows_as_json",
    "rows_as_table",
    "there_and_back",
]

DIGITS = 4

UNITS: Final = {"us": "µs"}
"""Display form of units that JSON spells in ASCII."""

LEGEND: Final = (
    "kvflow, bare: medians of the rounds, with the lowest and the highest round; p99 is over single requests",
    "ratio: kvflow / bare; paired: median of the ratios of single rounds, which is steadier on a busy machine",
)

Case = TypeVar("Case")


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Description of one quantity of one case.

    Attributes:
        bench: The measurement: "transfer", "handover", ...
        group: Cases that are drawn side by side, usually a shape.
        case: What was done, unique within bench, group and quantity.
        quantity: What was measured: "goodput", "time", "requests", "CPU", ...
        unit: Unit of every value of the row.
        better: Which values are better.
    """

    bench: str
    group: str
    case: str
    quantity: str
    unit: str
    better: Literal["higher", "lower"]


class Tail(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles of single requests, over all rounds, in the row's unit."""

    kvflow_p50: float
    kvflow_p99: float
    bare_p50: float | None = None
    bare_p99: float | None = None


class Row(Measured, frozen=True, kw_only=True):
    """Measured values of one quantity of one case.

    Attributes:
        kvflow: Median of kvflow's rounds.
        kvflow_low: Lowest round of kvflow.
        kvflow_high: Highest round of kvflow.
        bare: Median of the rounds of the other side; None if there is no other side.
        bare_low: Lowest round of the other side.
        bare_high: Highest round of the other side.
        ratio: `kvflow / bare`.
        paired_ratio: Median of the ratios of single rounds, which is steadier on a loaded machine.
        rounds: Number of rounds of each side.
        others: Medians of further sides, by name.
        tail: Percentiles of single requests, if the quantity is a time of one.
        facts: Additional facts, whose names contain their units.
    """

    kvflow: float
    kvflow_low: float
    kvflow_high: float
    rounds: int
    bare: float | None = None
    bare_low: float | None = None
    bare_high: float | None = None
    ratio: float | None = None
    paired_ratio: float | None = None
    others: dict[str, float] = {}
    tail: Tail | None = None
    facts: dict[str, float | str] = {}


Measure = Callable[[Callable[[Row], None]], Awaitable[Sequence[Row]]]
"""A measurement: returns rows, and calls its argument with each as soon as it is complete."""


def print_rows(measure: Measure, *, is_json: bool) -> int:
    """Run a measurement, and print its rows: each as a JSON object at once, or tables at the end.

    With tables, each row goes to standard error at once, so that a run that is cut off has not been for nothing.

    Returns:
        The exit code.
    """

    def report(row: Row) -> None:
        if is_json:
            print(rows_as_json([row]), flush=True)
            return
        bare = "" if row.bare is None else f" against {_text(row.bare)}, ratio {_text(row.paired_ratio)}"
        figures = f"{_text(row.kvflow)}{bare} ({UNITS.get(row.unit, row.unit)})"
        print(f"{row.group}: {row.case}, {row.quantity}: {figures}", file=sys.stderr, flush=True)

    rows = anyio.run(measure, report)
    if not is_json:
        print(rows_as_table(rows))
    return 0


def there_and_back(cases: Sequence[Case], rounds: int) -> Iterator[Case]:
    """Yield each case once per round, in alternating order (A B, B A, ...)."""
    for number in range(rounds):
        yield from cases if number % 2 == 0 else reversed(cases)


def compare(
    measured: Measured,
    kvflow: Sequence[float],
    bare: Sequence[float] = (),
    *,
    others: Mapping[str, Sequence[float]] | None = None,
    tail: Tail | None = None,
    facts: Mapping[str, float | str] | None = None,
) -> Row:
    """Create a row from the values of single rounds.

    Args:
        measured: Description of the values.
        kvflow: One value for each round, at least one.
        bare: Values of the other side, in the same order; empty if there is none.
        others: Values of further sides, by name.
        tail: Percentiles of single requests.
        facts: Additional facts.
    """
    row = Row(
        **msgspec.structs.asdict(measured),
        kvflow=_rounded(statistics.median(kvflow)),
        kvflow_low=_rounded(min(kvflow)),
        kvflow_high=_rounded(max(kvflow)),
        rounds=len(kvflow),
        others={name: _rounded(statistics.median(values)) for name, values in (others or {}).items()},
        tail=tail,
        facts=dict(facts or {}),
    )
    if not bare:
        return row
    return msgspec.structs.replace(
        row,
        bare=_rounded(statistics.median(bare)),
        bare_low=_rounded(min(bare)),
        bare_high=_rounded(max(bare)),
        ratio=_rounded(statistics.median(kvflow) / statistics.median(bare)),
        paired_ratio=_rounded(statistics.median(own / other for own, other in zip(kvflow, bare, strict=True))),
    )


def best_bare(values: Mapping[Way, Sequence[float]], better: Literal["higher", "lower"]) -> Way:
    """Return the better of the bare ways; with few cores, it is often the napping one."""
    choose = max if better == "higher" else min
    return choose(BARE_WAYS, key=lambda way: statistics.median(values[way]))


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed; requires at least one value."""
    return _rounded(sorted(values)[max(0, math.ceil(share * len(values)) - 1)])


def rows_as_json(rows: Iterable[Row]) -> str:
    """Return one JSON object per line."""
    return "\n".join(msgspec.json.encode(row).decode() for row in rows)


def rows_as_table(rows: Sequence[Row]) -> str:
    """Format rows as a table for people, with a heading for each group."""
    lines: list[str] = []
    for group in grouped(rows):
        first, width = group[0], max(len(row.case) for row in group)
        others = "".join(f" {name:>{_width(name)}}" for name in first.others)
        columns = f"{'kvflow':>9} {'low - high':>17} {'bare':>9} {'low - high':>17} {'ratio':>6} {'paired':>6}"
        unit = UNITS.get(first.unit, first.unit)
        lines.append(f"{first.group}: {first.quantity}, {unit} ({first.better} is better)")
        lines.append(f"  {'':{width}} {columns}{others}")
        for row in group:
            lines.append(f"  {row.case:{width}} {_cells(row)}")
            if row.tail is not None:
                lines.append(f"  {'':{width}} {_tail(row.tail)}")
        lines.append("")
    return "\n".join([*lines, *LEGEND])


def grouped(rows: Iterable[Row]) -> list[list[Row]]:
    """Group rows by bench, group and quantity, in order of first appearance."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.bench, row.group, row.quantity), []).append(row)
    return list(groups.values())


def _cells(row: Row) -> str:
    others = "".join(f" {_text(value):>{_width(name)}}" for name, value in row.others.items())
    return (
        f"{_text(row.kvflow):>9} {_span(row.kvflow_low, row.kvflow_high):>17} {_text(row.bare):>9} "
        f"{_span(row.bare_low, row.bare_high):>17} {_text(row.ratio):>6} {_text(row.paired_ratio):>6}{others}"
    )


def _tail(tail: Tail) -> str:
    kvflow, bare = ("" if value is None else f"p99 {_text(value):>5}" for value in (tail.kvflow_p99, tail.bare_p99))
    return f"{kvflow:>9} {'':17} {bare:>9}".rstrip()


def _width(name: str) -> int:
    return max(9, len(name))


def _span(low: float | None, high: float | None) -> str:
    return "" if low is None else f"{_text(low)} - {_text(high)}"


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}" if value else "0"


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")

"""Plot of rows: one panel for each group and quantity, with a pair of bars for each case."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from matplotlib.figure import Figure

from benchmarks.rows import Row, grouped
from kvflow import ConfigError

__all__ = ["add_arguments", "draw", "prepare"]

BAR: Final = 0.36
ROW_INCHES: Final = 0.46
PANEL_INCHES: Final = 1.35
WIDTH_INCHES: Final = 10.0
DOTS_PER_INCH: Final = 150

KVFLOW: Final = "#1f5fa8"
BARE: Final = "#b9c4d0"
MARKS: Final = (("D", "#e07b39"), ("o", "#4c9f70"), ("s", "#8a63b3"), ("^", "#c44e52"))
"""Markers and colours of further values that rows compare with, in order."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("rows", type=Path, metavar="ROWS", help="file with what --json has printed")
    parser.add_argument("picture", type=Path, metavar="FILE", help="to draw; its suffix says in what format")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return a function that draws.

    Raises:
        ConfigError: The rows cannot be read.
    """
    try:
        rows = [msgspec.json.decode(line, type=Row) for line in arguments.rows.read_bytes().splitlines()]
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError("rows cannot be read", path=str(arguments.rows), detail=str(error)) from error

    def run() -> int:
        draw(rows, arguments.picture)
        return 0

    return run


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw rows into a file; its suffix determines the format.

    Raises:
        ConfigError: The file cannot be written.
    """
    panels = grouped(rows)
    heights = [ROW_INCHES * len(panel) + PANEL_INCHES for panel in panels]
    figure: Any = Figure(figsize=(WIDTH_INCHES, sum(heights)), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.12, w_pad=0.1)
    axes = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axis, panel in zip(axes, panels, strict=True):
        _draw_panel(axis, panel)
    try:
        figure.savefig(path, dpi=DOTS_PER_INCH)
    except (OSError, ValueError) as error:
        raise ConfigError("cannot draw to this file", path=str(path), detail=str(error)) from error


def _draw_panel(axis: Any, rows: Sequence[Row]) -> None:
    places = range(len(rows))
    _draw_bars(axis, [place - BAR / 2 for place in places], [_bar(row) for row in rows], KVFLOW, "kvflow")
    with_bare = [(place + BAR / 2, bar) for place, row in zip(places, rows, strict=True) if (bar := _bare_bar(row))]
    if with_bare:
        heights, bars = zip(*with_bare, strict=True)
        _draw_bars(axis, heights, bars, BARE, "bare")
    others = dict.fromkeys(name for row in rows for name in row.others)
    for name, (marker, color) in zip(others, MARKS, strict=False):
        points = [(row.others[name], place) for place, row in zip(places, rows, strict=True) if name in row.others]
        axis.scatter(*zip(*points, strict=True), marker=marker, color=color, s=30, zorder=4, label=name)
    _label(axis, rows)
    _write_ratios(axis, rows)


def _label(axis: Any, rows: Sequence[Row]) -> None:
    first = rows[0]
    axis.set_yticks(range(len(rows)), [row.case for row in rows])
    axis.tick_params(axis="y", length=0)
    axis.set_ylim(len(rows) - 0.45, -0.55)
    axis.set_xlim(left=0)
    axis.set_xlabel(f"{first.unit} ({first.better} is better)")
    title = f"{first.quantity[:1].upper()}{first.quantity[1:]}: {first.group}"
    axis.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=26)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.xaxis.grid(visible=True, color="#e3e7ec")
    axis.set_axisbelow(True)
    bars = axis.get_legend_handles_labels()
    order = sorted(range(len(bars[1])), key=lambda at: bars[1][at] not in ("kvflow", "bare"))
    handles, labels = ([part[at] for at in order] for part in bars)
    axis.legend(handles, labels, loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=6, frameon=False, fontsize=9)


def _bar(row: Row) -> tuple[float, float, float]:
    return row.kvflow, row.kvflow_low, row.kvflow_high


def _bare_bar(row: Row) -> tuple[float, float, float] | None:
    if row.bare is None or row.bare_low is None or row.bare_high is None:
        return None
    return row.bare, row.bare_low, row.bare_high


def _draw_bars(
    axis: Any, places: Sequence[float], bars: Sequence[tuple[float, float, float]], color: str, name: str
) -> None:
    medians = [bar[0] for bar in bars]
    spread = [[bar[0] - bar[1] for bar in bars], [bar[2] - bar[0] for bar in bars]]
    axis.barh(places, medians, height=BAR, color=color, label=name, zorder=2)
    axis.errorbar(medians, places, xerr=spread, fmt="none", ecolor="#5a6472", elinewidth=0.8, capsize=2, zorder=3)


def _write_ratios(axis: Any, rows: Sequence[Row]) -> None:
    """Write the ratio of kvflow to bare to the right of the panel."""
    if all(row.ratio is None for row in rows):
        return
    column = {"transform": axis.get_yaxis_transform(), "ha": "left", "va": "center", "fontsize": 9.5}
    axis.text(1.015, -0.78, "kvflow / bare", color="#5a6472", **column)
    for place, row in enumerate(rows):
        if row.ratio is not None:
            axis.text(1.015, place, f"{row.ratio:.2f}", fontweight="bold", **column)

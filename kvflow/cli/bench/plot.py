"""Draws rows: one panel for each group and quantity, and a pair of bars for each case in it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kvflow.cli.bench.rows import Row, grouped
from kvflow.errors import ConfigError

__all__ = ["draw"]

BAR: Final = 0.36
ROW_INCHES: Final = 0.42
PANEL_INCHES: Final = 1.25
WIDTH_INCHES: Final = 10.0
DOTS_PER_INCH: Final = 150

KVFLOW: Final = "#1f5fa8"
BARE: Final = "#b9c4d0"
MARKS: Final = (("D", "#e07b39"), ("o", "#4c9f70"), ("s", "#8a63b3"), ("^", "#c44e52"))
"""For what else the rows are compared with, in order."""


def draw(rows: Sequence[Row], path: str | Path) -> None:
    """Draw rows into a file; its suffix says in what format.

    Raises:
        ConfigError: Matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an extra, and slow to load
    except ImportError as error:
        raise ConfigError("drawing needs matplotlib; install kvflow[bench]") from error
    panels = grouped(rows)
    heights = [ROW_INCHES * len(panel) + PANEL_INCHES for panel in panels]
    figure: Any = Figure(figsize=(WIDTH_INCHES, sum(heights)), layout="constrained")
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
    for (name, (marker, color)), _ in zip(_marks(rows), MARKS, strict=False):
        points = [(row.others[name], place) for place, row in zip(places, rows, strict=True) if name in row.others]
        axis.scatter(*zip(*points, strict=True), marker=marker, color=color, s=26, zorder=4, label=name)
    _write_ratios(axis, rows)
    axis.set_yticks(list(places), [row.case for row in rows])
    axis.invert_yaxis()
    axis.set_xlabel(f"{rows[0].unit}   ({rows[0].better} is better)")
    axis.set_title(f"{rows[0].group}: {rows[0].quantity}", loc="left", fontsize=11, fontweight="bold")
    axis.spines[["top", "right"]].set_visible(False)
    axis.xaxis.grid(visible=True, color="#e3e7ec", zorder=0)
    axis.set_axisbelow(True)
    axis.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=6, frameon=False, fontsize=9)


def _marks(rows: Sequence[Row]) -> list[tuple[str, tuple[str, str]]]:
    names = dict.fromkeys(name for row in rows for name in row.others)
    return list(zip(names, MARKS, strict=False))


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
    """Write each ratio to the right of its bars, in a column of its own."""
    axis.margins(x=0.12)
    for place, row in enumerate(rows):
        if row.ratio is not None:
            where = axis.get_yaxis_transform()
            axis.text(0.995, place, f"{row.ratio:.2f}x", transform=where, ha="right", va="center", fontsize=9)

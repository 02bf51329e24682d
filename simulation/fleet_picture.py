"""Picture of what a rank has to do with its peers, by their number."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure

from kvflow.errors import ConfigError
from simulation.fleet import FleetRow

__all__ = ["draw_fleets"]

PANELS: Final[tuple[tuple[str, Callable[[FleetRow], float]], ...]] = (
    ("control connections\nof the largest rank", lambda row: row.connections),
    ("its messages a second,\nidle", lambda row: row.idle_messages),
    ("messages of all ranks\nfor a request", lambda row: row.messages_per_request),
)
WAYS: Final = (
    ("decode ranks of one prefill rank", "#1f5fa8", "o"),
    ("prefill ranks of one decode rank", "#e07b39", "s"),
)


def draw_fleets(rows: Sequence[FleetRow], path: Path) -> None:
    """Draw fleets with one rank of a role; the suffix of the file says in what format.

    Raises:
        ConfigError: The file cannot be written.
    """
    figure: Any = Figure(figsize=(10.0, 3.4), layout="constrained")
    ways = ([row for row in rows if row.num_prefill == 1], [row for row in rows if row.num_prefill > 1])
    for axis, (title, value) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        for (label, color, marker), found in zip(WAYS, ways, strict=True):
            sizes = [max(row.num_prefill, row.num_decode) for row in found]
            axis.plot(sizes, [value(row) for row in found], marker=marker, color=color, label=label)
        axis.set_title(title, fontsize=11)
        axis.set_xlabel("peers")
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#e3e8ee")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError("cannot draw to this file", path=str(path), detail=str(error)) from error

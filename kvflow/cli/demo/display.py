"""Output for people, while the demo runs and after it."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kvflow.cli.demo.coordinator import DemoResult, ManagersResult
from kvflow.cli.demo.options import DemoOptions
from kvflow.cli.processes import Report

__all__ = ["ProgressDisplay", "print_result"]

STAGE_WORDS = {
    "bootstrap": "lookup, routes, handshake",
    "enqueue": "queueing",
    "planning": "planning",
    "submit": "writing",
    "aggregate": "first to last notice",
}


class ProgressDisplay:
    """A progress bar with status for each side, on standard error. Use it as a context manager.

    If standard error is not a terminal, the status is printed line by line instead.
    """

    def __init__(self, options: DemoOptions) -> None:
        self._console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description:<8}"),
            BarColumn(bar_width=32),
            TimeElapsedColumn(),
            TextColumn("{task.fields[state]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        loading = f"loading {options.model}"
        self._bars = {side: self._progress.add_task(side, total=None, state=loading) for side in ("prefill", "decode")}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, side: str, report: Report) -> None:
        """Display a report."""
        match report:
            case {"event": "note", "text": text}:
                self._state(side, text)
            case {"event": "ready"}:
                self._state(side, "ready")
            case {"event": "chunk", "computed": done, "of": total}:
                self._advance(side, done, total, f"{done} of {total} prompt tokens computed and sent")
            case {"event": "handover", "num_bytes": num_bytes, "notices": notices}:
                self._state(side, f"{num_bytes / 1e6:.1f} MB received in {notices} pieces")
            case {"event": "token", "count": done, "of": total}:
                self._advance(side, done, total, f"{done} tokens generated")
            case {"event": "stages"}:
                self._state(side, "all pages delivered; computing a single-process reference")
            case {"event": "answer" | "reference"}:
                self._finish(side)

    def _state(self, side: str, state: str) -> None:
        self._progress.update(self._bars[side], state=state)
        if not self._console.is_terminal:
            self._console.print(f"{side}: {state}", highlight=False)

    def _advance(self, side: str, done: int, total: int, state: str) -> None:
        self._progress.update(self._bars[side], completed=done, total=total, state=state)

    def _finish(self, side: str) -> None:
        bar = self._progress.tasks[self._bars[side]]
        total = bar.completed or 1
        self._progress.update(self._bars[side], completed=total, total=total)
        self._state(side, "done")


def print_result(result: DemoResult | ManagersResult) -> None:
    """Print the answer, the figures and the result of the comparison to standard output."""
    console = Console()
    console.print(Panel(Text(result.text.strip()), title="output of the decode side", title_align="left"))
    if isinstance(result, ManagersResult):
        console.print(Panel(Text(result.text_alone.strip()), title="output of a single manager", title_align="left"))
        console.print(_managers_table(result), highlight=False)
    else:
        console.print(_figures(result), highlight=False)
    alone = "single-manager" if isinstance(result, ManagersResult) else "single-process"
    if result.identical:
        console.print(f"[green]identical[/]: all {result.tokens} tokens match a {alone} run", highlight=False)
    else:
        console.print(f"[red]different[/]: the tokens do not match a {alone} run", highlight=False)


def _managers_table(result: ManagersResult) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_row("managers", f"two of transformers' continuous batching, over {result.backend}")
    table.add_row("cache moved", f"{result.prompt_tokens} tokens, {result.bytes / 1e6:.2f} MB")
    table.add_row("blocks", "{} tokens on prefill, {} on decode".format(*result.page_sizes))
    return table


def _figures(result: DemoResult) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_row("prefill -> decode", f"{result.prefill_tp} -> {result.decode_tp} ranks over {result.backend}")
    table.add_row("cache moved", f"{result.prompt_tokens} tokens, {result.bytes / 1e6:.2f} MB")
    table.add_row("throughput", f"{result.goodput_gbps / 8:.2f} GB/s during writes")
    table.add_row("handover", f"{result.handover_ms:.1f} ms from the last chunk to the start of decoding")
    table.add_row("time in each stage", "(slowest rank; stages overlap)")
    for stage, time_ms in result.stages_ms.items():
        table.add_row(f"  {stage}", f"{time_ms:8.2f} ms  {STAGE_WORDS[stage]}")
    return table

"""What the commands share that ask ranks of this host."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from kvflow.cli.options import check_positive
from kvflow.errors import ConfigError

if TYPE_CHECKING:
    from kvflow.admin.client import RankReply
    from kvflow.admin.messages import AnswerBase, Request, StatusAnswer

__all__ = [
    "AskedRank",
    "add_rank_options",
    "ask_ranks",
    "find_ranks",
    "print_problems",
    "print_table",
    "show_bytes",
    "show_duration",
]

AnyAnswer = TypeVar("AnyAnswer", bound="AnswerBase")

MAX_CELL: Final = 60
NAMES_OF_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


class AskedRank(NamedTuple):
    """A rank of this host.

    Attributes:
        path: Its socket.
        reply: Its answer to `StatusRequest`.
        status: The same, or why there is no answer.
    """

    path: Path
    reply: "RankReply"
    status: "StatusAnswer | str"

    @property
    def name(self) -> str:
        """Name of the rank, "instance/engine_rank"; if it does not answer, that of its process."""
        status = self.status
        return f"process {self.reply.pid}" if isinstance(status, str) else f"{status.instance}/{status.engine_rank}"


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that select ranks."""
    parser.add_argument("--instance", metavar="NAME", help="only ranks of this instance")
    parser.add_argument("--rank", type=int, metavar="N", help="only ranks with this engine rank")
    parser.add_argument("--pid", type=int, metavar="PID", help="only ranks of this process")
    parser.add_argument("--socket", type=Path, metavar="PATH", help="a socket, or a directory of sockets, to look at")
    parser.add_argument("--timeout", type=float, default=3.0, metavar="SECONDS", help="time to wait for an answer")


def find_ranks(arguments: argparse.Namespace) -> list[AskedRank]:
    """Ask all ranks of this host who they are, and return those that were selected.

    A rank that does not answer is among them unless an option rules it out.

    Raises:
        ConfigError: There is none.
    """
    from kvflow.admin.client import ask_all, find_sockets  # noqa: PLC0415 - `kvflow --help` loads little
    from kvflow.admin.messages import StatusAnswer, StatusRequest  # noqa: PLC0415 - as above

    check_positive(arguments, "timeout")
    replies = ask_all(find_sockets(arguments.socket), StatusRequest(), arguments.timeout)
    answered = [AskedRank(one.path, one, one.parse(StatusAnswer)) for one in replies if one.line or one.problem]
    found = [one for one in answered if _is_selected(one, arguments)]
    if not found:
        raise ConfigError(
            "no rank was found on this host that this user may ask",
            **{name: value for name in ("instance", "rank", "pid", "socket") if (value := getattr(arguments, name))},
        )
    return sorted(found, key=lambda one: one.name)


def ask_ranks(
    found: Sequence[AskedRank], request: "Request", kind: type[AnyAnswer], timeout_s: float
) -> list[tuple[AskedRank, bytes, AnyAnswer | str]]:
    """Ask ranks the same; return each with its answer as a line, and as `kind` or, if it is none, why there is none."""
    from kvflow.admin.client import ask_all  # noqa: PLC0415 - as above

    replies = ask_all([one.path for one in found], request, timeout_s)
    return [(one, reply.line, reply.parse(kind)) for one, reply in zip(found, replies, strict=True)]


def _is_selected(one: AskedRank, arguments: argparse.Namespace) -> bool:
    if isinstance(one.status, str):
        is_unnamed = arguments.instance is None and arguments.rank is None
        return is_unnamed and arguments.pid in (None, int(one.reply.pid) if one.reply.pid.isdigit() else None)
    found = (one.status.instance, one.status.engine_rank, one.status.pid)
    wanted = (arguments.instance, arguments.rank, arguments.pid)
    return all(which in (None, value) for which, value in zip(wanted, found, strict=True))


def print_problems(asked: Sequence[tuple[str, str]]) -> None:
    """Print on standard error, for each name, why there is no answer."""
    for name, problem in asked:
        print(f"{name}: {problem}", file=sys.stderr)


def print_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print aligned columns. What may come from a client is printable, and not long."""
    lines = [list(head), *([_shown(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _shown(cell: object) -> str:
    text = "-" if cell is None or cell == "" else str(cell)
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= MAX_CELL else f"{text[: MAX_CELL - 3]}..."


def show_duration(seconds: float | None) -> str:
    """Return a duration for people, such as 3.2s or 5h12m."""
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.1f}s" if seconds >= 1 else f"{seconds * 1e3:.0f}ms"
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes}m{int(seconds % 60):02d}s"
    hours = minutes // 60
    return f"{hours}h{minutes % 60:02d}m" if hours < 48 else f"{hours // 24}d{hours % 24:02d}h"


def show_bytes(num_bytes: float) -> str:
    """Return a number of bytes for people, such as 1.5 GiB."""
    for unit in NAMES_OF_UNITS[:-1]:
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} {NAMES_OF_UNITS[-1]}"

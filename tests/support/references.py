"""Generator of the docstring-based parts of docs/configuration.md and docs/api.md. `make docs` runs it."""

import ast
import dataclasses
import enum
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvflow import config, errors
from kvflow.doctor.checks import CHECKS
from kvflow.doctor.findings import name_of
from kvflow.doctor.peer import PEER_CHECKS
from kvflow.metrics import SERIES

__all__ = ["API_PAGE", "GROUPS", "METRICS_PAGE", "PAGES", "SETTINGS_PAGE", "fill_in", "main"]

DOCS: Final = Path(__file__).parents[2] / "docs"
SETTINGS_PAGE: Final = DOCS / "configuration.md"
API_PAGE: Final = DOCS / "api.md"
METRICS_PAGE: Final = DOCS / "metrics.md"
DOCTOR_PAGE: Final = DOCS / "doctor.md"
PAGES: Final = (SETTINGS_PAGE, API_PAGE, METRICS_PAGE, DOCTOR_PAGE)

MARKED: Final = re.compile(r"(<!-- generated: (\w+) (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

SETTINGS: Final = ("RankConfig", "PrefillConfig", "DecodeConfig", "Proofs", "Timeouts", "Limits")

RANKS: Final = "kvflow.blocking.ranks"
"""Where arguments of a constructor are documented by the base class."""

LEASE: Final = ("start_lease", "reclaim")
START: Final = ("announce_drain", "start_drain")
DRAIN: Final = ("is_drained", "drain")
RANK: Final = ("metrics", "health", "reload_trust", *START, "is_draining", *DRAIN, "quarantined", "release")
UPDATES: Final = ("completed", "wait_any", "fileno")
ASKED: Final = ("statistics", "metrics", "health", "reload_trust", *START, "quarantined", "release")

SENDER: Final = ("wanted", "queued_chunks", "chunk", "finish", "quiesce", "is_quiesced", "resume_at", *LEASE, "result")

WAITS: Final = ("wait", "until_safe")

TITLES: Final = {
    "kvflow.rank.Rank": "Both ranks",
    "kvflow.transfer.Transfer": "Both ends of a transfer",
    "kvflow.blocking.ranks.BlockingRank": "Both blocking ranks",
    "kvflow.blocking.transfers.BlockingTransfer": "Both blocking ends",
}
"""Non-public base classes whose members are described once."""

GROUPS: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "ranks": {
        "kvflow.PrefillRank": ("endpoint", "send", "ticket", "statistics"),
        "kvflow.DecodeRank": ("receive", "announce", "decline", "statistics"),
        "kvflow.rank.Rank": RANK,
        "kvflow.SendOptions": (),
        "kvflow.ReceiveOptions": (),
        "kvflow.OfferBook": ("make_offer",),
        "kvflow.MadeOffer": ("is_answered", "is_accepted", "accepted"),
        "kvflow.OfferQueue": ("is_empty", "wait_for_offer", "take_offers"),
        "kvflow.ReceivedOffer": ("accept", "decline"),
        "kvflow.SharedBackend": (),
        "kvflow.QuarantineRecord": (),
        "kvflow.MissingProof": ("detail",),
        "kvflow.ProofKind": (),
    },
    "transfers": {
        "kvflow.RoomSender": ("chunk", "finish", "granted", "quiesce", "delivered", "start_lease", "reclaim"),
        "kvflow.RoomReceiver": ("is_announced", "grant", "done"),
        "kvflow.transfer.Transfer": ("abort", "is_settled", "until_safe", "error"),
        "kvflow.Handover": ("breakdown",),
        "kvflow.Breakdown": ("parts", "total_s", "slowest"),
        "kvflow.TokenPages": (),
        "kvflow.LayersReady": (),
        "kvflow.Outcome": (),
        "kvflow.Memory": (),
    },
    "failures": {
        "kvflow.TransferFailed": ("memory", "quarantined"),
        "kvflow.wire.messages.Failure": (),
        "kvflow.FailureReason": (),
        "kvflow.Stage": (),
    },
    "layouts": {
        "kvflow.layout_from_tensors": (),
        "kvflow.KVLayout": (),
        "kvflow.head_range": (),
    },
    "registry": {
        "kvflow.Endpoint": ("parse",),
        "kvflow.Registry": ("reload_trust", "statistics"),
        "kvflow.ticket_for_room": (),
    },
    "trust": {
        "kvflow.Trust": ("none",),
        "kvflow.TrustedKey": (),
        "kvflow.load_trust": (),
        "kvflow.make_capability": (),
        "kvflow.load_capability_key": (),
    },
    "observation": {
        "kvflow.RankStatistics": (),
        "kvflow.statistics.StagingStatistics": (),
        "kvflow.directory.RegistryStatistics": (),
        "kvflow.observe.times.StageTimes": (),
        "kvflow.observe.totals.TransferTotals": (),
        "kvflow.observe.totals.WriteTotals": (),
        "kvflow.observe.histograms.Histogram": ("count",),
        "kvflow.metrics.Metric": (),
        "kvflow.metrics.Sample": (),
        "kvflow.admin.messages.Health": (),
        "kvflow.prometheus.RankCollector": ("add_rank", "remove_rank", "health"),
        "kvflow.prometheus.start_server": (),
        "kvflow.prometheus.make_app": (),
        "kvflow.otel.TransferTracer": (),
        "kvflow.configure_logging": (),
        "kvflow.known_backends": (),
    },
    "blocking": {
        "kvflow.blocking.PrefillRank": ("endpoint", "has_offers", "ticket", "send"),
        "kvflow.blocking.DecodeRank": ("receive", "announce", "decline"),
        "kvflow.blocking.ranks.BlockingRank": (
            "open",
            "close",
            "completed",
            "wait_any",
            "fileno",
            *DRAIN,
            *ASKED,
            "ask",
        ),
        "kvflow.blocking.TransferUpdate": (),
        "kvflow.blocking.BlockingSender": SENDER,
        "kvflow.blocking.BlockingReceiver": ("is_announced", "grant", "result"),
        "kvflow.blocking.transfers.BlockingTransfer": ("outcome", "failure", "memory", "is_settled", "abort", *WAITS),
        "kvflow.blocking.LoopThread": (),
        "kvflow.blocking.Registry": (),
    },
}
"""Public names by chapter, with the members that an engine uses. Settings and errors have their own tables."""

WIDTH: Final = 100
"""Longest signature on one line."""

UNITS: Final = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def main() -> None:
    """Rewrite the generated parts of the pages."""
    for page in PAGES:
        page.write_text(fill_in(page.read_text("utf-8")), "utf-8")


def fill_in(page: str) -> str:
    """Replace the text between the markers by that of the docstrings.

    Raises:
        KeyError: A marker has an unknown name.
    """
    return MARKED.sub(lambda found: f"{found[1]}\n{PARTS[found[2]](found[3])}\n{found[4]}", page)


# Docstrings --------------------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """An argument, attribute or error with its description; free text has no name."""

    name: str
    text: str


class Doc(NamedTuple):
    """A docstring in Google style."""

    text: list[str]
    sections: dict[str, list[Entry]]


def parse(docstring: str | None) -> Doc:
    """Split a docstring into paragraphs and sections."""
    paragraphs: list[str] = []
    sections: dict[str, list[Entry]] = {}
    name, lines = "", []
    for line in [*inspect.cleandoc(docstring or "").splitlines(), "End:"]:
        header = re.fullmatch(r"(Args|Attributes|Returns|Raises|Source|End):.*", line)
        if header is None:
            lines.append(line)
            continue
        if name:
            sections[name] = list(_entries(name, lines))
        else:
            paragraphs = [_joined(part) for part in "\n".join(lines).strip().split("\n\n")]
        name, lines = header[1], []
    sections.pop("Source", None)
    return Doc(paragraphs, sections)


def _entries(section: str, lines: list[str]) -> Iterator[Entry]:
    if section == "Returns":
        yield Entry("", _joined("\n".join(lines)))
        return
    for block in re.split(r"\n(?=\S)", textwrap.dedent("\n".join(lines)).strip()):
        found = re.match(r"([A-Za-z_][\w., ]*):\s+(.*)", block, re.DOTALL)
        yield Entry(found[1], _joined(found[2])) if found else Entry("", _joined(block))


def _joined(text: str) -> str:
    """Join a paragraph into one line, with single spaces; keep numbered lists."""
    return re.sub(r"\n(?=\d+\. )", "\n", re.sub(r"\n(?!\d+\. )\s*", " ", text.strip()))


def _member_docs(kind: type) -> dict[str, str]:
    """Return the string below each enum member, parsed from the source: Python drops it at run time."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    said: dict[str, str] = {}
    if isinstance(body, ast.ClassDef):
        for assignment, below in zip(body.body, body.body[1:], strict=False):
            match assignment, below:
                case ast.Assign(targets=[ast.Name(id=name)]), ast.Expr(value=ast.Constant(value=str(text))):
                    said[name] = _joined(text)
    return said


def _grid(*rows: tuple[str, ...]) -> str:
    head, *body = rows
    lines = [head, ("---",) * len(head), *body]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines) + "\n"


# Settings ----------------------------------------------------------------------------------------------------------


def settings(name: str) -> str:
    """Return a table of the settings that a class adds to its base.

    Raises:
        KeyError: A setting is not documented.
    """
    kind = getattr(config, name)
    said = {entry.name: entry.text for entry in parse(kind.__doc__).sections["Attributes"]}
    rows = [
        (f"`{item.name}`", f"`{annotation}`", _default(item), said[item.name]) for item, annotation in _own_fields(kind)
    ]
    return _grid(("setting", "type", "default", "meaning"), *rows)


def _own_fields(kind: Any) -> Iterator[tuple[dataclasses.Field[Any], str]]:
    """Yield the fields that a dataclass itself declares, with their types as in the source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    fields = {item.name: item for item in dataclasses.fields(kind)}
    for statement in getattr(body, "body", ()):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name = statement.target.id
            yield fields[name], ast.unparse(statement.annotation).replace("|", "\\|")


def _default(item: "dataclasses.Field[Any]") -> str:
    if item.default_factory is not dataclasses.MISSING:
        return "none"
    if item.default is dataclasses.MISSING:
        return "required"
    if isinstance(item.default, config.Timeouts | config.Limits):
        return "see below"
    if isinstance(item.default, float) and item.name.endswith("_s"):
        return f"{item.default:g} s"
    if isinstance(item.default, int) and not isinstance(item.default, bool):
        return _size(item.default) if "bytes" in item.name else f"{item.default:,}"
    return f"`{item.default!r}`"


def _size(num_bytes: int) -> str:
    return next((f"{num_bytes // unit} {name}" for unit, name in UNITS if num_bytes % unit == 0), f"{num_bytes:,}")


# The API -----------------------------------------------------------------------------------------------------------


def api(group: str) -> str:
    """Return the text of a chapter.

    Raises:
        KeyError: There is no such chapter.
    """
    return "\n".join(_object(path, members) for path, members in GROUPS[group].items())


def errors_table(base: str) -> str:
    """Return a table of an error and its subclasses, each with the first paragraph of its docstring."""
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, getattr(errors, base))
    ]
    rows = [(f"`{kind.__name__}`", f"`{kind.__bases__[0].__name__}`", parse(kind.__doc__).text[0]) for kind in kinds]
    return _grid(("error", "is a", "meaning"), *rows)


def metrics_table(kind: str) -> str:
    """Return a table of the series of a kind."""
    rows = [
        (
            f"`{series.name}`",
            series.unit,
            f"`{series.label}`" if series.label else "",
            " and ".join(series.roles),
            series.meaning,
        )
        for series in SERIES
        if series.kind == kind
    ]
    return _grid(("name", "unit", "label", "ranks", "meaning"), *rows)


def checks_table(subject: str) -> str:
    """Return a table of the checks of `kvflow doctor`, of the "host" or of a "peer"."""
    checks: dict[str, Sequence[Callable[..., object]]] = {"host": CHECKS, "peer": PEER_CHECKS}
    rows = [(name_of(check), parse(check.__doc__).text[0]) for check in checks[subject]]
    return _grid(("check", "what it looks at"), *rows)


PARTS: Final[dict[str, Callable[[str], str]]] = {
    "settings": settings,
    "api": api,
    "errors": errors_table,
    "metrics": metrics_table,
    "checks": checks_table,
}


def _object(path: str, members: tuple[str, ...]) -> str:
    module, _, name = path.rpartition(".")
    item = getattr(importlib.import_module(module), name)
    title = ""
    if path in TITLES:
        parts = [f"### {TITLES[path]}"]
    else:
        title = path.removeprefix("kvflow.") if module in ("kvflow", "kvflow.blocking") else path
        parts = [f"### `{title}`", *_described(item)]
    parts += [_member(item, member, title) for member in members]
    return "\n\n".join(part for part in parts if part) + "\n"


def _described(item: Any) -> list[str]:
    doc = parse(item.__doc__)
    maker = next((kind for kind in getattr(item, "__mro__", ()) if "__init__" in vars(kind)), item)
    doc = Doc(doc.text, {**parse(maker.__doc__).sections, **doc.sections}) if maker.__module__ == RANKS else doc
    if isinstance(item, type) and issubclass(item, enum.Enum):
        said = _member_docs(item)
        rows = [(f"`{member.name}`", f'`"{member.value}"`', said.get(member.name, "")) for member in item]
        return [*doc.text, _grid(("member", "value", "meaning"), *rows).rstrip()]
    is_made = "Args" in doc.sections and isinstance(item, type)
    made_by = item.__init__ if is_made else item
    signature = _signature(made_by, item.__name__) if is_made or not isinstance(item, type) else ""
    return [signature, *doc.text, *_sections(_with_inherited(item, doc))]


def _with_inherited(item: Any, doc: Doc) -> Doc:
    """Add the attributes that kvflow base classes document."""
    attributes = list(doc.sections.get("Attributes", ()))
    for base in getattr(item, "__mro__", ())[1:]:
        if base.__module__.startswith("kvflow"):
            known = {entry.name for entry in attributes}
            found = parse(base.__dict__.get("__doc__")).sections.get("Attributes", ())
            attributes = [*(entry for entry in found if entry.name not in known), *attributes]
    if attributes:
        doc.sections["Attributes"] = attributes
    return doc


def _member(owner: type, name: str, title: str) -> str:
    member = inspect.getattr_static(owner, name)
    if isinstance(member, property):
        function, kind = member.fget, "property"
    else:
        function, kind = member, "async method" if inspect.iscoroutinefunction(member) else "method"
    doc = parse(function.__doc__)
    text = doc.text[0] if doc.text else ""
    parts = [f"#### `{title}.{name}`" if title else f"#### `{name}`", f"*{kind}*. {text}", *doc.text[1:]]
    if kind != "property":
        parts.insert(1, _signature(function, name))
    return "\n\n".join([*parts, *_sections(doc)])


def _sections(doc: Doc) -> list[str]:
    titles = {"Args": "Arguments", "Attributes": "Attributes", "Returns": "Returns", "Raises": "Raises"}
    parts = []
    for name, entries in doc.sections.items():
        lines = [f"- `{entry.name}`: {entry.text}" if entry.name else f"- {entry.text}" for entry in entries]
        parts.append("\n".join([f"**{titles[name]}**", "", *lines]))
    return parts


def _signature(function: Any, name: str) -> str:
    """Return the signature of a function as in its source."""
    node, source = (_parsed(it) for it in (function, inspect.unwrap(function)))  # whose arguments it has
    arguments = _arguments(source.args)
    result = source.returns if isinstance(node.returns, ast.Name) and node.returns.id == "Result" else node.returns
    returns = "" if result is None or node.name == "__init__" else f" -> {_written(result)}"
    prefix = "await " if isinstance(node, ast.AsyncFunctionDef) else ""
    line = f"{prefix}{name}({', '.join(arguments)}){returns}"
    if len(line) > WIDTH:
        line = f"{prefix}{name}(\n    {f',{chr(10)}    '.join(arguments)},\n){returns}"
    return f"```text\n{line}\n```"


def _parsed(function: Any) -> ast.FunctionDef | ast.AsyncFunctionDef:
    node = ast.parse(textwrap.dedent(inspect.getsource(getattr(function, "__func__", function).__code__))).body[0]
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        raise TypeError(f"{function!r} is no function")
    return node


def _arguments(node: ast.arguments) -> list[str]:
    """Format all arguments except `self`, with a bare star before keyword-only ones."""
    missing = [None] * (len(node.args) - len(node.defaults))
    parts = [_argument(arg, default) for arg, default in zip(node.args, [*missing, *node.defaults], strict=True)]
    if node.vararg is not None:
        parts.append(f"*{_argument(node.vararg, None)}")
    elif node.kwonlyargs:
        parts.append("*")
    parts += [_argument(arg, default) for arg, default in zip(node.kwonlyargs, node.kw_defaults, strict=True)]
    if node.kwarg is not None:
        parts.append(f"**{_argument(node.kwarg, None)}")
    return [part for part in parts if part != "self"]


def _argument(node: ast.arg, default: ast.expr | None) -> str:
    annotation = "" if node.annotation is None else f": {_written(node.annotation)}"
    return f"{node.arg}{annotation}" + ("" if default is None else f" = {ast.unparse(default)}").replace("'", '"')


def _written(annotation: ast.expr) -> str:
    """Format an annotation, without the quotes of a forward reference."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return annotation.value
    return ast.unparse(annotation).replace("'", '"')


if __name__ == "__main__":
    main()

"""The documents agree with the code."""

import ast
import dataclasses
import functools
import pkgutil
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pytest

import benchmarks.__main__ as benchmarks
import kvflow
import kvflow.blocking
import simulation.__main__ as simulation
from kvflow.backends.base import Backend
from kvflow.backends.memory import MemoryBackend
from kvflow.backends.nixl import NixlBackend
from kvflow.cli import main as cli
from kvflow.config import Limits, Timeouts
from kvflow.errors import FailureReason, KvflowError, Stage
from kvflow.wire.messages import AnyMessage, Failure, RankRecord, Staged, StagingWindow
from tests.support import references, state_diagrams
from tests.support.commands import check_arguments
from tests.support.ports import unused_port

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
SOURCES = sorted((ROOT / "kvflow").rglob("*.py"))
LINK = re.compile(r"\[[^\]]*\]\((?!https?://)([^)#]+)[^)]*\)")
ANCHOR = re.compile(r"\[[^\]]*\]\((?!https?://)([^)#]*)#([^)]+)\)")
NAMED = re.compile(r"\[`((?!\w+\.py`)[A-Za-z_][\w.]*)`\]\(([^)#]+\.py)\)")
DOTTED = re.compile(r"(?<![\w./-])kvflow(?:\.[A-Za-z_]\w*)+(?![\w/-])")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)

ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()
PROTOCOL = (ROOT / "docs/protocol.md").read_text()
FAILURES = (ROOT / "docs/failure-model.md").read_text()
LOG_EVENTS = (ROOT / "docs/log-events.md").read_text()
CONFIGURATION = (ROOT / "docs/configuration.md").read_text()


def test_links_lead_somewhere() -> None:
    """Each link leads to an existing file, and to an existing heading if it names one."""
    assert not [f"{page.relative_to(ROOT)}: {link}" for page in DOCUMENTS for link in broken_links(page)]


def broken_links(page: Path) -> list[str]:
    text = page.read_text()
    lost = [target for target in LINK.findall(text) if not (page.parent / target).exists()]
    anchors = [(page.parent / target if target else page, anchor) for target, anchor in ANCHOR.findall(text)]
    return lost + [
        f"{path.name}#{anchor}" for path, anchor in anchors if path.exists() and anchor not in headings_of(path)
    ]


def test_dotted_names_exist() -> None:
    """Also those in the code of a page. Decisions and the changelog may speak of what is gone."""
    pages = [page for page in DOCUMENTS if page.name != "CHANGELOG.md" and page.parent.name != "decisions"]
    named = {(page.name, name) for page in pages for name in DOTTED.findall(page.read_text())}
    assert len(named) > 50
    assert not sorted((page, name) for page, name in named if not exists(name))


def exists(name: str) -> bool:
    """Return whether a dotted name is that of a module, or of something in one."""
    path = ROOT / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file() or _resolves(name)


def _resolves(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except AttributeError:
        return False
    return True


@functools.cache
def headings_of(page: Path) -> frozenset[str]:
    titles = HEADING.findall(page.read_text())
    return frozenset(re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles)


def test_symptoms_are_what_the_code_says() -> None:
    """Each message that is looked up by is in the code, as it is written there."""
    rows = [line.split("|")[1] for line in (ROOT / "docs/symptoms.md").read_text().splitlines() if line.startswith("|")]
    quoted = [text for cell in rows for text in re.findall(r"`([^`]+)`", cell)]
    code = re.sub(r'"\s+f?"', "", "".join(path.read_text() for path in SOURCES))
    assert len(quoted) > 30
    assert not [text for text in quoted if text not in code]


def test_every_page_is_reached_from_the_readme() -> None:
    """Directly or through other pages."""
    reached, waiting = set[Path](), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached or not page.exists():
            continue
        reached.add(page)
        waiting += [(page.parent / link).resolve() for link in LINK.findall(page.read_text()) if link.endswith(".md")]
    assert set(DOCUMENTS) - reached <= {ROOT / "docs/README.md"}


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    """Decisions are reached through their list."""
    listed = {ROOT / "docs" / found for found in re.findall(r"[\w./-]+\.md", (ROOT / "mkdocs.yml").read_text())}
    pages = {page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "decisions"}
    assert pages - listed == {ROOT / "docs/README.md"}  # which is documentation.md there


def test_linked_names_exist_in_the_files_that_they_link_to() -> None:
    found = [(page, name, page.parent / file) for page in DOCUMENTS for name, file in NAMED.findall(page.read_text())]
    assert len(found) > 40
    assert not [f"{page.name}: {name}" for page, name, file in found if name not in names_in(file.resolve())]


def test_every_guarantee_names_what_checks_it() -> None:
    """Each guarantee links to an existing test, or to an invariant of the simulation or the exploration."""
    page = ROOT / "docs/simulation.md"
    promises = chapter_of(page.read_text(), "Which code checks which guarantee")
    rows = [line.strip("| ").split(" | ") for line in promises.splitlines() if line.startswith("| **")]
    assert len(rows) >= 5
    for promise, checked_by in rows:
        named = NAMED.findall(checked_by)
        assert named, promise
        assert all(name in names_in((page.parent / file).resolve()) for name, file in named), promise
        assert "`" not in NAMED.sub("", checked_by), f"not linked: {checked_by}"


@functools.cache
def names_in(file: Path) -> frozenset[str]:
    """Return functions, classes and constants of a module, and members of its classes as `Class.member`."""
    found = set[str]()
    for statement in ast.parse(file.read_text()).body:
        names = list(names_of(statement))
        found.update(names)
        for member in statement.body if isinstance(statement, ast.ClassDef) else ():
            found.update(f"{names[0]}.{name}" for name in names_of(member))
    return frozenset(found)


def names_of(statement: ast.stmt) -> Iterator[str]:
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
            yield name


def test_request_passes_ten_stops() -> None:
    tour = chapter_of(ARCHITECTURE, "One request in ten stops")
    stops = re.findall(r"^(\d+)\. \*\*", tour, re.MULTILINE)
    assert stops == [str(number) for number in range(1, 11)]
    for stop in re.split(r"^\d+\. ", tour, flags=re.MULTILINE)[1:]:
        assert NAMED.search(stop), stop


def chapter_of(page: str, title: str) -> str:
    return page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_decisions_are_listed_and_numbered_once() -> None:
    listed = (ROOT / "docs/decisions/README.md").read_text()
    decisions = sorted((ROOT / "docs/decisions").glob("0*.md"))
    assert len({decision.name[:4] for decision in decisions}) == len(decisions)
    for decision in decisions:
        title = decision.read_text().partition("\n")[0]
        assert title.startswith(f"# {int(decision.name[:4])}. ")
        assert f"- [{title.removeprefix('# ')}]({decision.name})" in listed


def test_every_trap_names_tests_that_exist() -> None:
    suite = "".join(path.read_text() for path in (ROOT / "kvflow/testing/contract/suite").glob("*.py"))
    named = re.findall(r"`([\w/.]+)::(test_\w+)`", (ROOT / "docs/transport-traps.md").read_text())
    assert named
    for place, test in named:
        path = ROOT / place if "/" in place else ROOT / "tests/backends" / place
        source = suite if place == "contract" else path.read_text()
        assert f"def {test}(" in source, f"{place}::{test}"


def output_of(script: str, *arguments: str) -> str:
    """Return the output of a script in a fresh interpreter, where it must succeed and print no errors."""
    command = [sys.executable, "-c", script, *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert (finished.returncode, finished.stderr) == (0, "")
    return finished.stdout


def test_quick_start_runs() -> None:
    prefill, decode = PYTHON.findall((ROOT / "docs/quick-start.md").read_text())
    address = f"tcp://127.0.0.1:{unused_port()}"
    sending = subprocess.Popen([sys.executable, "-c", prefill, address], stdout=subprocess.PIPE, text=True)
    try:
        assert output_of(decode, address) == "first token: 42 1.0 2.0\n"
        printed, _ = sending.communicate(timeout=100)
    finally:
        sending.kill()
    assert (sending.returncode, printed) == (0, "sent\n")


def test_embedding_example_runs() -> None:
    (keeping,) = PYTHON.findall((ROOT / "docs/guide.md").read_text())
    assert output_of(keeping) == ""


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("async_pair", "metadata=b'first token'"),
        ("numpy_only", "start decoding with b'token'"),
        ("tensor_parallel", "16 of 16 pages are free again"),
    ],
)
def test_examples_run(name: str, printed: str) -> None:
    assert printed in output_of((ROOT / f"examples/{name}.py").read_text())


def test_configuration_example_is_valid() -> None:
    (example,) = PYTHON.findall(CONFIGURATION)
    assert output_of(f"{example}\nprint(config.engine_rank, config.limits.transfers)") == "3 4096\n"


COMMANDS = sorted(
    {
        line.partition("#")[0].strip()
        for page in DOCUMENTS
        for block in re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL)
        for line in block.splitlines()
        if line.startswith(("kvflow ", "python -m benchmarks ", "python -m simulation "))
    }
)


PROGRAMS: dict[str, Callable[[list[str]], int]] = {
    "benchmarks": benchmarks.main,
    "kvflow": cli.main,
    "simulation": simulation.main,
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_take_their_options(command: str) -> None:
    program, *words = shlex.split(command.removeprefix("python -m "))
    check_arguments(PROGRAMS[program], words)


def test_a_command_with_an_option_that_does_not_exist_is_found() -> None:
    with pytest.raises(SystemExit):
        check_arguments(cli.main, ["health", "--redy"])


def test_state_machines_are_drawn_from_their_tables() -> None:
    page = state_diagrams.PAGE.read_text()
    assert state_diagrams.fill_in(page) == page, "run `make docs`"


@pytest.mark.parametrize("page", references.PAGES, ids=lambda page: page.stem)
def test_references_are_taken_from_docstrings(page: Path) -> None:
    text = page.read_text()
    assert references.fill_in(text) == text, "run `make docs`"


def test_every_public_name_is_in_the_reference() -> None:
    described = {path.removeprefix("kvflow.") for group in references.GROUPS.values() for path in group}
    described |= set(references.SETTINGS)
    errors = {name for name in kvflow.__all__ if is_error(getattr(kvflow, name))}
    assert set(kvflow.__all__) <= described | errors


def is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, KvflowError)


COMPLETED = (
    *(getattr(kvflow, name) for name in ("PrefillRank", "DecodeRank", "RoomSender", "RoomReceiver")),
    *(getattr(kvflow.blocking, name) for name in ("PrefillRank", "DecodeRank", "BlockingSender", "BlockingReceiver")),
)


@pytest.mark.parametrize("kind", COMPLETED, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_what_completion_offers_is_in_the_reference(kind: type) -> None:
    """Who types a dot is offered nothing that may change."""
    described = dict(entry for group in references.GROUPS.values() for entry in group.items())
    module = "kvflow.blocking" if ".blocking" in kind.__module__ else "kvflow"
    paths = [f"{module}.{kind.__name__}", *(f"{base.__module__}.{base.__name__}" for base in kind.__mro__)]
    known = {member for path in paths for member in described.get(path, ())}
    documented = [references.parse(base.__doc__).sections for base in kind.__mro__]
    known |= {entry.name for sections in documented for entry in sections.get("Attributes", ())}
    assert {member for member in dir(kind) if not member.startswith("_")} - known == set()


def test_every_state_machine_is_drawn() -> None:
    page = state_diagrams.PAGE.read_text()
    parts = [f"{part} of {machine}" for machine in state_diagrams.MACHINES for part in ("diagram", "states", "changes")]
    assert not [part for part in parts if f"<!-- generated: {part} -->" not in page]


def test_every_signal_is_explained() -> None:
    page = state_diagrams.PAGE.read_text()
    for table in state_diagrams.MACHINES.values():
        assert state_diagrams.causes(table) in page


def test_every_message_is_explained() -> None:
    names = [message.__name__ for message in get_args(AnyMessage)]
    assert not [name for name in names if f"\n**{name}** (" not in PROTOCOL]


def test_every_field_is_listed() -> None:
    rows = {
        message.__name__: ", ".join(f"`{name}`" for name in message.__struct_fields__)
        for message in (*get_args(AnyMessage), RankRecord, StagingWindow, Staged, Failure)
    }
    assert not [name for name, fields in rows.items() if f"\n| {name} | {fields} |" not in PROTOCOL]


def test_what_happens_at_each_limit_is_said() -> None:
    rows = CONFIGURATION.partition("What happens at a limit, and who would change it:")[2].partition("\n## ")[0]
    assert sorted(names_in_first_column(rows)) == sorted(setting.name for setting in dataclasses.fields(Limits))


def names_in_first_column(page: str) -> list[str]:
    cells = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([\w/.]+)`", cell)]


def test_every_module_of_the_cores_has_a_line() -> None:
    modules = [path.relative_to(ROOT / "kvflow/state").with_suffix("") for path in SOURCES if "state" in path.parts]
    named = names_in_first_column(chapter_of(ARCHITECTURE, "Inside the cores"))
    assert sorted(named) == sorted(str(module) for module in modules if module.name != "__init__")


def test_every_package_has_a_line() -> None:
    inside = [path for path in (ROOT / "kvflow").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    named = [name.rstrip("/") for name in names_in_first_column(chapter_of(ARCHITECTURE, "Packages"))]
    assert sorted(named) == sorted(path.stem for path in inside if path.stem != "__init__")


def test_every_deadline_is_explained_with_its_default() -> None:
    rows = {setting.name: f"| `{setting.name}` | {setting.default:g} s |" for setting in dataclasses.fields(Timeouts)}
    assert not [name for name, row in rows.items() if f"\n{row}" not in PROTOCOL]


ANOMALY = re.compile(r"""(?:CountAnomaly|anomalies\.count|\.reject|_anomaly|ended\.answer)\([^"()]*"([a-z_]+)\"""")
POSTPONED = re.compile(r"""(?:\bpostpone\(|_postpone\(|POSTPONE, )"([a-z_]+)\"""")
EVENT = re.compile(r"""(?:\.(?:info|warning|error)|LogEvent|log_loss)\(\s*"([a-z_]+)\"""")
NAMED_ELSEWHERE = {
    *("send_failed", "send_finished", "receive_failed", "receive_finished", "receive_slow"),
    *("rank_registered", "rank_left", "rank_replaced", "registry_full"),
    *("instance_unreachable", "handshake_refused", "rank_closed", "pages_quarantined", "quarantine_left"),
}
"""Log events whose name or level is chosen from two, or whose lines are limited."""


def test_every_log_event_is_explained() -> None:
    explained = names_in_first_column(LOG_EVENTS.partition("\n## Anomalies\n")[0])
    logging = [path for path in SOURCES if not {"cli", "testing"} & set(path.parts)]
    found = {name for path in logging for name in EVENT.findall(path.read_text())}
    assert sorted(explained) == sorted(found | NAMED_ELSEWHERE)


def test_every_anomaly_is_explained() -> None:
    explained = set(names_in_first_column(chapter_of(LOG_EVENTS, "Anomalies"))) - {"unexpected_..."}
    sources = [path.read_text() for path in SOURCES]
    assert not [name for name in explained if not any(f'"{name}"' in source for source in sources)]
    found = {name for source in sources for name in ANOMALY.findall(source)}
    assert len(found) > 10
    assert not found - explained


def test_every_postponed_message_is_explained() -> None:
    explained = set(names_in_first_column(chapter_of(LOG_EVENTS, "Postponed messages")))
    assert explained == {name for path in SOURCES for name in POSTPONED.findall(path.read_text())}


def test_every_reason_is_explained() -> None:
    chapter = chapter_of(FAILURES, "Reasons")
    rows = [re.split(r" *\| *", row) for row in chapter.splitlines() if row.startswith("| `")]
    assert sorted(row[1].strip("`") for row in rows) == sorted(reason.value for reason in FailureReason)
    for _, _, meaning, stages, sides, advice, _ in rows:
        assert meaning
        assert advice
        assert set(stages.split(" or ")) <= {stage.value for stage in Stage}
        assert sides in ("prefill", "decode", "both")


@pytest.mark.parametrize("backend", [MemoryBackend, NixlBackend])
def test_which_transports_end_with_their_process_is_as_the_page_says(backend: type[Backend]) -> None:
    answer = "yes" if backend.capabilities.ends_with_process else "no"
    assert f"\n| `{backend.name}` | {answer} |" in FAILURES


DRAINED_BY_A_SIGNAL = """
import os, torch

async def main() -> None:
    async def run_engine() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        while True:
            try:
                async with rank.send(7) as sender:
                    await anyio.sleep(0.01)
                    sender.abort()
            except kvflow.RankDraining:
                print("draining lets nothing new in")
                await anyio.sleep_forever()

    pool = {"kv": [torch.zeros(4, 16, 1, 8)]}
    layout = kvflow.layout_from_tensors(pool, axes="page token head dim", heads=(0, 1), fingerprint="any")
    config = kvflow.PrefillConfig(instance="prefill", registry="tcp://127.0.0.1:1", backend="memory")
    rank = kvflow.PrefillRank(config, layout)
    await work(rank, run_engine)

anyio.run(main)
"""


def test_drain_example_drains() -> None:
    (example,) = PYTHON.findall(FAILURES)
    assert output_of(example + DRAINED_BY_A_SIGNAL) == "draining lets nothing new in\n"

"""What the documents say is so."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from kvflow.backends.base import Backend
from kvflow.backends.memory import MemoryBackend
from kvflow.backends.nixl import NixlBackend
from kvflow.config import Limits, Timeouts
from kvflow.errors import FailureReason, Stage
from kvflow.wire.messages import AnyMessage, Card, Failure, Staged, StagingWindow
from tests.support import state_diagrams

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\((?!https?://)([^)#]+)[^)]*\)")
ANCHOR = re.compile(r"\[[^\]]*\]\((?!https?://)([^)#]*)#([^)]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)

ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()
PROTOCOL = (ROOT / "docs/protocol.md").read_text()
FAILURES = (ROOT / "docs/failure-model.md").read_text()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for target in LINK.findall(document.read_text()):
        assert (document.parent / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_into_a_page_lead_to_a_heading(document: Path) -> None:
    for target, anchor in ANCHOR.findall(document.read_text()):
        page = document.parent / target if target else document
        headings = [
            re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in HEADING.findall(page.read_text())
        ]
        assert anchor in headings, f"{target}#{anchor}"


def test_every_decision_is_listed() -> None:
    listed = (ROOT / "docs/decisions/README.md").read_text()
    for decision in (ROOT / "docs/decisions").glob("0*.md"):
        assert decision.name in listed


def test_every_trap_names_tests_that_exist() -> None:
    suite = "".join(path.read_text() for path in (ROOT / "kvflow/testing/contract/suite").glob("*.py"))
    named = re.findall(r"`([\w/.]+)::(test_\w+)`", (ROOT / "docs/transport-traps.md").read_text())
    assert named
    for place, test in named:
        path = ROOT / place if "/" in place else ROOT / "tests/backends" / place
        source = suite if place == "contract" else path.read_text()
        assert f"def {test}(" in source, f"{place}::{test}"


def test_readme_example_runs() -> None:
    example, _ = PYTHON.findall((ROOT / "README.md").read_text())
    assert "metadata=b'first token'" in output_of(example)


def output_of(script: str) -> str:
    """What a script prints in a fresh interpreter, where it must succeed and complain about nothing."""
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=50)
    assert (finished.returncode, finished.stderr) == (0, "")
    return finished.stdout


def test_state_machines_are_drawn_from_their_tables() -> None:
    page = state_diagrams.PAGE.read_text()
    assert state_diagrams.fill_in(page) == page, "run `make docs`"


@pytest.mark.parametrize("machine", state_diagrams.MACHINES)
@pytest.mark.parametrize("part", ["diagram", "states", "changes"])
def test_every_state_machine_is_drawn(part: str, machine: str) -> None:
    assert f"<!-- generated: {part} of {machine} -->" in state_diagrams.PAGE.read_text()


def test_every_signal_is_explained() -> None:
    page = state_diagrams.PAGE.read_text()
    for table in state_diagrams.MACHINES.values():
        assert state_diagrams.causes(table) in page


@pytest.mark.parametrize("message", get_args(AnyMessage), ids=lambda message: message.__name__)
def test_every_message_is_explained(message: type) -> None:
    assert f"\n**{message.__name__}** (" in PROTOCOL


@pytest.mark.parametrize(
    "message", [*get_args(AnyMessage), Card, StagingWindow, Staged, Failure], ids=lambda message: message.__name__
)
def test_every_field_is_listed(message: type[msgspec.Struct]) -> None:
    names = ", ".join(f"`{name}`" for name in message.__struct_fields__)
    assert f"\n| {message.__name__} | {names} |" in PROTOCOL


@pytest.mark.parametrize("setting", dataclasses.fields(Limits), ids=lambda setting: setting.name)
def test_every_limit_is_explained_with_its_default(setting: "dataclasses.Field[int]") -> None:
    (default,) = re.findall(rf"^\| `{setting.name}` \| (.*?) \|", ARCHITECTURE, re.MULTILINE)
    number, _, unit = default.replace(",", "").partition(" ")
    assert int(number) * {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit] == setting.default


def test_every_module_of_the_core_has_a_line() -> None:
    chapter = ARCHITECTURE.partition("Inside `state/`")[2].partition("\n## ")[0]
    placed = [
        name for row in re.findall(r"^\| (`.*?) \|", chapter, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    ]
    modules = [path.stem for path in (ROOT / "kvflow/state").glob("*.py") if path.stem != "__init__"]
    assert sorted(placed) == sorted(modules)


@pytest.mark.parametrize("setting", dataclasses.fields(Timeouts), ids=lambda setting: setting.name)
def test_every_deadline_is_explained_with_its_default(setting: "dataclasses.Field[float]") -> None:
    assert f"\n| `{setting.name}` | {setting.default:g} s |" in PROTOCOL


def test_what_is_ignored_is_counted_under_the_names_of_the_page() -> None:
    chapter = PROTOCOL.partition("## What is ignored")[2].partition("\n## ")[0]
    names = [
        name for row in re.findall(r"^\| (`.*?) \|", chapter, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    ]
    assert len(names) > 10
    sources = [path.read_text() for path in (ROOT / "kvflow").rglob("*.py")]
    unknown = [name for name in names if not any(f'"{name}"' in source for source in sources)]
    assert not unknown


def test_every_reason_is_explained() -> None:
    chapter = FAILURES.partition("## Reasons")[2].partition("\n## ")[0]
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
                async with rank.send(7):
                    await anyio.sleep(0.01)
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

"""The packages, settings and commands on the platform pages exist."""

import importlib
import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import kvflow
from kvflow.backends import BUILT_IN, create_backend
from kvflow.cli import main as cli
from tests.support.commands import check_arguments
from tests.test_docs import DOCUMENTS

ROOT = Path(__file__).parent.parent
ASCEND = ("examples.ascend.kvflow_ascend", "AscendBackend")
PAGES = sorted((ROOT / "docs/platforms").glob("*.md"))

BY_NAME = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def extras() -> set[str]:
    text = (ROOT / "pyproject.toml").read_text()
    section = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    return set(re.findall(r"^([\w-]+) = \[", section, re.MULTILINE))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def test_extras_exist() -> None:
    """Extras in `kvflow[...]` and `.[...]`, possibly several at once."""
    named = {
        (page.name, name)
        for page in DOCUMENTS
        for names in re.findall(r"(?:kvflow|\.)\[([\w,-]+)\]", page.read_text())
        for name in names.split(",")
    }
    assert named
    assert not {(page, name) for page, name in named if name not in extras()}


def test_builds_of_mooncake_conflict() -> None:
    """They install the same module over each other."""
    section = (ROOT / "pyproject.toml").read_text().partition("[tool.uv]")[2].partition("\n[tool.")[0]
    declared = re.findall(r'extra = "([\w-]+)"', section)
    assert sorted(declared) == sorted(extra for extra in extras() if extra.startswith("mooncake"))


@BY_NAME
@pytest.mark.usefixtures("ascend")
def test_settings_are_valid(page: Path) -> None:
    for example in blocks(page, "python"):
        scope: dict[str, Any] = {}
        exec(example, scope)  # noqa: S102 - it is our own page
        configs = [value for value in scope.values() if isinstance(value, kvflow.PrefillConfig | kvflow.DecodeConfig)]
        assert configs
        for config in configs:
            create_backend(config.backend, config.backend_options)


@BY_NAME
def test_commands_exist(page: Path) -> None:
    for line in "".join(blocks(page, "console")).splitlines():
        if line.startswith("kvflow "):
            check_arguments(cli.main, shlex.split(line)[1:])


def test_options_in_the_tables_are_options() -> None:
    """Each name in the first column is an environment variable or an option of a transport."""
    options = {option for module, backend in [*BUILT_IN.values(), ASCEND] for option in options_of(module, backend)}
    named = {(page.name, name) for page in PAGES for name in named_in_tables(page)}
    assert named
    assert not {(page, name) for page, name in named if name not in options}


def named_in_tables(page: Path) -> set[str]:
    cells = re.findall(r"^\| (`[^|]*?) \|", page.read_text(), re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([a-z_]+)(?:=[^`]*)?`", cell)} - {*BUILT_IN, "ascend"}


def options_of(module: str, backend: str) -> set[str]:
    return set(inspect.signature(getattr(importlib.import_module(module), backend)).parameters)


PROVED = re.compile(r"^\| (CPU|CUDA|XPU|Ascend|ROCm) \| [^|]+ \| [^|]+ \| ([^|]+) \|$", re.MULTILINE)


def test_every_platform_names_tests_that_exist() -> None:
    section = (ROOT / "docs/platforms/README.md").read_text().partition("## What is proved")[2].partition("\n## ")[0]
    header, *lines = re.findall(r"^\| .*", section, re.MULTILINE)
    rows = PROVED.findall(section)
    assert header.startswith("| platform")
    assert len(rows) == len(lines)
    assert {platform for platform, _ in rows} == {"CPU", "CUDA", "XPU", "Ascend", "ROCm"}
    for platform, tests in rows:
        named = re.findall(r"`(tests/[\w/.]+)(?:::(\w+))?`", tests)
        assert named, platform
        for place, name in named:
            files = [ROOT / place] if place.endswith(".py") else sorted((ROOT / place).glob("test_*.py"))
            sources = "".join(file.read_text() for file in files)
            wanted = rf"\b(def|class) {name}\b" if name else r"\b(def test_|class Test)"
            assert re.search(wanted, sources), f"{place}::{name}"


def test_readme_leads_to_what_is_proved() -> None:
    assert "(docs/platforms/README.md#what-is-proved)" in (ROOT / "README.md").read_text()


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs/platforms/README.md").read_text()
    for page in PAGES:
        assert page.stem == "README" or f"]({page.name})" in index

"""The transport of docs/backends.md passes the suite from a distribution of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvflow.backends import BUILT_IN, create_backend
from tests.support.distributions import build_wheel, install

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/backends.md").read_text()


def block(language: str, number: int) -> str:
    found: list[str] = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return found[number]


@pytest.mark.slow
def test_the_example_passes_the_suite_from_outside(tmp_path: Path) -> None:
    (entry_point,) = re.findall(r'^(\w+) = "(.*)"$', block("toml", 0), re.MULTILINE)
    site, tests = tmp_path / "site", tmp_path / "tests"
    install(build_wheel(tmp_path, "loopback", {"loopback.py": block("python", 0)}, dict([entry_point])), site)
    tests.mkdir()
    (tests / "test_loopback.py").write_text(block("python", 1))
    path = os.pathsep.join([str(site), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider"]
    done = subprocess.run(
        command, cwd=tests, env={**os.environ, "PYTHONPATH": path}, capture_output=True, check=False, text=True
    )
    assert done.returncode == 0, done.stdout
    (passed,) = re.findall(r"(\d+) passed", done.stdout)
    assert int(passed) > 40
    assert "failed" not in done.stdout


def rows() -> dict[str, list[str]]:
    """Return the table of transports, by its first column."""
    table = PAGE.partition("## The transports there are")[2].partition("\n\n")[2].partition("\n\n")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return {row[0]: row[1:] for row in cells}


@pytest.mark.parametrize("column", range(3))
def test_the_table_says_what_the_transports_say_of_themselves(column: int) -> None:
    table = rows()
    name = table[""][column].strip("`")
    capabilities = create_backend(name, {}).capabilities
    assert table["in-band notices"][column].startswith("yes" if capabilities.in_band_notices else "no")
    assert table["nothing lands after its process ends"][column].startswith(
        "yes" if capabilities.ends_with_process else "no"
    )
    assert table["longest descriptor"][column] == str(capabilities.max_descriptor_bytes or "no limit")
    always = table["memory kinds"][column].partition(";")[0]
    assert set(always.split(", ")) == capabilities.memory_kinds


def test_the_table_has_every_transport() -> None:
    assert {name.strip("`") for name in rows()[""]} == set(BUILT_IN)

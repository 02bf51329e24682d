"""Rules of the house that no other tool holds: what is imported, what is public, how long things are."""

import ast
import functools
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

import kvflow
from kvflow import errors
from kvflow.cli import main as cli

ROOT: Final = Path(kvflow.__file__).parent
SOURCES: Final = sorted(ROOT.rglob("*.py"))

MAX_FILE_LINES: Final = 400
MAX_FUNCTION_LINES: Final = 60

PURE: Final = [
    "kvflow",
    "kvflow.config",
    "kvflow.errors",
    "kvflow.geometry",
    "kvflow.state",
    "kvflow.state.core",
    "kvflow.state.invariants",
    "kvflow.wire.codec",
    "kvflow.wire.messages",
]

IMPURE: Final = {
    "anyio",
    "asyncio",
    "concurrent.futures",
    "ctypes",
    "http",
    "logging",
    "mooncake",
    "multiprocessing",
    "nixl",
    "queue",
    "random",
    "secrets",
    "select",
    "selectors",
    "signal",
    "socket",
    "sqlite3",
    "ssl",
    "structlog",
    "subprocess",
    "tempfile",
    "threading",
    "torch",
    "urllib.request",
    "zmq",
}

PRINT_MODULES: Final = "import json, sys; print(json.dumps(sorted(sys.modules)))"

ALLOWED: Final = ["numpy", "numpy.typing", "msgspec", "msgspec.structs", "msgspec.msgpack"]
"""Third-party libraries of the pure packages; what they load is theirs to answer for."""

STANDARD: Final = ["dataclasses", "enum", "heapq", "itertools", "math", "typing"]


@functools.cache
def modules_after(*imports: str) -> frozenset[str]:
    """What a fresh interpreter has loaded after some imports."""
    script = "".join(f"import {name}\n" for name in imports) + PRINT_MODULES
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, timeout=50)
    return frozenset(json.loads(done.stdout))


@functools.cache
def own_modules_after(name: str) -> frozenset[str]:
    """What kvflow itself has loaded: the same import with and without kvflow in it."""
    libraries = (*ALLOWED, *STANDARD)
    return modules_after(*libraries, name) - modules_after(*libraries)


@pytest.mark.parametrize("name", PURE)
def test_pure_package_loads_no_io(name: str) -> None:
    loaded = own_modules_after(name)
    assert name in loaded
    assert not loaded & IMPURE
    foreign = {module.partition(".")[0] for module in loaded} - {"kvflow", *sys.stdlib_module_names}
    assert foreign <= {"numpy", "msgspec"}


@pytest.mark.parametrize("name", ["kvflow", "kvflow.config", "kvflow.errors"])
def test_what_needs_no_library_loads_none(name: str) -> None:
    loaded = modules_after(name) - modules_after(*STANDARD)
    assert {module.partition(".")[0] for module in loaded} == {"kvflow"}


def test_what_is_loaded_can_be_seen() -> None:
    """The check would find something if there was something to find; only `ctypes` is numpy's own."""
    assert modules_after(*ALLOWED, *STANDARD) & IMPURE <= {"ctypes"}
    assert own_modules_after("kvflow.wire.channel") >= {"zmq", "asyncio", "socket"}
    assert own_modules_after("kvflow.observe.logs") >= {"structlog", "logging"}


def test_ranks_do_not_load_torch_or_a_transport() -> None:
    loaded = modules_after("kvflow.prefill", "kvflow.decode", "kvflow.blocking", "kvflow.registry")
    roots = {module.partition(".")[0] for module in loaded}
    assert not {root for root in roots if root.startswith(("torch", "nixl", "mooncake", "memfabric", "transformers"))}


def test_public_names_are_sorted_and_listed() -> None:
    assert sorted(kvflow.__all__) == kvflow.__all__
    assert set(kvflow.__all__) <= set(dir(kvflow))
    assert set(kvflow.__all__) == set(kvflow._HOMES)


@pytest.mark.parametrize("name", kvflow.__all__)
def test_public_name_resolves_and_says_what_it_is(name: str) -> None:
    value = getattr(kvflow, name)
    assert value.__doc__
    assert value.__doc__.strip()
    assert not value.__doc__.startswith(f"{name}(")  # what dataclass and NamedTuple write for themselves
    assert value.__module__ == kvflow._HOMES[name]


def test_every_error_that_an_engine_may_catch_is_public() -> None:
    assert set(errors.__all__) <= set(kvflow.__all__)
    for name in errors.__all__:
        assert getattr(kvflow, name) is getattr(errors, name)


def test_other_names_do_not_resolve() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'PrefilRank'"):
        _ = kvflow.PrefilRank


def test_there_is_something_to_look_at() -> None:
    assert len(SOURCES) > 30


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_file_and_its_functions_are_short(path: Path) -> None:
    source = path.read_text("utf-8")
    assert len(source.splitlines()) <= MAX_FILE_LINES
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    long = {node.name: num_lines(node) for node in functions if num_lines(node) > MAX_FUNCTION_LINES}
    assert not long


def num_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_module_has_a_docstring_and_says_what_it_offers(path: Path) -> None:
    tree = ast.parse(path.read_text("utf-8"))
    assert ast.get_docstring(tree)
    names = {target.id for node in tree.body for target in assigned(node)}
    defined = {node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    if any(not name.startswith("_") for name in defined):
        assert "__all__" in names


def assigned(node: ast.stmt) -> list[ast.Name]:
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [target for target in targets if isinstance(target, ast.Name)]


def test_types_travel_with_the_package() -> None:
    assert (ROOT / "py.typed").is_file()


def test_version_is_the_same_everywhere() -> None:
    assert importlib.metadata.version("kvflow") == kvflow.__version__


def test_command_gives_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["--version"])
    assert (left.value.code, capsys.readouterr().out) == (0, f"kvflow {kvflow.__version__}\n")


@pytest.mark.parametrize(
    "command", [[], ["demo"], ["bench"], ["registry"], ["simulate"]], ids=lambda words: " ".join(words) or "kvflow"
)
def test_command_explains_itself(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main([*command, "--help"])
    shown = capsys.readouterr().out
    assert left.value.code == 0
    assert shown.startswith(" ".join(["usage: kvflow", *command]))


def test_installed_command_runs() -> None:
    command = Path(sys.executable).with_name("kvflow")
    done = subprocess.run([command, "--version"], capture_output=True, check=True, timeout=50, text=True)
    assert done.stdout == f"kvflow {kvflow.__version__}\n"

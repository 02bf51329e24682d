"""Rules of the package that no other tool checks: imports, public names, lengths."""

import ast
import functools
import importlib.metadata
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Final

import pytest
from hatchling.builders.wheel import WheelBuilder

import kvflow
from kvflow import errors
from kvflow.cli import main as cli

ROOT: Final = Path(kvflow.__file__).parent
SOURCES: Final = sorted([*ROOT.rglob("*.py"), *(ROOT.parent / "simulation").rglob("*.py")])

MAX_FILE_LINES: Final = 500
MAX_CLASS_LINES: Final = 350
MAX_FUNCTION_LINES: Final = 60

MAX_LINES_OF_SIMULATED: Final = 750
"""What a file of the simulation may have instead."""

BARE_VERBS: Final = frozenset({"end", "look", "of", "put", "take"})
"""Names of methods that say neither what is taken, put or ended, nor where."""

TWINS: Final = {
    **dict.fromkeys(("PrefillRank", "DecodeRank", "Registry"), "blocking, with the names of the asynchronous API"),
    **dict.fromkeys(("Room", "Rooms"), "of a prefill rank, and of a decode rank"),
    **dict.fromkeys(("PostEnded", "PostInDoubt"), "as the transport reports it, and as the core learns of it"),
    "Endpoint": "where a registry is, and a transport under test",
}
"""Names that two classes may have, and why."""

PURE: Final = [
    "kvflow",
    "kvflow.config",
    "kvflow.errors",
    "kvflow.geometry",
    "kvflow.state",
    "kvflow.state.decode.core",
    "kvflow.state.prefill.core",
    "kvflow.state.part_replay",
    "kvflow.state.recorder",
    "kvflow.state.replay",
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
"""Third-party libraries of the pure packages; their own imports are not checked."""

STANDARD: Final = ["dataclasses", "enum", "hashlib", "heapq", "ipaddress", "itertools", "math", "typing"]


@functools.cache
def modules_after(*imports: str) -> frozenset[str]:
    """Return the modules that a fresh interpreter has loaded after some imports."""
    script = "".join(f"import {name}\n" for name in imports) + PRINT_MODULES
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, timeout=100)
    return frozenset(json.loads(done.stdout))


def own_modules_after(*names: str) -> frozenset[str]:
    """Return the modules that kvflow itself loads: the difference with and without kvflow in the imports."""
    libraries = (*ALLOWED, *STANDARD)
    return modules_after(*libraries, *names) - modules_after(*libraries)


def test_pure_packages_load_no_io() -> None:
    loaded = own_modules_after(*PURE)
    assert loaded >= set(PURE)
    assert not loaded & IMPURE
    foreign = {module.partition(".")[0] for module in loaded} - {"kvflow", *sys.stdlib_module_names}
    assert foreign <= {"numpy", "msgspec"}


def test_what_needs_no_library_loads_none() -> None:
    loaded = modules_after("kvflow", "kvflow.config", "kvflow.errors") - modules_after(*STANDARD)
    assert {module.partition(".")[0] for module in loaded} == {"kvflow"}


def test_commands_that_ask_ranks_load_little() -> None:
    """Kubernetes runs them as probes, every few seconds in each pod."""
    for command in ("health", "drain", "status"):
        script = f"from kvflow.cli.main import main\nmain(['{command}'])\n{PRINT_MODULES}"
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, timeout=100)
        loaded = set(json.loads(done.stdout.splitlines()[-1])) - modules_after(*STANDARD)
        foreign = {module.partition(".")[0] for module in loaded} - {"kvflow", *sys.stdlib_module_names}
        assert foreign <= {"msgspec", "typing_extensions"}
        assert "asyncio" not in loaded


def test_what_is_loaded_can_be_seen() -> None:
    """The check can find violations; numpy itself loads only `ctypes`."""
    assert modules_after(*ALLOWED, *STANDARD) & IMPURE <= {"ctypes"}
    assert own_modules_after("kvflow.control.channel") >= {"zmq", "asyncio", "socket"}
    assert own_modules_after("kvflow.observe.logs") >= {"logging"}


def test_ranks_load_neither_torch_nor_a_transport_nor_what_renders_logs() -> None:
    loaded = modules_after("kvflow.prefill", "kvflow.decode", "kvflow.blocking", "kvflow.directory")
    roots = {module.partition(".")[0] for module in loaded}
    assert not {
        root
        for root in roots
        if root.startswith(("torch", "nixl", "mooncake", "memfabric", "transformers", "structlog"))
    }


def test_public_names_are_sorted_and_listed() -> None:
    assert sorted(kvflow.__all__) == kvflow.__all__
    assert set(kvflow.__all__) <= set(dir(kvflow))
    assert set(kvflow.__all__) == set(kvflow._HOMES)


def test_public_names_have_a_docstring_and_the_module_that_is_listed() -> None:
    values = {name: getattr(kvflow, name) for name in kvflow.__all__}
    assert not [name for name, value in values.items() if not has_own_docstring(name, value)]
    assert {name: value.__module__ for name, value in values.items()} == kvflow._HOMES


def has_own_docstring(name: str, value: object) -> bool:
    """Return whether a docstring was written by hand; dataclasses and named tuples generate "Name(fields)"."""
    docstring = value.__doc__ or ""
    return bool(docstring.strip()) and not docstring.startswith(f"{name}(")


def test_every_error_that_an_engine_may_catch_is_public() -> None:
    assert set(errors.__all__) <= set(kvflow.__all__)
    for name in errors.__all__:
        assert getattr(kvflow, name) is getattr(errors, name)


def test_other_names_do_not_resolve() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'PrefilRank'"):
        _ = kvflow.PrefilRank


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    """Return the parsed modules of the package and of the simulation."""
    return {str(path.relative_to(ROOT.parent)): ast.parse(path.read_text("utf-8")) for path in SOURCES}


def test_files_are_short() -> None:
    lengths = {str(path.relative_to(ROOT.parent)): len(path.read_text("utf-8").splitlines()) for path in SOURCES}
    assert len(lengths) > 30
    assert not [name for name, length in lengths.items() if length > most_lines(name)]


def most_lines(file: str) -> int:
    return MAX_FILE_LINES if file.startswith("kvflow/") else MAX_LINES_OF_SIMULATED


def test_classes_are_short(trees: dict[str, ast.Module]) -> None:
    lengths = {
        f"{name} {node.name}": num_lines(node)
        for name, tree in trees.items()
        if name.startswith("kvflow/")
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    assert len(lengths) > 300
    assert not [name for name, length in lengths.items() if length > MAX_CLASS_LINES]


def test_a_class_name_has_one_meaning(trees: dict[str, ast.Module]) -> None:
    library = {path: tree for path, tree in trees.items() if path.startswith("kvflow")}
    names = [node.name for tree in library.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert {name for name, count in Counter(names).items() if count > 1} == TWINS.keys()


def test_methods_name_their_object(trees: dict[str, ast.Module]) -> None:
    bare = [
        f"{path}: {owner.name}.{node.name}"
        for path, tree in trees.items()
        if path.startswith("kvflow")
        for owner in ast.walk(tree)
        if isinstance(owner, ast.ClassDef)
        for node in owner.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.strip("_") in BARE_VERBS
        and not any(ast.unparse(decorator) == "property" for decorator in node.decorator_list)
    ]
    assert bare == []


def test_functions_are_short(trees: dict[str, ast.Module]) -> None:
    lengths = {
        f"{name}:{node.lineno} {node.name}": num_lines(node)
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert len(lengths) > 300
    assert {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}


def num_lines(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_modules_list_what_they_offer(trees: dict[str, ast.Module]) -> None:
    """Each module that defines a public name has `__all__`."""
    assert not [name for name, tree in trees.items() if offers(tree) and not has_all(tree)]


def offers(tree: ast.Module) -> bool:
    defined = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return any(not name.startswith("_") for name in defined)


def has_all(tree: ast.Module) -> bool:
    targets = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets)


def test_wheel_holds_the_library_alone() -> None:
    """The simulation, benchmarks and tests run in a checkout."""
    files = [file.distribution_path for file in WheelBuilder(str(ROOT.parent)).recurse_included_files()]
    assert {file.partition("/")[0] for file in files} == {"kvflow"}
    assert "kvflow/prefill.py" in files


def test_types_travel_with_the_package() -> None:
    assert (ROOT / "py.typed").is_file()


def test_version_is_the_same_everywhere() -> None:
    assert importlib.metadata.version("kvflow") == kvflow.__version__


def test_lock_has_the_versions_that_are_pinned() -> None:
    """`make lock` must run after `constraints.txt` changes."""
    place = ROOT.parent
    pinned = {line for line in (place / "constraints.txt").read_text("utf-8").splitlines() if "==" in line}
    locked = {line.removesuffix(" \\") for line in (place / "requirements.lock").read_text("utf-8").splitlines()}
    assert {name.partition("==")[0] for name in pinned - locked} == {"torch"}, "run make lock"


def test_command_gives_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["--version"])
    assert (left.value.code, capsys.readouterr().out) == (0, f"kvflow {kvflow.__version__}\n")


@pytest.mark.parametrize(
    "command",
    [[], ["demo"], ["registry"], ["serve"], ["proxy"]],
    ids=lambda words: " ".join(words) or "kvflow",
)
def test_command_explains_itself(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main([*command, "--help"])
    shown = capsys.readouterr().out
    assert left.value.code == 0
    assert shown.startswith(" ".join(["usage: kvflow", *command]))


def test_installed_command_runs() -> None:
    command = Path(sys.executable).with_name("kvflow")
    done = subprocess.run([command, "--version"], capture_output=True, check=True, timeout=100, text=True)
    assert done.stdout == f"kvflow {kvflow.__version__}\n"

"""Lines, files, and lengths of functions and classes of kvflow, for each package.

To measure another version: `PYTHONPATH=CHECKOUT python benchmarks/shape.py`.
"""

import argparse
import ast
import importlib.util
import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

__all__ = ["Shape", "add_arguments", "measure", "prepare"]


class Shape(NamedTuple):
    """Statistics of one package, or of all.

    Attributes:
        lines: Lines of all files, including blank ones.
        function_p95: Lines that 95 % of the functions do not exceed.
    """

    lines: int
    files: int
    functions: int
    function_p95: int
    function_max: int
    classes: int
    class_p95: int
    class_max: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--root", type=Path, metavar="FOLDER", help="a package (default: the kvflow that is imported)")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return a function that measures and prints."""
    return lambda: _print(measure(arguments.root or _find_kvflow()), is_json=arguments.json)


def measure(root: Path) -> dict[str, Shape]:
    """Measure each package in a folder, and the whole folder as "all"."""
    packages = defaultdict[str, list[Path]](list)
    for path in sorted(root.rglob("*.py")):
        inner = path.relative_to(root).parts
        packages["all"].append(path)
        packages[inner[0] if len(inner) > 1 else "(files)"].append(path)
    return {name: _measure(paths) for name, paths in packages.items()}


def _measure(paths: Iterable[Path]) -> Shape:
    sources = [path.read_text("utf-8") for path in paths]
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    functions = _lengths(nodes, ast.FunctionDef, ast.AsyncFunctionDef)
    classes = _lengths(nodes, ast.ClassDef)
    lines = sum(len(source.splitlines()) for source in sources)
    return Shape(lines, len(sources), *_summary(functions), *_summary(classes))


def _lengths(nodes: Iterable[ast.AST], *kinds: type[ast.stmt]) -> list[int]:
    found = [node for node in nodes if isinstance(node, kinds)]
    return sorted((node.end_lineno or node.lineno) - node.lineno + 1 for node in found)


def _summary(lengths: list[int]) -> tuple[int, int, int]:
    """Return count, 95th percentile and maximum of sorted lengths."""
    return (len(lengths), lengths[-(-95 * len(lengths) // 100) - 1], lengths[-1]) if lengths else (0, 0, 0)


def _find_kvflow() -> Path:
    spec = importlib.util.find_spec("kvflow")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("kvflow is not installed")
    return Path(spec.origin).parent


def _print(shapes: dict[str, Shape], *, is_json: bool) -> int:
    if is_json:
        print(json.dumps({name: shape._asdict() for name, shape in shapes.items()}))
        return 0
    heads = [name.replace("_", " ") for name in Shape._fields]
    print(f"{'':12} " + " ".join(f"{head:>12}" for head in heads))
    for name, shape in shapes.items():
        print(f"{name:12} " + " ".join(f"{value:12,}" for value in shape))
    return 0


if __name__ == "__main__":
    own_parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(own_parser)
    own_parser.add_argument("--json", action="store_true")
    prepare(own_parser.parse_args())()

"""Mutation test of the pure cores: make one small change at a time, and check that a test fails.

usage: python scripts/mutants.py [--sample N] [--seed S] [PATH ...]

The script runs tests/state against each mutant in a copy of the package, and prints the mutants that pass with their
line: either a test is missing, or the change makes no difference. Existing tools draw no sample, and all mutants of the
cores together take a day.
"""

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent
TIMEOUT_S: Final = 300

COMPARISONS: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


class Mutant(NamedTuple):
    """A source file with one change."""

    path: Path
    line: int
    change: str
    source: str


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield every mutant of a file: inverted comparisons, swapped and/or, dropped calls and nots, other constants."""
    tree = ast.parse(path.read_text())
    for number, node in enumerate(ast.walk(tree)):
        for change, mutate in _changes(node):
            changed = copy.deepcopy(tree)
            mutate(next(other for at, other in enumerate(ast.walk(changed)) if at == number))
            yield Mutant(path, getattr(node, "lineno", 0), change, ast.unparse(ast.fix_missing_locations(changed)))


def _changes(node: ast.AST) -> Iterator[tuple[str, Callable[[Any], object]]]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        other = COMPARISONS[type(node.ops[0])]
        yield f"{type(node.ops[0]).__name__} -> {other.__name__}", lambda it: it.ops.__setitem__(0, other())
    if isinstance(node, ast.BoolOp):
        swapped = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield f"-> {swapped.__name__}", lambda it: setattr(it, "op", swapped())
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "call dropped", lambda it: setattr(it, "value", ast.Constant(None))
    if isinstance(node, ast.AugAssign) and isinstance(node.op, (ast.Add, ast.Sub)):
        turned = ast.Sub if isinstance(node.op, ast.Add) else ast.Add
        yield f"-> {turned.__name__}", lambda it: setattr(it, "op", turned())
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not dropped", lambda it: setattr(it, "operand", ast.UnaryOp(ast.Not(), it.operand))
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield f"-> {not node.value}", lambda it: setattr(it, "value", not it.value)


def is_killed(mutant: Mutant) -> bool:
    """Return whether the tests of the cores fail on a mutant."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "kvflow", Path(folder, "kvflow"), ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("simulation", "tests", "pyproject.toml"):
            Path(folder, name).symlink_to(ROOT / name)
        Path(folder, mutant.path.relative_to(ROOT)).write_text(mutant.source)
        words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", "tests/state"]
        environment = os.environ | {"PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                words, cwd=folder, env=environment, capture_output=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return True
        return done.returncode != 0


def main() -> None:
    """Draw mutants, and print the survivors."""
    parser = argparse.ArgumentParser(description="mutation check of the pure cores")
    parser.add_argument("paths", nargs="*", type=Path, default=[ROOT / "kvflow/state"], help="files or folders")
    parser.add_argument("--sample", type=int, default=50, help="how many mutants to draw")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    arguments = parser.parse_args()
    files: list[Path] = []
    for path in arguments.paths:
        files += sorted(path.resolve().rglob("*.py")) if path.is_dir() else [path.resolve()]
    found = [mutant for file in files for mutant in mutants_of(file)]
    drawn = random.Random(arguments.seed).sample(found, min(arguments.sample, len(found)))  # noqa: S311 - a sample
    num_killed = 0
    for mutant in drawn:
        if is_killed(mutant):
            num_killed += 1
        else:
            print(f"lives: {mutant.path.relative_to(ROOT)}:{mutant.line} {mutant.change}", flush=True)
    print(f"{num_killed} of {len(drawn)} mutants are killed, drawn from {len(found)}")


if __name__ == "__main__":
    main()

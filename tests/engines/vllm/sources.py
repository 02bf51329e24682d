"""A version of vLLM as source files, which are read and not run: its newest wheel needs a GPU to be imported."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import vllm

__all__ = ["VERSIONS", "Signature", "Sources"]

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Signature(NamedTuple):
    """Parameters of a method without `self`, the last ones optional, and whether it takes any others by name."""

    names: tuple[str, ...]
    num_optional: int
    takes_any: bool

    def accepts(self, other: "Signature") -> bool:
        """Return whether every call that fits the other one fits this one, by position and by name."""
        count = len(other.names)
        required, others_required = len(self.names) - self.num_optional, count - other.num_optional
        return self.names[:count] == other.names and required <= others_required and self.takes_any >= other.takes_any


def signature_of(function: Function) -> Signature:
    """Return the signature of a method."""
    own = function.args
    names = [one.arg for one in (*own.posonlyargs, *own.args)]
    if names[:1] in (["self"], ["cls"]):
        names = names[1:]
    return Signature(
        (*names, *(one.arg for one in own.kwonlyargs)),
        len(own.defaults) + sum(default is not None for default in own.kw_defaults),
        own.kwarg is not None,
    )


class Sources:
    """The source files of a version of vLLM.

    Args:
        root: The folder that contains the package `vllm`.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    @functools.cache  # noqa: B019 - one object a version
    def module(self, name: str) -> ast.Module:
        """Parse a module."""
        path = self._root.joinpath(*name.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        return ast.parse(file.read_text())

    def has(self, module: str, name: str) -> bool:
        """Return whether a module defines or imports a name; modules that import on demand have it as a string."""
        return any(
            getattr(node, "name", None) == name
            or (isinstance(node, ast.alias) and (node.asname or node.name) == name)
            or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name)
            or (isinstance(node, ast.Constant) and node.value == name)
            for node in ast.walk(self.module(module))
        )

    def class_of(self, path: str) -> ast.ClassDef:
        """Return a class, by its module and name."""
        module, _, name = path.rpartition(".")
        found = [node for node in ast.walk(self.module(module)) if isinstance(node, ast.ClassDef) and node.name == name]
        assert len(found) == 1, f"{path} is defined {len(found)} times"
        return found[0]

    def methods(self, path: str) -> dict[str, Signature]:
        """Return the methods and properties of a class, without those of its bases."""
        return {one.name: signature_of(one) for one in self.class_of(path).body if isinstance(one, Function)}

    def members(self, path: str) -> set[str]:
        """Return the names of the methods, fields and attributes of a class, without those of its bases."""
        return set(self._members(self.class_of(path)))

    def _members(self, found: ast.ClassDef) -> Iterator[str]:
        for node in ast.walk(found):
            if isinstance(node, Function):
                yield node.name
            elif isinstance(node, ast.AnnAssign | ast.Assign):
                for target in [node.target] if isinstance(node, ast.AnnAssign) else node.targets:
                    if isinstance(target, ast.Name):
                        yield target.id
                    elif isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "self":
                        yield target.attr


INSTALLED: Final = Path(vllm.__file__).parents[1]
UNPACKED: Final = Path(__file__).parents[3] / ".cache/vllm-sources"
VERSIONS: Final = {vllm.__version__.partition("+")[0]: Sources(INSTALLED)} | {
    path.name: Sources(path) for path in sorted(UNPACKED.glob("*"))
}
"""The installed version, and those that `scripts/test-vllm.sh` has unpacked."""

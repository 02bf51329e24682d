"""Makes SGLang's transfers importable without a GPU and without what else SGLang needs.

All of `sglang.srt.disaggregation` is SGLang's own code. Of other packages, those that cannot be found when SGLang
imports them are replaced by modules whose every attribute is a dummy, and `import sglang` itself does nothing.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from pathlib import Path
from typing import Any, Final

from typing_extensions import override

__all__ = ["install"]

NIXL: Final = ("nixl_cu12", "nixl_cu13")
"""Builds that SGLang knows as `nixl`."""


class Dummy:
    """Anything: it can be called, indexed, inherited from, and be a decorator."""

    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def __getattr__(self, name: str) -> "Dummy":
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return Dummy(f"{self._name}.{name}")

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        is_decorator = len(arguments) == 1 and not options and callable(arguments[0])
        return arguments[0] if is_decorator and not isinstance(arguments[0], Dummy) else Dummy(f"{self._name}()")

    def __getitem__(self, _key: object) -> "Dummy":
        return self

    def __mro_entries__(self, _bases: object) -> tuple[type, ...]:
        return (object,)

    def __iter__(self) -> Any:
        return iter(())

    def __bool__(self) -> bool:
        return False

    def __or__(self, _other: object) -> "Dummy":
        return self

    __ror__ = __or__


class DummyModule(types.ModuleType):
    """A module of dummies."""

    __path__: list[str] = []  # noqa: RUF012 - what makes it a package

    def __getattr__(self, name: str) -> Dummy:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return Dummy(f"{self.__name__}.{name}")


class DummyFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what nobody else has found, if it is SGLang that looks for it."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._packages: set[str] = set()

    @override
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        package = fullname.partition(".")[0]
        if package == "sglang":
            return None
        if package not in self._packages:
            if "." in fullname or not self._is_wanted_by_sglang():
                return None
            self._packages.add(package)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    @override
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> DummyModule:
        module = DummyModule(spec.name)
        module.__dict__["__version__"] = "0.0.0"
        return module

    @override
    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: there is nothing to run."""

    def _is_wanted_by_sglang(self) -> bool:
        frame: types.FrameType | None = sys._getframe(2)
        while frame is not None and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        return frame is not None and frame.f_code.co_filename.startswith(self._root)


def install(directory: Path) -> None:
    """Make `import sglang.srt...` work.

    Args:
        directory: Where SGLang is installed.
    """
    import torch  # noqa: PLC0415 - before the dummies: it looks for packages that SGLang wants, too
    import torch._dynamo  # noqa: PLC0415

    torch.compile = lambda function=None, *_, **__: function or (lambda inner: inner)  # type: ignore[assignment]
    root = directory / "sglang"
    sys.path.append(str(directory))
    sys.meta_path.append(DummyFinder(root))
    package = types.ModuleType("sglang")
    package.__path__ = [str(root)]
    package.__spec__ = importlib.machinery.ModuleSpec("sglang", None, is_package=True)
    sys.modules["sglang"] = package
    build = _first_of(NIXL)
    sys.modules["nixl"], sys.modules["nixl._api"] = build, importlib.import_module(f"{build.__name__}._api")


def _first_of(names: tuple[str, ...]) -> types.ModuleType:
    for name in names[:-1]:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return importlib.import_module(names[-1])

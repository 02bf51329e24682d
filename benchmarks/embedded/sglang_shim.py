"""Shim that makes SGLang's disaggregation code importable without a GPU.

Everything in `sglang.srt.disaggregation` and its memory pools is SGLang's own code. Stubs replace libraries that need a
GPU to be installed or imported, and the package's `__init__`, which imports its front end.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from typing import Any, Final

__all__ = ["install"]

STUBS: Final = frozenset(
    [
        "IPython",
        "flashinfer",
        "gguf",
        "loguru",
        "sglang.kernels.ops.attention.fla.utils",
        "sentencepiece",
        "sgl_kernel",
        "torchao",
        "torchvision",
        "triton",
        "tvm_ffi",
        "uvicorn",
    ]
)


class Dummy:
    """A stand-in for any object: it can be called, subscripted, subclassed and used as a decorator."""

    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def __getattr__(self, name: str) -> "Dummy":
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return Dummy(f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and callable(args[0]) and not isinstance(args[0], Dummy):
            return args[0]  # a decorator
        return Dummy(f"{self._name}()")

    def __getitem__(self, key: object) -> "Dummy":
        return self

    def __mro_entries__(self, bases: tuple[type, ...]) -> tuple[type, ...]:
        return (object,)

    def __iter__(self) -> Any:
        return iter(())

    def __bool__(self) -> bool:
        return False

    def __or__(self, other: object) -> "Dummy":
        return self

    def __ror__(self, other: object) -> "Dummy":
        return self


class StubModule(types.ModuleType):
    """A module in which every name exists."""

    def __getattr__(self, name: str) -> Dummy:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return Dummy(f"{self.__name__}.{name}")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An import finder and loader for stub modules."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name in STUBS or name.partition(".")[0] in STUBS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> StubModule:
        module = StubModule(spec.name)
        module.__dict__.update(__version__="0.0.0", __path__=[])
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Leave the module empty."""


def as_it_is(function: Any = None, *_: Any, **__: Any) -> Any:
    """Return the function uncompiled, in place of `torch.compile`, which needs triton."""
    return function or as_it_is


def install() -> None:
    """Install the stubs. Call this first, in a process that does nothing else."""
    import torch  # noqa: PLC0415 - it looks for triton, and must not find the stub
    import torch._dynamo  # noqa: PLC0415
    import torch.utils.flop_counter  # noqa: PLC0415

    torch.set_num_threads(1)
    vars(torch)["compile"] = as_it_is
    os.environ.setdefault("SGLANG_HOST_IP", "127.0.0.1")
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("sglang")
    sys.meta_path.insert(0, Finder())
    package = types.ModuleType("sglang")
    package.__path__ = list(spec.submodule_search_locations)
    package.__spec__ = importlib.machinery.ModuleSpec("sglang", None, is_package=True)
    sys.modules["sglang"] = package

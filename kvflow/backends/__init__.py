"""Transports: what moves the bytes. `base` is the contract; the others are found by name."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Final

from kvflow.backends.base import Backend
from kvflow.errors import ConfigError

__all__ = ["Backend", "create_backend"]

BUILT_IN: Final = {
    "ascend": ("kvflow.backends.ascend", "AscendBackend"),
    "memory": ("kvflow.backends.memory", "MemoryBackend"),
    "mooncake": ("kvflow.backends.mooncake", "MooncakeBackend"),
    "nixl": ("kvflow.backends.nixl", "NixlBackend"),
}


def create_backend(name: str, options: Mapping[str, object]) -> Backend:
    """Make a backend by name; its module, and the library behind it, are imported only now.

    Raises:
        ConfigError: No such backend, or it does not take these options.
    """
    if name not in BUILT_IN:
        raise ConfigError("unknown backend", backend=name, known=sorted(BUILT_IN))
    module, class_name = BUILT_IN[name]
    backend_class: Callable[..., Backend] = getattr(import_module(module), class_name)
    try:
        return backend_class(**options)
    except TypeError as error:
        raise ConfigError("backend does not take these options", backend=name, options=sorted(options)) from error

"""Transports: what moves the bytes. `base` is the contract; the others are found by name."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Final

from kvflow.backends.base import (
    Backend,
    BackendEvent,
    Capabilities,
    NoticeArrived,
    OnBroken,
    OnEvents,
    PostEnded,
    PostInDoubt,
)
from kvflow.errors import ConfigError

__all__ = [
    "Backend",
    "BackendEvent",
    "Capabilities",
    "NoticeArrived",
    "OnBroken",
    "OnEvents",
    "PostEnded",
    "PostInDoubt",
    "create_backend",
    "known_backends",
]

BUILT_IN: Final = {
    "ascend": ("kvflow.backends.ascend", "AscendBackend"),
    "memory": ("kvflow.backends.memory", "MemoryBackend"),
    "mooncake": ("kvflow.backends.mooncake", "MooncakeBackend"),
    "nixl": ("kvflow.backends.nixl", "NixlBackend"),
}


def known_backends() -> list[str]:
    """Names that the settings may give: kvflow's own, and those that installed distributions declare.

    A name says nothing about whether its library works here.
    """
    return sorted({*BUILT_IN, *_plugins().plugin_names()})


def create_backend(name: str, options: Mapping[str, object]) -> Backend:
    """Make a backend by name; its module, and the library behind it, are imported only now.

    Raises:
        ConfigError: No such backend, several, or it does not take these options.
        BackendUnavailable: A plugin of that name cannot be imported, or is no backend.
    """
    backend_class = _find(name)
    try:
        return backend_class(**options)
    except TypeError as error:
        raise ConfigError("backend does not take these options", backend=name, options=sorted(options)) from error


def _find(name: str) -> Callable[..., Backend]:
    if name not in BUILT_IN:
        plugin: type[Backend] = _plugins().load_plugin(name, built_in=BUILT_IN)
        return plugin
    _plugins().refuse_claims(name)
    module, class_name = BUILT_IN[name]
    built_in: type[Backend] = getattr(import_module(module), class_name)
    return built_in


def _plugins() -> Any:
    """Import late: reading what is installed takes the standard library 30 ms."""
    return import_module("kvflow.backends.plugins")

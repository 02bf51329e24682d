"""Transports: what moves the bytes. `base` is the contract; the others are found by name."""

import inspect
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
    _check_options(name, backend_class, options)
    try:
        return backend_class(**options)
    except TypeError as error:
        raise ConfigError(
            "backend does not take these options", backend=name, options=sorted(options), detail=str(error)
        ) from error


def _check_options(name: str, backend_class: Callable[..., Backend], options: Mapping[str, object]) -> None:
    """Refuse options that a backend does not have, and name those that it needs."""
    parameters = inspect.signature(backend_class).parameters.values()
    named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    missing = [one.name for one in named if one.default is one.empty and one.name not in options]
    if missing:
        raise ConfigError("backend needs more options", backend=name, missing=missing)
    unknown = sorted(options.keys() - {one.name for one in named})
    if unknown and not any(one.kind is one.VAR_KEYWORD for one in parameters):
        raise ConfigError(
            "backend has no such options", backend=name, unknown=unknown, known=[one.name for one in named]
        )


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

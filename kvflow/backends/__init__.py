"""Transports, which move the bytes. `base` defines the contract; implementations are looked up by name."""

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
    "memory": ("kvflow.backends.memory", "MemoryBackend"),
    "mooncake": ("kvflow.backends.mooncake", "MooncakeBackend"),
    "nixl": ("kvflow.backends.nixl", "NixlBackend"),
}


def known_backends() -> list[str]:
    """Return the names accepted by the settings: kvflow's own, and those declared by installed distributions.

    A listed name does not mean that its library works here.
    """
    return sorted({*BUILT_IN, *_plugins().plugin_names()})


def create_backend(name: str, options: Mapping[str, object]) -> Backend:
    """Create a backend by name. Its module and library are imported only now.

    Raises:
        ConfigError: The backend is unknown, declared several times, or does not accept these options.
        BackendUnavailable: A plugin of that name cannot be imported, or is not a backend.
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
    """Reject unknown options, and report missing ones."""
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
    """Import the plugins module on first use: reading the installed distributions takes the standard library 30 ms."""
    return import_module("kvflow.backends.plugins")

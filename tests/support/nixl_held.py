"""Counts what NIXL holds for peers, by watching the calls of the real library."""

import importlib
from collections.abc import Callable
from typing import Any, Final

import pytest

__all__ = ["HeldByNixl"]

PAIRS: Final = (
    ("add_remote_agent", "remove_remote_agent"),
    ("prep_xfer_dlist", "release_dlist_handle"),
    ("make_prepped_xfer", "release_xfer_handle"),
    ("initialize_xfer", "release_xfer_handle"),
)
"""Calls that map something of a peer, and those that drop it."""


class HeldByNixl:
    """What agents of this process hold.

    Attributes:
        held: Names of remote agents, and handles, each with its agent.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held: list[tuple[Any, Any]] = []
        agent = importlib.import_module("nixl_cu12._api").nixl_agent
        for drop in dict.fromkeys(name for _, name in PAIRS):
            monkeypatch.setattr(agent, drop, self._dropping(getattr(agent, drop)))
        for take, _ in PAIRS:
            monkeypatch.setattr(agent, take, self._taking(getattr(agent, take)))

    def _taking(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def taken(agent: Any, *given: Any) -> Any:
            found = call(agent, *given)
            self.held.append((id(agent), _key(found)))
            return found

        return taken

    def _dropping(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def drop(agent: Any, what: Any) -> Any:
            found = call(agent, what)
            self.held = [one for one in self.held if one != (id(agent), _key(what))]
            return found

        return drop


def _key(found: Any) -> Any:
    return found.decode() if isinstance(found, bytes) else found if isinstance(found, str) else id(found)

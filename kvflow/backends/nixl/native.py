"""The NIXL agents that make up one endpoint. Used on the owner thread."""

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from kvflow.backends.library_sockets import find_epolls
from kvflow.backends.metadata import RegisteredMemory
from kvflow.backends.nixl.outgoing import OutgoingSockets
from kvflow.errors import BackendError, BackendUnavailable, RegistrationError
from kvflow.geometry.memory import MemoryKind
from kvflow.resources import error_text, pinning_facts, shared_memory_facts

__all__ = ["MAX_AGENTS", "NativeAgents"]

MAX_AGENTS: Final = 4
"""Limit on agents. Several exist so that posts over former endpoints to a peer can end; all stay until `close`."""

Row = tuple[int, int, int, str]
"""Memory in NIXL's terms: address, length, device, and a text that is not used."""


class NativeAgents:
    """The first agent, which peers write to, and further agents that only write, with the same memory.

    Args:
        name: Name of the first agent; further agents append a number to it.

    Raises:
        BackendUnavailable: The plugin does not start.
    """

    def __init__(self, api: Any, name: str, plugin: str, plugin_options: dict[str, str]) -> None:
        self._name = name
        self._start = functools.partial(_start, api, plugin=plugin, plugin_options=plugin_options)
        self._rows: dict[MemoryKind, list[Row]] = {}
        self._registered: list[tuple[Any, Any]] = []
        self._agents: list[tuple[Any, OutgoingSockets]] = []
        self._add(name)

    def __len__(self) -> int:
        return len(self._agents)

    def __iter__(self) -> Iterator[Any]:
        return (agent for agent, _ in self._agents)

    @property
    def epolls(self) -> tuple[int, ...]:
        """Epoll descriptors of the first agent, as returned by `find_epolls`."""
        return self._agents[0][1].epolls

    def outgoing(self, agent: Any) -> OutgoingSockets:
        """Return the connections opened by one of the agents."""
        return next(sockets for it, sockets in self._agents if it is agent)

    def register(self, memory: RegisteredMemory) -> bytes:
        """Register memory with every agent, and return the metadata that peers need; raise RegistrationError if not."""
        rows = {
            kind: [(item.address, item.length, device, "") for item, device in items]
            for kind, items in memory.by_kind.items()
        }
        for agent in self:
            self._register_with(agent, rows)
        for kind, added in rows.items():
            self._rows.setdefault(kind, []).extend(added)
        return bytes(self._agents[0][0].get_agent_metadata())

    def other_than(self, taken: Sequence[Any]) -> Any:
        """Return an agent that is not in `taken`, starting one if necessary. Too many raise BackendError."""
        for agent in self:
            if not any(agent is other for other in taken):
                return agent
        if len(self._agents) >= MAX_AGENTS:
            raise BackendError("writes over previous endpoints of this peer have not ended", endpoints=len(taken))
        return self._add(f"{self._name}#{len(self._agents) + 1}")

    def progress(self) -> list[tuple[str, bytes]]:
        """Let the library make progress, and return the notices that have arrived, each with the agent name it carries.

        The name is not authenticated.
        """
        return [
            (name, payload)
            for agent in self
            for name, received in agent.get_new_notifs().items()
            for payload in received
        ]

    def close(self, clean_up: Callable[..., object]) -> None:
        """Deregister the memory and drop the agents, which destroys those without other references."""
        for fd in [fd for _, sockets in self._agents for fd in sockets.epolls]:
            os.close(fd)
        for agent, registered in self._registered:
            clean_up(agent.deregister_memory, registered)
        self._registered.clear()
        self._agents.clear()

    def _add(self, name: str) -> Any:
        agent, epolls = find_epolls(lambda: self._start(name))
        try:
            self._register_with(agent, self._rows)
        except BaseException:
            for fd in epolls:
                os.close(fd)
            raise
        self._agents.append((agent, OutgoingSockets(epolls)))
        return agent

    def _register_with(self, agent: Any, rows_by_kind: Mapping[MemoryKind, list[Row]]) -> None:
        for kind, rows in rows_by_kind.items():
            try:
                self._registered.append((agent, _register(agent, rows, kind)))
            except RegistrationError as error:
                raise _explain(agent, rows, kind, error) from error


def _register(agent: Any, rows: list[Row], kind: MemoryKind) -> Any:
    try:
        registered = agent.register_memory(rows, kind)
    except Exception as error:
        raise RegistrationError("NIXL refused to register memory", detail=error_text(error)) from error
    if registered is None:  # how NIXL reports invalid arguments
        raise RegistrationError("NIXL did not accept the memory ranges", detail="invalid arguments")
    return registered


def _explain(agent: Any, rows: list[Row], kind: MemoryKind, error: RegistrationError) -> RegistrationError:
    """Name the range that is refused alone, or say that all of them together are too much."""
    which: dict[str, object] = {"hint": "each range alone is accepted; all together may be too much"}
    for address, length, device, text in rows:
        try:
            alone = _register(agent, [(address, length, device, text)], kind)
        except RegistrationError:
            which = {"address": hex(address), "length": length, "device_id": device}
            break
        agent.deregister_memory(alone)
    num_bytes = sum(length for _, length, _, _ in rows)
    facts = {"memory_kind": kind, "ranges": len(rows), "num_bytes": num_bytes, **which, **error.values}
    if kind == "DRAM":
        facts |= pinning_facts()
    return RegistrationError(error.message, **facts)


def _start(api: Any, name: str, *, plugin: str, plugin_options: dict[str, str]) -> Any:
    try:
        agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
        agent.create_backend(plugin, plugin_options)
    except Exception as error:
        raise BackendUnavailable(
            "NIXL could not start its plugin",
            plugin=plugin,
            options=plugin_options,
            detail=error_text(error),
            **pinning_facts(),
            **shared_memory_facts(),
        ) from error
    return agent

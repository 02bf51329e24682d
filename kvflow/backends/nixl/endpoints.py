"""The endpoints of a NIXL agent: connections to its peers, from the first to the last.

The measurements behind this module, and the conclusions:

* A failed endpoint stays failed, even if the peer is alive. Removing the agent and adding it again makes a new one.
* Removing a live peer leaves its connections open on both sides, one file descriptor per lane, until either process
  ends; removing on both sides changes nothing. Therefore some sound endpoints are kept when a rank disconnects a peer
  (which may only have been silent), and reused if the same incarnation comes back. The library closes endpoints to
  ended processes, but keeps their metadata until they are removed. The connections of removed peers are shut down
  (`outgoing`).
* After a partition, TCP retransmits unacknowledged data only after a pause that doubles each time: up to as long after
  the heal as the partition lasted. A peer that reconnects while posts to it are in flight therefore gets a fresh
  endpoint. A library agent has one endpoint per peer, and removing it would lose track of its posts, so several agents
  are created if necessary; peers write to the first one.

Source: nixl 1.5.1 (UCX 1.23) on Linux, host memory, one host.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from kvflow.backends.library_sockets import CHECK_S, Address
from kvflow.backends.nixl.native import NativeAgents
from kvflow.backends.nixl.outgoing import ANSWER_S, InUse, OutgoingSockets, StaleConnections
from kvflow.backends.nixl.posts import NativeEndpoint
from kvflow.backends.nixl.writes import NativeWrites
from kvflow.backends.observed_path import count_paths
from kvflow.errors import BackendError
from kvflow.observe.logs import get_logger
from kvflow.resources import error_text

__all__ = ["CLOSE_POLL_S", "NativeEndpoints"]

CLOSE_POLL_S: Final = 1e-3

CLOSING_ROUNDS: Final = 20
"""Rounds of progress between removing the last peer and destroying the agent; measured: zero is too few."""

MAX_KEPT: Final = 32
"""Maximum number of sound endpoints kept for disconnected peers; beyond it, the oldest is removed."""

NAME_AT: Final = b"nixlSerDes|Agent"
"""Start of a metadata blob; the length and then the name of its agent follow."""


class NativeEndpoints:
    """One sound endpoint per peer, and former ones over which writes have not ended. Used on the owner thread.

    Args:
        name: Name of the first NIXL agent.
        clean_up: Makes a call of the library whose failure is only logged.
        other_paths: What a write takes that does not go over TCP, for the log.

    Attributes:
        blobs: Metadata of this agent, which no peer may have.
    """

    def __init__(
        self, name: str, agents: NativeAgents, writes: NativeWrites, clean_up: Callable[..., bool], other_paths: str
    ) -> None:
        self._log = get_logger(agent=name)
        self._name = name
        self._agents = agents
        self._writes = writes
        self._clean_up = clean_up
        self._other_paths = other_paths
        self.blobs: set[bytes] = set()
        self._connections: dict[str, NativeEndpoint] = {}
        self._former: list[NativeEndpoint] = []
        self._disconnecting: dict[str, None] = {}
        self._kept: dict[str, None] = {}
        self._left_open = StaleConnections()
        self._silence_at = 0.0

    @property
    def unclosed(self) -> frozenset[str]:
        """Removed peers that still have open connections. Can be read from any thread."""
        return self._left_open.peers

    def find(self, peer: str) -> NativeEndpoint | None:
        """Return the latest endpoint to a peer. Can be called from any thread."""
        return self._connections.get(peer)

    def connect(self, peer: str, blob: bytes, poll: Callable[[], object]) -> None:
        """Do as `NixlAgent.connect`. To `poll` lets the library make progress: posts over a failed endpoint end."""
        self._disconnecting.pop(peer, None)
        self._kept.pop(peer, None)
        connection = self._connections.get(peer)
        if connection is not None:
            is_sound = not connection.has_failed and connection.blob == blob
            if is_sound and not self._writes.is_used(connection):
                return
            if not self._clean_up(poll):  # posts over a failed endpoint raise during this poll
                raise BackendError("writes over the previous endpoint of this peer have not ended", peer=peer)
        agent = self._agent_for(peer)
        if connection is not None and self._connections.get(peer) is connection:
            self._former.append(connection)
            self._remove_former()
        self._add(agent, peer, blob)

    def disconnect(self, peer: str) -> None:
        """Do as `NixlAgent.disconnect`."""
        self._disconnecting[peer] = None
        self._finish_disconnecting()

    def tidy_up(self) -> None:
        """Remove what is not used any more, and close what is silent. Call it often."""
        self._finish_disconnecting()
        self._remove_former()
        self._look_at_left_open()
        self._close_silent()

    def expect_silence(self) -> None:
        """Have the next `tidy_up` look for silent connections at once."""
        self._silence_at = 0.0

    def remove_all(self) -> None:
        """Remove every peer, and give the library time to finish.

        UCX aborts the process if an agent is destroyed while data is queued for a peer that has closed.
        """
        while self._connections:
            self._former.append(self._connections.popitem()[1])
        while self._former:
            self._remove(self._former.pop())
        for _ in range(CLOSING_ROUNDS):
            for agent in self._agents:
                self._clean_up(agent.get_new_notifs)
            time.sleep(CLOSE_POLL_S)

    def ends_to(self, peer: str) -> tuple[bytes, ...]:
        """Return the local ends of the sound connections to a peer, see `Backend.ends_to`."""
        connection = self._connections.get(peer)
        if connection is None or connection.has_failed:
            return ()
        return self._agents.outgoing(connection.agent).local_ends(connection.opened)

    def _agent_for(self, peer: str) -> Any:
        """Return a NIXL agent that has no posts in flight to a peer; raises as `NativeAgents.other_than`."""
        num_agents = len(self._agents)
        agent = self._agents.other_than(
            [it.agent for it in self._endpoints() if it.peer == peer and self._writes.is_used(it)]
        )
        if len(self._agents) > num_agents:
            self._log.info("nixl_agent_added", peer=peer, agents=len(self._agents))
        return agent

    def _endpoints(self) -> list[NativeEndpoint]:
        return [*self._connections.values(), *self._former]

    def check_self(self, peer: str, blob: bytes) -> None:
        """Raise BackendError for a peer with the name of an own agent, or of a future one, or the metadata of one.

        Only the agent that peers write to is accepted, with both its name and its metadata.
        """
        is_first = peer == self._name and blob in self.blobs
        if not is_first and (peer == self._name or peer.startswith(f"{self._name}#") or blob in self.blobs):
            raise BackendError("peer has the name or the metadata of an own agent", peer=peer)

    def _add(self, agent: Any, peer: str, blob: bytes) -> None:
        if peer == agent.name:  # the agent itself, which need not be added
            self._connections[peer] = NativeEndpoint(peer, agent, blob)
            return
        _check_name(peer, blob)
        sockets = self._agents.outgoing(agent)
        if self._left_open.shut_down_of(peer, sockets):
            self._clean_up(agent.get_new_notifs)  # lets UCX close it
        before = sockets.now()
        try:
            added = agent.add_remote_agent(blob)
        except Exception as error:
            self._undo_adding(agent, peer, before)
            raise BackendError("NIXL refused the peer's metadata", peer=peer, detail=error_text(error)) from error
        name = added.decode() if isinstance(added, bytes) else added
        if name != peer:
            self._undo_adding(agent, name, before)
            raise BackendError("peer's metadata belongs to another agent", peer=peer, agent=name)
        opened = _without(sockets.now(), before)
        self._connections[peer] = NativeEndpoint(peer, agent, blob, opened, time.monotonic())

    def _undo_adding(self, agent: Any, name: str, before: Mapping[int, Address]) -> None:
        """Remove an agent that NIXL has added wrongly or in part, and shut down the connections opened since `before`.

        The other agent may have been added under `name`.
        """
        if not any(it.peer == name and it.agent is agent for it in self._endpoints()):
            self._clean_up(agent.remove_remote_agent, name)
        sockets = self._agents.outgoing(agent)
        opened = _without(sockets.now(), before)
        shut_from = time.monotonic() + ANSWER_S
        self._left_open.add(name, sockets, opened, shut_from=shut_from, is_written=False)

    def _finish_disconnecting(self) -> None:
        """Keep or remove the endpoints of disconnected peers that have no posts in flight."""
        for peer in list(self._disconnecting):
            connection = self._connections.get(peer)
            if connection is None or self._try_to_keep(connection) or self._try_to_remove(connection):
                del self._disconnecting[peer]

    def _try_to_keep(self, connection: NativeEndpoint) -> bool:
        """Keep a sound, unused endpoint in case its peer comes back. Return whether it was kept."""
        if connection.has_erred or self._writes.is_used(connection):
            return False
        self._kept[connection.peer] = None
        if len(self._kept) > MAX_KEPT:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            self._try_to_remove(self._connections[oldest])
        return True

    def _try_to_remove(self, connection: NativeEndpoint) -> bool:
        """Remove an endpoint, unless posts may be in flight over it. Return whether it was removed."""
        if self._writes.is_used(connection):
            return False
        if self._connections.get(connection.peer) is connection:
            del self._connections[connection.peer]
        self._remove(connection)
        return True

    def _remove(self, connection: NativeEndpoint) -> None:
        connection.drop_lists(self._clean_up)
        if connection.peer == connection.agent.name:
            return
        self._clean_up(connection.agent.remove_remote_agent, connection.peer)
        shut_from = 0.0 if connection.is_used else connection.opened_at + ANSWER_S
        sockets = self._agents.outgoing(connection.agent)
        is_written = connection.is_written
        self._left_open.add(connection.peer, sockets, connection.opened, shut_from=shut_from, is_written=is_written)

    @property
    def observed_paths(self) -> dict[str, int]:
        """How many peers are written to over each path. May be read from any thread."""
        return count_paths([connection.path for connection in list(self._connections.values())])

    def _close_silent(self) -> None:
        now = time.monotonic()
        if now < self._silence_at:
            return
        self._silence_at = now + CHECK_S
        for agent in self._agents:
            for address, silent_s in self._agents.outgoing(agent).close_silent():
                self._log.warning("data_connection_silent", address=address, silent_s=silent_s)
        self._remove_ended()
        for connection in self._connections.values():
            sockets = self._agents.outgoing(connection.agent)
            if connection.path.can_be_told and sockets.carried is not None:
                carried = [one for one in sockets.carried if one[:2] in connection.opened.values()]
                may_be_more = sockets.is_sending or connection.is_written  # over connections that the peer has opened
                connection.path.tell(self._log, connection.peer, carried, self._other_paths, may_be_more=may_be_more)

    def _remove_ended(self) -> None:
        """Remove kept endpoints whose connections are all closed: their peers have ended, and cannot come back."""
        kept = [self._connections[peer] for peer in self._kept]
        open_now = {one: one.now() for one in {self._agents.outgoing(connection.agent) for connection in kept}}
        for connection in kept:
            opened, now = connection.opened, open_now[self._agents.outgoing(connection.agent)]
            if opened and not (opened.keys() & now.keys() or {*opened.values()} & {*now.values()}):
                del self._kept[connection.peer]
                self._try_to_remove(connection)

    def _look_at_left_open(self) -> None:
        now = time.monotonic()
        if self._left_open.is_due(now):
            self._left_open.shut_connections(now, self._sockets_in_use())

    def _sockets_in_use(self) -> dict[OutgoingSockets, InUse]:
        used: dict[OutgoingSockets, InUse] = {}
        for connection in self._endpoints():
            mine = used.setdefault(self._agents.outgoing(connection.agent), InUse())
            mine.inodes.update(connection.opened)
            if connection.peer not in self._kept or connection.is_written:
                mine.addresses.update(connection.opened.values())
        return used

    def _remove_former(self) -> None:
        """Remove former endpoints of reconnected peers, once they have no posts in flight."""
        if self._former:
            self._former = [connection for connection in self._former if not self._try_to_remove(connection)]


def _check_name(peer: str, blob: bytes) -> None:
    """Raise BackendError for a blob that carries the name of another agent, before the library reads it.

    A truncated blob would make its name unusable in the library, even for the agent that owns the name.
    """
    start = len(NAME_AT) + 8
    if blob[: len(NAME_AT)] != NAME_AT:  # written by another version of the library, which checks the name itself
        return
    name = blob[start : start + int.from_bytes(blob[len(NAME_AT) : start], "little")]
    if name != peer.encode():
        raise BackendError(
            "peer's metadata belongs to another agent", peer=peer, agent=name[:64].decode(errors="replace")
        )


def _without(found: Mapping[int, Address], before: Mapping[int, Address]) -> dict[int, Address]:
    return {inode: address for inode, address in found.items() if inode not in before}

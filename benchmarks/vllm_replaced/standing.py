"""What stands in the processes of a server: descriptors by kind, mappings, memory, and agents of NIXL."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.vllm_handover.timeline import read_events

__all__ = ["Standing", "standing_in"]

SHARED_MEMORY: Final = ("/memfd:", "/dev/shm/")  # noqa: S108 - prefixes, no files
CLOSE_WAIT: Final = "08"


class Standing(NamedTuple):
    """What stands in all processes of a server.

    Attributes:
        descriptors: Open descriptors, without sockets of the HTTP port.
        sockets: Those of them that are sockets.
        half_closed: Those that the far end has closed, and this one has not (CLOSE_WAIT).
        epolls: Descriptors of epoll instances.
        eventfds: Those for events.
        shared: Those of shared memory: memfd, or files in /dev/shm.
        mappings: Lines of /proc/PID/maps.
        shared_mib: Size of shared mappings.
        resident_mib: Resident memory; shared pages count once for each process.
        threads: Number of threads.
        agents: Agents of other processes that NIXL has been told of, and not told to forget.
    """

    descriptors: float = 0.0
    sockets: float = 0.0
    half_closed: float = 0.0
    epolls: float = 0.0
    eventfds: float = 0.0
    shared: float = 0.0
    mappings: float = 0.0
    shared_mib: float = 0.0
    resident_mib: float = 0.0
    threads: float = 0.0
    agents: float = 0.0

    def beyond(self, other: "Standing") -> "Standing":
        """Return the difference from an earlier one."""
        return Standing(*(own - before for own, before in zip(self, other, strict=True)))


def standing_in(group: int, http_port: int, trace: Path) -> Standing:
    """Return what stands in all processes of a group, whose NIXL agents are in a trace."""
    found = [standing for process in _processes(group) if (standing := _in_process(process, http_port)) is not None]
    known = set[str]()
    for event in read_events(trace) if trace.exists() else ():
        if event.event == "agent_added":
            known.update(event.requests)
        elif event.event == "agent_removed":
            known.difference_update(event.requests)
    return Standing(*map(sum, zip(*found, strict=True)))._replace(agents=len(known))


def _processes(group: int) -> Iterator[Path]:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            is_in = os.getpgid(int(process.name)) == group
        except ProcessLookupError:
            continue
        if is_in:
            yield process


def _in_process(process: Path, http_port: int) -> Standing | None:
    try:
        sockets = _tcp_sockets(process)
        links = [str(descriptor.readlink()) for descriptor in (process / "fd").iterdir()]
        maps = (process / "maps").read_text().splitlines()
        fields = (process / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):  # the process, or a descriptor, has gone while it was looked at
        return _in_process(process, http_port) if process.exists() else None
    states = [sockets[link] for link in links if link in sockets]
    counted = [link for link in links if sockets.get(link, (0, ""))[0] != http_port]
    return Standing(
        descriptors=len(counted),
        sockets=sum(link.startswith("socket:") for link in counted),
        half_closed=sum(state == CLOSE_WAIT and port != http_port for port, state in states),
        epolls=counted.count("anon_inode:[eventpoll]"),
        eventfds=counted.count("anon_inode:[eventfd]"),
        shared=sum(link.startswith(SHARED_MEMORY) for link in counted),
        mappings=len(maps),
        shared_mib=sum(_size(line) for line in maps if line.split()[1].endswith("s")) / 2**20,
        resident_mib=int(fields[21]) * os.sysconf("SC_PAGESIZE") / 2**20,
        threads=int(fields[17]),
    )


def _tcp_sockets(process: Path) -> dict[str, tuple[int, str]]:
    """Return the local port and the state of each TCP socket of a network namespace, by the link of a descriptor."""
    found: dict[str, tuple[int, str]] = {}
    for table in ("tcp", "tcp6"):
        for line in (process / "net" / table).read_text().splitlines()[1:]:
            fields = line.split()
            found[f"socket:[{fields[9]}]"] = (int(fields[1].rpartition(":")[2], 16), fields[3])
    return found


def _size(line: str) -> int:
    begin, _, end = line.partition(" ")[0].partition("-")
    return int(end, 16) - int(begin, 16)

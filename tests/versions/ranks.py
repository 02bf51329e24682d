"""Processes of both versions that find each other, and rooms that they hand over."""

import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

import kvflow
from benchmarks.processes import ChildProcess, Report
from kvflow.cli.tasks import open_tasks
from kvflow.keys import add_peer, add_registry, make_capability_key, make_keys, make_ticket_key
from tests.versions.rank_process import RankOptions
from tests.versions.version import Version

__all__ = ["Ranks", "make_key_directories", "open_ranks"]

ROLES = ("registry", "prefill", "decode")


@dataclass
class Ranks:
    """Running processes: a registry, the ranks of one prefill instance, and one decode rank.

    Attributes:
        at: Address of the registry.
        keys: The directory with the keys of each role, or None.
    """

    at: str
    prefill: Sequence[ChildProcess]
    decode: ChildProcess
    keys: Path | None

    async def hand_over(self, room: int, *, by_ticket: bool) -> Report:
        """Send a room from every prefill rank, receive it, and return what decode reports of it."""
        for rank in self.prefill:
            await rank.tell("send", room=room, is_text=by_ticket)
        prefill: Any = await self.give_ticket(room) if by_ticket else "prefill"
        await self.receive(room, prefill, is_text=by_ticket)
        received = await self.decode.expect("received", room)
        for rank in self.prefill:
            assert (await rank.expect("sent", room))["why"] == ""
        return received

    async def give_ticket(self, room: int) -> dict[str, Any]:
        """Return a ticket of a room whose ID is a string, as a router would get it."""
        await self.prefill[0].tell("ticket", room=room, is_text=True)
        ticket: dict[str, Any] = (await self.prefill[0].expect("ticket", room))["ticket"]
        return ticket

    async def receive(self, room: int, prefill: Any, *, is_text: bool) -> None:
        """Let decode receive a room, with a capability if there are keys."""
        capability = None
        if self.keys is not None:
            key = kvflow.load_capability_key(self.keys / "prefill")
            name = f"request {room}" if is_text else room
            capability = kvflow.make_capability(key, name, prefill="prefill", decode="decode")
        await self.decode.tell("receive", room=room, is_text=is_text, prefill=prefill, capability=capability)

    async def accounts(self) -> list[Report]:
        """Return what each rank has left once no room is open: pages in quarantine, and anomalies."""
        found = []
        for rank in (*self.prefill, self.decode):
            await rank.tell("account")
            found.append(await rank.expect("account"))
        return found


@asynccontextmanager
async def open_ranks(
    registry: Version, prefill: Version, decode: Version, *, tp: int = 1, keys: Path | None = None, **settings: Any
) -> AsyncIterator[Ranks]:
    """Start a registry, `tp` prefill ranks, and a decode rank, with further settings; only prefill has `page_size`."""
    of = {role: None if keys is None else str(keys / role) for role in ROLES}
    async with open_tasks() as tasks, AsyncExitStack() as stack:

        async def start(version: Version, options: RankOptions) -> ChildProcess:
            name = f"{version.name} {options.role}/{options.rank}"
            module, environment = "tests.versions.rank_process", version.environment
            child = ChildProcess(name, module, options, tasks, environment=environment)
            return await stack.enter_async_context(child)

        async def wait_until_ready(child: ChildProcess, version: Version) -> str:
            ready = await child.expect("ready")
            assert ready["library"] == version.library
            return str(ready["endpoint"])

        place = await start(registry, RankOptions(role="registry", keys=of["registry"]))
        at = await wait_until_ready(place, registry)
        options = RankOptions(role="prefill", registry=at, keys=of["prefill"], num_ranks=tp, **settings)
        sources = [await start(prefill, replace(options, rank=rank)) for rank in range(tp)]
        target = await start(decode, replace(options, role="decode", keys=of["decode"], num_ranks=1, page_size=4))
        for child in sources:
            await wait_until_ready(child, prefill)
        await wait_until_ready(target, decode)
        yield Ranks(at, sources, target, keys)


def make_key_directories(place: Path) -> Path:
    """Create keys of a registry, a prefill and a decode instance, which trust each other and need capabilities."""
    public = {role: make_keys(place / role) for role in ROLES}
    for role in ROLES:
        add_registry(place / role, public["registry"])
        for instance in ("prefill", "decode"):
            add_peer(place / role, public[instance], instance)
    make_ticket_key(place / "prefill")
    make_capability_key(place / "prefill")
    shutil.copy(place / "prefill" / "ticket.key", place / "decode")
    return place

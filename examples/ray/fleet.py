"""A router in Ray's driver: it passes tickets on, and retries a request only if its actor has gone."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import ray
from ray.exceptions import RayActorError

from examples.ray.servers import Decode, Prefill, Request
from kvflow import FailureReason, RankDraining, TransferFailed

GONE = (FailureReason.PEER_LOST, FailureReason.PEER_CLOSED, FailureReason.STALE_TICKET, FailureReason.UNREACHABLE)


class Fleet:
    """Actors by role and name; requests take turns among those that answer."""

    def __init__(self) -> None:
        self.ready: dict[str, list[str]] = {"prefill": [], "decode": []}
        self.nodes: dict[str, set[str]] = {"prefill": set(), "decode": set()}
        self.changed = asyncio.Condition()
        self.turns = {role: itertools.count() for role in self.ready}
        self.lent: Counter[str] = Counter()
        self.tasks: set[asyncio.Task[None]] = set()
        self.retried: Counter[str] = Counter()

    async def add_server(self, name: str) -> None:
        """Start a server, named ROLE-NUMBER, on a node that offers its role; Ray restarts it if it dies."""
        role = name.partition("-")[0]
        kind = ray.remote(Prefill if role == "prefill" else Decode)
        kind.options(name=name, lifetime="detached", max_restarts=-1, num_cpus=0, resources={role: 1}).remote(name)
        await self._use_server(name)

    async def remove_server(self, name: str) -> None:
        """Give a server no more requests, let it finish those that it has, and end it."""
        self.ready[name.partition("-")[0]].remove(name)
        await ray.get_actor(name).leave_fleet.remote()
        async with self.changed:
            await self.changed.wait_for(lambda: not self.lent[name])  # until its last answers have arrived
        ray.kill(ray.get_actor(name))

    async def serve_request(self, seed: int, num_tokens: int) -> int:
        """Serve a request, and return its number of bytes."""
        attempt = 0
        while True:
            try:
                return await self._try_request(Request(f"{seed}.{attempt}", seed, num_tokens))
            except RankDraining:  # its actor is about to leave
                why = "RankDraining"
            except RayActorError as error:  # its actor has gone
                why = type(error).__name__
            except TransferFailed as error:  # the actor at the other end has gone
                if error.reason not in GONE:
                    raise
                why = error.reason.value
            self.retried[why] += 1
            attempt += 1

    async def _try_request(self, request: Request) -> int:
        """Pass the ticket on. What decode says counts: kvflow tells it of every failure of prefill."""
        async with self._lend_server("prefill") as prefill:
            sending = prefill.prefill.options(num_returns="streaming").remote(request)
            try:
                ticket = await (await anext(sending))
                async with self._lend_server("decode") as decode:
                    num_bytes = int(await decode.decode.remote(ticket, request))
            except BaseException:
                ray.cancel(sending)  # if decode has died before it asked, prefill would wait
                raise
            async for result in sending:
                await result
        return num_bytes

    @asynccontextmanager
    async def _lend_server(self, role: str) -> AsyncIterator[Any]:
        """Lend the actor whose turn it is. After a failure it is left alone until it answers."""
        names = self.ready[role]
        async with self.changed:
            await self.changed.wait_for(lambda: names)
        name = names[next(self.turns[role]) % len(names)]
        self.lent[name] += 1
        try:
            yield ray.get_actor(name)
        except (RayActorError, TransferFailed):
            if name in names:
                names.remove(name)
                self.tasks.add(task := asyncio.create_task(self._use_server(name)))
                task.add_done_callback(self.tasks.discard)
            raise
        finally:
            async with self.changed:
                self.lent[name] -= 1
                self.changed.notify_all()

    async def _use_server(self, name: str) -> None:
        """Wait until a server answers, or its next incarnation, and give it requests."""
        role = name.partition("-")[0]
        self.nodes[role].add(await ray.get_actor(name).await_opening.options(max_task_retries=-1).remote())
        async with self.changed:
            self.ready[role].append(name)
            self.changed.notify_all()

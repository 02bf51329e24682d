"""What a router asks a vLLM server, answered for its ranks, too: `--middleware kvflow.engines.vllm.health.RanksHealth`.

vLLM's own `GET /health` knows nothing of ranks, so routers would go on sending requests to a server whose rank is
draining or broken. The middleware runs in vLLM's HTTP processes, and asks the ranks in the workers over their sockets,
as `kvflow health` does. It loads nothing of vLLM, and imposes nothing on other requests.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from kvflow.admin.client import RankReply, ask_all, find_sockets
from kvflow.admin.messages import Health, StatusAnswer, StatusRequest

__all__ = ["RanksHealth"]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Application = Callable[[Scope, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]

ASK_S: Final = 2.0
"""How long a rank may take to answer. Routers wait for 5 s."""

KEEP_S: Final = 1.0
"""How long an answer counts, however many routers ask."""

JUDGED: Final[Mapping[str, Callable[[Health], bool]]] = {
    "/health": lambda health: health.ready,
    "/readyz": lambda health: health.ready,
    "/livez": lambda health: health.live,
}
"""Which ranks are healthy, by the path that is asked."""

VLLM_PATH: Final = "/health"


class OwnRank(NamedTuple):
    """A rank of this server, with its health, or why it does not answer."""

    name: str
    health: Health | str

    @property
    def reason(self) -> str:
        """Why it is not healthy."""
        return self.health if isinstance(self.health, str) else self.health.reason

    def is_healthy(self, path: str) -> bool:
        """Return whether it is, for those who ask at this path."""
        return not isinstance(self.health, str) and JUDGED[path](self.health)


class RanksHealth:
    """ASGI middleware: 503 with reasons if a rank of this server is not healthy, otherwise what vLLM answers.

    `GET /health` and `GET /readyz` want every rank to accept new rooms; `GET /livez` wants none to be broken. Only the
    ranks of this server count, on this host. One that does not answer counts once it has answered before: until then,
    it belongs to somebody else, or is still being opened.

    Args:
        app: vLLM's application.
    """

    def __init__(self, app: Application) -> None:
        self._app = app
        self._asks_at = -math.inf
        self._found: dict[Path, OwnRank] = {}
        self._asking = asyncio.Lock()

    async def __call__(
        self,
        scope: Scope,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        """Answer a question about health, or pass the request on."""
        path = scope.get("path", "")
        if scope["type"] != "http" or scope["method"] != "GET" or path not in JUDGED:
            await self._app(scope, receive, send)
            return
        unhealthy = {rank.name: rank.reason for rank in await self._ask_ranks(scope) if not rank.is_healthy(path)}
        if not unhealthy:
            await self._app({**scope, "path": VLLM_PATH, "raw_path": VLLM_PATH.encode()}, receive, send)
            return
        body = msgspec.json.encode({"error": "a rank of this server is not well", "ranks": unhealthy})
        head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 503, "headers": head})
        await send({"type": "http.response.body", "body": body})

    async def _ask_ranks(self, scope: Scope) -> list[OwnRank]:
        transfer = scope["app"].state.vllm_config.kv_transfer_config
        if transfer is None:
            return []
        async with self._asking:
            if time.monotonic() >= self._asks_at:
                places = list(_find_places(transfer.kv_connector, transfer.kv_connector_extra_config))
                # In a thread, as the client waits for all ranks at once in threads of its own.
                replies = await asyncio.to_thread(_ask_places, places)
                found = {reply.path: self._identify(reply, transfer.engine_id) for reply in replies}
                self._found = {path: rank for path, rank in found.items() if rank is not None}
                self._asks_at = time.monotonic() + KEEP_S
            return list(self._found.values())

    def _identify(self, reply: RankReply, instance: str) -> OwnRank | None:
        """Return the rank that a reply is from; None if it is not of this server. One that closes leaves no socket."""
        status = reply.parse(StatusAnswer)
        if isinstance(status, str):
            before = self._found.get(reply.path)
            return None if before is None else OwnRank(before.name, status)
        if status.instance != instance and not status.instance.startswith(f"{instance}_dp"):
            return None
        return OwnRank(f"{status.role} {status.instance}/{status.engine_rank}", status.health)


def _find_places(connector: str, options: Mapping[str, Any]) -> Iterator[str | bool]:
    """Yield the setting `admin` of each connector of kvflow: a directory, True for the default ones, False for none."""
    for inner in options.get("connectors", ()):  # of a MultiConnector
        yield from _find_places(inner["kv_connector"], inner.get("kv_connector_extra_config", {}))
    if connector == "KvflowConnector":
        yield options.get("admin", True)


def _ask_places(places: list[str | bool]) -> list[RankReply]:
    paths = [path for place in places if place is not False for path in find_sockets(None if place is True else place)]
    return ask_all(paths, StatusRequest(), ASK_S)

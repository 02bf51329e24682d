"""etcd as a directory, through the JSON gateway that every etcd server has.

The gateway needs no gRPC, which few Python clients of etcd offer with TLS. A watch that is quiet is begun again now and
then, after a read that a majority of the servers has confirmed: one that is cut off from the others is left that way.
"""

import base64
import itertools
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import aiohttp
import anyio
import msgspec
from typing_extensions import override

from kvflow.addresses import DirectoryURL
from kvflow.directory.listings import (
    LEASE_S,
    RENEW_S,
    UNREADABLE,
    Directory,
    DirectoryDown,
    Listing,
    Listings,
    ListingTaken,
    read_listing,
)
from kvflow.errors import ConfigError
from kvflow.gate.listings import MAX_LISTED_INSTANCES, MAX_REPORT_BYTES

__all__ = ["EtcdDirectory"]

ANSWER_S: Final = 2.0
"""Time for an answer. A server that is slower is given up for the next one."""

QUIET_S: Final = 5.0
"""Time without a change after which a watch is begun again."""


class EtcdDirectory(Directory):
    """Instances in `etcd://HOST:PORT[,HOST:PORT]/PREFIX`, each in a key `PREFIX/NAME` with a listing, under a lease.

    Raises:
        ConfigError: A file that the URL names cannot be read or used.
    """

    def __init__(self, url: DirectoryURL) -> None:
        super().__init__(url)
        self._prefix = f"{url.path or 'kvflow/instances'}/".encode()
        self._tls = _load_tls(url.options)
        self._login = _load_login(url.options)
        self._hosts = itertools.cycle(url.hosts)

    @override
    async def watch(self) -> AsyncGenerator[Listings, None]:
        async with self._connected() as server:
            revision, listings = await self._list(server)
            yield dict(listings)
            while True:
                async for header_revision, events in server.watch(self._prefix, revision + 1):
                    changed = [self._apply(listings, event) for event in events]
                    revision = max(revision, header_revision)
                    if any(changed):
                        yield dict(listings)
                # Nothing has changed for a while, so that this is cheap. It fails where there is no majority.
                await server.ask("kv/range", {"key": _encoded(self._prefix), "count_only": True})

    async def _list(self, server: "_Server") -> tuple[int, dict[str, Listing]]:
        wanted = {"key": _encoded(self._prefix), "range_end": _encoded(_end_of(self._prefix))}
        answer = await server.ask("kv/range", {**wanted, "limit": MAX_LISTED_INSTANCES})
        listings: dict[str, Listing] = {}
        for pair in answer.get("kvs", []):
            self._apply(listings, {"kv": pair})
        return int(answer["header"]["revision"]), listings

    def _apply(self, listings: dict[str, Listing], event: Mapping[str, Any]) -> bool:
        """Apply a change to the listings, and return whether it makes a difference."""
        name = _decoded(event["kv"]["key"]).removeprefix(self._prefix).decode(errors="replace")
        listing = None if event.get("type") == "DELETE" else read_listing(_decoded(event["kv"].get("value", "")))
        before = listings.pop(name, None)
        if listing is not None and len(listings) < MAX_LISTED_INSTANCES:
            listings[name] = listing
        return listings.get(name) != before

    @override
    async def keep(self, instance: str, listing: Listing, may_replace: bool) -> AsyncGenerator[None, None]:
        key, value = self._key_of(instance), _encoded(msgspec.json.encode(listing))
        async with self._connected() as server:
            if not may_replace:
                await self._check_free(server, key, listing)
            lease = (await server.ask("lease/grant", {"TTL": round(LEASE_S)}))["ID"]
            await server.ask("kv/put", {"key": key, "value": value, "lease": lease})
            while True:
                yield
                await anyio.sleep(RENEW_S)
                renewed = await server.ask("lease/keepalive", {"ID": lease})
                is_alive = int(renewed.get("result", {}).get("TTL", 0)) > 0
                if not (is_alive and await self._check_free(server, key, listing)):
                    raise DirectoryDown("the lease has expired, or the key was removed")

    async def _check_free(self, server: "_Server", key: str, listing: Listing) -> bool:
        """Return whether an instance is listed; raise ListingTaken if that is another process."""
        pairs = (await server.ask("kv/range", {"key": key})).get("kvs", [])
        found = read_listing(_decoded(pairs[0].get("value", ""))) if pairs else None
        if found is not None and found.identity != listing.identity:
            raise ListingTaken(found)
        return found is not None

    @override
    async def remove(self, instance: str, listing: Listing) -> None:
        key = self._key_of(instance)
        async with self._connected() as server:
            with suppress(ListingTaken):
                if await self._check_free(server, key, listing):
                    await server.ask("kv/deleterange", {"key": key})

    def _key_of(self, instance: str) -> str:
        return _encoded(self._prefix + instance.encode())

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator["_Server"]:
        """Connect to the next server, and log in if that is wanted."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=ANSWER_S, sock_read=ANSWER_S)
        url = f"{'http' if self._tls is None else 'https'}://{next(self._hosts)}/v3/"
        connector = aiohttp.TCPConnector(ssl=self._tls if self._tls is not None else True)
        try:
            async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
                server = _Server(session)
                if self._login is not None:
                    token = (await server.ask("auth/authenticate", self._login)).get("token", "")
                    session.headers["Authorization"] = str(token)
                yield server
        except (aiohttp.ClientError, OSError, msgspec.MsgspecError, *UNREADABLE) as error:
            raise DirectoryDown(f"{url}: {type(error).__name__}: {error}") from error


class _Server:
    """One etcd server."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def ask(self, method: str, body: Mapping[str, object]) -> dict[str, Any]:
        """Call a method, and return its answer; raises if it is an error."""
        async with self._session.post(method, data=msgspec.json.encode(body)) as answer:
            text = await answer.read()
        if answer.status != 200:
            raise DirectoryDown(f"{method}: {answer.status} {text[:200].decode(errors='replace')}")
        return msgspec.json.decode(text, type=dict[str, Any])

    async def watch(self, prefix: bytes, revision: int) -> AsyncIterator[tuple[int, list[dict[str, Any]]]]:
        """Yield a revision and the changes up to it, from a revision on, until nothing has changed for a while."""
        wanted = {"key": _encoded(prefix), "range_end": _encoded(_end_of(prefix)), "start_revision": revision}
        body = msgspec.json.encode({"create_request": wanted})
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=ANSWER_S, sock_read=QUIET_S)
        async with self._session.post("watch", data=body, timeout=timeout, read_bufsize=MAX_REPORT_BYTES) as answer:
            while True:
                try:
                    line = await answer.content.readline()
                except aiohttp.SocketTimeoutError:
                    return
                report = msgspec.json.decode(line, type=dict[str, Any]) if line else {}
                result = report.get("result", {})
                if "result" not in report or result.get("canceled"):
                    reason = result.get("cancel_reason") or report.get("error") or "it was closed"
                    raise DirectoryDown(f"watch has ended: {reason}")
                yield int(result["header"]["revision"]), result.get("events", [])


def _end_of(prefix: bytes) -> bytes:
    """Return the first key after all that begin with a prefix, which ends in a slash."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def _encoded(key: bytes) -> str:
    return base64.b64encode(key).decode()


def _decoded(text: str) -> bytes:
    return base64.b64decode(text)


def _load_tls(options: Mapping[str, str]) -> ssl.SSLContext | None:
    """Return what is needed for TLS; None for a plain connection, if no certificate is named."""
    if not options.keys() & {"ca", "cert", "key"}:
        return None
    try:
        context = ssl.create_default_context(cafile=options.get("ca"))
        if "cert" in options:
            context.load_cert_chain(options["cert"], options.get("key"))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError("certificate of etcd cannot be used", setting="registry", detail=str(error)) from error
    return context


def _load_login(options: Mapping[str, str]) -> dict[str, str] | None:
    if "user" not in options:
        return None
    try:
        password = Path(options.get("password_file", "")).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("password of etcd cannot be read", setting="registry", detail=str(error)) from error
    return {"name": options["user"], "password": password}

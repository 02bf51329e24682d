"""A folder as a directory: a file for each instance, on one host or a file system that hosts share."""

import itertools
import os
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypeVar
from urllib.parse import quote, unquote

import anyio
import msgspec
from anyio.to_thread import run_sync
from typing_extensions import override

from kvflow.addresses import DirectoryURL
from kvflow.directory.listings import (
    RENEW_S,
    Directory,
    DirectoryDown,
    Listing,
    Listings,
    ListingTaken,
    read_listing,
)
from kvflow.gate.listings import MAX_LISTED_INSTANCES, MAX_LISTING_BYTES

__all__ = ["FileDirectory"]

LOOK_S: Final = 0.5
"""Time between two looks at the folder: not every file system tells of changes."""

Result = TypeVar("Result")

SUFFIX: Final = ".json"


class _Seen(NamedTuple):
    """A file as it was last read, how it looked then, and since when it looks so."""

    looks: tuple[int, ...]
    since: float
    listing: Listing | None


class FileDirectory(Directory):
    """Instances in `file:///FOLDER`, each in a file `NAME.json` with a listing.

    Whoever lists an instance touches its file, and readers compare only whether that has changed: clocks of several
    hosts need not agree. A file without `lease_s`, as an operator writes it, counts until it is removed.
    """

    def __init__(self, url: DirectoryURL) -> None:
        super().__init__(url)
        self._folder = Path(url.path)

    @override
    async def watch(self) -> AsyncGenerator[Listings, None]:
        seen: dict[str, _Seen] = {}
        told: dict[str, Listing] | None = None
        while True:
            now = anyio.current_time()
            seen = await _in_thread(partial(_look, self._folder, seen, now))
            listings = {
                name: it.listing
                for name, it in seen.items()
                if it.listing is not None and (it.listing.lease_s is None or now < it.since + it.listing.lease_s)
            }
            if listings != told:
                told = listings
                yield listings
            await anyio.sleep(LOOK_S)

    @override
    async def keep(self, instance: str, listing: Listing, may_replace: bool) -> AsyncGenerator[None, None]:
        path = self._path_of(instance)
        while True:
            other = await _in_thread(partial(_renew, path, listing, may_replace))
            if other is not None:
                raise ListingTaken(other)
            may_replace = False
            yield
            await anyio.sleep(RENEW_S)

    @override
    async def remove(self, instance: str, listing: Listing) -> None:
        await _in_thread(partial(_remove, self._path_of(instance), listing))

    def _path_of(self, instance: str) -> Path:
        return self._folder / f"{quote(instance, safe='')}{SUFFIX}"


async def _in_thread(call: Callable[[], Result]) -> Result:
    """Call a function of the file system, which may wait for another host."""
    try:
        return await run_sync(call, abandon_on_cancel=True)
    except OSError as error:
        raise DirectoryDown(f"{type(error).__name__}: {error}") from error


def _look(folder: Path, seen: Mapping[str, _Seen], now: float) -> dict[str, _Seen]:
    """Return the files of a folder by name of the instance, and read those that look otherwise than before."""
    found = {}
    with os.scandir(folder) as entries:
        for entry in itertools.islice(entries, MAX_LISTED_INSTANCES):
            if entry.name.endswith(SUFFIX):
                name = unquote(entry.name.removesuffix(SUFFIX))
                with suppress(FileNotFoundError):  # removed meanwhile
                    state = entry.stat()
                    looks = (state.st_mtime_ns, state.st_size, state.st_ino)
                    before = seen.get(name)
                    if before is None or before.looks != looks:
                        before = _Seen(looks, now, _read(Path(entry)))
                    found[name] = before
    return found


def _read(path: Path) -> Listing | None:
    """Return the listing in a file; None if there is none, or it may not be read. Others count nevertheless."""
    try:
        with path.open("rb") as file:
            return read_listing(file.read(MAX_LISTING_BYTES))
    except (IsADirectoryError, PermissionError):
        return None


def _write(path: Path, listing: Listing) -> None:
    """Write a file at once, so that no reader sees half of it."""
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    beside.write_bytes(msgspec.json.encode(listing))
    beside.replace(path)


def _renew(path: Path, listing: Listing, may_replace: bool) -> Listing | None:
    """Touch the file of a listing, or write it; return the listing of another process that is there instead."""
    try:
        found = _read(path)
    except FileNotFoundError:
        found = None
    if found is not None and found.identity != listing.identity and not may_replace:
        return found
    if found == listing:
        os.utime(path)
    else:
        _write(path, listing)
    return None


def _remove(path: Path, listing: Listing) -> None:
    with suppress(FileNotFoundError):
        found = _read(path)
        if found is None or found.identity == listing.identity:
            path.unlink()

"""What goes on with a directory whatever happens to it: follows its listings, and keeps a listing in it."""

from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Final, Protocol

import anyio
import msgspec

from kvflow.directory.listings import REMOVE_S, Directory, DirectoryDown, Listing, Listings, ListingTaken
from kvflow.observe.logs import BoundLogger

__all__ = ["Publication", "Subscription"]

PAUSE_S: Final = (0.1, 2.0)
"""Time until a directory that has failed is asked again: at first, and at most."""


class OnListed(Protocol):
    """Takes a change."""

    def __call__(self, instance: str, before: Listing | None, now: Listing | None, /) -> None:
        """Note what is listed of an instance, and what was; None for nothing."""


class _Persistence:
    """Tries until it works, and says once that it does not."""

    def __init__(self, directory: Directory, log: BoundLogger) -> None:
        self._log = log.bind(registry=directory.url.url)
        self._pause_s = PAUSE_S[0]
        self._is_in_trouble = False

    async def repeat(self, attempt: Callable[[], Awaitable[None]]) -> None:
        """Make an attempt again and again, until cancelled."""
        while True:
            try:
                await attempt()
            except ListingTaken as error:
                if self._begin_trouble():
                    other = error.other
                    self._log.error(
                        "registration_conflict", other=other.identity, other_endpoint=other.endpoint, refused=True
                    )
            except DirectoryDown as error:
                if self._begin_trouble():
                    self._log.warning("directory_down", detail=str(error))
            await anyio.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, PAUSE_S[1])

    def note_answer(self) -> None:
        """Note that the directory works."""
        self._pause_s = PAUSE_S[0]
        if self._is_in_trouble:
            self._is_in_trouble = False
            self._log.info("directory_back")

    def _begin_trouble(self) -> bool:
        """Return whether this is new trouble."""
        was_in_trouble, self._is_in_trouble = self._is_in_trouble, True
        return not was_in_trouble


class Subscription:
    """The listings of a directory, which stay as they are while it is down.

    Args:
        directory: Is watched.
        log: Reports a directory that is down.
        on_listed: Is called for each change.
    """

    def __init__(self, directory: Directory, log: BoundLogger, on_listed: OnListed) -> None:
        self._directory = directory
        self._persistence = _Persistence(directory, log)
        self._on_listed = on_listed
        self._listings: Listings | None = None

    async def run(self) -> None:
        """Follow the directory until cancelled."""
        await self._persistence.repeat(self._follow)

    def find(self, instance: str) -> Listing | None:
        """Return what is listed of an instance that takes requests."""
        listing = (self._listings or {}).get(instance)
        return None if listing is None or listing.draining else listing

    def explain_absence(self) -> str:
        """Return why an instance is not found."""
        name = self._directory.url.url
        return f"{name} does not list it" if self._listings is not None else f"{name} has not answered yet"

    async def _follow(self) -> None:
        async with aclosing(self._directory.watch()) as changes:
            async for listings in changes:
                self._persistence.note_answer()
                before, self._listings = self._listings or {}, listings
                for instance in sorted({*before, *listings}):
                    if before.get(instance) != listings.get(instance):
                        self._on_listed(instance, before.get(instance), listings.get(instance))


class Publication:
    """Keeps one instance listed: ready, then draining, until cancelled.

    Args:
        directory: Lists it.
        log: Reports a directory that is down, and another process that is listed under the same name.
        instance: Its name.
        listing: What is listed of it.
    """

    def __init__(self, directory: Directory, log: BoundLogger, instance: str, listing: Listing) -> None:
        self._directory = directory
        self._persistence = _Persistence(directory, log)
        self._instance = instance
        self._listing = listing
        self._is_draining = False
        self._keeping = anyio.CancelScope()
        self._may_replace = True

    def drain(self) -> None:
        """List the instance as draining from now on."""
        if not self._is_draining:
            self._is_draining = True
            self._keeping.cancel()

    async def run(self) -> None:
        """Keep the instance listed until cancelled, and then no more."""
        try:
            await self._persistence.repeat(self._keep)
        finally:
            with anyio.move_on_after(REMOVE_S, shield=True), suppress(DirectoryDown):
                await self._directory.remove(self._instance, self._listing)

    async def _keep(self) -> None:
        """List the instance as it is now, until that changes."""
        listing = msgspec.structs.replace(self._listing, draining=self._is_draining)
        with anyio.CancelScope() as self._keeping:
            async with aclosing(self._directory.keep(self._instance, listing, self._may_replace)) as renewals:
                async for _ in renewals:
                    self._may_replace = False  # whoever is listed from now on came later
                    self._persistence.note_answer()

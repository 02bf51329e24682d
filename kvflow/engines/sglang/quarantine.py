"""Pages in quarantine, for the operator of a server: a reminder in its log, and a way to release them."""

from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from kvflow import LocalProtocolError, Memory, QuarantineRecord
from kvflow.blocking import BlockingReceiver, BlockingSender
from kvflow.engines.logs import adapter_logger

__all__ = ["QuarantineWatch"]

LOGGER: Final = adapter_logger(__name__)
LOOK_S: Final = 1.0
REMIND_S: Final = 60.0


class QuarantineWatch:
    """Logs reminders of pages in quarantine, and releases those that an operator names.

    The operator touches a file named after the room, in a directory that all ranks of the server watch. Because they
    share it, no rank removes the file: a file that exists already when pages enter quarantine does not release them.

    Args:
        directory: Directory of these files; None to release nothing.
    """

    def __init__(self, directory: str | None) -> None:
        self._directory = None if directory is None else Path(directory)
        self._touched: dict[object, int] = {}
        self._look_at = self._remind_at = 0.0
        self._asked: Future[list[QuarantineRecord]] | None = None

    def check_pages(self, rank: Any, transfers: Iterable[BlockingSender | BlockingReceiver], now: float) -> None:
        """Check for pages to remind of and to release, if it is time. This is cheap while nothing is in quarantine.

        It does not wait for the event loop of the blocking rank, but looks at the answer in a later call. `transfers`
        are those of the rank whose pages are not safe.
        """
        if self._asked is not None and self._asked.done():
            records, self._asked = self._asked.result(), None
            self._check(rank, records, now)
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        if not any(one.memory is Memory.QUARANTINED for one in transfers):
            self._touched = {}
        elif self._asked is None:
            self._asked = rank.ask(lambda rank: rank.quarantined())

    def _check(self, rank: Any, records: list[QuarantineRecord], now: float) -> None:
        if not self._touched:
            self._remind_at = now + REMIND_S
        self._touched = {one.key: self._touched.get(one.key, self._touched_at(one)) for one in records}
        for record in records:
            if self._touched_at(record) != self._touched[record.key]:
                rank.ask(partial(_release, record))
        if records and now >= self._remind_at:
            self._remind_at = now + REMIND_S
            num_bytes, oldest = sum(one.num_bytes for one in records), max(records, key=lambda one: one.since_s)
            LOGGER.warning("%d bytes of %d requests are in quarantine; the oldest: %s", num_bytes, len(records), oldest)

    def _touched_at(self, record: QuarantineRecord) -> int:
        """Return when the file of a room was last touched; 0 if there is none."""
        if self._directory is not None:
            with suppress(OSError):
                return (self._directory / str(record.room)).stat().st_mtime_ns
        return 0


def _release(record: QuarantineRecord, rank: Any) -> None:
    with suppress(LocalProtocolError):  # a proof has arrived meanwhile
        rank.release(record)

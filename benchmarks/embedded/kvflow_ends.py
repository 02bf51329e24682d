"""Ends over kvflow's blocking ranks."""

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.embedded.engines import LOOK_S, News
from benchmarks.embedded.loads import LANES, EmbeddedOptions
from benchmarks.pools import PagePool
from benchmarks.sides import DECODE, PREFILL
from kvflow import DecodeConfig, PrefillConfig
from kvflow.blocking import BlockingSender, DecodeRank, LoopThread, Memory, Outcome, PrefillRank
from kvflow.errors import KvflowError

__all__ = ["KvflowDecode", "KvflowPrefill", "open_decode", "open_prefill"]

Tables = list[list[int]]


class KvflowPrefill:
    """A `PrefillEnd` over kvflow."""

    nap_s = LOOK_S
    is_quiet = False

    def __init__(self, rank: PrefillRank, tokens: int, tables: Tables) -> None:
        self._rank = rank
        self._tokens = tokens
        self._tables = tables
        self._senders: dict[int, BlockingSender] = {}

    def send(self, room: int) -> None:
        """Start a request."""
        self._senders[room] = self._rank.send(room)

    def chunk(self, room: int) -> None:
        """Send all tokens without ending the room."""
        self._senders[room].chunk((0, self._tokens), {"kv": self._tables[room % LANES]})

    def finish(self, room: int, *, is_rest: bool) -> None:
        """Send all tokens and end the room; with `is_rest`, only end it."""
        tokens = (self._tokens, self._tokens) if is_rest else (0, self._tokens)
        self._senders[room].finish(tokens, {"kv": [] if is_rest else self._tables[room % LANES]}, metadata=b"token")

    def completed(self) -> list[News]:
        """Return what has changed since the last call."""
        updates = self._rank.completed()
        if not updates:
            return []
        news = []
        for update in updates:
            _check(update.failure)
            is_over = update.outcome is Outcome.SUCCESS
            news.append(
                News(int(update.room), update.transfer.wanted is not None, update.memory is Memory.SAFE, is_over)
            )
            if is_over:
                del self._senders[int(update.room)]
        return news


class KvflowDecode:
    """A `DecodeEnd` over kvflow."""

    nap_s = LOOK_S

    def __init__(self, rank: DecodeRank, tokens: int, tables: Tables) -> None:
        self._rank = rank
        self._tokens = (0, tokens)
        self._tables = tables

    def receive(self, room: int) -> None:
        """Start a request."""
        self._rank.receive(room, prefill=PREFILL, tokens=self._tokens, pages={"kv": self._tables[room % LANES]})

    def completed(self) -> list[News]:
        """Return what has changed since the last call."""
        updates = self._rank.completed()
        if not updates:
            return []
        for update in updates:
            _check(update.failure)
        return [News(int(update.room), ended=update.outcome is Outcome.SUCCESS) for update in updates]


def _check(failure: object) -> None:
    if failure is not None:
        raise KvflowError("a transfer failed", failure=str(failure))


@contextmanager
def open_prefill(options: EmbeddedOptions, pool: PagePool, tables: Tables) -> Iterator[KvflowPrefill]:
    """Open a prefill rank."""
    config = PrefillConfig(instance=PREFILL, registry=options.registry, backend=options.backend)
    with LoopThread() as loop, PrefillRank(config, pool.layout, loop=loop) as rank:
        yield KvflowPrefill(rank, options.tokens, tables)


@contextmanager
def open_decode(options: EmbeddedOptions, pool: PagePool, tables: Tables) -> Iterator[KvflowDecode]:
    """Open a decode rank."""
    config = DecodeConfig(instance=DECODE, registry=options.registry, backend=options.backend)
    with LoopThread() as loop, DecodeRank(config, pool.layout, loop=loop) as rank:
        yield KvflowDecode(rank, options.tokens, tables)

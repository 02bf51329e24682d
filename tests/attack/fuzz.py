"""Messages that no rank sends: random, mutated, too large, with many parts."""

import copy
import random
from collections.abc import Callable
from typing import Any, Final

import msgspec

from kvflow.errors import FailureReason, Stage
from kvflow.wire.codec import HEADER, encode
from kvflow.wire.messages import (
    Ack,
    Announce,
    Cancel,
    Decline,
    Drained,
    Failed,
    Failure,
    Goodbye,
    Hello,
    Lookup,
    Message,
    Notice,
    PeerId,
    Ping,
    Pong,
    RankRecord,
    Refuse,
    Register,
    SlotQuery,
    SlotReleased,
    Unregister,
    Welcome,
)
from tests.support.cores import grant

__all__ = ["Fuzz", "corpus_of"]

ODD: Final[tuple[Any, ...]] = (
    *(-1, 0, 2**31, 2**32, 2**53, 2**63, 2**64 - 1, -(2**63)),
    *(0.5, float("inf"), float("nan"), None, True, "", "x" * 300, "x" * 100_000, b"", bytes(70_000)),
    *([], {}, [[]] * 5_000, {"kv": b""}, {"kv": [5, 1]}, [1] * 20_000),
)

OVERSIZED: Final = 9 * 2**20


def corpus_of(hello: Hello) -> list[Message]:
    """Return one message of each kind from the sender of a hello, about rooms that no other peer uses."""
    me: PeerId = hello.peer
    failure = Failure(FailureReason.ABORTED, Stage.ENQUEUE, "other/0", "no more")
    ids: dict[str, Any] = {"room": "fuzzed", "generation": 3}
    record = RankRecord(peer=me, num_ranks=2, endpoint="tcp://127.0.0.1:9", backend="memory", layout=hello.layout)
    ranges = {"kv": (0, 8)}
    return [
        hello,
        grant("fuzzed", 3),
        grant("fuzzed too", 4, pages={}, ranges={}),
        Announce(**ids, num_decode_ranks=1, timeout_s=1.0),
        Decline(**ids, failure=failure),
        Cancel(**ids, failure=failure),
        Ack(**ids),
        SlotReleased(**ids, engine_rank=0, seq=0),
        SlotQuery(**ids, engine_rank=0, seq=0),
        Drained(**ids, engine_rank=0),
        Failed(**ids, engine_rank=0, failure=failure, drained=True),
        Notice(**ids, token=1, engine_rank=0, seq=0, ranges=ranges, num_bytes=8),
        Ping(peer=me),
        Pong(peer=me),
        Goodbye(peer=me),
        Welcome(peer=me, attempt=0, version=3),
        Refuse(peer=me, to=None, detail="no"),
        Register(record=record, lease_s=1.0),
        Unregister(peer=me),
        Lookup(instance="nobody", timeout_s=0.5),
        Lookup(instance="prefill", timeout_s=0.5),
    ]


class Fuzz:
    """A generator of random messages, reproducible by its seed."""

    def __init__(self, corpus: list[Message], seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - to be repeated
        self._corpus = [encode(message) for message in corpus]
        self._draws: list[Callable[[], bytes]] = [
            *[self._as_it_is] * 3,
            *[self._with_other_values] * 8,
            *[self._with_other_bytes] * 8,
            self._noise,
        ]

    def message(self) -> list[bytes]:
        """Return the frames of one message."""
        kind = self._random.randrange(10_000)
        if kind == 0:
            return [bytes(OVERSIZED)]
        if kind < 10:
            return [self._noise() for _ in range(self._random.randrange(2, 300))]
        return [self._random.choice(self._draws)()]

    def _as_it_is(self) -> bytes:
        return self._random.choice(self._corpus)

    def _noise(self) -> bytes:
        return self._random.choice((b"", HEADER)) + self._random.randbytes(self._random.randrange(200))

    def _with_other_bytes(self) -> bytes:
        data = bytearray(self._as_it_is())
        for _ in range(self._random.randrange(1, 5)):
            start = self._random.randrange(len(data) + 1)
            data[start : start + self._random.randrange(4)] = self._random.randbytes(self._random.randrange(4))
        return bytes(data)

    def _with_other_values(self) -> bytes:
        fields = msgspec.msgpack.decode(self._as_it_is()[len(HEADER) :])
        for _ in range(self._random.randrange(1, 3)):
            self._change(fields)
        return HEADER + msgspec.msgpack.encode(fields)

    def _change(self, inside: Any) -> None:
        """Replace one nested value, except the message's type."""
        keys = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
        key = self._random.choice([one for one in keys if one != "type"] or [None])
        if key is None:
            return
        if isinstance(inside[key], dict | list) and inside[key] and self._random.random() < 0.8:
            self._change(inside[key])
        else:
            inside[key] = copy.deepcopy(self._random.choice(ODD))

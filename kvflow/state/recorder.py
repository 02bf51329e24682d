"""Recordings of a core: every event with its time, and its effects. Pure, except for the file that one is given.

A recording is a sequence of frames, each a four-byte length (little-endian) and that many bytes of MessagePack: first a
`Header`, then an `Entry` for each event. An entry holds the whole event and the effects, so that a fresh core that is
fed the same events can be compared with the recorded one (`kvflow.state.replay`).

Left out is what the core does not read: device events, data prepared for planning, and routes, which follow from a
Hello; and of effects, what they repeat from events. Secrets are replaced by other bytes of the same length before they
leave the process: capabilities, tokens of grants, and the metadata of engines and of transports. Equal ones stay equal.
"""

import hashlib
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from kvflow.state import effects as ef
from kvflow.state import events as ev
from kvflow.state.decode.messages import grant_token
from kvflow.state.settings import DecodeSettings, PrefillSettings
from kvflow.wire.messages import Goodbye, Hello, PeerId, Refuse, Welcome

__all__ = [
    "FORMAT",
    "LENGTH_BYTES",
    "BlackBox",
    "BoxContents",
    "Cause",
    "Entry",
    "Header",
    "Veil",
    "encode",
    "frame",
    "make_header",
    "shown",
]

FORMAT: Final = 2
LENGTH_BYTES: Final = 4

KEPT_S: Final = 60.0
KEPT_BYTES: Final = 16 * 2**20

LASTING_BYTES: Final = 4 * 2**20

BATCH: Final = 64
"""Events that are encoded together."""

Settings = PrefillSettings | DecodeSettings


class Cause(msgspec.Struct, frozen=True):
    """Why a recording was written, at a time of the rank's clock: a failure, a quarantine, or somebody has asked.

    Attributes:
        room: The room that it is about, if any.
        missing: Proofs that were missing, as sentences.
    """

    at: float
    text: str
    room: int | str | None = None
    missing: tuple[str, ...] = ()


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The header of a recording.

    Attributes:
        role: "prefill" or "decode".
        settings: Those of the core, as MessagePack.
        version: Of kvflow.
        first: Number of the first entry; it is not 0 if earlier events are not in the recording.
        lasting: So many entries come before it: those of earlier events that still matter, as they made the
            connections. None if they were too many to be kept.
        causes: Why it was written; none if it is written all the time.
    """

    format: int = FORMAT
    role: str
    me: PeerId
    settings: msgspec.Raw
    version: str = ""
    first: int = 0
    lasting: int | None = 0
    causes: tuple[Cause, ...] = ()


def make_header(me: PeerId, settings: Settings, version: str) -> Header:
    """Return the header of a recording that begins with the rank, without secrets."""
    role = "prefill" if isinstance(settings, PrefillSettings) else "decode"
    return Header(role=role, me=me, settings=msgspec.Raw(Veil().veil_fields(encode(settings))), version=version)


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """An event at a time, with the name of each effect and what is `shown` of it, or the error that was raised."""

    now: float
    kind: str
    event: msgspec.Raw
    effects: tuple[tuple[str, msgspec.Raw], ...]
    error: str = ""


def _enc_hook(value: object) -> object:
    if isinstance(value, np.ndarray):
        return [value.dtype.str, value.tobytes()]
    if isinstance(value, np.generic):
        return value.item()
    return True  # a device event


encode: Final[Callable[[object], bytes]] = msgspec.msgpack.Encoder(enc_hook=_enc_hook).encode


def frame(data: bytes) -> bytes:
    """Return an encoded header or entry with its length before it."""
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


# What is shown of effects --------------------------------------------------------------------------------------------


def _piece(effect: Any) -> object:
    piece: ef.Piece = effect.piece
    return {
        "delivery": piece.delivery,
        "seq": piece.seq,
        "ranges": piece.ranges,
        "layers": piece.layers,
        "cost": piece.cost,
        "slots": piece.slots,
    }


def _plan(effect: Any) -> object:
    return {"delivery": effect.delivery, "seq": effect.seq}


def _wait(effect: Any) -> object:
    return {"delivery": effect.delivery, "wait": effect.wait}


def _scatter(effect: Any) -> object:
    return {"generation": effect.opened.generation, "peer": effect.rank.peer, "notice": effect.notice}


def _digests(effect: Any) -> object:
    return {"generation": effect.opened.generation, "notices": [each.notices for each in effect.written]}


SHORTER: Final[Mapping[type, Callable[[Any], object]]] = {
    ef.PostPiece: _piece,
    ef.PlanPiece: _piece,
    ef.PostPlan: _plan,
    ef.AwaitData: _wait,
    ef.ScatterStaged: _scatter,
    ef.VerifyDigests: _digests,
}


def shown(effect: object) -> object:
    """Return what a recording holds of an effect, which may be the whole."""
    shorten = SHORTER.get(type(effect))
    return effect if shorten is None else shorten(effect)


# Keeping -------------------------------------------------------------------------------------------------------------


LASTING: Final = frozenset(
    {
        *(ev.ConnectFailed, ev.ConnectionLost, ev.ConnectionObstructed, ev.ConnectionRefused, ev.FenceImpossible),
        *(ev.HelloChecked, ev.InstanceDoubted, ev.InstanceFound, ev.LookUpRefused, ev.PeerFenced, ev.PeerRevoked),
        *(ev.ProbeFinished, ev.ReplyLost, ev.RoutesCompiled, Goodbye, Hello, Refuse, Welcome),
        *(ef.CheckHello, ef.CompileRoutes, ef.Connect, ef.Disconnect, ef.DisconnectTransport, ef.LookUp),
    }
)
"""Events, messages and effects that make or end a connection to a peer."""


PASSING: Final = frozenset({ev.ChunkOffered, ev.NoticeDelivered, ev.PlanFinished, ev.PostEnded, ev.SendOpened})
"""The most frequent of the others."""


class BoxContents(NamedTuple):
    """What a black box held at some moment: encoded entries with their secrets, and the number of the first.

    `lasting` are earlier ones that still matter; None if they were too many.
    """

    first: int
    batches: Sequence[bytes]
    lasting: Sequence[bytes] | None


class Batch(NamedTuple):
    """Encoded entries, when the last one happened, and those of them that will matter when the others do not."""

    ended_at: float
    num_events: int
    data: bytes
    lasting: Sequence[bytes]


class BlackBox:
    """Keeps the last events of a core as bytes, so that they neither hold anything else nor change.

    They are encoded a batch at a time, which takes half as long. Until then they are kept as they are, and frozen.

    Args:
        write: Called with each encoded entry, if all are to be recorded.
        max_bytes: How many bytes are kept, of at most the last minute.

    Attributes:
        recent: Append each event that the core has processed, with its time, its effects, and the name of the error
            that it has raised instead, if any. Call `pack` when there are `batch`.
    """

    def __init__(self, write: Callable[[bytes], None] | None = None, max_bytes: int = KEPT_BYTES) -> None:
        self.recent: list[tuple[object, float, Sequence[object], str]] = []
        self.batch = BATCH if write is None else 1
        self._write = write
        self._max_bytes = max_bytes
        self._batches: deque[Batch] = deque()
        self._num_bytes = 0
        self._first = 0
        self._lasting: list[bytes] | None = []

    def kept(self) -> BoxContents:
        """Return what is kept now."""
        if self.recent:
            self.pack()
        lasting = None if self._lasting is None else list(self._lasting)
        return BoxContents(self._first, [batch.data for batch in self._batches], lasting)

    def pack(self) -> None:
        """Encode the recent events, and drop the oldest that are too much; `recent` must not be empty.

        Raises:
            TypeError, ValueError, OverflowError: An event cannot be encoded.
        """
        recent, self.recent = self.recent, []
        entries = [_entry(*each) for each in recent]
        if self._write is not None:
            for entry in entries:
                self._write(encode(entry))
        lasting = [encode(entry) for each, entry in zip(recent, entries, strict=True) if _is_lasting(each[0], each[2])]
        batch = Batch(recent[-1][1], len(recent), encode(entries), lasting)
        self._batches.append(batch)
        self._num_bytes += len(batch.data)
        oldest = batch.ended_at - KEPT_S
        while self._batches and (self._num_bytes > self._max_bytes or self._batches[0].ended_at < oldest):
            dropped = self._batches.popleft()
            self._num_bytes -= len(dropped.data)
            self._first += dropped.num_events
            if dropped.lasting and self._lasting is not None:
                self._lasting += dropped.lasting
                if sum(map(len, self._lasting)) > LASTING_BYTES:
                    self._lasting = None


def _is_lasting(event: Any, effects: Sequence[Any]) -> bool:
    """Return whether an event makes or ends a connection to a peer, or tries."""
    kind = type(event)
    if kind in PASSING:
        return False
    if kind is ev.MessageArrived or kind is ev.MessageReceived:
        kind = type(event.message)
        if kind not in LASTING:
            return False
    if kind in LASTING or not LASTING.isdisjoint(map(type, effects)):
        return True
    is_timer = kind is ev.TimePassed
    return is_timer and any(type(each) is ef.SendMessage and type(each.message) is Hello for each in effects)


def _entry(event: Any, now: float, effects: Sequence[object], error: str) -> tuple[object, ...]:
    """Return the fields of an `Entry`."""
    if type(event) is ev.HelloChecked and event.link is not None:
        event = msgspec.structs.replace(event, link=None, failure="")
    known = SHORTER
    told = [(kind.__name__, known[kind](each) if kind in known else each) for each in effects for kind in (type(each),)]
    return now, type(event).__name__, event, told, error


# Secrets -------------------------------------------------------------------------------------------------------------

SECRET_FIELDS: Final = frozenset({"backend_metadata", "capability", "metadata", "secret"})

MAX_GRANTS: Final = 65_536
"""How many grants of a decode rank are remembered, to replace their tokens in notices; more than can be open."""


class Veil:
    """Replaces the secrets in the entries of one recording.

    A decode core derives the tokens of its grants from a secret. They are replaced by those that it derives from the
    replaced secret, so a replay expects what is recorded.
    """

    def __init__(self) -> None:
        self._secrets: OrderedDict[int, bytes] = OrderedDict()
        self._tokens: OrderedDict[int, int] = OrderedDict()

    def veil(self, data: bytes) -> bytes:
        """Return an encoded entry without its secrets."""
        return self._veil_entry(msgspec.msgpack.decode(data))

    def veil_batch(self, data: bytes) -> list[bytes]:
        """Return the entries of a batch one by one, without their secrets."""
        return [self._veil_entry(entry) for entry in msgspec.msgpack.decode(data)]

    def veil_fields(self, data: bytes) -> bytes:
        """Return an encoded value without its secrets."""
        return encode(self._veiled(msgspec.msgpack.decode(data)))

    def _veil_entry(self, entry: Sequence[Any]) -> bytes:
        _, kind, event, effects, _ = entry
        if kind == "ReceiveOpened":
            _remember(self._secrets, event["generation"], _replaced(event["secret"]))
        for name, effect in effects:
            if name == "SendMessage" and effect["message"]["type"] == "grant":
                self._note_grant(effect["peer"][0][1], effect["message"])
        return encode(self._veiled(entry))

    def _note_grant(self, engine_rank: int, grant: Mapping[str, Any]) -> None:
        secret = self._secrets.get(grant["generation"])
        if secret is not None:
            _remember(self._tokens, grant["token"], grant_token(secret, engine_rank))

    def _veiled(self, value: Any, name: str = "", *, is_secret: bool = False) -> Any:
        is_secret = is_secret or name in SECRET_FIELDS
        if isinstance(value, dict):
            return {key: self._veiled(item, key, is_secret=is_secret) for key, item in value.items()}
        if isinstance(value, list):
            return [self._veiled(item, is_secret=is_secret) for item in value]
        if is_secret and isinstance(value, str | bytes):
            return _replaced(value)
        if name == "token" and value is not None:
            known = self._tokens.get(value)
            return int.from_bytes(_replaced(value.to_bytes(8, "little")), "little") if known is None else known
        return value


def _remember(known: "OrderedDict[int, Any]", key: int, value: object) -> None:
    known[key] = value
    if len(known) > MAX_GRANTS:
        known.popitem(last=False)


def _replaced(value: Any) -> Any:
    """Return other bytes, or another text, of the same length."""
    other = hashlib.shake_256(value.encode() if isinstance(value, str) else value).digest(len(value))
    return other.hex()[: len(value)] if isinstance(value, str) else other

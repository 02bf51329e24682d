"""Recordings of a core: every event with its time, and its effects. Pure, except for the file that it is given.

A recording is a sequence of frames, each a four-byte length (little-endian) and that many bytes of MessagePack: first a
`Header`, then an `Entry` for each event. An entry holds the whole event, and the name and a digest of each effect, so
that a fresh core that is fed the same events can be compared with the recorded one.

Data that the core does not read is left out: device events, data prepared for planning, and routes, which follow from a
Hello. Capabilities, and the metadata that engines pass, are replaced by other bytes of the same length; equal ones
stay equal. What remains secret are the tokens of grants.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, Final, NamedTuple, get_args

import msgspec
import numpy as np

from kvflow.errors import ConfigError, KvflowError
from kvflow.state import effects as ef
from kvflow.state import events as ev
from kvflow.state.decode.core import DecodeCore
from kvflow.state.packing import link_for
from kvflow.state.prefill.core import PrefillCore
from kvflow.state.settings import DecodeSettings, PrefillSettings
from kvflow.wire.messages import PeerId

__all__ = ["Recorder", "Replay", "ReplayDifference", "replay"]

FORMAT: Final = 1
LENGTH_BYTES: Final = 4
DIGEST_BYTES: Final = 8

Settings = PrefillSettings | DecodeSettings
Event = ev.PrefillEvent | ev.DecodeEvent
Effect = ef.PrefillEffect | ef.DecodeEffect

EVENT_TYPES: Final[dict[str, type]] = {
    kind.__name__: kind for union in (ev.PrefillEvent, ev.DecodeEvent) for kind in get_args(union)
}


class Header(msgspec.Struct, frozen=True):
    """The header of a recording: version, role ("prefill" or "decode"), and the core's settings as MessagePack."""

    format: int
    role: str
    me: PeerId
    settings: msgspec.Raw


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """An event at a time, with the name and digest of each effect, or the name of the error if the core refused it."""

    now: float
    kind: str
    event: msgspec.Raw
    effects: tuple[tuple[str, bytes], ...]
    error: str = ""


class RecordedReady:
    """A stand-in for a device event in a replay."""

    def synchronize(self) -> None:
        """Return at once."""


def _enc_hook(value: object) -> object:
    if isinstance(value, np.ndarray):
        return [value.dtype.str, value.tobytes()]
    if isinstance(value, np.generic):
        return value.item()
    return True  # a device event


def _dec_hook(kind: Any, value: Any) -> Any:
    if kind is ev.ReadyEvent:
        return RecordedReady()
    dtype, data = value
    return np.frombuffer(data, np.dtype(dtype))


_encoder = msgspec.msgpack.Encoder(enc_hook=_enc_hook)
_decoders: dict[str, msgspec.msgpack.Decoder[Any]] = {}


SECRET_FIELDS: Final = frozenset({"capability", "metadata"})


def _veiled(value: Any, *, is_secret: bool = False) -> Any:
    """Return a copy of an event or effect with its secrets replaced; what contains none is returned as it is."""
    if isinstance(value, msgspec.Struct):
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        veiled = {name: _veiled(item, is_secret=is_secret or name in SECRET_FIELDS) for name, item in fields.items()}
        changes = {name: item for name, item in veiled.items() if item is not fields[name]}
        return msgspec.structs.replace(value, **changes) if changes else value
    if isinstance(value, tuple):
        names = getattr(value, "_fields", ("",) * len(value))
        items = [_veiled(item, is_secret=is_secret or n in SECRET_FIELDS) for n, item in zip(names, value, strict=True)]
        is_same = all(item is before for item, before in zip(items, value, strict=True))
        return value if is_same else (type(value)(*items) if hasattr(value, "_fields") else tuple(items))
    if isinstance(value, dict):
        return {key: _veiled(item, is_secret=is_secret) for key, item in value.items()}
    if is_secret and isinstance(value, (str, bytes)):
        is_text = isinstance(value, str)
        other = hashlib.shake_256(value.encode() if isinstance(value, str) else value).digest(len(value))
        return other.hex()[: len(value)] if is_text else other
    return value


def _encode_event(event: Event) -> bytes:
    event = _veiled(event)
    if isinstance(event, ev.HelloChecked) and event.link is not None:
        event = msgspec.structs.replace(event, link=None, failure="")
    return _encoder.encode(event)


def _decode_event(kind: str, data: msgspec.Raw) -> Event:
    if kind not in _decoders:
        if kind not in EVENT_TYPES:
            raise ConfigError("recording contains an event of an unknown kind", kind=kind)
        _decoders[kind] = msgspec.msgpack.Decoder(EVENT_TYPES[kind], dec_hook=_dec_hook)
    event: Event = _decoders[kind].decode(data)
    return event


def _digest(effect: Effect, *, veils: bool) -> bytes:
    if isinstance(effect, (ef.PostPiece, ef.PlanPiece)):
        piece = effect.piece
        shown: object = (
            piece.delivery, piece.seq, piece.ranges, piece.notice, piece.cost, piece.layers, piece.slots,
            piece.must_pack, piece.grant,
        )  # fmt: skip
    elif isinstance(effect, ef.AwaitData):
        shown = (effect.delivery, effect.wait)
    else:
        shown = effect
    encoded = _encoder.encode(_veiled(shown) if veils else shown)
    return hashlib.blake2b(encoded, digest_size=DIGEST_BYTES).digest()


def _summary(effects: Sequence[Effect], *, veils: bool) -> tuple[tuple[str, bytes], ...]:
    return tuple((type(effect).__name__, _digest(effect, veils=veils)) for effect in effects)


class Recorder:
    """A recorder of the events and effects of a core.

    The caller opens and closes the file. It must be unbuffered, so that the recording of a killed process is complete.
    """

    def __init__(self, file: BinaryIO, me: PeerId, settings: Settings) -> None:
        self._file = file
        role = "prefill" if isinstance(settings, PrefillSettings) else "decode"
        self._write(Header(FORMAT, role, me, msgspec.Raw(_encoder.encode(settings))))

    def record(self, event: Event, now: float, effects: Sequence[Effect], error: Exception | None = None) -> None:
        """Record an event that the core has processed, and its effects, or the error that it has raised instead."""
        name = type(error).__name__ if error is not None else ""
        encoded = msgspec.Raw(_encode_event(event))
        self._write(Entry(now, type(event).__name__, encoded, _summary(effects, veils=True), name))

    def _write(self, frame: Header | Entry) -> None:
        data = _encoder.encode(frame)
        left = len(data).to_bytes(LENGTH_BYTES, "little") + data
        while left:  # an unbuffered file may take a part
            left = left[self._file.write(left) :]


class ReplayDifference(NamedTuple):
    """A difference between a replay and its recording.

    Attributes:
        number: Number of the event, from 0.
        recorded: Names of the recorded effects, or of the error.
        replayed: Effects of the fresh core, or its error.
    """

    number: int
    now: float
    event: Event
    recorded: tuple[str, ...]
    replayed: tuple[object, ...]


class Replay(NamedTuple):
    """The result of a replay: how much was fed to the core and compared, and the first difference, if any."""

    role: str
    me: PeerId
    num_events: int
    num_effects: int
    difference: ReplayDifference | None


def replay(file: BinaryIO) -> Replay:
    """Feed a recording to a fresh core, and compare all effects up to the first difference.

    A truncated recording, as of a killed process, is replayed as far as it goes.

    Raises:
        ConfigError: The file is not a recording, has another format, or is damaged.
    """
    frames = _frames(file)
    try:
        header = msgspec.msgpack.decode(next(frames), type=Header)
    except (StopIteration, msgspec.DecodeError) as error:
        raise ConfigError("file is not a recording") from error
    if header.format != FORMAT:
        raise ConfigError("recording has a different format", format=header.format, spoken=FORMAT)
    try:
        return _replay(header, frames)
    except msgspec.DecodeError as error:
        raise ConfigError("recording is damaged", detail=str(error)) from error


def _replay(header: Header, frames: Iterator[bytes]) -> Replay:
    """Replay the frames after a header; a malformed frame raises msgspec.DecodeError."""
    core: PrefillCore | DecodeCore
    prefill: PrefillSettings | None = None
    if header.role == "prefill":
        prefill = msgspec.msgpack.Decoder(PrefillSettings, dec_hook=_dec_hook).decode(header.settings)
        core = PrefillCore(header.me, prefill)
    else:
        core = DecodeCore(
            header.me, msgspec.msgpack.Decoder(DecodeSettings, dec_hook=_dec_hook).decode(header.settings)
        )
    num_events = num_effects = 0
    for number, data in enumerate(frames):
        entry = msgspec.msgpack.decode(data, type=Entry)
        event = _decode_event(entry.kind, entry.event)
        if isinstance(event, ev.HelloChecked) and not event.failure and prefill is not None:
            event = msgspec.structs.replace(event, link=link_for(event.hello, prefill))
        replayed, error_name = _handle(core, event, entry.now)
        num_events, num_effects = number + 1, num_effects + len(replayed)
        if _summary(replayed, veils=False) != entry.effects or error_name != entry.error:
            recorded = (entry.error,) if entry.error else tuple(name for name, _ in entry.effects)
            found: tuple[object, ...] = (error_name,) if error_name else tuple(replayed)
            difference = ReplayDifference(number, entry.now, event, recorded, found)
            return Replay(header.role, header.me, num_events, num_effects, difference)
    return Replay(header.role, header.me, num_events, num_effects, None)


def _handle(core: PrefillCore | DecodeCore, event: Event, now: float) -> tuple[list[Effect], str]:
    try:
        return list(core.handle(event, now)), ""  # type: ignore[arg-type] # recorded by a core of the same role
    except KvflowError as error:
        return [], type(error).__name__


def _frames(file: BinaryIO) -> Iterator[bytes]:
    while len(length := file.read(LENGTH_BYTES)) == LENGTH_BYTES:
        num_bytes = int.from_bytes(length, "little")
        data = file.read(num_bytes)
        if len(data) < num_bytes:
            return
        yield data

"""Reads recordings, and feeds them to fresh cores. Pure, except for the file that it is given."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO, Final, NamedTuple, get_args

import msgspec
import numpy as np

from kvflow.errors import ConfigError
from kvflow.state import effects as ef
from kvflow.state import events as ev
from kvflow.state.decode.core import DecodeCore
from kvflow.state.packing import link_for
from kvflow.state.prefill.core import PrefillCore
from kvflow.state.recorder import FORMAT, LENGTH_BYTES, Entry, Header, encode, shown
from kvflow.state.settings import DecodeSettings, PrefillSettings
from kvflow.wire.messages import PeerId

__all__ = [
    "FreshCore",
    "Moment",
    "Recording",
    "Replay",
    "ReplayDifference",
    "as_plain",
    "read_recording",
    "read_settings",
    "replay",
]

Event = ev.PrefillEvent | ev.DecodeEvent
Effect = ef.PrefillEffect | ef.DecodeEffect

EVENT_TYPES: Final[dict[str, type]] = {
    kind.__name__: kind for union in (ev.PrefillEvent, ev.DecodeEvent) for kind in get_args(union)
}


class Moment(NamedTuple):
    """An event of a recording, and its effects as plain values.

    Attributes:
        number: Counts the rank's events, from 0.
        effects: Name and fields of each.
        error: Name of the error that the core raised instead; empty if it raised none.
    """

    number: int
    now: float
    event: Event
    effects: Sequence[tuple[str, Any]]
    error: str


class Recording(NamedTuple):
    """A recording that was read. One that was cut off, as of a killed process, is read as far as it goes.

    Attributes:
        lasting: Earlier events that made the connections, if the recording does not begin with its rank.
    """

    header: Header
    moments: Sequence[Moment]
    lasting: Sequence[Moment] = ()


class ReplayDifference(NamedTuple):
    """A difference between a replay and its recording.

    Attributes:
        number: Number of the event, from 0.
        recorded: Recorded effects, or the name of the error.
        replayed: The same of the fresh core.
    """

    number: int
    now: float
    event: Event
    recorded: Sequence[object]
    replayed: Sequence[object]


class Replay(NamedTuple):
    """The result of a replay: how much was fed to the core and compared, and the first difference, if any."""

    role: str
    me: PeerId
    num_events: int
    num_effects: int
    difference: ReplayDifference | None


class RecordedReady:
    """A stand-in for a device event in a replay."""

    def synchronize(self) -> None:
        """Return at once."""


def read_recording(file: BinaryIO) -> Recording:
    """Read a recording.

    Raises:
        ConfigError: The file is not a recording, has another format, is damaged, or is newer than this version.
    """
    frames = _frames(file)
    try:
        header = msgspec.msgpack.decode(next(frames), type=Header)
    except (StopIteration, msgspec.DecodeError) as error:
        raise ConfigError("file is not a recording") from error
    if header.format != FORMAT:
        known = {"format": header.format, "spoken": FORMAT, "written_by": header.version}
        raise ConfigError("recording has a different format", **known)
    try:
        num_lasting = header.lasting or 0
        numbered = enumerate(frames, header.first - num_lasting)
        moments = [_moment(number, data, header.version) for number, data in numbered]
        return Recording(header, moments[num_lasting:], moments[:num_lasting])
    except (msgspec.DecodeError, ValueError) as error:
        text = "recording is damaged, or newer than this version"
        raise ConfigError(text, written_by=header.version, detail=str(error)) from error


class FreshCore:
    """A core as a rank has it when it is opened, which is fed recorded events.

    Raises:
        ConfigError: The settings in the header are damaged.
    """

    def __init__(self, header: Header) -> None:
        settings = read_settings(header)
        self._settings = settings
        self.core: PrefillCore | DecodeCore
        if isinstance(settings, PrefillSettings):
            self.core = PrefillCore(header.me, settings)
        else:
            self.core = DecodeCore(header.me, settings)

    def handle(self, event: Event, now: float) -> tuple[Sequence[Effect], str]:
        """Return the effects of an event, and the name of the error that the core has raised instead, if any."""
        if isinstance(event, ev.HelloChecked) and not event.failure and isinstance(self._settings, PrefillSettings):
            event = msgspec.structs.replace(event, link=link_for(event.hello, self._settings))
        try:
            return list(self.core.handle(event, now)), ""  # type: ignore[arg-type] # recorded by a core of the same role
        except Exception as error:  # noqa: BLE001 - it was recorded by its name, too
            return [], type(error).__name__


def as_plain(effects: Iterable[Effect]) -> list[tuple[str, Any]]:
    """Return effects as a recording has them."""
    return [(type(effect).__name__, msgspec.msgpack.decode(encode(shown(effect)))) for effect in effects]


def read_settings(header: Header) -> PrefillSettings | DecodeSettings:
    """Return the settings of the recorded core; raise ConfigError if they are damaged."""
    kind: type[PrefillSettings | DecodeSettings] = PrefillSettings if header.role == "prefill" else DecodeSettings
    try:
        return msgspec.msgpack.decode(header.settings, type=kind, dec_hook=_dec_hook)
    except msgspec.DecodeError as error:
        raise ConfigError("recording is damaged", detail=str(error)) from error


def replay(recording: Recording) -> Replay:
    """Feed a recording that begins with its rank to a fresh core, and compare all effects up to the first difference.

    Raises:
        ConfigError: Earlier events are missing, or the settings are damaged.
    """
    header = recording.header
    if header.first:
        raise ConfigError("recording begins after its rank, so a fresh core cannot follow it", missing=header.first)
    core = FreshCore(header)
    num_events = num_effects = 0
    for moment in recording.moments:
        effects, error_name = core.handle(moment.event, moment.now)
        num_events, num_effects = num_events + 1, num_effects + len(effects)
        if as_plain(effects) != list(moment.effects) or error_name != moment.error:
            found: Sequence[object] = [error_name] if error_name else effects
            recorded: Sequence[object] = [moment.error] if moment.error else moment.effects
            difference = ReplayDifference(moment.number, moment.now, moment.event, recorded, found)
            return Replay(header.role, header.me, num_events, num_effects, difference)
    return Replay(header.role, header.me, num_events, num_effects, None)


def _moment(number: int, data: bytes, version: str) -> Moment:
    entry = msgspec.msgpack.decode(data, type=Entry)
    if entry.kind not in EVENT_TYPES:
        raise ConfigError("recording contains an event of an unknown kind", kind=entry.kind, written_by=version)
    effects = [(name, msgspec.msgpack.decode(effect)) for name, effect in entry.effects]
    return Moment(number, entry.now, _event(entry.kind, entry.event), effects, entry.error)


_decoders: dict[str, msgspec.msgpack.Decoder[Any]] = {}


def _event(kind: str, data: msgspec.Raw) -> Event:
    if kind not in _decoders:
        _decoders[kind] = msgspec.msgpack.Decoder(EVENT_TYPES[kind], dec_hook=_dec_hook)
    event: Event = _decoders[kind].decode(data)
    return event


def _dec_hook(kind: Any, value: Any) -> Any:
    if kind is ev.ReadyEvent:
        return RecordedReady()
    dtype, data = value
    return np.frombuffer(data, np.dtype(dtype))


def _frames(file: BinaryIO) -> Iterator[bytes]:
    while len(length := file.read(LENGTH_BYTES)) == LENGTH_BYTES:
        num_bytes = int.from_bytes(length, "little")
        data = file.read(num_bytes)
        if len(data) < num_bytes:
            return
        yield data

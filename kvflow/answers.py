"""What a rank answers to a person or a probe, see `kvflow.admin`."""

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import msgspec

from kvflow import __version__
from kvflow.admin import messages as msg
from kvflow.config import RankConfig
from kvflow.errors import CapacityExceeded, KvflowError, LocalProtocolError, describe, shorten
from kvflow.observe.logs import BoundLogger
from kvflow.open_transfers import QuarantineRecord
from kvflow.ports import OpenAdmin
from kvflow.room import RoomId
from kvflow.state.quarantine import MissingProof

if TYPE_CHECKING:
    from kvflow.incidents import Incidents
    from kvflow.open_transfers import OpenTransfers
    from kvflow.rank import Rank
    from kvflow.transfer import Transfer

__all__ = ["RankAnswers", "RankFacts", "health_of"]

MAX_LISTED: Final = 16
"""Maximum number of peers, and of missing proofs, in a row."""

Row = TypeVar("Row", bound=msgspec.Struct)


@dataclass(frozen=True)
class RankFacts:
    """What does not change while a rank is open, see `StatusAnswer`."""

    role: Literal["prefill", "decode"]
    backend: str
    paths: str
    endpoint: str
    opened_at: float


class RankAnswers:
    """Answers requests about one rank, on its event loop.

    Args:
        rank: The rank.
        transfers: Its transfers.
        facts: What else is known of it.
        incidents: What writes files about incidents.
    """

    def __init__(
        self, rank: "Rank[Any, Any, Any]", transfers: "OpenTransfers[Any]", facts: RankFacts, incidents: "Incidents"
    ) -> None:
        self._rank = rank
        self._transfers = transfers
        self._facts = facts
        self._incidents = incidents

    def open_socket(self, open_admin: OpenAdmin | None, log: BoundLogger, resources: ExitStack) -> str:
        """Let commands ask the rank until `resources` are closed. Without a socket, the rank works on.

        Returns:
            The path of the socket; empty if there is none.
        """
        setting = self._rank.config.admin
        if setting is False or open_admin is None:
            return ""
        directory = None if setting is True else setting
        try:
            admin = open_admin(directory, f"{self._rank.me.incarnation:016x}", self.answer_line)
        except (OSError, ValueError) as error:  # the latter for a path that no file can have
            log.warning("admin_unavailable", detail=str(error))
            return ""
        resources.callback(admin.close)
        return os.fspath(admin.path)

    def answer_line(self, line: bytes) -> bytes:
        """Return the answer to a request, both a line of JSON."""
        try:
            answer = self._answer(msgspec.json.decode(line, type=msg.Request))
        except KvflowError as error:
            answer = msg.ErrorAnswer(error=shorten(str(error)))
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # the last two for text that is no JSON
            answer = msg.ErrorAnswer(error=f"malformed request: {shorten(describe(error))}")
        return msgspec.json.encode(answer) + b"\n"

    def _answer(self, request: msg.Request) -> msg.AnswerBase:
        match request:
            case msg.StatusRequest():
                return self._status()
            case msg.HealthRequest():
                return msg.HealthAnswer(health=health_of(self._rank, self._transfers))
            case msg.RoomsRequest(limit=limit):
                transfers = self._transfers.by_key
                rows = _rows_that_fit(self._room_row(*item) for item in self._transfers.oldest(limit))
                return msg.RoomsAnswer(total=len(transfers), rooms=rows)
            case msg.QuarantineRequest(limit=limit):
                held = _rows_that_fit(map(_quarantine_row, self._transfers.quarantined(limit)))
                return msg.QuarantineAnswer(total=self._transfers.num_quarantined, quarantine=held)
            case msg.ReleaseRequest(id=name, because=because):
                record = self._find(name)
                self._rank.release(record, because=because)
                return msg.ReleaseAnswer(room=record.room)
            case msg.AnnounceDrainRequest():
                self._rank.announce_drain()
                return self._drain_answer()
            case msg.DrainRequest():
                self._rank.start_drain()
                return self._drain_answer()
            case msg.IncidentRequest():
                found = self._transfers.quarantined(MAX_LISTED)
                missing = [(record.room, [proof.detail for proof in record.missing]) for record in found]
                return msg.IncidentAnswer(path=self._incidents.write_soon("asked for", missing))

    def _drain_answer(self) -> msg.DrainAnswer:
        return msg.DrainAnswer(is_drained=self._rank.is_drained, num_unsettled=self._transfers.num_unsettled)

    def _status(self) -> msg.StatusAnswer:
        rank, facts = self._rank, self._facts
        oldest = [transfer._log_line().elapsed_s for _, transfer in self._transfers.oldest(1)]
        return msg.StatusAnswer(
            instance=rank.me.rank.instance,
            engine_rank=rank.me.rank.engine_rank,
            incarnation=f"{rank.me.incarnation:016x}",
            role=facts.role,
            version=__version__,
            pid=os.getpid(),
            uptime_s=rank._now() - facts.opened_at,
            backend=facts.backend,
            paths=facts.paths,
            endpoint=facts.endpoint,
            layout=shorten(rank.layout.summary),
            fingerprint=shorten(rank.layout.fingerprint),
            draft_layers=rank.layout.num_draft_layers,
            settings=_settings_of(rank.config),
            is_draining=rank.is_draining,
            health=health_of(self._rank, self._transfers),
            oldest_room_s=oldest[0] if oldest else None,
            statistics=_as_fields(rank.statistics()),
        )

    def _room_row(self, key: RoomId, transfer: "Transfer") -> msg.RoomRow:
        line = transfer._log_line()
        peers: Sequence[object] = self._transfers.core.peers_of(key)
        if not peers and line.prefill is not None:
            peers = [line.prefill]
        return msg.RoomRow(
            room=transfer.room,
            label=transfer.label,
            outcome=transfer.outcome.value,
            memory=transfer.memory.value,
            age_s=line.elapsed_s,
            peers=[str(peer) for peer in peers[:MAX_LISTED]],
            num_peers=len(peers),
            num_pages=line.num_pages,
            num_bytes=line.page_bytes,
        )

    def _find(self, name: str) -> QuarantineRecord:
        found = [record for record in self._transfers.quarantined() if str(record.key) == name]
        if len(found) != 1:
            reason = (
                "several transfers in quarantine have this ID" if found else "no transfer in quarantine has this ID"
            )
            raise LocalProtocolError(reason, id=name)
        return found[0]


def health_of(rank: "Rank[Any, Any, Any]", transfers: "OpenTransfers[Any]") -> msg.Health:
    """Return whether a rank can transfer, and if not, why."""
    try:
        rank._check_usable()
    except LocalProtocolError as error:  # it is closing
        return msg.Health(transfer="degraded", reason=str(error), live=True, ready=False)
    except KvflowError as error:
        reason = f"{error}: {shorten(describe(error.__cause__ or error))}"
        return msg.Health(transfer="broken", reason=reason, live=False, ready=False)
    reason = _why_not_ready(rank, transfers)
    if reason:
        return msg.Health(transfer="degraded", reason=reason, live=True, ready=False)
    found = transfers.quarantined(1)
    if found:
        reason = f"transfers in quarantine: {transfers.num_quarantined}; the oldest is {found[0]}"
        return msg.Health(transfer="degraded", reason=shorten(reason), live=True, ready=True)
    return msg.Health(transfer="ok", reason="", live=True, ready=True)


def _why_not_ready(rank: "Rank[Any, Any, Any]", transfers: "OpenTransfers[Any]") -> str:
    """Return why new rooms are refused, or soon will be; empty if neither."""
    if rank.is_draining:
        return "the rank is draining"
    if rank._will_drain:
        return "the rank is about to drain"
    try:
        transfers.core.quarantine.check_admission()
    except CapacityExceeded as error:
        return str(error)
    limit = rank.config.limits.transfers
    num_rooms = rank.statistics().rooms
    return f"{num_rooms} rooms are open: limits.transfers is {limit}" if num_rooms >= limit else ""


def _quarantine_row(record: QuarantineRecord) -> msg.QuarantineRow:
    failure = record.failure
    return msg.QuarantineRow(
        id=str(record.key),
        room=record.room,
        label=record.label,
        since_s=record.since_s,
        pages={name: len(pages) for name, pages in record.pages.items()},
        num_bytes=record.num_bytes,
        failure="" if failure is None else f"{failure.reason.value}: {shorten(failure.detail)}",
        missing=[_missing_row(proof) for proof in record.missing[:MAX_LISTED]],
        num_missing=len(record.missing),
    )


def _missing_row(proof: MissingProof) -> msg.MissingRow:
    return msg.MissingRow(peer=proof.peer, endpoint=proof.endpoint, awaited=proof.awaited.value, detail=proof.detail)


def _rows_that_fit(rows: Iterable[Row]) -> list[Row]:
    """Return the first rows whose JSON is short enough for an answer."""
    fitting: list[Row] = []
    left = msg.MAX_ANSWER_BYTES
    for row in rows:
        left -= len(msgspec.json.encode(row))
        if left < 0:
            break
        fitting.append(row)
    return fitting


def _settings_of(config: RankConfig) -> dict[str, Any]:
    """Return the settings for JSON, without the keys."""
    names = [field.name for field in dataclasses.fields(config) if field.name != "trust"]
    return {name: msgspec.to_builtins(getattr(config, name), str_keys=True, enc_hook=str) for name in names}


def _as_fields(value: Any) -> Any:
    """Return a value for JSON, with the names of all fields; a key of several parts is their text, as "failed lost"."""
    if hasattr(value, "_asdict"):
        return _as_fields(value._asdict())
    if dataclasses.is_dataclass(value):
        return {field.name: _as_fields(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {_as_text(key): _as_fields(item) for key, item in value.items()}
    return msgspec.to_builtins(value)


def _as_text(key: object) -> str:
    parts = msgspec.to_builtins(key if isinstance(key, tuple) else (key,))
    return " ".join(str(part) for part in parts if part is not None)

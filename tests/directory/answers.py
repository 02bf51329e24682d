"""Short forms of a registry table's answers, for comparisons."""

from kvflow.directory.table import Answer
from kvflow.wire.messages import Registered, RegistrationConflict, SealedRecord, SealedRecords

__all__ = ["Brief", "brief", "incarnations"]

Brief = tuple[object, ...]
"""Connection, kind of message, and its content."""


def brief(answers: list[Answer]) -> list[Brief]:
    """Return all answers in short form, as if every peer can be reached."""
    return [(one.connection, *_brief(one)) for answer in answers for one in _chain(answer)]


def _chain(answer: Answer) -> list[Answer]:
    return [answer] if answer.then is None else [answer, *_chain(answer.then)]


def _brief(answer: Answer) -> Brief:
    match answer.message:
        case SealedRecords(instance=instance, records=records):
            return "records", instance, incarnations(records)
        case Registered(peer=peer):
            return "registered", peer.incarnation
        case RegistrationConflict(peer=peer, other=other, refused=refused):
            return "refused" if refused else "disputed", peer.incarnation, other.incarnation
        case message:
            raise AssertionError(message)


def incarnations(records: tuple[SealedRecord, ...]) -> list[tuple[int, int]]:
    return [(record.peer.rank.engine_rank, record.peer.incarnation) for record in records]

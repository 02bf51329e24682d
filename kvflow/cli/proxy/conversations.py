"""Which decode server has kept the last turn of a conversation. Pure."""

import hashlib
from collections.abc import Mapping, Sequence
from itertools import dropwhile
from typing import Final, NamedTuple

import msgspec

__all__ = ["Conversations", "LastTurn"]

MOST: Final = 10_000
"""Conversations that are remembered."""


class SaidPart(msgspec.Struct, frozen=True):
    """A part of a message."""

    text: str = ""


class Said(msgspec.Struct, frozen=True):
    """A message of a chat, as far as it tells one conversation from another; servers compare tokens."""

    role: str = ""
    content: str | list[SaidPart] | None = None


class LastTurn(NamedTuple):
    """The server that has answered, and its name for the request."""

    url: str
    transfer: str


class Conversations:
    """Turns by everything that was said until then."""

    def __init__(self) -> None:
        self._turns: dict[bytes, LastTurn] = {}

    def keep_turn(self, fields: Mapping[str, msgspec.Raw], text: str, turn: LastTurn) -> None:
        """Remember who has answered a chat, with this text."""
        if messages := _messages(fields):
            self._turns[_key(fields, [*messages, Said("assistant", text)])] = turn
            if len(self._turns) > MOST:
                del self._turns[next(iter(self._turns))]

    def take_turn(self, fields: Mapping[str, msgspec.Raw]) -> LastTurn | None:
        """Return who has given the last answer in a chat, once."""
        from_last = [*dropwhile(lambda it: it.role != "assistant", reversed(_messages(fields)))]
        return self._turns.pop(_key(fields, from_last[::-1]), None) if from_last else None


def _messages(fields: Mapping[str, msgspec.Raw]) -> list[Said]:
    try:
        return msgspec.json.decode(fields.get("messages", b"[]"), type=list[Said])
    except (msgspec.MsgspecError, RecursionError):
        return []


def _key(fields: Mapping[str, msgspec.Raw], messages: Sequence[Said]) -> bytes:
    said = [
        (it.role, "".join(part.text for part in it.content) if isinstance(it.content, list) else it.content)
        for it in messages
    ]
    return hashlib.blake2b(msgspec.msgpack.encode((fields.get("model"), said)), digest_size=16).digest()

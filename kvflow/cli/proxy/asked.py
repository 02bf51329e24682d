"""A request that the proxy serves, and why it cannot."""

import sys
import uuid
from contextlib import suppress
from typing import Any

import msgspec
from aiohttp import web

__all__ = ["Asked", "BadAnswer", "decode_fields"]


class BadAnswer(Exception):
    """A request cannot be served. The client is told why, in the form that servers use, or with the text of one."""

    def __init__(self, status: int, message: str, text: bytes = b"") -> None:
        if status >= 500:
            with suppress(OSError):
                print(f"kvflow proxy: {message}", file=sys.stderr, flush=True)
        body = text or msgspec.json.encode({"error": {"message": message, "type": "proxy_error", "code": status}})
        self.response = web.Response(status=status, body=body, content_type="application/json")


class Asked(msgspec.Struct, eq=False):
    """A request: its servers, path, encoded fields, headers, and its name on both.

    Prefill may keep it while it `is_kept`; its stream can move to another decode server if it `is_relayed`.
    """

    prefill: str
    decode: str
    path: str
    fields: dict[str, msgspec.Raw]
    headers: Any
    transfer: str = msgspec.field(default_factory=lambda: uuid.uuid4().hex)
    is_kept: bool = True
    is_relayed: bool = False


def decode_fields(body: bytes | bytearray, status: int = 400) -> dict[str, msgspec.Raw]:
    """Decode a JSON object, but not its fields; raise BadAnswer with the status if it is none."""
    try:
        return msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise BadAnswer(status, f"body is not a JSON object: {error}") from error

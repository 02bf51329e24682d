"""Finds out why no connection to a listener is made, by connecting once more and reading what it answers.

libzmq says that an attempt has failed, but not why: its events have no error number, and it treats a program that
speaks something else like one with other keys.
"""

import asyncio
from contextlib import suppress
from typing import Final, NamedTuple

from kvflow.addresses import split_address, split_hosts
from kvflow.errors import Shortage
from kvflow.resources import check_shortage

__all__ = ["Diagnosis", "diagnose"]

CONNECT_S: Final = 1.0
"""How long a host may take to answer, as for libzmq (`control/sockets`)."""

GREETING_S: Final = 1.0
MAX_SHOWN: Final = 24

SIGNATURE_BYTES: Final = 10
GREETING_BYTES: Final = 64
MECHANISM: Final = slice(12, 32)
OPENING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x01"
"""The first part of a greeting (RFC 37), which libzmq answers with its whole. It answers a mechanism that it does not
like with nothing."""

HTTP_REQUEST: Final = b"GET / HTTP/1.0\r\n\r\n"
"""For a listener that says nothing to `OPENING`, as HTTP servers do that wait for the end of a line."""

HTTP: Final = b"HTTP/"

NULL: Final = b"NULL"
CURVE: Final = b"CURVE"


class Diagnosis(NamedTuple):
    """Why there is no connection.

    Attributes:
        detail: The cause.
        is_refusal: Whether one end requires a key that the other does not have.
        is_short: Whether this process lacks a resource.
    """

    detail: str
    is_refusal: bool = False
    is_short: bool = False


async def diagnose(endpoint: str, *, is_encrypted: bool) -> Diagnosis:
    """Return why a connection to a listener is not made by this process, which uses keys or not."""
    host, port = split_address("endpoint", endpoint)
    first, *others = split_hosts(host)
    found = await _diagnose_host(first, port, is_encrypted=is_encrypted)
    for other in others:
        more = await _diagnose_host(other, port, is_encrypted=is_encrypted)
        detail = f"{found.detail}; {other}: {more.detail}"
        found = Diagnosis(detail, found.is_refusal or more.is_refusal, found.is_short or more.is_short)
    return found


async def _diagnose_host(host: str, port: int, *, is_encrypted: bool) -> Diagnosis:
    try:
        got = await _ask(host, port, OPENING)
    except TimeoutError:
        return Diagnosis(f"no answer to a TCP connection within {CONNECT_S:g} s: the host is down, or drops it")
    except ConnectionRefusedError:
        return Diagnosis("connection refused: no process listens there")
    except (OSError, UnicodeError) as error:
        shortage = _shortage(error)
        return Diagnosis(shortage or f"no TCP connection: {error}", is_short=bool(shortage))
    if not got:
        with suppress(OSError):  # TimeoutError, too
            got = await _ask(host, port, HTTP_REQUEST)
    return _judge(got, is_encrypted=is_encrypted)


async def _ask(host: str, port: int, request: bytes) -> bytes:
    """Connect, send something, and return the beginning of the answer; raise OSError if no connection is made."""
    async with asyncio.timeout(CONNECT_S):
        reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(request)
        return await _read(reader)
    finally:
        writer.transport.abort()


async def _read(reader: asyncio.StreamReader) -> bytes:
    """Return the greeting, or what has arrived of it in time."""
    got = b""
    try:
        async with asyncio.timeout(GREETING_S):
            while len(got) < GREETING_BYTES and (data := await reader.read(GREETING_BYTES - len(got))):
                got += data
    except (TimeoutError, OSError):
        pass
    return got


def _judge(got: bytes, *, is_encrypted: bool) -> Diagnosis:
    if not got:
        return Diagnosis("it accepts TCP connections, but says nothing: another program, or a process that is stopped")
    if got.startswith(HTTP):
        return Diagnosis(f"it is an HTTP server, which does not speak ZMTP: it answers {got[:MAX_SHOWN]!r}")
    if got[0] != 0xFF or len(got) < SIGNATURE_BYTES or not got[SIGNATURE_BYTES - 1] & 1:
        return Diagnosis(f"it is another program, which does not speak ZMTP: it answers {got[:MAX_SHOWN]!r}")
    mechanism = got[MECHANISM].rstrip(b"\0")
    if mechanism == CURVE and not is_encrypted:
        return Diagnosis("it requires a key, and this process has none", is_refusal=True)
    if mechanism == NULL and is_encrypted:
        return Diagnosis("it has no keys, but this process does", is_refusal=True)
    return Diagnosis("it speaks ZMTP, but does not complete the handshake in time")


def _shortage(error: Exception) -> str:
    """Return what this process lacks, if that is the cause of an error; else an empty text."""
    try:
        check_shortage(getattr(error, "errno", None))
    except Shortage as shortage:
        return str(shortage)
    return ""

"""What a version writes and reads: `python -m tests.versions.messages record | read`, run with that version.

`record` prints a line for each kind of message that the version knows: the kind, its bytes, and its fields as JSON. The
values are those of the golden file in `tests/wire`, as this version understands them. `messages.txt` has the lines of
the older version, see `record.py`. `read` reads lines "kind bytes", and prints the same for each, or why it cannot be
read.
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from kvflow.errors import RemoteProtocolError
from kvflow.wire.codec import decode, encode

__all__ = ["FILE", "Recorded", "describe", "recorded"]

FILE: Final = Path(__file__).with_name("messages.txt")
GOLDEN: Final = sorted((Path(__file__).parents[1] / "wire").glob("golden_v*.txt"))[-1]


class Recorded(NamedTuple):
    """A message as a version has written it: its bytes, and its fields."""

    data: bytes
    fields: dict[str, object]


def describe(message: object) -> str:
    """Return the fields of a message as JSON, on one line."""
    return msgspec.json.encode(message).decode()


def recorded(lines: Iterable[str]) -> dict[str, Recorded]:
    """Read lines of `record` or `read` by kind."""
    found = {}
    for line in lines:
        kind, digits, text = line.split(" ", maxsplit=2)
        found[kind] = Recorded(bytes.fromhex(digits), msgspec.json.decode(text))
    return found


def record() -> Iterator[str]:
    for kind, digits in map(str.split, GOLDEN.read_text().splitlines()):
        try:
            message = decode(bytes.fromhex(digits))
        except RemoteProtocolError as error:
            if error.values.get("kind") != kind:
                raise
        else:  # it is newer than this version
            yield f"{kind} {encode(message).hex()} {describe(message)}"


def read(lines: Iterable[str]) -> Iterator[str]:
    for kind, digits in map(str.split, lines):
        try:
            text = describe(decode(bytes.fromhex(digits)))
        except RemoteProtocolError as error:
            text = describe({"error": error.message, **{name: str(value) for name, value in error.values.items()}})
        yield f"{kind} {digits} {text}"


if __name__ == "__main__":
    made = record() if sys.argv[1:] == ["record"] else read(sys.stdin)
    sys.stdout.writelines(f"{line}\n" for line in made)

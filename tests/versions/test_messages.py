"""Messages of the older version are read by this one, and the other way round."""

import subprocess
from collections.abc import Sequence
from typing import Final

import msgspec
import pytest
from hatchling.builders.sdist import SdistBuilder

from kvflow.wire.codec import decode, encode
from tests.versions.messages import FILE, Recorded, describe, recorded
from tests.versions.version import CHECKOUT, WHEEL, Version
from tests.wire import golden

RECORDED: Final = recorded(FILE.read_text().splitlines())

SINCE: Final = {"offer", "offer_answered"}
"""Kinds that are newer than the older version."""


def run_with(version: Version, *arguments: str, lines: Sequence[str] = ()) -> str:
    command = version.command("tests.versions.messages", *arguments)
    text = "".join(f"{line}\n" for line in lines)
    done = subprocess.run(
        command, env=version.environment, input=text, capture_output=True, check=True, timeout=100, text=True
    )
    assert done.stderr == ""
    return done.stdout


@pytest.fixture(scope="module")
def as_older_reads(older: Version) -> dict[str, Recorded]:
    """What the older version reads of the bytes that this version writes, with every field set."""
    lines = [f"{kind} {encode(message).hex()}" for kind, message in golden.MESSAGES.items()]
    return recorded(run_with(older, "read", lines=lines).splitlines())


def test_processes_run_with_the_version_that_is_asked_for(older: Version) -> None:
    script = "import kvflow, tests; print(kvflow.__file__, tests.__file__)"
    command = [older.command("")[0], "-c", script]
    done = subprocess.run(command, env=older.environment, capture_output=True, check=True, timeout=100, text=True)
    assert done.stdout.split() == [older.library, str(CHECKOUT / "tests/__init__.py")]


def test_the_file_is_what_the_older_version_writes(older: Version) -> None:
    """`python -m tests.versions.record` writes it, after the wheel has been replaced."""
    assert run_with(older, "record") == FILE.read_text()


def test_there_are_all_kinds_but_the_newer_ones() -> None:
    assert golden.MESSAGES.keys() - RECORDED.keys() == SINCE
    assert RECORDED.keys() <= golden.MESSAGES.keys()


@pytest.mark.parametrize("kind", RECORDED)
def test_message_of_the_older_version_is_read_with_every_field(kind: str) -> None:
    fields = msgspec.json.decode(describe(decode(RECORDED[kind].data)))
    assert differences(RECORDED[kind].fields, fields) == []


@pytest.mark.parametrize("kind", RECORDED)
def test_the_older_version_reads_every_field_that_it_knows(kind: str, as_older_reads: dict[str, Recorded]) -> None:
    assert as_older_reads[kind].fields == RECORDED[kind].fields


@pytest.mark.parametrize("kind", sorted(SINCE))
def test_the_older_version_names_a_newer_kind(kind: str, as_older_reads: dict[str, Recorded]) -> None:
    assert as_older_reads[kind].fields == {"error": "message of this kind is not accepted here", "kind": kind}


def differences(older: object, newer: object, at: str = "") -> list[str]:
    """Return where a value is not what the older version meant; a newer one may have more fields."""
    if isinstance(older, dict) and isinstance(newer, dict):
        return [
            found
            for name, value in older.items()
            for found in (
                differences(value, newer[name], f"{at}.{name}") if name in newer else [f"{at}.{name} is gone"]
            )
        ]
    if isinstance(older, list) and isinstance(newer, list):
        pairs = enumerate(zip(older, newer, strict=False))
        own = [found for index, (one, other) in pairs for found in differences(one, other, f"{at}[{index}]")]
        return own + ([f"{at} is shorter"] if len(newer) < len(older) else [])
    return [] if older == newer else [f"{at} is {newer!r} instead of {older!r}"]


def test_wheel_is_not_in_the_source_distribution() -> None:
    files = {file.distribution_path for file in SdistBuilder(str(CHECKOUT)).recurse_included_files()}
    assert "tests/versions/test_messages.py" in files
    assert WHEEL is not None
    assert not [name for name in files if name.endswith(".whl")]

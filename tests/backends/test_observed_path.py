"""The path of the writes to a peer, told from what TCP has carried."""

import logging
from collections.abc import Mapping
from typing import Any

import anyio
import pytest

from kvflow.backends import create_backend
from kvflow.backends.library_sockets import Carried
from kvflow.backends.observed_path import MIN_BYTES, ObservedPath
from kvflow.observe.logs import get_logger
from kvflow.testing.contract.suite.processes import PIECE, target_process
from tests.backends.endpoints import open_backend

HERE = bytes((127, 0, 0, 1))
OTHERS = "shared memory"

Lines = list[dict[str, Any]]


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Lines:
    """Gather the values of the lines about paths."""
    found: Lines = []

    def note(record: logging.LogRecord) -> bool:
        if isinstance(record.msg, dict) and record.msg["event"] == "transport_path":
            found.append(record.msg)
        return True

    logger = logging.getLogger("kvflow")
    monkeypatch.setattr(logger, "filters", [note])
    monkeypatch.setattr(logger, "level", logging.INFO)
    return found


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("name", "options", "path"),
    [
        ("nixl", {}, "shared memory within the host"),
        ("nixl", {"plugin_options": {"engine_config": "TLS=tcp"}}, "TCP"),
        ("mooncake", {}, "TCP"),
    ],
)
async def test_the_path_that_a_transport_takes_is_told_once(
    name: str, options: Mapping[str, object], path: str, lines: Lines
) -> None:
    async with (
        target_process(name, PIECE, options=options) as target,
        open_backend(create_backend(name, options), PIECE) as source,
    ):
        await source.backend.connect(target.name, target.metadata)
        number = 0

        async def write() -> None:
            nonlocal number
            number += 1
            source.backend.post(number, target.name, target.pieces(source, 0), b"")
            assert (await source.take_end(number)).error is None

        while not lines:  # each check forgets the writes before it, and tells nothing while one is under way
            await write()
            await anyio.sleep(0.05)
        await write()
        assert source.backend.observed_paths == {path: 1}
    (line,) = lines
    assert (line["peer"], line["path"]) == (target.name, path)
    assert line["addresses"]
    assert (2 * line["num_bytes_tcp"] >= line["num_bytes"]) is (path == "TCP")


def test_the_path_is_told_when_it_changes_and_only_from_writes_that_outweigh_their_notices(lines: Lines) -> None:
    path, carried = ObservedPath(), 1_000

    def write(num_bytes: int, over_tcp: int, *, may_be_more: bool = False) -> None:
        nonlocal carried
        carried += over_tcp
        path.count(num_bytes)
        if path.can_be_told:
            found = [Carried(HERE, 4_000, carried - 500), Carried(HERE, 4_001, 500)]
            path.tell(get_logger(), "peer", found, OTHERS, may_be_more=may_be_more)

    assert not path.can_be_told
    write(100, 300)
    assert not path.can_be_told
    write(2**20, 100, may_be_more=True)
    assert not lines, "the rest may still be on its way"
    for over_tcp in (100, 200, 2**20 + 1_000, 2**20 + 1_000, 100):
        write(2**20, over_tcp)
    write(MIN_BYTES - 1, MIN_BYTES)
    assert [line["path"] for line in lines] == [OTHERS, "TCP", OTHERS]
    assert lines[1]["addresses"] == ["127.0.0.1:4000", "127.0.0.1:4001"]
    assert (lines[1]["num_bytes"], lines[1]["num_bytes_tcp"]) == (2**20, 2**20 + 1_000)

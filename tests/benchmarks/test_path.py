"""The ways of a chunk and of a notice: what they pass through, and that they do not grow."""

import json
from pathlib import Path
from typing import Any, Final

import anyio
import pytest

from benchmarks import path
from benchmarks.__main__ import main

CEILINGS: Final = {"chunk to post": (90, 101), "notice to done": (57, 71)}
"""Functions and calls of the first chunk of a room, and of the last notice; lower these when a way becomes shorter.
Wanted are 90 and 110 for a chunk, and 55 functions for a notice."""


@pytest.mark.parametrize("name", CEILINGS)
def test_no_way_is_longer_than_before(name: str) -> None:
    """Make a way shorter by leaving out what it does twice, not by pasting functions into others."""
    way = path.measure(rounds=8)[name]
    counts = (way.everything.functions, way.everything.calls)
    assert all(count <= most for count, most in zip(counts, CEILINGS[name], strict=True)), (counts, way.functions)


def test_what_is_entered_is_counted(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["path", "--rounds=2", "--list", "--json"]) == 0
    ways = json.loads(capfd.readouterr().out)
    chunk, notice = ways["chunk to post"], ways["notice to done"]
    assert chunk["list"][0].startswith("sender.py")
    assert chunk["list"][0].endswith(" chunk")
    assert chunk["list"][-1].startswith("backends/memory.py")
    assert chunk["list"][-1].endswith(" post")
    assert any(function.startswith("geometry/") for function in chunk["list"])
    assert any(function.startswith("decode.py") for function in notice["list"])
    assert not any(function.startswith("sender.py") for function in notice["list"])
    assert notice["turns"] > 0
    for way in (chunk, notice):
        whole, impure = way["all"], way["outside geometry and state"]
        assert whole["calls"] == len(way["list"]) >= whole["functions"] > impure["functions"] >= impure["files"] > 0


def test_coroutine_that_is_resumed_is_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "waits.py"
    source.write_text("import anyio\nasync def wait():\n    for _ in range(3): await anyio.sleep(0)\n")
    monkeypatch.setattr(path, "ROOT", tmp_path)
    names: dict[str, Any] = {}
    exec(compile(source.read_text(), str(source), "exec"), names)  # noqa: S102 - so that it has a file below the root
    trace = path.Trace()

    async def run() -> None:
        trace.on()
        await names["wait"]()
        trace.off()

    anyio.run(run)
    assert [call.code.co_name for call in trace.calls if call.code] == ["wait"]
    assert sum(call.code is None for call in trace.calls) == 3

"""Every benchmark runs, with a minimal load."""

import itertools
import json
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest

from benchmarks import memory, shape
from benchmarks.__main__ import NAMES, main
from benchmarks.attack import KINDS
from benchmarks.embedded.loads import LANES, EmbeddedOptions, Load
from benchmarks.embedded.timeline import STEPS
from benchmarks.embedded.worker import Side
from benchmarks.hetero import CASES
from benchmarks.limits import LIMITS
from benchmarks.rows import Measured, Tail, compare, rows_as_json
from tests.support.distributions import build_wheel, unpack

Run = Callable[..., list[dict[str, Any]]]

PIGEON = """
from kvflow.backends.memory import MemoryBackend

class PigeonBackend(MemoryBackend):
    name = "pigeon"
"""


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a benchmark and returns its output, and fails if it prints anything else."""

    def run(*words: str) -> list[dict[str, Any]]:
        assert main([*words, "--json"]) == 0
        shown = capfd.readouterr()
        assert shown.err == ""
        return [json.loads(line) for line in shown.out.splitlines()]

    return run


@pytest.mark.parametrize("name", NAMES)
def test_benchmark_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([name, "--help"])
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m benchmarks {name}")


@pytest.mark.parametrize(("words", "code"), [(["--help"], 0), ([], 2), (["nobody"], 2)])
def test_benchmarks_are_listed(words: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == code
    shown = capsys.readouterr()
    assert "usage: python -m benchmarks" in shown.out + shown.err


@pytest.mark.slow
def test_attack_has_a_row_for_each_kind(run: Run) -> None:
    rows = run("attack", "--backend=memory", "--rounds=1", "--requests=20")
    assert [row["case"] for row in rows] == list(KINDS)
    facts = {row["case"]: row["facts"] for row in rows}
    assert facts["wrong key"]["key_refused"] > 0
    assert facts["insider, malformed"]["message_rejected"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("case", ["tp4-tp2", "hnd-nhd"])
def test_hetero_compares_direct_packed_and_chosen(case: str, run: Run) -> None:
    packed, chosen = run("hetero", "--cases", case, "--layers=1", "--tokens=64", "--rounds=1")
    assert packed["case"] == chosen["case"] == f"{CASES[case].prefill} -> {CASES[case].decode}"
    assert packed["ratio"] == pytest.approx(packed["kvflow"] / packed["bare"], rel=1e-2)
    assert chosen["bare"] == min(packed["kvflow"], packed["bare"])
    assert chosen["facts"]["auto chose"]
    assert (packed["facts"]["packed always"], packed["facts"]["packed never"]) == ("packed", "direct")


@pytest.mark.slow
def test_scale_has_a_row_for_every_case(run: Run) -> None:
    small = ("--in-flight=2,3", "--peers=1,2", "--rounds=1", "--transfers=2", "--seconds=0.1")
    rows = run("scale", "--cases=in-flight,peers,waiting", *small)
    cases = {(row["group"], row["case"], row["quantity"]) for row in rows}
    assert len(cases) == len(rows)
    for quantity in ("cpu of a transfer", "wall of a transfer"):
        for count in (2, 3):
            assert ("transfers in flight", f"{count} in flight", quantity) in cases
        for case in ("2 decode ranks to 1 prefill rank", "2 prefill ranks to 1 decode rank"):
            assert ("peers, 256 in flight", case, quantity) in cases
    assert ("waiting", "3 wait, both sides", "CPU") in cases


@pytest.mark.slow
@pytest.mark.parametrize("case", list(memory.CASES))
def test_memory_of_what_waits(case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["memory", case, "rss", "3"])
    assert memory.main() == 0
    here, there = json.loads(capsys.readouterr().out)
    assert here >= 0
    assert there >= 0 or case == "granted"  # memory that zmq held for the grants may be free again


def test_memory_is_measured_in_a_process_of_its_own() -> None:
    held = anyio.run(memory.measure_in_process, "opened", "tracemalloc", 2)
    assert held.here > 0


@pytest.mark.slow
def test_embedded_times_handovers_and_calls(run: Run) -> None:
    rows = run("embedded", "--engines=sleeps", "--shape=tiny", "--requests=4", "--rounds=1", "--gap=0.001")
    assert [row["unit"] for row in rows] == ["ms"] * 2 + ["us"] * 6
    assert all(0 < row["kvflow"] <= row["tail"]["kvflow_p99"] for row in rows)
    assert all(row["ratio"] > 0 for row in rows[:2])


@pytest.mark.parametrize("function", [step.function for step in STEPS if step.function])
def test_what_marks_a_step_of_a_handover_is_there(function: str) -> None:
    assert callable(pkgutil.resolve_name(function))


@pytest.mark.parametrize("is_fragmented", [False, True])
def test_embedded_finds_bytes_that_are_wrong_or_were_not_sent(*, is_fragmented: bool) -> None:
    no_parent: Any = None
    side = Side(EmbeddedOptions(side="decode", shape="tiny", tokens=64), no_parent)
    load = Load(engine="sleeps", first_room=LANES - 1, count=3, is_fragmented=is_fragmented, prefix=1)
    sent, got = (side.tables(is_prefill, is_fragmented=is_fragmented) for is_prefill in (True, False))
    page_size = side.pool.shape.page_size

    def arrive(first: int) -> None:
        for lane in (LANES - 1, 0, 1):
            side.pool.write(got[lane][first:], page_size * np.asarray(sent[lane][first:]))

    arrive(1)
    assert side.holds(load)
    assert not side.holds(load)  # it was wiped
    arrive(0)
    assert not side.holds(load)  # with the prefix
    arrive(1)
    side.pool.write(got[0][-1:], 1_000_000)
    assert not side.holds(load)


@pytest.mark.slow
def test_embedded_times_every_step_of_a_handover(run: Run) -> None:
    small = ("--engines=sleeps", "--shape=tiny", "--requests=4", "--rounds=1", "--gap=0.001")
    rows = run("embedded", "--timeline", *small)
    assert [row["case"] for row in rows] == [step.name for step in STEPS]


@pytest.mark.parametrize("backend", ["memory", "nixl", "mooncake"])
def test_idle_gives_one_row(backend: str, run: Run) -> None:
    (row,) = run("idle", "--backend", backend, "--seconds=0.1", "--pairs=2")
    assert (row["bench"], row["group"]) == ("idle", f"connected ranks over {backend}")
    assert row["facts"]["ranks"] == 4
    assert row["facts"]["seconds"] >= 0.1
    assert row["kvflow"] >= 0


def test_transport_of_a_plugin_can_be_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    wheel = build_wheel(tmp_path, "pigeon_post", {"pigeon_post.py": PIGEON}, {"pigeon": "pigeon_post:PigeonBackend"})
    unpack(wheel, tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, "pigeon_post", raising=False)  # another test may have imported one of this name
    (row,) = run("idle", "--backend=pigeon", "--seconds=0.1")
    assert row["group"] == "connected ranks over pigeon"


@pytest.mark.slow
def test_failures_give_a_row_for_each_case(run: Run) -> None:
    (row,) = run("failures", "--rounds=1", "--cases=abort-decode")
    assert (row["case"], row["rounds"], row["ok"], row["next_transfer_ok"]) == ("abort-decode", 1, 1, 1)
    assert 0 < row["known_ms_p50"] <= row["known_ms_p99"] <= row["known_ms_max"]
    assert (row["faults"], row["quarantined_pages"]) == ({}, 0)


def test_plan_gives_the_handshake_and_every_plan(run: Run) -> None:
    handshake, plans = run("plan", "--layers=2", "--tokens=64,128")[:2], run("plan", "--layers=2", "--tokens=64")[2:]
    assert [row["quantity"] for row in handshake] == ["compile routes", "bind routes"]
    expected = itertools.product(["equal", "4 to 2", "2 to 4", "mla"], [1, 16, 64], ["contiguous", "half", "random"])
    cases = [f"{split}, 2 layers, 64 tokens, pages of {size}, {table}" for split, size, table in expected]
    assert [row["case"] for row in plans] == cases
    assert all(row["kvflow"] > 0 and row["facts"]["descriptors"] > 0 for row in plans)


def test_offers_give_a_row_for_each_case(run: Run) -> None:
    rows = {row["case"]: row for row in run("offers", "--rounds=1", "--requests=5", "--drained=5")}
    assert len(rows) == 5
    assert all(rows[case]["ratio"] > 0 for case in ("beside a warm-up", "one of 5 moves", "drain by moves"))
    assert rows["move of a request"]["facts"]["bytes"] == 2**20
    role = rows["prefill server becomes decode server"]
    assert role["kvflow"] >= 1e3 * role["facts"]["open_s"]


@pytest.mark.parametrize("backend", ["memory", "nixl"])
def test_digest_compares_transfers_with_and_without(backend: str, run: Run) -> None:
    rows = run("digest", "--backend", backend, "--megabytes=1", "--rounds=1", "--page-sizes=1,16")
    cases = [f"pages of {size}, {order}-major" for size in (1, 16) for order in ("token", "head")]
    assert [row["case"] for row in rows] == cases
    assert all(row["kvflow"] > 0 and row["bare"] > 0 for row in rows)


def test_shape_measures_each_package(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "top.py").write_text("class One:\n    def two(self):\n        return 2\n")
    (tmp_path / "inner" / "deep.py").write_text("\n\nasync def four():\n    a = 1\n    b = 2\n    return a + b\n")
    shapes = shape.measure(tmp_path)
    assert shapes == {
        "all": shape.Shape(9, 2, 2, 4, 4, 1, 3, 3),
        "(files)": shape.Shape(3, 1, 1, 2, 2, 1, 3, 3),
        "inner": shape.Shape(6, 1, 1, 4, 4, 0, 0, 0),
    }


@pytest.mark.slow
def test_shape_of_kvflow(run: Run) -> None:
    (shapes,) = run("shape")
    packages = {name: values for name, values in shapes.items() if name != "all"}
    assert packages.keys() >= {"(files)", "cli", "geometry", "state"}
    for name in ("lines", "files", "functions", "classes"):
        assert shapes["all"][name] == sum(values[name] for values in packages.values())


def test_rows_are_drawn(tmp_path: Path, run: Run) -> None:
    requests = Measured(bench="b", group="g", case="c", quantity="requests", unit="1/s", better="higher")
    tail = Tail(kvflow_p50=1.0, kvflow_p99=2.0)
    rows = [
        compare(requests, [1.0, 2.0], [1.0, 1.0], others={"copy": [3.0]}),
        compare(msgspec.structs.replace(requests, group="h"), [1.0], tail=tail),
    ]
    (tmp_path / "rows.jsonl").write_text(rows_as_json(rows))
    assert run("plot", str(tmp_path / "rows.jsonl"), str(tmp_path / "rows.png")) == []
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["hetero", "--cases", "nobody"], "nobody"),
        (["hetero", "--tokens", "100"], "page_size=64"),
        (["hetero", "--rounds", "0"], "--rounds"),
        (["hetero", "--backend", "memory"], "memory"),
        (["scale", "--rounds", "0"], "--rounds"),
        (["scale", "--cases", "nobody"], "nobody"),
        (["embedded", "--engines", "nobody"], "nobody"),
        (["embedded", "--gap", "0"], "--gap"),
        (["embedded", "--backend", "memory"], "memory"),
        (["embedded", "--sglang"], "sglang"),
        (["idle", "--pairs", "0"], "--pairs"),
        (["idle", "--seconds", "inf"], "--seconds"),
        (["idle", "--backend", "raven"], "raven"),
        (["failures", "--cases", "abort-all"], "abort-all"),
        (["failures", "--lease", "0"], "--lease"),
        (["failures", "--backend", "memory"], "memory"),
        (["offers", "--rounds", "0"], "--rounds"),
        (["offers", "--backend", "memory"], "memory"),
        (["digest", "--megabytes", "0"], "--megabytes"),
        (["plot", "/nowhere", "rows.png"], "/nowhere"),
    ],
)
def test_what_cannot_be_measured_is_named(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"benchmarks {words[0]}: ")
    assert named in shown


def test_limits_gives_cost_growth_and_hold_of_each_limit(run: Run) -> None:
    rows = run("limits", "--share=0.001")
    assert [row["quantity"] for row in rows] == ["CPU", "growth", "hold"] * 3 * len(LIMITS)
    assert {row["group"] for row in rows} == LIMITS.keys()

"""`python -m benchmarks handover` and `transfer`: their output, and their check of the bytes."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from msgspec.structs import replace

import kvflow
from benchmarks.__main__ import main
from benchmarks.pair.loads import SHAPES, Load, PairOptions, Table, Way, tables_of
from benchmarks.pair.processes import open_pair
from benchmarks.rows import Measured, Row, Tail, compare, grouped, percentile, rows_as_json, rows_as_table
from tests.support.slow import slow_except

SMALL = ["--rounds", "2", "--pool-megabytes", "1"]

REQUESTS = Measured(bench="b", group="g", case="c", quantity="requests", unit="1/s", better="higher")


def rows_of(options: list[str], capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert main([*options, *SMALL, "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    return [json.loads(line) for line in shown.out.splitlines()]


def check(row: dict[str, Any]) -> None:
    assert row["rounds"] == 2
    assert 0 < row["kvflow_low"] <= row["kvflow"] <= row["kvflow_high"]
    assert 0 < row["bare_low"] <= row["bare"] <= row["bare_high"]
    assert row["ratio"] == pytest.approx(row["kvflow"] / row["bare"], rel=0.01)
    assert row["facts"]["bare_way"] in {"bare", "bare-napping"}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_transfer_gives_a_row_for_each_size_and_table(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(["transfer", "--backend", backend, "--shapes", "tiny", "--tokens", "256,1024"], capsys)
    tables = itertools.product((256, 1024), ("contiguous", "random"))
    assert [row["case"] for row in rows] == [f"{tokens} tokens, {table}" for tokens, table in tables]
    for row in rows:
        check(row)
        assert (row["bench"], row["quantity"], row["unit"], row["better"]) == ("transfer", "goodput", "GB/s", "higher")
        assert row["group"] == f"tiny over {backend}, one transfer at a time"
    assert rows[2]["facts"]["bytes"] == 1024 * SHAPES["tiny"].token_bytes


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_handover_gives_times_rates_and_costs(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "handover",
        "--backend",
        backend,
        "--shape",
        "tiny",
        "--tokens",
        "64,256",
        "--requests",
        "8",
        "--in-flight",
        "1,4",
    ]
    rows = rows_of(options, capsys)
    one_by_one, *pairs = rows
    for row in rows:
        check(row)
    assert (one_by_one["case"], one_by_one["unit"], one_by_one["better"]) == ("one at a time", "us", "lower")
    assert 0 < one_by_one["tail"]["kvflow_p50"] <= one_by_one["tail"]["kvflow_p99"]
    assert 0 < one_by_one["tail"]["bare_p50"] <= one_by_one["tail"]["bare_p99"]
    seen = [(row["group"].rpartition(", ")[2], row["case"], row["unit"], row["better"]) for row in pairs]
    units = [("1/s", "higher"), ("ms per request", "lower")]
    expected = itertools.product((64, 256), (1, 4), units)
    assert seen == [(f"requests of {tokens} tokens", f"{lanes} in flight", *unit) for tokens, lanes, unit in expected]
    costs = [row["facts"] for row in pairs if row["better"] == "lower"]
    assert all(fact["prefill loop ms"] > 0 and fact["decode loop ms"] > 0 for fact in costs)


@pytest.mark.slow
def test_rows_are_shown_to_a_person(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["handover", "--shape", "tiny", "--tokens", "256", "--in-flight", "2", "--requests", "4", *SMALL]
    assert main(options) == 0
    shown = capsys.readouterr()
    assert "tiny over nixl, requests of 256 tokens: requests, 1/s (higher is better)" in shown.out
    assert "2 in flight" in shown.out
    assert "one at a time" in shown.err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["transfer", "--shapes", "tiny,gpt-5"], "gpt-5"),
        (["transfer", "--tokens", "16,17"], "page_size=16"),
        (["handover", "--shape", "tiny,mla"], "tiny,mla"),
        (["handover", "--rounds", "0"], "--rounds"),
        (["handover", "--requests", "0"], "--requests"),
    ],
)
def test_what_cannot_be_measured_is_named(options: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(options) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("text", ["abc", "1,,2", "0", "-1", "1.5", ""])
def test_numbers_that_are_none_are_refused_in_plain_words(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["handover", f"--tokens={text}"])
    assert f"argument --tokens: expected positive numbers separated by commas, not {text!r}" in capsys.readouterr().err


@pytest.mark.parametrize("way", ["kvflow", "bare"])
@pytest.mark.parametrize("backend", slow_except(["nixl"], ["nixl", "mooncake"]))
def test_bytes_of_a_round_are_looked_at(backend: str, way: Way) -> None:
    async def play() -> None:
        load = Load(way=way, tokens=32, table="random", count=2, tables=2)
        async with open_pair(backend, "tiny", num_bytes=0, tokens=128) as pair:
            await pair.wipe()
            assert not await pair.has_arrived(load)
            await pair.play(replace(load, count=1))
            assert not await pair.has_arrived(load)
            await pair.play(load)
            assert await pair.has_arrived(load)

    anyio.run(play)


@pytest.mark.parametrize("table", ["contiguous", "random"])
def test_both_sides_have_tables_of_their_own_order(table: Table) -> None:
    options = PairOptions(shape="tiny", num_pages=32)
    tables = tables_of(Load(way="kvflow", tokens=64, table=table, tables=8, lanes=8), options)
    assert [len(pair.src) for pair in tables] == [4] * 8
    is_equal = all((pair.src == pair.dst).all() for pair in tables)
    assert is_equal is (table == "contiguous")


def test_ratio_is_that_of_the_medians_and_the_paired_one_that_of_rounds() -> None:
    row = compare(REQUESTS, [10, 20, 90], [20, 10, 100], others={"copy": [1, 5, 2]})
    assert (row.kvflow, row.kvflow_low, row.kvflow_high, row.rounds) == (20, 10, 90, 3)
    assert (row.bare, row.bare_low, row.bare_high) == (20, 10, 100)
    assert (row.ratio, row.paired_ratio) == (1.0, 0.9)
    assert row.others == {"copy": 2}


def test_row_without_another_side_has_no_ratio() -> None:
    row = compare(REQUESTS, [3.0])
    assert (row.bare, row.ratio, row.paired_ratio) == (None, None, None)
    assert "3.00" in rows_as_table([row])


WITHOUT_NIXL = """
import sys
from importlib.abc import MetaPathFinder

class NoNixl(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.startswith("nixl"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoNixl())
"""


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_NIXL)
    paths = [str(tmp_path), str(Path(kvflow.__file__).parent.parent)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    command = [sys.executable, "-m", "benchmarks", "handover", "--shape", "tiny", *SMALL]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    assert shown.returncode == 2
    (line,) = shown.stderr.splitlines()
    assert line.startswith("benchmarks handover: NIXL is not installed or does not load; install kvflow[nixl-cu12]")


def test_a_table_says_what_its_columns_are() -> None:
    shown = rows_as_table([compare(replace(REQUESTS, unit="us"), [3.0], [2.0])])
    assert "µs (higher is better)" in shown
    assert "paired: median of the ratios of single rounds" in shown.splitlines()[-1]


def test_rows_come_back_from_json() -> None:
    tail = Tail(kvflow_p50=1.0, kvflow_p99=2.0, bare_p50=0.5, bare_p99=0.75)
    rows = [compare(REQUESTS, [1.0, 2.0], [1.0, 1.0], tail=tail, facts={"bytes": 3}), compare(REQUESTS, [1.0])]
    assert [msgspec.json.decode(line, type=Row) for line in rows_as_json(rows).splitlines()] == rows


def test_rows_of_a_kind_come_together() -> None:
    cost = replace(REQUESTS, quantity="CPU")
    rows = [compare(measured, [1.0]) for measured in (REQUESTS, cost, REQUESTS)]
    assert grouped(rows) == [[rows[0], rows[2]], [rows[1]]]


def test_percentile_is_the_smallest_value_that_so_many_do_not_exceed() -> None:
    assert [percentile(range(1, 101), share) for share in (0.0, 0.5, 0.99, 1.0)] == [1, 50, 99, 100]

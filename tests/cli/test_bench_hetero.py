"""`kvflow bench hetero` with next to nothing to measure; it looks at every byte it has moved."""

import json

import numpy as np
import pytest

from kvflow.cli.bench.hetero.options import CASES, HeteroOptions, HeteroShape
from kvflow.cli.bench.hetero.pool import RankPool
from kvflow.cli.bench.workers.options import DECODE
from kvflow.cli.main import main

pytestmark = pytest.mark.timeout(180)  # it starts processes, which takes long where all cores are busy

SMALL = HeteroShape(layers=1, heads=4, head_bytes=16)


@pytest.mark.parametrize("case", ["tp4-tp2", "page16-page64"])
def test_direct_packed_and_chosen_are_held_against_each_other(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "hetero", "--json", "--cases", case, "--layers=1", "--tokens=64", "--rounds=1"]) == 0
    packed, chosen = (json.loads(line) for line in capfd.readouterr().out.splitlines())
    name = f"{CASES[case].prefill} -> {CASES[case].decode}"
    assert packed["case"] == chosen["case"] == name
    assert packed["ratio"] == pytest.approx(packed["kvflow"] / packed["bare"], rel=1e-2)
    assert chosen["bare"] == min(packed["kvflow"], packed["bare"])
    assert chosen["facts"]["auto chose"]
    assert packed["facts"]["packed always"] == "packed"
    assert packed["facts"]["packed never"] == "direct"


def test_cells_are_the_same_on_both_sides_whatever_their_order() -> None:
    options = HeteroOptions(case="hnd-nhd", shape=SMALL, tokens=64, tables=2)
    source = RankPool(options, 0)
    target = RankPool(HeteroOptions(side=DECODE, case="hnd-nhd", shape=SMALL, tokens=64, tables=2), 0)
    source.fill()
    target.fill()
    assert [source.has_arrived(request) for request in range(2)] == [True, True]
    source_cells, target_cells = source._in_order(), target._in_order()
    for request in range(2):
        np.testing.assert_array_equal(source_cells[:, source.tables[request]], target_cells[:, target.tables[request]])


def test_one_wrong_byte_is_found() -> None:
    pool = RankPool(HeteroOptions(case="tp4-tp2", shape=SMALL, tokens=64, tables=2), 3)
    pool.fill()
    pool._tensors.view(np.uint8)[1, pool.tables[1][0], 0, 0, 5] ^= 1
    assert [pool.has_arrived(request) for request in range(2)] == [True, False]


@pytest.mark.parametrize(
    "options", [["--cases", "nobody"], ["--tokens", "100"], ["--rounds", "0"], ["--backend", "memory"]]
)
def test_what_cannot_be_measured_is_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "hetero", *options]) == 2
    assert "kvflow bench: " in capsys.readouterr().err

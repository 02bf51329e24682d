"""`python -m simulation explore`."""

import re

import pytest

from simulation.__main__ import main
from simulation.explore import Exploration, Setup, SmallWorld, Violation

QUICK = ["explore", "--max-faults", "0"]


def test_it_says_how_much_was_walked_and_that_nothing_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(QUICK) == 0
    assert re.fullmatch(r"\d+ states, \d+ steps, \d+ ends: complete, no violation\n", capsys.readouterr().out)


def test_it_says_that_it_was_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--seconds", "1e-9"]) == 0
    assert capsys.readouterr().out == "1 states, 0 steps, 0 ends: not complete, no violation\n"


def test_a_violation_is_told_step_by_step_and_is_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def land(world: SmallWorld, number: int) -> None:
        raise AssertionError("landed")

    monkeypatch.setattr(SmallWorld, "land", land)
    assert main(QUICK) == 1
    counts, error, after, *steps = capsys.readouterr().out.splitlines()
    assert counts.endswith(": stopped at a violation")
    assert (error, after) == ("AssertionError: landed", "after")
    assert steps[0] == "    1 P0 SendOpened"
    assert steps[-1].endswith(" write 0 of P0 ends")


def test_options_make_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Setup, float | None]] = []

    def explore(setup: Setup, *, seconds: float | None) -> Exploration:
        asked.append((setup, seconds))
        return Exploration(1, 0, 0, is_complete=False, violation=Violation((), "broken at once"))

    monkeypatch.setattr("simulation.explore.command.explore", explore)
    words = (
        "explore --prefill 2 --decode 3 --rooms 2 --writes 4 --max-faults 5 --faults kill,lose --handshake --seconds 7 "
        "--posts-per-peer 1 --slots 2"
    )
    assert main(words.split()) == 1
    setup = Setup(
        num_prefill=2,
        num_decode=3,
        rooms=(1, 2),
        num_writes=4,
        max_faults=5,
        faults=("lose", "kill"),
        is_connected=False,
        posts_per_peer=1,
        slots=2,
    )
    assert asked == [(setup, 7.0)]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--prefill", "0"], "--prefill"),
        (["--max-faults", "-1"], "--max-faults"),
        (["--slots", "-1"], "--slots"),
        (["--posts-per-peer", "0"], "--posts-per-peer"),
        (["--seconds", "0"], "--seconds"),
        (["--faults", "lose,meteor"], "meteor"),
    ],
)
def test_what_makes_no_sense_is_refused(options: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explore", *options]) == 2
    assert named in capsys.readouterr().err


def test_a_fault_that_there_is_not_is_called_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explore", "--faults", "earthquake"]) == 2
    shown = capsys.readouterr().err
    assert "python -m simulation explore: unknown fault (unknown=['earthquake'], known=[" in shown

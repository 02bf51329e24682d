"""Races that were met in the field, and the language in which scenarios are written."""

import re
from pathlib import Path

import pytest

import kvflow
from simulation import ScenarioError, play
from simulation.script import parse

SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))

START = """# Nothing happened.
prefill P: page 2
decode D: page 2
request 7: 4 tokens, P to D
"""


def failure_of(text: str) -> ScenarioError:
    with pytest.raises(ScenarioError) as caught:
        play(text)
    return caught.value


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    play(path.read_text("utf-8"))


def test_there_are_scenarios() -> None:
    assert len(SCENARIOS) >= 15


def test_a_scenario_tells_its_story_with_its_own_lines() -> None:
    story = play(f"{START}P opens 7\nD receives 7\nP finishes 7\nrun 50 ms\nexpect D 7: success")
    assert [line for line in story if line.endswith("> P finishes 7")]
    assert [line for line in story if line.endswith("room 7 try 1 on D/0 ENDS success, memory safe")]


@pytest.mark.parametrize(
    ("text", "message", "values"),
    [
        ("prefill P\n", "first line must begin", {}),
        ("# a\nP dances\n", "cannot parse line", {"line": 2, "text": "P dances"}),
        (
            "# a\nP open 7\n",
            "cannot parse line",
            {"line": 2, "text": "P open 7", "did_you_mean": ["RANK opens|cannot open ROOM"]},
        ),
        ("# a\nprefill P: ranks many\nP opens 7\n", "invalid literal", {"line": 2, "text": "prefill P: ranks many"}),
        ("# a\nprefill P: wheels 4\n", "no such option", {"line": 2}),
        ("# a\nstaging: slots 1, wheels 4\n", "no such option", {"line": 2}),
        ("# a\ntimeouts lease=x\n", "line contains an invalid value", {"line": 2}),
        ("# a\nrun 10 ms\n", "no instance has been described yet", {"line": 2}),
        (f"{START}run 1 ms\nprefill Q\n", "statement must come before any action", {"line": 6}),
        (f"{START}Q opens 7\n", "no such instance", {"line": 5}),
        (f"{START}P opens 8\n", "8", {"line": 5}),
        (f"{START}P aborts 7\n", "has never had this room", {"line": 5}),
        (f"{START}P cannot open 7\n", "transfer has started", {"line": 5}),
        (f"{START}P opens 7\nP opens 7\n", "room is in use", {"line": 6}),
        (f"{START}held writes fail\n", "no write is being held", {"line": 5}),
        (f"{START}repeat Grant from D to P\n", "no such message has been sent", {"line": 5}),
        (f"{START}D receives 7\nexpect D 7: success\n", "not as expected", {"line": 6}),
        (f"{START}D receives 7\nexpect D pages: 8 free\n", "pages are not as expected", {"line": 6}),
        (f"{START}expect D ignored: notice_duplicate\n", "no anomaly of this kind was counted", {"line": 5}),
    ],
)
def test_what_is_wrong_with_a_scenario_is_said(text: str, message: str, values: dict[str, object]) -> None:
    error = failure_of(text)
    assert message in error.message
    assert {name: error.values[name] for name in values} == values


def test_a_scenario_that_leaves_something_open_fails() -> None:
    error = failure_of(f"{START}P opens 7\n")
    assert "still has {'rooms': 1}" in error.message
    assert [line for line in error.story if "room 7 try 1 on P/0 begins" in line]


def test_lines_are_numbered_and_comments_skipped() -> None:
    statements = parse(f"{START}\n# why\nrun 10 ms  # and on\n")
    assert [(one.line, one.act) for one in statements[-2:]] == [(4, "request"), (7, "run")]
    assert statements[-1].values == {"lasts": 0.01}


def test_the_scenario_in_the_document_can_be_played() -> None:
    document = Path(kvflow.__file__).parent.parent / "docs/simulation.md"
    (example,) = re.findall(r"```text\n(# sglang.*?)```", document.read_text("utf-8"), re.DOTALL)
    assert play(example)

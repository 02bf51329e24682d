"""The language of scenarios: one statement per line, close to English.

This module parses it; `scenario` carries it out.
"""

import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, Final, NamedTuple

from kvflow.errors import KvflowError

__all__ = ["STATEMENTS", "ScenarioError", "Statement", "parse", "seconds"]

MAX_FORMS: Final = 3
"""Maximum number of statements suggested for a line that cannot be parsed."""

WORD_SIMILARITY: Final = 0.7
"""Minimum similarity of two words, from 0 to 1, as `difflib` computes it."""

WHO: Final = r"\w[\w-]*(?:/\d+)?"
DURATION: Final = r"[\d.]+ (?:ms|s)"


class ScenarioError(KvflowError):
    """A scenario contains something that cannot be parsed or done, or an expectation is not met.

    Attributes:
        line: Number of the line, or 0 if the error concerns the whole scenario.
        text: The line.
        story: What had happened until then.
    """

    line = 0
    text = ""
    story: tuple[str, ...] = ()

    def at(self, line: int, text: str, story: Sequence[str] = ()) -> "ScenarioError":
        """Return this error, extended by the line where it occurred and the story until then."""
        self.line, self.text, self.story = line, text, tuple(story)
        self.values = {"line": line, "text": text, **self.values}
        return self


class Statement(NamedTuple):
    """One line of a scenario.

    Attributes:
        line: Its number, from 1.
        text: As written.
        act: Name of the act.
        values: Arguments of the act.
    """

    line: int
    text: str
    act: str
    values: dict[str, Any]


def _options(text: str | None) -> dict[str, str]:
    """Parse `ranks 2, page 4`."""
    pairs = [part.rsplit(" ", 1) for part in (text or "").split(", ") if part]
    return {pair[0]: pair[1] if len(pair) > 1 else "" for pair in pairs}


def _settings(text: str) -> dict[str, float]:
    """Parse `lease=1 drain=0.5`."""
    return {name: float(value) for name, value in (pair.split("=") for pair in text.split())}


def seconds(text: str) -> float:
    """Parse `10 ms` or `2 s` into seconds."""
    number, unit = text.split()
    return float(number) * (0.001 if unit == "ms" else 1.0)


def _facts(text: str) -> tuple[str, ...]:
    return tuple(text.split(", "))


STATEMENTS: Final = {
    "model": r"model (?P<name>\w+)",
    "instance": r"(?P<kind>prefill|decode) (?P<name>\w[\w-]*)(?:: (?P<options>.+))?",
    "timeouts": r"timeouts (?P<settings>.+)",
    "limits": r"limits (?P<settings>.+)",
    "transport": r"transport "
    r"(?P<kind>without notices|that ends with the process|that outlives the process|that shows last bytes)",
    "staging": r"staging: (?P<options>.+)",
    "request": r"request (?P<room>\d+): (?P<tokens>\d+) tokens, (?P<prefill>[\w-]+) to (?P<decode>[\w-]+)"
    r"(?:, decode has (?P<has>\d+))?",
    "open": rf"(?P<who>{WHO}) (?P<verb>opens|cannot open) (?P<room>\d+)",
    "receive": rf"(?P<who>{WHO}) (?P<verb>receives|cannot receive) (?P<room>\d+)(?: within (?P<within>{DURATION}))?",
    "announce": rf"(?P<who>{WHO}) announces (?P<room>\d+)(?: for (?P<within>{DURATION}))?",
    "grant": rf"(?P<who>{WHO}) (?P<verb>grants|cannot grant) (?P<room>\d+)",
    "reuse": rf"(?P<who>{WHO}) cannot reuse pages",
    "ticket": rf"(?P<who>{WHO}) gives a ticket for (?P<room>\d+)",
    "compute": rf"(?P<who>{WHO}) computes (?P<room>\d+) up to (?P<stop>\d+)",
    "finish": rf"(?P<who>{WHO}) finishes (?P<room>\d+)",
    "preempt": rf"(?P<who>{WHO}) preempts (?P<room>\d+)",
    "abort": rf"(?P<who>{WHO}) aborts (?P<room>\d+)",
    "process": rf"(?P<who>{WHO}) "
    r"(?P<verb>dies|vanishes|starts|stops|is blocked|goes on|closes|closes its rank|drains|breaks)",
    "message": rf"(?P<verb>hold|drop|repeat) (?P<kind>[A-Z]\w+) from (?P<source>{WHO}) to (?P<target>{WHO})",
    "release_messages": r"release messages",
    "hold_writes": rf"hold writes(?: from (?P<source>{WHO}))?(?: to (?P<target>{WHO}))?",
    "hold_no_more_writes": r"hold no more writes",
    "release_writes": r"release writes",
    "held_writes": r"held writes (?P<verb>land in part|fail|are in doubt|linger)",
    "notices": rf"(?P<verb>hold|drop) notices to (?P<target>{WHO})",
    "release_notices": r"release notices",
    "cut": rf"cut (?P<source>{WHO}) to (?P<target>{WHO})",
    "mend": r"mend",
    "run": rf"run (?P<lasts>{DURATION})",
    "release": rf"operator releases (?P<room>\d+) on (?P<who>{WHO})",
    "expect_pages": rf"expect (?P<who>{WHO}) pages: (?P<facts>\d+ \w+(?:, \d+ \w+)*)",
    "expect_anomaly": rf"expect (?P<who>{WHO}) ignored: (?P<kind>\w+)",
    "expect": rf"expect (?P<who>{WHO}) (?P<room>\d+): (?P<facts>\w+(?:, \w+)*)",
}
"""All statements, by the name of their act."""

READERS: Final[dict[str, Callable[[str], Any]]] = {
    "options": _options,
    "settings": _settings,
    "room": int,
    "tokens": int,
    "has": int,
    "stop": int,
    "lasts": seconds,
    "within": seconds,
    "facts": _facts,
}

_PATTERNS: Final = {act: re.compile(pattern) for act, pattern in STATEMENTS.items()}


def parse(text: str) -> list[Statement]:
    """Parse a scenario.

    Raises:
        ScenarioError: The first line does not begin with "# ", or a line cannot be parsed.
    """
    if not text.startswith("# "):
        raise ScenarioError("first line must begin with '# ' and say what happened in the field")
    statements = []
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.partition("#")[0].strip()
        if line:
            statements.append(_parse_line(number, line))
    return statements


def _parse_line(number: int, line: str) -> Statement:
    for act, pattern in _PATTERNS.items():
        found = pattern.fullmatch(line)
        if found is not None:
            return Statement(number, line, act, _read(number, line, found.groupdict()))
    near = _similar_forms(line)
    raise ScenarioError("cannot parse line", **{"did_you_mean": near} if near else {}).at(number, line)


def _similar_forms(line: str) -> list[str]:
    """List the statements that share the most words with a line, in the form that `_form` returns."""
    words = line.split()
    found: dict[str, int] = {}
    for form in map(_form, STATEMENTS.values()):
        known = re.findall(r"\b[a-z]+", form)
        found[form] = sum(bool(get_close_matches(word, known, 1, WORD_SIMILARITY)) for word in words)
    most = max(found.values())
    near = [form for form, count in found.items() if count == most > 0]
    return sorted(near, key=lambda form: not form.startswith(words[0]))[:MAX_FORMS]


def _form(pattern: str) -> str:
    """Turn a pattern into text: RANK opens|cannot open ROOM."""
    form = pattern.replace(WHO, "RANK").replace(DURATION, "TIME")
    form = re.sub(r"\(\?:[^()]*\)\*", "", form)
    form = re.sub(r"\(\?P<\w+>([A-Za-z| ]+)\)", r"\1", form)
    form = re.sub(r"\(\?P<(\w+)>[^()]*\)", lambda found: found[1].upper(), form)
    return re.sub(r"\(\?:([^()]*)\)\?", r"[\1]", form)


def _read(number: int, line: str, groups: dict[str, str | None]) -> dict[str, Any]:
    try:
        return {
            name: READERS[name](value) if name in READERS and value is not None else value
            for name, value in groups.items()
        }
    except (ValueError, IndexError) as error:
        raise ScenarioError("line contains an invalid value", detail=str(error)).at(number, line) from error

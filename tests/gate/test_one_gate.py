"""Limits on what comes from outside are in the gate, and nowhere else."""

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final

import kvflow

ROOT: Final = Path(kvflow.__file__).parent

JUDGED: Final = ("control", "directory", "stages", "wire/codec.py", "decode.py", "prefill.py", "rank.py")
"""Where bytes from outside pass."""

LIMIT: Final = re.compile(r"MAX_|_AT_ONCE$|_PER_S$")

ELSEWHERE: Final = {
    **dict.fromkeys(
        (
            "control/intake.py DROPPED_AT_ONCE",
            "control/intake.py LOOKED_AT_ONCE",
            "control/sockets.py MESSAGES_AT_ONCE",
        ),
        "when to let the event loop go on; nothing is lost",
    ),
    **dict.fromkeys(("rank.py EVENTS_AT_ONCE",), "of the transport; when to let the event loop go on"),
    **dict.fromkeys(
        ("stages/aggregate.py SCATTERS_AT_ONCE", "stages/enqueue.py DEVICE_WAITS_AT_ONCE"),
        "threads of this process, for what its engine has asked for",
    ),
    **dict.fromkeys(("control/diagnosis.py MAX_SHOWN", "control/dialer.py MAX_KEYS_SHOWN"), "what a log line shows"),
    "control/intake.py MAX_BROKEN": "how long connections that were cut are remembered",
    "control/sockets.py RECONNECT_MAX_MS": "how often this process tries to connect",
    "directory/lookups.py MAX_CONNECTIONS": "follows from what the core looks up at once",
}
"""Limits outside the gate, and what they are about."""

TAKERS: Final = {
    "backends/mooncake/agent.py Budget": "engines of one transport",
    "backends/mooncake/contacts.py FairShares": "threads of one transport",
    "state/prefill/offers.py FairShares": "what the core remembers of offers",
    "state/prefill/peers.py FairShares": "what the core remembers of peers: only it knows what can be given up",
    "state/prefill/waiting.py FairShares": "what the core remembers of rooms",
}
"""Who divides resources outside the gate, with what."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith("gate/"):
            yield name, ast.parse(path.read_text("utf-8"))


def targets(node: ast.stmt) -> list[ast.expr]:
    if isinstance(node, ast.AnnAssign):
        return [node.target]
    return node.targets if isinstance(node, ast.Assign) else []


def test_what_judges_bytes_has_no_limit_of_its_own() -> None:
    limits = {
        f"{name} {target.id}"
        for name, tree in modules()
        if name.startswith(JUDGED)
        for node in tree.body
        for target in targets(node)
        if isinstance(target, ast.Name) and LIMIT.search(target.id)
    }
    assert limits == ELSEWHERE.keys()


def test_nothing_else_divides_what_senders_may_take() -> None:
    makers = {
        f"{name} {node.func.id}"
        for name, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("Budget", "FairShares")
    }
    assert makers == TAKERS.keys()


def test_every_limit_of_the_gate_says_why() -> None:
    for path in sorted((ROOT / "gate").glob("*.py")):
        body = ast.parse(path.read_text("utf-8")).body
        for node, after in pairwise(body):
            names = [target.id for target in targets(node) if isinstance(target, ast.Name)]
            if any(LIMIT.search(name) for name in names) or (names and "Budget(" in ast.unparse(node)):
                assert isinstance(after, ast.Expr), f"{path.name}: {names}"

"""An engine that holds the GIL for seconds: its event loop stands still, while its sockets and writes go on."""

import random

import pytest

from kvflow.state import peers
from simulation import ScenarioError, play
from tests.support.slow import slow_except

ROOMS = (1, 2, 3)

START = """# Drawn: engines hold the interpreter for up to eight leases, at any moment of a transfer.
prefill P: page 2, ranks 2, pages 16
decode D: page 2, ranks 2, pages 16
timeouts lease=1 handshake=60 transfer=600 open=600 grant=600 progress=600 drain=60
"""


def drawn(seed: int) -> str:
    """Draw when each side acts, and who is blocked meanwhile; a blocked engine gets no calls."""
    rng = random.Random(f"busy {seed}")  # noqa: S311 - chance must be repeatable here
    requests = [f"request {room}: 4 tokens, P to D" for room in ROOMS]
    lines: dict[str, list[str]] = {"P": [], "D": []}
    for room in ROOMS:
        lines["P"] += [f"P opens {room}", f"P computes {room} up to 2", f"P finishes {room}"]
        is_announced = rng.random() < 0.5
        lines["D"] += [f"D announces {room}", f"D grants {room}"] if is_announced else [f"D receives {room}"]
    story = [*requests]
    while lines["P"] or lines["D"]:
        busy, other = rng.choice([("P", "D"), ("D", "P")])
        who, lasts_s = rng.choice([busy, f"{busy}/0", f"{busy}/1"]), rng.uniform(1.0, 8.0)
        story.append(f"{who} is blocked")
        for _ in range(rng.randint(0, 3)):
            if lines[other]:
                story += [lines[other].pop(0), f"run {rng.choice((0, 1, 5))} ms"]
        story += [f"run {lasts_s:.3f} s", f"{who} goes on", f"run {rng.choice((0, 1, 100))} ms"]
        for side in (busy, other):
            if lines[side] and rng.random() < 0.5:
                story += [lines[side].pop(0), f"run {rng.choice((0, 1, 5))} ms"]
    story += ["run 5 s", *(f"expect {side} {room}: success, safe" for room in ROOMS for side in lines)]
    return START + "\n".join(story)


@pytest.mark.parametrize("seed", slow_except(range(8), range(25)))
def test_a_busy_engine_costs_no_transfer(seed: int) -> None:
    story = play(drawn(seed))
    assert not [line for line in story if "peer_disconnected" in line or "ENDS failed" in line]


def test_it_would_with_one_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "BUSY_LEASES", 1)
    with pytest.raises(ScenarioError):
        play(drawn(0))

"""The simulation finds each deliberate fault in the protocol, and each reintroduced defect."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import pytest

from simulation import ScenarioError, play, run_seed
from tests.simulation import faulty
from tests.simulation.faulty import Fault
from tests.simulation.reverted import DEFECTS

FAULTS: Final = (*faulty.FAULTS, *DEFECTS)

SCENARIOS: Final = Path(__file__).parent / "scenarios"

EVIDENCE: Final[Mapping[str, int | str]] = MappingProxyType(
    {
        "abort_releases_pages": 34,
        "failure_releases_pages": 10,
        "elapsed_time_is_a_proof": 65,
        "one_complete_rank_is_enough": 8,
        "last_notice_is_enough": 0,
        "notices_count_twice": "kvflow-notice-that-comes-twice",
        "tokens_do_not_matter": 34,
        "decode_ignores_generations": "kvflow-drained-of-an-earlier-try",
        "closed_generations_are_forgotten": "sglang-23020-late-grant-after-cancel",
        "late_grant_is_obeyed_after_cancel": 93,
        "drained_is_said_before_posts_end": 10,
        "posting_goes_on_after_the_end": "kvflow-plan-that-comes-late",
        "goodbye_is_a_proof": 68,
        "death_is_always_a_proof": 186,
        "pages_that_are_held_are_taken_again": 0,
        "silence_is_a_proof": 68,
        "doubt_is_an_end": 194,
        "written_is_delivered": 0,
        "receivers_have_no_deadline": 7,
        "senders_have_no_deadline": 6,
        "credit_is_not_given_back": 47,
        "free_source_pages_are_a_proof_for_the_destination": 83,
        "cancels_are_not_said": 0,
        "digests_are_believed": 86,
        "notices_go_with_writes_that_they_overtake": 3,
        "notices_prove_ends_although_digests_differ": 33,
        "the_first_piece_of_the_last_chunk_ends_the_transfer": 0,
        "the_last_piece_of_every_chunk_ends_the_transfer": 0,
        "later_layers_are_not_waited_for": 2,
        "layers_of_a_chunk_count_as_the_whole": 17,
        "staged_notices_count_before_they_are_scattered": 7,
        "pages_are_given_back_while_they_are_scattered": 55,
        "slots_are_free_as_soon_as_their_write_has_ended": 12,
        "slots_of_writes_that_linger_are_used_again": "kvflow-slot-of-a-lingering-write",
        "slots_are_not_asked_for": 109,
        "windows_of_the_lost_go_to_others_without_a_proof": "kvflow-window-of-a-dead-rank",
        "tickets_are_good_for_any_process": "kvflow-ticket-of-the-process-before",
        "goodbye_is_said_first_and_proofs_after_it_are_dropped": 158,
        "the_fate_of_rooms_decides_about_an_instance": 3,
        "sockets_have_no_heartbeats": 10,
        "ports_are_refused_while_bytes_may_still_land": "kvflow-rank-closed-before-its-bytes-landed",
        "windows_do_not_come_back": 7,
        "windows_of_ranks_that_left_are_remembered": 63,
        "broken_connections_say_nothing": 7,
        "engines_are_told_when_pages_are_quiet": 17,
        "quiesced_pages_are_not_waited_for": 13,
        "direct_writes_of_quiesced_pages_are_not_waited_for": 13,
        "plans_of_quiesced_pages_are_not_waited_for": 24,
        "tokens_that_were_forgotten_do_not_come_again": 18,
        "events_of_forgotten_data_count_for_what_comes_again": 18,
        "layers_that_have_left_come_again": 26,
        "empty_notices_overtake_pieces": 42,
        "ranks_that_leave_end_writes_that_go_on": 1765,
        "notices_go_to_any_rank_of_an_endpoint": 294,
        "announcements_keep_no_pages": 233,
        "pages_that_come_later_are_always_safe": 3,
        "rooms_are_announced_once": "kvflow-decode-that-dies-before-it-has-pages",
        "announced_rooms_may_be_without_pages_for_ever": 18,
        "announced_rooms_outlive_their_decode_rank": 91,
        "declines_of_announced_rooms_are_not_heard": "kvflow-decode-that-has-no-pages-yet",
        "pages_of_announced_rooms_are_not_held": 1,
        "announced_rooms_are_said_to_hold_pages": 10,
        "sound_connections_of_the_living_must_end": 113,
        "errors_lose_the_remaining_effects": 5,
    }
)
"""What finds each fault: the first seed that does, or a scenario if that takes too many seeds."""

NEARBY: Final = range(200)
"""Seeds to try if the one above misses its fault because the code has changed its draws."""

DRAWN: Final = range(320)
RARE: Final = (
    "decode_ignores_generations",
    "closed_generations_are_forgotten",
    "slots_of_writes_that_linger_are_used_again",
    "windows_of_the_lost_go_to_others_without_a_proof",
    "ports_are_refused_while_bytes_may_still_land",
    "rooms_are_announced_once",
    "declines_of_announced_rooms_are_not_heard",
)
"""Those that need several rare events in one order, among the faults that a scenario finds. Seeds find them too rarely
for a test."""


def is_found_by(evidence: int | str) -> bool:
    """Return whether a run breaks a promise. A fault that raises does not count: its patch may be outdated."""
    if isinstance(evidence, int):
        violation = run_seed(evidence).violation
        return violation is not None and "event_failed" not in violation
    try:
        play((SCENARIOS / f"{evidence}.txt").read_text("utf-8"))
    except ScenarioError as error:
        return "event_failed" not in str(error)
    return False


def is_found_by_any(seeds: Iterable[int]) -> bool:
    return any(is_found_by(seed) for seed in seeds)


def is_staged(fault: Fault) -> bool:
    """Return whether a scenario finds the fault, not a seed."""
    return isinstance(EVIDENCE[fault.__name__], str)


def name_of(fault: Fault) -> str:
    return fault.__name__.replace("_", " ")


@pytest.mark.parametrize("fault", FAULTS, ids=name_of)
def test_fault_is_found(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    evidence = EVIDENCE[fault.__name__]
    assert is_found_by(evidence) or (isinstance(evidence, int) and is_found_by_any(NEARBY))


@pytest.mark.slow
@pytest.mark.parametrize("fault", [one for one in FAULTS if is_staged(one) and one.__name__ not in RARE], ids=name_of)
def test_fault_is_found_by_what_is_drawn(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above finds all others by what is drawn, too."""
    fault(monkeypatch)
    assert is_found_by_any(DRAWN)


@pytest.mark.parametrize("evidence", [seed for seed in EVIDENCE.values() if isinstance(seed, int) and seed >= 200])
def test_no_promise_is_broken_without_the_fault(evidence: int) -> None:
    """Other tests run all scenarios, and the seeds below 200."""
    assert not is_found_by(evidence)

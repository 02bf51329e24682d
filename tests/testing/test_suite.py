"""The contract suite finds the faults that it is meant to find."""

import functools
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.testing import faulty_transports

FILE: Final = Path(faulty_transports.__file__)

FINDS: Final = {
    "TestEndsTwice": "test_a_write_without_notice_brings_none",
    "TestLosesEnds": "test_closing_gives_every_post_its_end",
    "TestNeverEnds": "test_connecting_twice_changes_nothing",
    "TestDoubtsAfterTheEnd": "test_disconnecting_lets_posts_end",
    "TestEndsBeforeItHasRead": "test_pages_may_change_once_their_post_has_ended",
    "TestNoticesFirst": "test_notices_come_once_each_and_after_their_bytes_in_both_directions_at_once",
    "TestNoticesTwice": "test_a_write_without_notice_brings_none",
    "TestLosesNotices": "test_one_side_alone_can_connect",
    "TestCorrupts": "test_descriptors_of_one_post_may_have_any_lengths",
    "TestDeliversInsidePost": "test_the_next_write_can_be_posted_when_the_last_one_is_reported",
    "TestDeliversInAnotherThread": "test_connecting_twice_changes_nothing",
    "TestDeliversAfterClose": "test_closing_gives_every_post_its_end",
    "TestDeliversNothingAtAll": "test_a_write_without_notice_brings_none",
    "TestRefusesLate": "test_a_range_that_is_not_registered_is_refused",
    "TestTrustsMetadata": "test_damaged_or_foreign_metadata_is_refused",
    "TestNeverForgetsAPeer": "test_a_peer_can_be_disconnected_and_connected_again",
    "TestWritesOnAfterClose": "test_closing_without_waiting_leaves_the_source_alone",
    "TestRegistersAgain": "test_memory_is_registered_once",
    "TestViewsACopy": "test_registered_memory_can_be_seen_without_a_copy",
}
"""Which test finds which fault."""

ALLOWED: Final = {"TestTellsErrorsLast": "test_a_target_that_closes_does_not_hold_up_other_peers"}
"""Behaviour that is allowed, and the test that must accept it."""


@functools.cache
def outcomes() -> dict[tuple[str, str], set[str]]:
    """Return the outcomes ("PASSED", "FAILED", ...) by class and test; a parametrised test may have several."""
    pairs = [*FINDS.items(), *ALLOWED.items(), *(("TestNothingIsWrong", test) for test in FINDS.values())]
    nodes = [f"{FILE}::{suite}::{test}" for suite, test in dict.fromkeys(pairs)]
    command = [sys.executable, "-m", "pytest", "-rA", "--tb=no", "-p", "no:cacheprovider", *nodes]
    done = subprocess.run(command, capture_output=True, check=False, timeout=55, text=True)
    found: dict[tuple[str, str], set[str]] = {}
    for line in done.stdout.splitlines():
        outcome, _, node = line.partition(" ")
        if node.count("::") == 2 and outcome.isupper():
            _, suite, test = node.partition(" - ")[0].split("::")
            found.setdefault((suite, test.partition("[")[0]), set()).add(outcome)
    return found


@pytest.mark.parametrize(("suite", "test"), FINDS.items())
def test_a_fault_is_found(suite: str, test: str) -> None:
    assert outcomes()[suite, test] == {"FAILED"}


@pytest.mark.parametrize("test", sorted(set(FINDS.values())))
def test_what_has_no_fault_passes(test: str) -> None:
    assert outcomes()["TestNothingIsWrong", test] == {"PASSED"}


@pytest.mark.parametrize(("suite", "test"), ALLOWED.items())
def test_what_is_allowed_passes(suite: str, test: str) -> None:
    assert outcomes()[suite, test] == {"PASSED"}


def test_every_fault_is_looked_for() -> None:
    suites = {name for name in vars(faulty_transports) if name.startswith("Test")}
    assert suites == {*FINDS, *ALLOWED, "TestNothingIsWrong"}

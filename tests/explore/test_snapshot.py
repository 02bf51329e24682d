"""Copies of cores: what a copy does must not change the original."""

import pytest

from kvflow.state.timers import Timers
from simulation.explore.snapshot import copied, fingerprint


class Core:
    def __init__(self) -> None:
        self.timers: Timers[str] = Timers()
        self.note = self._note
        self.notes: list[str] = []

    def _note(self, text: str) -> None:
        self.notes.append(text)


def test_methods_of_a_copy_are_those_of_the_copy() -> None:
    core = Core()
    copy = copied(core, {})
    copy.note("here")
    assert (core.notes, copy.notes) == ([], ["here"])


def test_functions_that_enclose_the_original_are_refused() -> None:
    core = Core()
    core.note = lambda text: core.notes.append(text)  # noqa: PLW0108
    with pytest.raises(TypeError, match="encloses"):
        copied(core, {})


def test_timers_are_the_same_if_the_same_is_due_in_the_same_order() -> None:
    core, again, other, turned = Core(), Core(), Core(), Core()
    for one in (core, again):
        one.timers.set("first", 1.0)
        one.timers.set("second", 1.0)
    again.timers.set("third", 2.0)
    again.timers.set("second", 1.0)
    again.timers.clear("third")
    other.timers.set("first", 1.0)
    other.timers.set("second", 1.5)
    turned.timers.set("second", 1.0)
    turned.timers.set("first", 1.0)
    assert fingerprint([core]) == fingerprint([again])
    assert len({fingerprint([one]) for one in (core, other, turned)}) == 3

"""What the handshake of a decode rank may take from a transport."""

from collections import Counter
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.gate import hellos
from kvflow.gate.hellos import UnclosedAgents, agent_denial

OWN: Final = ["me", "shared"]


@pytest.mark.parametrize("agent", ["me", "me#1", "shared", "shared#12"])
def test_an_agent_of_this_process_is_for_its_own_ranks(agent: str) -> None:
    assert "agent of this process" in agent_denial(agent, OWN, is_ours=False)
    assert agent_denial(agent, OWN, is_ours=True) == ""


@pytest.mark.parametrize("agent", ["you", "me2", "mesh#1", ""])
def test_any_other_agent_is_allowed(agent: str) -> None:
    assert agent_denial(agent, OWN, is_ours=False) == ""


@given(st.lists(st.sampled_from("abc"), max_size=60), st.integers(1, 20))
def test_no_instance_has_more_unclosed_agents_than_are_left_for_others(comes: list[str], most: int) -> None:
    """Every agent comes, leaves and keeps its descriptors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hellos, "MAX_UNCLOSED", most)
        left, unclosed, taken = UnclosedAgents(), set[str](), Counter[str]()
        for number, instance in enumerate(comes):
            agent = f"{instance}{number}"
            is_denied = bool(left.denial(agent, instance, unclosed))
            assert is_denied is (bool(unclosed) and taken[instance] + 1 > most - taken.total())
            if not is_denied:
                unclosed.add(agent)
                taken[instance] += 1
                left.note_gone(agent, instance)
                assert left.denial(agent, instance, unclosed) == "", "it may come back"
        assert taken.total() <= max(most, 1)

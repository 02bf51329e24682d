"""Waiting grants against a plain list."""

from hypothesis import given
from hypothesis import strategies as st

from kvflow.state.waiting import WaitingGrants
from kvflow.wire.messages import Grant, PeerId
from tests.support.cores import grant, peer

PEERS = [peer("decode", rank) for rank in range(3)]
STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "put", "take"]), st.integers(0, 3), st.sampled_from(PEERS)), max_size=80
)


@given(STEPS)
def test_they_agree_with_a_list(steps: list[tuple[str, int, PeerId]]) -> None:
    waiting = WaitingGrants()
    plain: list[tuple[int, PeerId, Grant]] = []
    for number, (step, room, asker) in enumerate(steps):
        places = [place for place, entry in enumerate(plain) if entry[:2] == (room, asker)]
        if step == "put":
            asked = grant(room=room, generation=number)
            waiting.put(asker, asked)
            if places:
                plain[places[0]] = (room, asker, asked)
            else:
                plain.append((room, asker, asked))
        elif places:
            assert waiting.take(room, asker) == plain.pop(places[0])[2]
        assert len(waiting) == len(plain)
        assert sorted(waiting.everybody()) == sorted(entry[:2] for entry in plain)
        for where in range(4):
            assert waiting.of_room(where) == [entry[1] for entry in plain if entry[0] == where], "first come first"
            assert (where in waiting) == any(entry[0] == where for entry in plain)
        for who in PEERS:
            assert sorted(waiting.of_peer(who)) == sorted(entry[0] for entry in plain if entry[1] == who)
            for where in range(4):
                found = [entry[2] for entry in plain if entry[:2] == (where, who)]
                assert waiting.find(where, who) == (found[0] if found else None)

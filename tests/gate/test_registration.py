"""Who may register where."""

import pytest

from kvflow.gate.identity import REGISTRY, registration_denial
from kvflow.trust import ANY
from kvflow.wire.messages import PeerId, RankId, Refuse, RegistrationConflict
from tests.directory.records import sealed

OWN = sealed(num_ranks=2)
SECOND = PeerId(RankId(OWN.peer.rank.instance, 1), 7)
OTHER = PeerId(RankId("other", 1), 7)


@pytest.mark.parametrize("own", [None, OWN])
@pytest.mark.parametrize("num_ranks", [2, None])
def test_the_key_must_be_listed_for_the_instance(own: object, num_ranks: int | None) -> None:
    denied = registration_denial(("other",), SECOND, num_ranks, OWN if own else None)
    assert denied is not None
    assert isinstance(denied[0], Refuse)
    assert denied[0].peer == (OWN.peer if own else REGISTRY)
    for names in (ANY,), (SECOND.rank.instance,), ("x", f"{SECOND.rank.instance}*"):
        assert registration_denial(names, SECOND, num_ranks, OWN if own else None) is None


def test_a_rank_hosts_its_own_instance_only_and_keeps_its_name() -> None:
    assert registration_denial((ANY,), OTHER, 2, None) is None
    for peer, num_ranks in ((OTHER, 2), (SECOND, 3)):
        denied = registration_denial((ANY,), peer, num_ranks, OWN)
        assert denied is not None
        assert denied[1] == "rank of a different instance registers"
    other = OWN.peer._replace(incarnation=OWN.peer.incarnation + 1)
    denied = registration_denial((ANY,), other, 2, OWN)
    assert denied is not None
    assert isinstance(denied[0], RegistrationConflict)
    assert denied[0].refused

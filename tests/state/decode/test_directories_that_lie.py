"""A directory may list a rank at any address. What listens there does not prove that the rank's process has ended."""

import pytest
from msgspec.structs import replace

from kvflow.state import events as ev
from kvflow.state.effects import DecodeEffect, Disconnect, LookUp, ProbePeer
from kvflow.wire.messages import Grant, Hello, PeerId, Ping, Pong, Refuse
from tests.support.cores import (
    DECODE,
    OTHER_PREFILL,
    PREFILL,
    DecodeDriver,
    endpoint_of,
    messages,
    of_kind,
    peer,
    records,
    reports,
    welcome_of,
)
from tests.support.receiving import request

LIE = "tcp://10.0.0.66:6666"
DRAINING = [("failed", "draining")]
SAFE = [*DRAINING, ("failed", "safe")]


def connect(core: DecodeDriver, other: PeerId, *, listed: str, said: str, room: int = 7) -> list[DecodeEffect]:
    """Grant a room to a rank that the directory lists at one address, and that reports another itself."""
    core(request(room, room=room, instance=other.rank.instance))
    found = tuple(replace(record, endpoint=listed) for record in records(other))
    effects = core.compiled(core(ev.InstanceFound(other.rank.instance, found)))
    ((_, hello),) = messages(effects, Hello)
    assert isinstance(hello, Hello)
    return core.hear(other, welcome_of(other, hello, endpoint=said))


@pytest.fixture
def core() -> DecodeDriver:
    return DecodeDriver()


def test_a_rank_is_probed_where_it_has_said_that_it_listens(core: DecodeDriver) -> None:
    connect(core, PREFILL, listed=LIE, said=endpoint_of(PREFILL))
    assert of_kind(core(ev.ConnectionLost(PREFILL)), ProbePeer) == [ProbePeer(PREFILL, endpoint_of(PREFILL))]
    assert reports(core(ev.ProbeFinished(PREFILL, is_gone=True))) == SAFE


def test_an_instance_that_is_not_listed_any_more_is_asked_at_once_and_goes_on_if_it_answers(core: DecodeDriver) -> None:
    connect(core, PREFILL, listed=LIE, said=endpoint_of(PREFILL))
    effects = core(ev.InstanceDoubted("prefill"))
    assert of_kind(effects, ProbePeer) == [ProbePeer(PREFILL, endpoint_of(PREFILL))]
    assert [to for to, _ in messages(effects, Ping)] == [PREFILL]
    assert of_kind(effects, LookUp) == [LookUp("prefill")]
    assert not reports(effects), "the directory may lie"
    assert not messages(core(request(8, room=8)), Grant)
    assert len(messages(core.hear(PREFILL, Pong(peer=PREFILL)), Grant)) == 1


def test_doubts_about_an_instance_that_is_not_connected_change_nothing(core: DecodeDriver) -> None:
    assert core(ev.InstanceDoubted("prefill")) == []
    core(request())
    core.compiled(core.found(PREFILL))
    assert core(ev.InstanceDoubted("prefill")) == []


def test_a_process_that_is_listed_instead_replaces_one_that_is_silent(core: DecodeDriver) -> None:
    connect(core, PREFILL, listed=endpoint_of(PREFILL), said=endpoint_of(PREFILL))
    core(ev.InstanceDoubted("prefill"))
    successor = peer("prefill", incarnation=2)
    hellos = core.compiled(core.found(successor))
    ((_, hello),) = messages(hellos, Hello)
    assert isinstance(hello, Hello)
    effects = core.hear(successor, welcome_of(successor, hello, endpoint="tcp://10.0.0.2:7000"))
    assert reports(effects) == DRAINING, "its pages wait for a proof"


def test_a_rank_that_has_not_said_where_it_listens_is_not_probed(core: DecodeDriver) -> None:
    connect(core, PREFILL, listed=LIE, said="")
    assert not of_kind([*core(ev.ConnectionLost(PREFILL)), *core.sleep(60.0)], ProbePeer)


def test_nothing_is_probed_before_it_has_answered(core: DecodeDriver) -> None:
    core(request())
    core.compiled(core.found(PREFILL))
    assert not of_kind([*core(ev.ConnectionLost(PREFILL)), *core.sleep(60.0)], ProbePeer)


@pytest.mark.parametrize(("listed", "outcome"), [(LIE, DRAINING), (endpoint_of(PREFILL), SAFE)])
def test_somebody_else_proves_that_a_rank_has_ended_only_at_its_own_port(
    core: DecodeDriver, listed: str, outcome: object
) -> None:
    connect(core, PREFILL, listed=listed, said=endpoint_of(PREFILL))
    effects = core.hear(PREFILL, Refuse(peer=OTHER_PREFILL, to=DECODE, detail="who are you?"))
    assert reports(effects) == outcome
    assert Disconnect(PREFILL) in effects
    assert of_kind(effects, LookUp) == [LookUp("prefill")]
    assert core.found(PREFILL) == [], "it is not asked for there again and again"


@pytest.mark.parametrize(
    ("listed", "said", "outcome"),
    [
        (endpoint_of(PREFILL), endpoint_of(PREFILL), SAFE),
        (endpoint_of(PREFILL), LIE, SAFE),
        (LIE, endpoint_of(PREFILL), []),
        (LIE, LIE, []),
    ],
)
def test_who_was_reached_at_a_port_proves_that_the_one_who_listened_there_has_ended(
    core: DecodeDriver, listed: str, said: str, outcome: object
) -> None:
    """The address that was actually reached counts, not the one that the rank reports."""
    connect(core, PREFILL, listed=LIE, said=endpoint_of(PREFILL))
    effects = connect(core, peer("stranger"), listed=listed, said=said, room=8)
    assert reports(effects) == outcome

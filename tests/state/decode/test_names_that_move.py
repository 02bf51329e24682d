"""The name in an address may lead to another host later, which proves nothing about the process on the first one."""

import pytest
from msgspec.structs import replace

from kvflow.state import events as ev
from kvflow.state.effects import DecodeEffect, ProbePeer
from kvflow.wire.messages import Hello, PeerId, Refuse
from tests.support.cores import (
    DECODE,
    OTHER_PREFILL,
    PREFILL,
    DecodeDriver,
    messages,
    of_kind,
    peer,
    records,
    reports,
    welcome_of,
)
from tests.support.receiving import request

NAME = "tcp://prefill-0.example:7000"
HERE, ELSEWHERE = "10.0.0.1", "fd00::2"
DRAINING = [("failed", "draining")]
SAFE = [*DRAINING, ("failed", "safe")]


def connect(core: DecodeDriver, other: PeerId, *, host: str, room: int = 7, **said: str) -> list[DecodeEffect]:
    """Grant a room to a rank that is listed by name, and that was reached at a host."""
    core(request(room, room=room, instance=other.rank.instance))
    found = tuple(replace(record, endpoint=said.get("listed", NAME)) for record in records(other))
    effects = core.compiled(core(ev.InstanceFound(other.rank.instance, found)))
    ((_, hello),) = messages(effects, Hello)
    assert isinstance(hello, Hello)
    return core.hear(other, welcome_of(other, hello, endpoint=said.get("endpoint", NAME)), host)


@pytest.fixture
def core() -> DecodeDriver:
    return DecodeDriver()


@pytest.mark.parametrize(
    ("host", "probed"), [(HERE, "tcp://10.0.0.1:7000"), (ELSEWHERE, "tcp://[fd00::2]:7000"), ("", None)]
)
def test_the_host_that_has_answered_is_probed(core: DecodeDriver, host: str, probed: str | None) -> None:
    connect(core, PREFILL, host=host)
    probes = of_kind([*core(ev.ConnectionLost(PREFILL)), *core.sleep(60.0)], ProbePeer)
    assert [probe.endpoint for probe in probes[:1]] == ([] if probed is None else [probed])


def test_a_name_that_was_not_reached_itself_is_not_probed(core: DecodeDriver) -> None:
    connect(core, PREFILL, host=HERE, listed="tcp://10.0.0.1:7000")
    assert not of_kind([*core(ev.ConnectionLost(PREFILL)), *core.sleep(60.0)], ProbePeer)


@pytest.mark.parametrize("address", ["tcp://localhost:7000", "tcp://10.0.0.9:7000", "tcp://[fd00::9]:7000"])
def test_addresses_that_do_not_move_are_probed_as_they_are(core: DecodeDriver, address: str) -> None:
    connect(core, PREFILL, host=HERE, listed=address, endpoint=address)
    assert of_kind(core(ev.ConnectionLost(PREFILL)), ProbePeer) == [ProbePeer(PREFILL, address)]


@pytest.mark.parametrize(("host", "outcome"), [(HERE, SAFE), (ELSEWHERE, DRAINING)])
def test_somebody_else_proves_an_end_only_on_the_same_host(core: DecodeDriver, host: str, outcome: object) -> None:
    connect(core, PREFILL, host=HERE)
    core(ev.ConnectionLost(PREFILL))
    refused = Refuse(peer=OTHER_PREFILL, to=DECODE, detail="who are you?")
    assert reports(core.hear(PREFILL, refused, host)) == outcome


@pytest.mark.parametrize(("host", "outcome"), [(HERE, SAFE), (ELSEWHERE, DRAINING)])
def test_a_successor_proves_an_end_only_on_the_same_host(core: DecodeDriver, host: str, outcome: object) -> None:
    connect(core, PREFILL, host=HERE)
    core(ev.ConnectionLost(PREFILL))
    assert reports(connect(core, peer("prefill", incarnation=2), host=host, room=8))[:2] == outcome


def test_an_end_on_the_first_host_is_a_proof_after_the_name_has_moved(core: DecodeDriver) -> None:
    connect(core, PREFILL, host=HERE)
    core(ev.ConnectionLost(PREFILL))
    effects = connect(core, peer("prefill", incarnation=2), host=ELSEWHERE, room=8)
    assert reports(effects) == DRAINING
    again = core(ev.ProbeFinished(PREFILL, is_gone=False))  # begun when the connection was lost
    assert of_kind(again, ProbePeer) == [ProbePeer(PREFILL, "tcp://10.0.0.1:7000")]
    assert reports(core(ev.ProbeFinished(PREFILL, is_gone=True))) == [("failed", "safe")]

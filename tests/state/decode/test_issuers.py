"""Tickets of processes that listen no more: their rooms fail as soon as a probe of the address is refused."""

import pytest
from msgspec.structs import replace

from kvflow.config import Timeouts
from kvflow.errors import FailureReason
from kvflow.state import events as ev
from kvflow.state.decode import dialing, issuers
from kvflow.state.effects import DecodeEffect, ProbeAddress, ReportReceiver
from kvflow.state.tables import Memory
from kvflow.wire.messages import Decline, Grant, Hello, PeerId
from tests.support.cores import (
    OTHER_PREFILL,
    PREFILL,
    DecodeDriver,
    endpoint_of,
    messages,
    of_kind,
    peer,
    records,
    welcome_of,
)
from tests.support.receiving import request

HANDSHAKE_S = Timeouts().handshake_s
LOOK_AGAIN_S = dialing.LOOK_AGAIN_S
HERE = ev.InstanceAddress(endpoint_of(PREFILL))
TICKET = ev.InstanceAddress(endpoint_of(PREFILL), "prefill")
AGAIN = peer("prefill", incarnation=2)


@pytest.fixture
def core() -> DecodeDriver:
    return DecodeDriver()


def ticket(room: int, issuer: PeerId = PREFILL, ref: ev.InstanceAddress = TICKET) -> ev.ReceiveOpened:
    """Return a request with the ticket of a process that listens at the address in it."""
    return replace(request(room, room=room, instance=ref, issuer=issuer), is_own_address=True)


def answer(core: DecodeDriver, ref: ev.InstanceAddress, *peers: PeerId) -> list[DecodeEffect]:
    first, *others = records(*peers)
    return core(ev.InstanceFound(ref, (replace(first, endpoint=ref.address), *others), 2**31))


def probe_in(effects: list[DecodeEffect]) -> ProbeAddress:
    (probe,) = of_kind(effects, ProbeAddress)
    assert isinstance(probe, ProbeAddress)
    return probe


def refused(core: DecodeDriver, probe: ProbeAddress, *, is_refused: bool = True) -> list[DecodeEffect]:
    return core(ev.AddressProbed(probe.instance, probe.number, is_refused))


def failures(effects: list[DecodeEffect]) -> list[tuple[int, FailureReason]]:
    found = [(effect.room, effect.failure) for effect in of_kind(effects, ReportReceiver)]
    return list(dict.fromkeys((room, failure.reason) for room, failure in found if failure is not None))


def test_a_ticket_fails_when_its_address_refuses_and_says_so(core: DecodeDriver) -> None:
    assert not of_kind(core(ticket(1)), ProbeAddress), "an answer may come at once"
    probe = probe_in(core.sleep(LOOK_AGAIN_S))
    assert probe.instance == TICKET
    *_, report = of_kind(refused(core, probe), ReportReceiver)
    assert (report.failure.reason, report.memory) == (FailureReason.UNREACHABLE, Memory.SAFE)
    assert f"{TICKET.address} refuses connections" in report.failure.detail
    assert str(PREFILL) in report.failure.detail


def test_what_is_no_ticket_of_a_process_at_the_address_is_not_probed_and_waits(core: DecodeDriver) -> None:
    core(request(1, room=1, instance=HERE))
    core(request(2, room=2, instance="prefill"))
    core(request(3, room=3, instance=TICKET, issuer=PREFILL))
    effects = core.sleep(HANDSHAKE_S - LOOK_AGAIN_S)
    assert (of_kind(effects, ProbeAddress), failures(effects)) == ([], [])


def test_others_that_wait_for_the_same_address_go_on_waiting(core: DecodeDriver) -> None:
    core(request(1, room=1, instance=TICKET))
    core(request(2, room=2, instance=TICKET, issuer=PREFILL))
    core(ticket(3))
    core(ticket(4, ref=ev.InstanceAddress("tcp://10.9.9.9:7000", "prefill")))
    first, second = of_kind(core.sleep(LOOK_AGAIN_S), ProbeAddress)
    assert failures(refused(core, first)) == [(3, FailureReason.UNREACHABLE)]
    assert failures(refused(core, second)) == [(4, FailureReason.UNREACHABLE)]
    granted = messages(core.welcome(core.compiled(answer(core, TICKET, PREFILL))), Grant)
    assert [message.room for _, message in granted if isinstance(message, Grant)] == [1, 2]


def test_a_ticket_that_comes_while_a_probe_runs_is_judged_by_the_next(core: DecodeDriver) -> None:
    """Another process may have begun to listen there and have issued it."""
    core(ticket(1))
    probe = probe_in(core.sleep(LOOK_AGAIN_S))
    core(ticket(2, AGAIN))
    assert not of_kind(core.sleep(LOOK_AGAIN_S), ProbeAddress), "one runs"
    assert failures(refused(core, probe)) == [(1, FailureReason.UNREACHABLE)]
    probe = probe_in(core.sleep(LOOK_AGAIN_S))
    assert failures(refused(core, probe, is_refused=False)) == []
    granted = messages(core.welcome(core.compiled(answer(core, TICKET, AGAIN))), Grant)
    assert [to for to, _ in granted] == [AGAIN]


def test_an_address_that_does_not_refuse_is_probed_again_in_case_its_process_ends(core: DecodeDriver) -> None:
    core(ticket(1))
    refused(core, probe_in(core.sleep(LOOK_AGAIN_S)), is_refused=False)
    assert not of_kind(core.sleep(issuers.PROBE_AGAIN_S - LOOK_AGAIN_S), ProbeAddress)
    probe = probe_in(core.sleep(LOOK_AGAIN_S))
    assert failures(refused(core, probe)) == [(1, FailureReason.UNREACHABLE)]


def test_without_a_refusal_the_handshake_has_its_time(core: DecodeDriver) -> None:
    core(ticket(1))
    effects = core.sleep(HANDSHAKE_S)
    assert len(of_kind(effects, ProbeAddress)) == 1, "its host drops packets"
    assert failures(effects) == [(1, FailureReason.UNREACHABLE)]


def test_a_restarted_process_at_the_address_makes_the_ticket_stale(core: DecodeDriver) -> None:
    core(ticket(1))
    probe = probe_in(core.sleep(LOOK_AGAIN_S))
    assert failures(answer(core, TICKET, AGAIN)) == [(1, FailureReason.STALE_TICKET)]
    assert failures(refused(core, probe)) == []


def test_an_issuer_that_is_connected_is_left_to_its_lease(core: DecodeDriver) -> None:
    """Its address in the ticket refuses, for example because a firewall does; another of its ranks is silent."""
    core(ticket(1))
    core.welcome(core.compiled(answer(core, TICKET, PREFILL, OTHER_PREFILL)))
    core(ev.ConnectionLost(OTHER_PREFILL))
    assert failures(core(ticket(2))) == []
    effects = core.sleep(2 * LOOK_AGAIN_S)
    assert (of_kind(effects, ProbeAddress), failures(effects)) == ([], [])


def test_an_issuer_that_has_connected_meanwhile_is_left_to_its_lease(core: DecodeDriver) -> None:
    core(ticket(1))
    probe = probe_in(core.sleep(LOOK_AGAIN_S))
    ((to, hello),) = messages(core.compiled(answer(core, TICKET, PREFILL, OTHER_PREFILL)), Hello)
    assert isinstance(hello, Hello)
    core.hear(to, welcome_of(to, hello))
    assert failures(refused(core, probe)) == [], "it waits for the other rank"


def test_a_ticket_of_a_process_whose_name_a_connected_one_has_fails_alone(core: DecodeDriver) -> None:
    elsewhere = ev.InstanceAddress("tcp://10.9.9.9:7000", "prefill")
    core(ticket(1))
    core.welcome(core.compiled(answer(core, TICKET, PREFILL)))
    core(ticket(2, AGAIN, elsewhere))
    effects = refused(core, probe_in(core.sleep(LOOK_AGAIN_S)))
    assert failures(effects) == [(2, FailureReason.UNREACHABLE)]
    assert messages(effects, Decline) == [], "the connected process has not issued it"
    assert messages(core(ticket(3)), Grant)


def test_later_tickets_are_probed_for_themselves(core: DecodeDriver) -> None:
    """The next process at the address may have issued them."""
    for room in (1, 2, 3):
        assert failures(core(ticket(room, peer("prefill", incarnation=room)))) == []
        probe = probe_in(core.sleep(LOOK_AGAIN_S))
        assert failures(refused(core, probe)) == [(room, FailureReason.UNREACHABLE)]
    assert not of_kind(core.sleep(HANDSHAKE_S), ProbeAddress), "no room waits"


def test_many_tickets_of_one_address_take_one_probe(core: DecodeDriver) -> None:
    for room in range(1, 50):
        core(ticket(room))
    probe = probe_in(core.sleep(LOOK_AGAIN_S))
    assert len(failures(refused(core, probe))) == 49


def test_probes_at_once_are_bounded(core: DecodeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(issuers, "MAX_LOOKUPS", 2)
    for room in range(1, 5):
        core(ticket(room, ref=ev.InstanceAddress(f"tcp://10.0.0.{room}:7000", f"prefill-{room}")))
    probes = of_kind(core.sleep(LOOK_AGAIN_S), ProbeAddress)
    assert len(probes) == 2
    refused(core, probes[0])
    assert len(of_kind(core.sleep(LOOK_AGAIN_S), ProbeAddress)) == 1


def test_an_address_that_has_no_place_is_not_probed(core: DecodeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(issuers, "MAX_LOOKUPS", 1_000)
    for room in range(1, 81):
        core(ticket(room, ref=ev.InstanceAddress(f"tcp://10.0.0.{room % 9}:{7000 + room}", f"prefill-{room}")))
    assert len(of_kind(core.sleep(LOOK_AGAIN_S), ProbeAddress)) <= dialing.MAX_LOOKUPS


def test_a_probe_of_what_was_forgotten_says_nothing(core: DecodeDriver) -> None:
    core(ticket(1))
    probe = probe_in(core.sleep(LOOK_AGAIN_S))
    core.sleep(HANDSHAKE_S + 60.0)
    assert refused(core, probe) == []
    assert list(core.core.instances._instances) == []

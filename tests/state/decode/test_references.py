"""Rooms that name their instance by address or ticket, and the ranks that are granted."""

import pytest
from msgspec.structs import replace

from kvflow.config import Timeouts
from kvflow.errors import FailureReason
from kvflow.room import RoomId
from kvflow.state import events as ev
from kvflow.state.decode import dialing, instances
from kvflow.state.effects import CompileRoutes, DecodeEffect, LookUp, ProbePeer, ReportReceiver
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
)
from tests.support.receiving import request

HANDSHAKE_S = Timeouts().handshake_s
AGAIN = peer("prefill", incarnation=2)
OTHER = peer("other")
HERE = ev.InstanceAddress(endpoint_of(PREFILL))
TICKET = ev.InstanceAddress(endpoint_of(PREFILL), "prefill")
ELSEWHERE = ev.InstanceAddress("tcp://10.9.9.9:7000", "prefill")


@pytest.fixture
def core() -> DecodeDriver:
    return DecodeDriver()


def answer(core: DecodeDriver, ref: ev.InstanceRef, *peers: PeerId, number: int = 2**31) -> list[DecodeEffect]:
    """Deliver the answer of the first rank to a query at its address, or that of the registry."""
    first, *others = records(*peers)
    if isinstance(ref, ev.InstanceAddress):
        first = replace(first, endpoint=ref.address)
    return core(ev.InstanceFound(ref, (first, *others), number))


def connect(core: DecodeDriver, ref: ev.InstanceRef, *peers: PeerId) -> None:
    """Find the instance with a first room, and grant it."""
    core(request(1, room=1, instance=ref))
    granted = core.welcome(core.compiled(answer(core, ref, *peers)))
    assert rooms_granted(granted) == [1] * len(peers)


def rooms_granted(effects: list[DecodeEffect]) -> list[RoomId]:
    return [message.room for _, message in messages(effects, Grant) if isinstance(message, Grant)]


def failures(effects: list[DecodeEffect]) -> list[tuple[int, FailureReason]]:
    found = [(effect.room, effect.failure) for effect in of_kind(effects, ReportReceiver)]
    return list(dict.fromkeys((room, failure.reason) for room, failure in found if failure is not None))


def test_an_address_is_asked_and_tells_which_instance_it_is(core: DecodeDriver) -> None:
    assert of_kind(core(request(instance=HERE)), LookUp) == [LookUp(HERE)]
    (compiling,) = of_kind(answer(core, HERE, PREFILL, OTHER_PREFILL), CompileRoutes)
    assert compiling.instance == "prefill"


def test_an_address_that_nobody_answers_fails_in_time_and_names_it(core: DecodeDriver) -> None:
    core(request(instance=HERE))
    effects = core.sleep(HANDSHAKE_S)
    assert LookUp(HERE) in effects
    (failure,) = {effect.failure for effect in of_kind(effects, ReportReceiver)}
    assert failure is not None
    assert (failure.reason, HERE.address in failure.detail) == (FailureReason.UNREACHABLE, True)


@pytest.mark.parametrize("ref", ["prefill", HERE, TICKET])
@pytest.mark.parametrize("other", ["prefill", HERE, TICKET])
def test_an_instance_has_one_handshake_however_it_is_referred_to(
    core: DecodeDriver, ref: ev.InstanceRef, other: ev.InstanceRef
) -> None:
    connect(core, ref, PREFILL, OTHER_PREFILL)
    effects = core(request(2, room=2, instance=other))
    if other != ref:
        assert of_kind(effects, LookUp) == [LookUp(other)], "nobody has said yet that it is the same"
        effects = answer(core, other, PREFILL, OTHER_PREFILL)
    assert (rooms_granted(effects), messages(effects, Hello)) == ([2, 2], [])
    assert LookUp(other) not in core.pass_time(2.0), "all is known"
    assert rooms_granted(core(request(3, room=3, instance=other))) == [3, 3]


def test_rooms_that_wait_by_name_and_address_for_one_instance_share_the_handshake(core: DecodeDriver) -> None:
    core(request(1, room=1, instance="prefill"))
    core(request(2, room=2, instance=HERE))
    hellos = core.compiled(answer(core, "prefill", PREFILL))
    assert not of_kind(answer(core, HERE, PREFILL), CompileRoutes)
    assert rooms_granted(core.welcome(hellos)) == [1, 2]


def test_another_instance_at_an_address_does_not_get_rooms_of_the_one_before(core: DecodeDriver) -> None:
    connect(core, HERE, PREFILL)
    core(ev.ProbeFinished(PREFILL, is_gone=True))
    core(request(2, room=2, instance=HERE))
    effects = answer(core, HERE, OTHER)
    (compiling,) = of_kind(effects, CompileRoutes)
    assert compiling.instance == "other"
    granted = core.welcome(core.compiled(effects))
    assert [(to, message.room) for to, message in messages(granted, Grant) if isinstance(message, Grant)] == [
        (OTHER, 2)
    ]
    assert rooms_granted(core(request(3, room=3, instance="prefill"))) == [], "nobody has said that it is there"


def test_a_ticket_of_the_connected_process_is_granted_at_once(core: DecodeDriver) -> None:
    connect(core, HERE, PREFILL, OTHER_PREFILL)
    for generation, issuer in enumerate((PREFILL, OTHER_PREFILL), 2):
        effects = core(request(generation, room=generation, instance=TICKET, issuer=issuer))
        assert rooms_granted(effects) == [generation] * 2


def test_a_stale_ticket_fails_as_soon_as_the_rank_says_who_it_is(core: DecodeDriver) -> None:
    connect(core, TICKET, AGAIN)
    effects = core(request(2, room=2, instance=TICKET, issuer=PREFILL))
    (asked,) = of_kind(effects, LookUp)
    effects = answer(core, TICKET, AGAIN, number=asked.number)
    assert failures(effects) == [(2, FailureReason.STALE_TICKET)]
    assert (rooms_granted(effects), messages(effects, Decline)) == ([], []), "the new process may compute it as well"


def test_a_stale_ticket_fails_before_any_handshake(core: DecodeDriver) -> None:
    (asked,) = of_kind(core(request(2, room=2, instance=TICKET, issuer=PREFILL)), LookUp)
    assert failures(answer(core, TICKET, AGAIN, number=asked.number)) == [(2, FailureReason.STALE_TICKET)]


def test_a_ticket_is_not_judged_by_an_answer_that_may_be_older(core: DecodeDriver) -> None:
    connect(core, TICKET, PREFILL)
    (asked,) = of_kind(core(request(2, room=2, instance=TICKET, issuer=AGAIN)), LookUp)
    assert failures(answer(core, TICKET, PREFILL, number=asked.number - 1)) == []
    effects = answer(core, TICKET, AGAIN, number=asked.number)
    assert ProbePeer(PREFILL, endpoint_of(PREFILL)) in effects
    assert (failures(effects), rooms_granted(effects)) == ([], [])
    core(ev.ProbeFinished(PREFILL, is_gone=True))
    hellos = core.compiled(answer(core, TICKET, AGAIN))
    assert rooms_granted(core.welcome(hellos)) == [2]


def test_a_ticket_of_a_process_whose_name_a_living_one_has_waits_and_is_refused(core: DecodeDriver) -> None:
    connect(core, HERE, PREFILL)
    namesake = peer("prefill", incarnation=9)
    effects = core(request(2, room=2, instance=ELSEWHERE, issuer=namesake))
    effects += answer(core, ELSEWHERE, namesake)
    for _ in range(int(HANDSHAKE_S)):
        effects += core.pass_time(1.0)
        effects += answer(core, ELSEWHERE, namesake)
    assert (failures(effects), 2 in rooms_granted(effects)) == ([(2, FailureReason.UNREACHABLE)], False)
    assert rooms_granted(core(request(3, room=3, instance=HERE))) == [3], "the other one goes on"


def test_a_ticket_of_a_sibling_that_the_directory_does_not_know_yet_waits(core: DecodeDriver) -> None:
    sibling = OTHER_PREFILL._replace(incarnation=2)
    connect(core, TICKET, PREFILL, OTHER_PREFILL)
    effects = core(request(2, room=2, instance=TICKET, issuer=sibling))
    effects += answer(core, TICKET, PREFILL, OTHER_PREFILL)
    assert failures(effects) == []
    core(ev.ProbeFinished(OTHER_PREFILL, is_gone=True))
    hellos = core.compiled(answer(core, TICKET, PREFILL, sibling))
    assert rooms_granted(core.welcome(hellos)) == [2, 2]


def test_a_ticket_of_a_sibling_that_the_directory_never_knows_is_stale_in_the_end(core: DecodeDriver) -> None:
    former = OTHER_PREFILL._replace(incarnation=2)
    connect(core, TICKET, PREFILL, OTHER_PREFILL)
    effects = core(request(2, room=2, instance=TICKET, issuer=former))
    effects += answer(core, TICKET, PREFILL, OTHER_PREFILL)
    effects += core.pass_time(HANDSHAKE_S)
    assert failures(effects) == [(2, FailureReason.STALE_TICKET)]
    assert rooms_granted(core(request(3, room=3, instance=TICKET, issuer=PREFILL))) == [3, 3]


def test_tickets_that_are_not_known_yet_wait_each_for_its_own_time(core: DecodeDriver) -> None:
    connect(core, TICKET, PREFILL, OTHER_PREFILL)
    for generation, incarnation in ((2, 2), (3, 3)):
        issuer = OTHER_PREFILL._replace(incarnation=incarnation)
        core(request(generation, room=generation, instance=TICKET, issuer=issuer))
        answer(core, TICKET, PREFILL, OTHER_PREFILL)
        failed = failures(core.pass_time(3.0))
    assert failed == [(2, FailureReason.STALE_TICKET)]
    assert failures(core.pass_time(2.0)) == [(3, FailureReason.STALE_TICKET)]


def test_a_ticket_that_is_newer_than_a_failed_handshake_waits_for_another(core: DecodeDriver) -> None:
    core(request(1, room=1, instance=TICKET, issuer=PREFILL))
    core.compiled(answer(core, TICKET, PREFILL))
    assert failures(core.sleep(HANDSHAKE_S)) == [(1, FailureReason.UNREACHABLE)]
    assert failures(core(request(2, room=2, instance=TICKET, issuer=PREFILL))) == [(2, FailureReason.PEER_FAILING)]
    assert failures(core(request(3, room=3, instance=TICKET, issuer=AGAIN))) == []
    assert rooms_granted(core.welcome(core.compiled(answer(core, TICKET, AGAIN)))) == [3]


def test_a_room_is_declined_only_to_the_process_that_gave_its_ticket(core: DecodeDriver) -> None:
    core(request(1, room=1, instance=TICKET, issuer=PREFILL))
    core(request(2, room=2, instance=TICKET))
    core.sleep(HANDSHAKE_S)
    declined = [
        message.room
        for _, message in messages(core.welcome(core.compiled(answer(core, TICKET, AGAIN))), Decline)
        if isinstance(message, Decline)
    ]
    assert declined == [2]


def test_answers_that_contradict_each_other_do_not_keep_a_handshake_from_its_end(core: DecodeDriver) -> None:
    """The registry may list an incarnation for a while after its process has ended."""
    core(request(1, room=1, instance="prefill"))
    core(request(2, room=2, instance=TICKET, issuer=AGAIN))
    effects = answer(core, TICKET, AGAIN)
    hellos = core.compiled(effects)
    assert not of_kind(answer(core, "prefill", PREFILL), CompileRoutes)
    effects = core.welcome(hellos)
    assert rooms_granted(effects) == [2]
    assert rooms_granted(answer(core, "prefill", AGAIN)) == [1]


def test_addresses_are_forgotten_when_nobody_asks_for_them(core: DecodeDriver) -> None:
    for generation in range(1, 10):
        ref = ev.InstanceAddress(f"tcp://10.0.0.{generation}:7000")
        core(request(generation, room=generation, instance=ref))
    core.sleep(HANDSHAKE_S + 60.0)
    assert list(core.core.instances._instances) == []
    assert len(core.core.timers) == 0


def test_the_number_of_instances_is_bounded(core: DecodeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instances, "MAX_REFS", 1)
    core(request(1, room=1, instance=HERE))
    assert failures(core(request(2, room=2, instance=ELSEWHERE))) == [(2, FailureReason.CAPACITY)]
    assert core(request(3, room=3, instance=HERE)) == []


def silent(number: int, host: int) -> ev.InstanceAddress:
    return ev.InstanceAddress(f"tcp://10.0.0.{host}:{7000 + number}")


def test_those_who_do_not_answer_do_not_keep_others_out(core: DecodeDriver) -> None:
    """Whoever writes tickets may name any number of addresses; so may honest requests to a dead pool."""
    asked = set()
    for number in range(80):
        effects = core(request(number + 1, room=number + 1, instance=silent(number, number % 9)))
        asked |= {effect.instance for effect in of_kind(effects, LookUp)}
    assert len(asked) <= dialing.MAX_LOOKUPS
    assert LookUp(HERE) in core(request(900, room=900, instance=HERE))
    assert rooms_granted(core.welcome(core.compiled(answer(core, HERE, PREFILL)))) == [900]


def test_addresses_at_one_host_leave_half_of_the_places_to_others(
    core: DecodeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instances, "MAX_REFS", 4)
    found = [failures(core(request(number, room=number, instance=silent(number, 1)))) for number in (1, 2, 3)]
    assert found == [[], [], [(3, FailureReason.CAPACITY)]]
    assert failures(core(request(4, room=4, instance=HERE))) == []


def test_the_number_of_references_to_an_instance_is_bounded(
    core: DecodeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instances, "MAX_REFS", 3)
    connect(core, "prefill", PREFILL)
    for generation in range(2, 12):
        ref = ev.InstanceAddress(f"tcp://10.0.0.{generation}:7000", "prefill")
        assert rooms_granted(core(request(generation, room=generation, instance=ref, issuer=PREFILL))) == [generation]
    (known,) = core.core.instances._instances
    assert len(known.refs) == 3
    core(request(20, room=20, instance=HERE))
    assert rooms_granted(answer(core, HERE, PREFILL)) == [20]

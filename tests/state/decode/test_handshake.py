"""From an instance's name to ranks that accept grants: lookups, hellos, refusals, and rooms that wait meanwhile."""

from typing import Any

import pytest
from msgspec.structs import replace

from kvflow.config import Timeouts
from kvflow.errors import FailureReason
from kvflow.room import RoomId
from kvflow.state import events as ev
from kvflow.state.decode import declines, dialing, handshake
from kvflow.state.effects import (
    CompileRoutes,
    Connect,
    CountAnomaly,
    DecodeEffect,
    Disconnect,
    LogEvent,
    LookUp,
    ProbePeer,
    ReportReceiver,
    SendMessage,
)
from kvflow.wire.messages import Cancel, Decline, Drained, Goodbye, Grant, Hello, PeerId, Ping, Pong, RankRecord, Refuse
from tests.support.cores import (
    ABORTED,
    DECODE,
    OTHER_PREFILL,
    PREFILL,
    DecodeDriver,
    anomalies,
    endpoint_of,
    messages,
    of_kind,
    peer,
    records,
    reports,
    welcome_of,
)
from tests.support.receiving import ROOM, Transfer, request

AGAIN = peer("prefill", incarnation=2)
HANDSHAKE_S = Timeouts().handshake_s
FAILED = [("failed", "draining"), ("failed", "safe")]


@pytest.fixture
def core() -> DecodeDriver:
    return DecodeDriver()


@pytest.fixture
def hellos(core: DecodeDriver) -> list[DecodeEffect]:
    """A room waits for two ranks, the first of which has been sent a Hello."""
    core(request())
    return core.compiled(core.found(PREFILL, OTHER_PREFILL))


def hello_to(effects: list[DecodeEffect], to: PeerId) -> Hello:
    ((_, hello),) = [item for item in messages(effects, Hello) if item[0] == to]
    assert isinstance(hello, Hello)
    return hello


def accept(core: DecodeDriver, hello: Hello) -> list[DecodeEffect]:
    return core.hear(hello.to, welcome_of(hello.to, hello))


def refuse(core: DecodeDriver, hello: Hello, **changes: Any) -> list[DecodeEffect]:
    refusal = Refuse(peer=hello.to, to=DECODE, detail="it does not fit", attempt=hello.attempt)
    return core.hear(hello.to, replace(refusal, **changes))


def reasons(effects: list[DecodeEffect]) -> list[tuple[FailureReason, str]]:
    """Return reason and detail of each reported failure."""
    found = [effect.failure for effect in of_kind(effects, ReportReceiver)]
    return list(dict.fromkeys((failure.reason, failure.detail) for failure in found if failure is not None))


# The directory -----------------------------------------------------------------------------------------------------


def test_first_contact_looks_the_instance_up_once(core: DecodeDriver) -> None:
    assert of_kind(core(request()), LookUp) == [LookUp("prefill")]
    assert core(request(2, room=8)) == []


def test_lookups_go_on_until_every_rank_is_registered(core: DecodeDriver) -> None:
    core(request())
    assert core(ev.InstanceFound("prefill", records(PREFILL, OTHER_PREFILL)[:1])) == []
    assert len(of_kind(core.sleep(1.0), LookUp)) == 4
    effects = core.found(PREFILL, OTHER_PREFILL)
    assert effects == [CompileRoutes("prefill", 0, records(PREFILL, OTHER_PREFILL))]


@pytest.mark.parametrize("places", [(), (1,), (1, 0), (0, 0)])
def test_records_that_are_not_every_rank_in_order_begin_nothing(core: DecodeDriver, places: tuple[int, ...]) -> None:
    core(request())
    whole = records(PREFILL, OTHER_PREFILL)
    assert core(ev.InstanceFound("prefill", tuple(whole[place] for place in places))) == []


def test_an_instance_that_nobody_wants_is_not_shaken_hands_with(core: DecodeDriver) -> None:
    assert core.found(PREFILL) == []


def test_lookups_go_on_during_the_handshake_and_equal_answers_change_nothing(
    core: DecodeDriver, hellos: list[DecodeEffect]
) -> None:
    assert LookUp("prefill") in core.sleep(1.0)
    assert core.found(PREFILL, OTHER_PREFILL) == []
    core.welcome(hellos)
    assert LookUp("prefill") not in core.pass_time(10.0)


def test_a_rank_that_restarts_during_the_handshake_is_shaken_hands_with_instead(
    core: DecodeDriver, hellos: list[DecodeEffect]
) -> None:
    old = hello_to(hellos, PREFILL)
    effects = core.found(AGAIN, OTHER_PREFILL)
    assert Disconnect(PREFILL) in effects
    effects = core.compiled(effects)
    assert of_kind(effects, Connect) == [Connect(AGAIN, endpoint_of(AGAIN))]
    assert messages(accept(core, old), Hello) == [], "of the former attempt"
    grants = messages(core.welcome(effects), Grant)
    assert [to for to, _ in grants] == [AGAIN, OTHER_PREFILL]


def test_routes_of_an_attempt_that_was_given_up_are_ignored(core: DecodeDriver) -> None:
    core(request())
    first = core.found(PREFILL)
    second = core.found(AGAIN)
    assert core.compiled(first) == []
    assert [to for to, _ in messages(core.compiled(second), Hello)] == [AGAIN]


def test_an_answer_of_the_directory_that_comes_late_changes_nothing(core: DecodeDriver) -> None:
    core(request())
    core.connect(PREFILL)
    assert core.found(AGAIN) == []


# Hellos ------------------------------------------------------------------------------------------------------------


def test_a_hello_says_what_is_wanted_of_whom(core: DecodeDriver, hellos: list[DecodeEffect]) -> None:
    for head, to in enumerate((PREFILL, OTHER_PREFILL)):
        assert of_kind(hellos, Connect) == [Connect(to, endpoint_of(to))]
        hello = hello_to(hellos, to)
        assert (hello.peer, hello.to, hello.attempt, hello.versions) == (DECODE, to, 0, (3, 3))
        assert [one.heads for one in hello.route.slices] == [(head, head + 1)]
        assert hello.staging is None
        hellos = accept(core, hello)


THIRD_PARTY = "tcp://203.0.113.7"


def lying(number: int, num_ranks: int) -> tuple[RankRecord, ...]:
    """Return records of an instance whose ranks are all said to be at a third party."""
    whole = records(*(peer(f"evil-{number}", rank) for rank in range(num_ranks)))
    return tuple(replace(record, endpoint=f"{THIRD_PARTY}:{1 + record.peer.rank.engine_rank}") for record in whole)


def test_a_directory_that_names_strangers_leads_to_one_connection(core: DecodeDriver) -> None:
    core(request(instance="evil-0"))
    records_of_strangers = lying(0, 200)
    compiling = core(ev.InstanceFound("evil-0", records_of_strangers))
    silent = [record.peer for record in records_of_strangers[1:]]
    hellos = core.compiled(compiling, silent=silent)
    assert len(of_kind(hellos, Connect)) == 1
    assert of_kind(core.pass_time(HANDSHAKE_S - 1.0), Connect) == []
    effects = accept(core, hello_to(hellos, records_of_strangers[0].peer))
    assert len(of_kind(effects, Connect)) == dialing.MAX_DIALS // 2, "the share of one host"


def test_a_decline_leads_to_no_more_connections_than_there_are_places(core: DecodeDriver) -> None:
    core(request(instance="evil-0"))
    strangers = lying(0, 200)
    first, *others = (record.peer for record in strangers)
    hellos = core.compiled(core(ev.InstanceFound("evil-0", strangers)), silent=others)
    refused = refuse(core, hello_to(hellos, first))
    ((_, decline),) = messages(refused, Decline)
    assert isinstance(decline, Decline)
    answer = Drained(room=decline.room, generation=decline.generation, engine_rank=0)
    assert len(of_kind(core.hear(first, answer), Connect)) == dialing.MAX_DIALS // 2


def test_the_ranks_of_a_large_instance_are_connected_as_they_answer(core: DecodeDriver) -> None:
    others = [peer("prefill", rank) for rank in range(3 * dialing.MAX_DIALS)]
    core(request())
    hellos = core.compiled(core.found(*others), silent=others[1:])
    assert len(messages(core.welcome(hellos), Grant)) == len(others)
    assert len(core.core.instances._dialing._dials) == 0


def test_instances_that_never_answer_do_not_keep_others_out(core: DecodeDriver) -> None:
    for number in range(2 * dialing.MAX_DIALS):
        core(request(100 + number, room=100 + number, instance=f"evil-{number}"))
        core.compiled(core(ev.InstanceFound(f"evil-{number}", lying(number, 1))))
    assert len(core.core.peers.all_open) <= dialing.MAX_DIALS
    core(request(900))
    assert len(messages(core.welcome(core.compiled(core.found(PREFILL))), Grant)) == 1
    assert len(core.core.peers.all_open) <= dialing.MAX_DIALS + 1
    core.pass_time(2 * dialing.TURN_S)
    assert len(core.core.peers.all_open) <= dialing.MAX_DIALS + 1


def test_a_hello_is_retransmitted_less_and_less_often(core: DecodeDriver, hellos: list[DecodeEffect]) -> None:
    begin, times = core.now, []
    for _ in range(60):
        effects = core.sleep(0.125)
        times += [core.now - begin for to, message in messages(effects, Hello) if to == PREFILL]
    assert times[:4] == [0.25, 0.75, 1.75, 2.75]


def test_a_retransmitted_hello_is_the_same(core: DecodeDriver, hellos: list[DecodeEffect]) -> None:
    assert hello_to(core.sleep(0.25), PREFILL) == hello_to(hellos, PREFILL)


def test_a_rank_that_has_answered_is_not_asked_again(core: DecodeDriver, hellos: list[DecodeEffect]) -> None:
    accept(core, hello_to(hellos, PREFILL))
    assert {to for to, _ in messages(core.sleep(2.0), Hello)} == {OTHER_PREFILL}


def test_a_welcome_of_another_attempt_is_ignored(core: DecodeDriver, hellos: list[DecodeEffect]) -> None:
    other = accept(core, hello_to(hellos, PREFILL))
    assert messages(accept(core, replace(hello_to(other, OTHER_PREFILL), attempt=7)), Grant) == []
    assert len(messages(accept(core, hello_to(other, OTHER_PREFILL)), Grant)) == 2


def test_a_second_welcome_changes_nothing(core: DecodeDriver, hellos: list[DecodeEffect]) -> None:
    core.welcome(hellos)
    assert core.welcome(hellos) == []


def test_each_attempt_has_a_number_of_its_own(core: DecodeDriver) -> None:
    core(request())
    core.connect(PREFILL)
    core.hear(PREFILL, Goodbye(peer=PREFILL))
    assert hello_to(core.compiled(core.found(AGAIN)), AGAIN).attempt == 1


def test_a_rank_that_has_answered_is_pinged_while_others_have_not(
    core: DecodeDriver, hellos: list[DecodeEffect]
) -> None:
    """Otherwise the rank would consider this one dead, and refuse the first grants."""
    accept(core, hello_to(hellos, PREFILL))
    pinged = messages(core.sleep(2.5), Ping)
    assert pinged == [(PREFILL, Ping(peer=DECODE, sent_at=at)) for at in (101.0, 102.0)]


# Connections ---------------------------------------------------------------------------------------------------------


def test_a_connection_that_cannot_be_made_is_tried_again_with_the_hello(
    core: DecodeDriver, hellos: list[DecodeEffect]
) -> None:
    effects = core(ev.ConnectFailed(PREFILL, "no sockets left"))
    assert anomalies(effects) == ["connect_failed"]
    effects = core.sleep(0.25)
    again = effects.index(Connect(PREFILL, endpoint_of(PREFILL)))
    assert effects[again + 1] == SendMessage(PREFILL, hello_to(hellos, PREFILL))
    assert len(messages(core.welcome(hellos), Grant)) == 2


def test_a_connection_that_breaks_during_the_handshake_looks_the_instance_up(
    core: DecodeDriver, hellos: list[DecodeEffect]
) -> None:
    assert core(ev.ConnectionLost(PREFILL)) == [LookUp("prefill")]
    assert {to for to, _ in messages(core.sleep(0.25), Hello)} == {PREFILL}


def test_who_accepts_over_a_connection_that_broke_is_suspect_until_it_is_heard(
    core: DecodeDriver, hellos: list[DecodeEffect]
) -> None:
    """The rank may have died since: its answer was in flight when its connection broke."""
    core(ev.ConnectionLost(PREFILL))
    effects = core.welcome(hellos)
    assert messages(effects, Grant) == []
    assert ProbePeer(PREFILL, endpoint_of(PREFILL)) in effects
    assert messages(effects, Ping) == [(PREFILL, Ping(peer=DECODE, sent_at=100.0))]
    assert len(messages(core.hear(PREFILL, Pong(peer=PREFILL)), Grant)) == 2


def test_who_accepts_over_a_connection_that_broke_is_lost_as_soon_as_its_process_is_known_to_be_gone(
    core: DecodeDriver, hellos: list[DecodeEffect]
) -> None:
    core(ev.ConnectionLost(PREFILL))
    core.welcome(hellos)
    assert core.core.peers.is_connected(OTHER_PREFILL)
    core(ev.ProbeFinished(PREFILL, is_gone=True))
    assert PREFILL not in core.core.peers
    assert len(messages(core.connect(AGAIN, OTHER_PREFILL), Grant)) == 2


def test_who_says_goodbye_during_the_handshake_is_not_asked_again_but_looked_up(
    core: DecodeDriver, hellos: list[DecodeEffect]
) -> None:
    effects = core.hear(PREFILL, Goodbye(peer=PREFILL, fenced=True))
    assert reports(effects) == [], "the room waits for the next incarnation"
    assert of_kind(effects, LookUp) == [LookUp("prefill")]
    assert Disconnect(PREFILL) in effects
    assert core.found(PREFILL, OTHER_PREFILL) == [], "its record may outlive it"
    assert PREFILL not in {to for to, _ in messages(core.sleep(1.0), Hello)}
    assert len(messages(core.connect(AGAIN, OTHER_PREFILL), Grant)) == 2


def test_a_goodbye_during_another_handshake_frees_pages(core: DecodeDriver) -> None:
    core(request())
    core.connect(PREFILL)
    core.hear(PREFILL, Refuse(peer=PREFILL, to=None, detail="handshake required"))
    core.compiled(core.found(PREFILL))
    effects = core.hear(PREFILL, Goodbye(peer=PREFILL, fenced=True))
    assert reports(effects) == [("failed", "safe")]


def test_a_process_that_has_ended_during_the_handshake_is_looked_up_again(
    core: DecodeDriver, hellos: list[DecodeEffect]
) -> None:
    effects = core(ev.ProbeFinished(PREFILL, is_gone=True))
    assert Disconnect(PREFILL) in effects
    assert LookUp("prefill") in effects
    assert PREFILL not in {to for to, _ in messages(core.sleep(2.0), Hello)}
    grants = messages(core.connect(AGAIN, OTHER_PREFILL), Grant)
    assert [to for to, _ in grants] == [AGAIN, OTHER_PREFILL]


def test_a_connected_rank_whose_process_ends_while_it_is_said_hello_again_is_looked_up_once(core: DecodeDriver) -> None:
    core(request())
    core.connect(PREFILL, OTHER_PREFILL)
    core.hear(OTHER_PREFILL, Goodbye(peer=OTHER_PREFILL))
    core.compiled(core.found(PREFILL, peer("prefill", 1, 2)))
    assert of_kind(core(ev.ProbeFinished(PREFILL, is_gone=True)), LookUp) == [LookUp("prefill")]


def test_a_welcome_of_another_attempt_replaces_nobody(core: DecodeDriver) -> None:
    core(request())
    core.connect(PREFILL)
    core(ev.ConnectionLost(PREFILL))
    again = hello_to(core.compiled(core.found(AGAIN)), AGAIN)
    assert reports(accept(core, replace(again, attempt=7))) == []
    assert reports(accept(core, again)) == [("failed", "draining")]


def test_ranks_that_claim_the_same_address_are_never_granted_anything(core: DecodeDriver) -> None:
    """One of the two records is wrong, so the directory is asked again until the records change."""
    core(request())
    both = tuple(replace(record, endpoint=endpoint_of(PREFILL)) for record in records(PREFILL, OTHER_PREFILL))
    hellos = core.compiled(core(ev.InstanceFound("prefill", both)))
    assert messages(core.welcome(hellos), Grant) == []
    assert len(messages(core.connect(AGAIN, peer("prefill", 1, 2)), Grant)) == 2


UNKNOWN_HERE = Refuse(peer=PREFILL, to=DECODE, detail="writes to you fail, connect again")


def test_the_connection_to_a_rank_that_has_disconnected_this_one_is_closed(core: DecodeDriver) -> None:
    core(request())
    Transfer(core, core.connect(PREFILL)).notice(PREFILL, 0, (0, 8), last=True)
    assert Disconnect(PREFILL) in core.hear(PREFILL, UNKNOWN_HERE)


def test_the_connection_to_a_rank_that_has_disconnected_this_one_is_kept_for_its_proof(core: DecodeDriver) -> None:
    """The directory may not answer, or the rank may leave before the next handshake."""
    core(request())
    core.connect(PREFILL)
    effects = core.hear(PREFILL, UNKNOWN_HERE)
    assert reports(effects) == [("failed", "draining")]
    assert Disconnect(PREFILL) not in [*effects, *core.sleep(100.0)]
    effects = core.hear(PREFILL, Goodbye(peer=PREFILL, fenced=True))
    assert reports(effects) == [("failed", "safe")]
    assert Disconnect(PREFILL) in effects


def test_a_connection_that_was_kept_for_a_proof_is_closed_after_it(core: DecodeDriver) -> None:
    core(request())
    core.connect(PREFILL)
    core.hear(PREFILL, UNKNOWN_HERE)
    assert reports(core.hear(PREFILL, Drained(room=ROOM, generation=1, engine_rank=0))) == [("failed", "safe")]
    assert Disconnect(PREFILL) in core.sleep(30.0)


def test_a_connection_that_was_kept_for_a_proof_is_used_for_the_next_handshake(core: DecodeDriver) -> None:
    core(request())
    core.connect(PREFILL)
    core.hear(PREFILL, UNKNOWN_HERE)
    effects = core.compiled(core.found(PREFILL))
    assert Connect(PREFILL, endpoint_of(PREFILL)) not in effects
    hello = hello_to(effects, PREFILL)
    core.hear(PREFILL, Drained(room=ROOM, generation=1, engine_rank=0))
    core.sleep(10.0)
    core(request(2))
    assert Disconnect(PREFILL) not in core.sleep(21.0), "the handshake goes on"
    accept(core, hello)
    assert Disconnect(PREFILL) not in core.pass_time(31)


def test_the_connection_to_an_incarnation_that_was_replaced_is_closed(core: DecodeDriver) -> None:
    core(request())
    Transfer(core, core.connect(PREFILL)).notice(PREFILL, 0, (0, 8), last=True)
    core(ev.ConnectionLost(PREFILL))
    core(request(2))
    assert Disconnect(PREFILL) in core.connect(AGAIN)


# Refusals ----------------------------------------------------------------------------------------------------------


def test_a_refusal_fails_what_waits_and_is_tried_again_after_a_pause(
    core: DecodeDriver, hellos: list[DecodeEffect]
) -> None:
    effects = refuse(core, hello_to(hellos, PREFILL))
    assert reports(effects) == FAILED
    assert reasons(effects) == [(FailureReason.REFUSED, "prefill/0 refused: it does not fit")]
    assert Disconnect(PREFILL) in effects
    assert core.found(PREFILL, OTHER_PREFILL) == [], "an answer to an earlier lookup"
    assert of_kind(core.sleep(handshake.REFUSED_PAUSE_S - 0.1), LookUp) == []
    assert of_kind(core.sleep(0.1), LookUp) == [LookUp("prefill")]
    assert messages(core.compiled(core.found(PREFILL, OTHER_PREFILL)), Hello)


def test_routes_that_cannot_be_compiled_are_a_refusal(core: DecodeDriver) -> None:
    core(request())
    (compile_routes,) = core.found(PREFILL)
    assert isinstance(compile_routes, CompileRoutes)
    effects = core(ev.RoutesCompiled("prefill", compile_routes.attempt, (), "model fingerprints differ"))
    assert reasons(effects) == [(FailureReason.REFUSED, "model fingerprints differ")]
    assert core.found(PREFILL) == []
    core.sleep(handshake.REFUSED_PAUSE_S)
    assert of_kind(core.found(PREFILL), CompileRoutes)


def test_a_refusal_of_another_attempt_is_ignored(core: DecodeDriver, hellos: list[DecodeEffect]) -> None:
    assert refuse(core, hello_to(hellos, PREFILL), attempt=7) == []
    assert len(messages(core.welcome(hellos), Grant)) == 2


def test_a_refusal_that_is_over_lets_rooms_wait_again(core: DecodeDriver, hellos: list[DecodeEffect]) -> None:
    refuse(core, hello_to(hellos, PREFILL))
    assert reasons(core(request(2)))[0][0] is FailureReason.PEER_FAILING
    core.sleep(handshake.REFUSED_PAUSE_S)
    core.connect(PREFILL, OTHER_PREFILL)
    assert len(messages(core(request(3)), Grant)) == 2


def test_whoever_answers_in_the_place_of_a_rank_proves_that_it_has_ended(
    core: DecodeDriver, hellos: list[DecodeEffect]
) -> None:
    effects = refuse(core, hello_to(hellos, PREFILL), peer=AGAIN)
    assert Disconnect(PREFILL) in effects
    assert LookUp("prefill") in effects
    assert reports(effects) == [], "the room waits for the next one"


def test_a_rank_that_does_not_know_this_one_any_more_is_shaken_hands_with_again(core: DecodeDriver) -> None:
    core(request())
    core.connect(PREFILL)
    effects = core.hear(PREFILL, Refuse(peer=PREFILL, to=None, detail="handshake required"))
    assert reports(effects) == [("failed", "draining")]
    assert LookUp("prefill") in effects
    assert [to for to, _ in messages(core.connect(PREFILL), Cancel)] == [PREFILL], "for its proof"


# Rooms that wait -----------------------------------------------------------------------------------------------------


def test_rooms_wait_for_the_handshake_for_so_long_and_then_fail(core: DecodeDriver, hellos: list[DecodeEffect]) -> None:
    core.sleep(1.0)
    assert reports(core(request(2, room=8))) == []
    accept(core, hello_to(hellos, PREFILL))
    assert reports(core.pass_time(3.0)) == []
    effects = core.pass_time(1.0)
    assert reports(effects) == FAILED * 2
    ((reason, detail),) = reasons(effects)
    assert reason is FailureReason.UNREACHABLE
    assert detail == (
        f"prefill was not reached within 5.0 s: rank prefill/1 at {endpoint_of(OTHER_PREFILL)} does not answer"
    )
    (log,) = [item for item in of_kind(effects, LogEvent) if item.name == "instance_unreachable"]
    assert not log.is_warning  # each room is logged once


def test_a_refusal_that_fails_no_room_is_a_warning(core: DecodeDriver, hellos: list[DecodeEffect]) -> None:
    core(ev.ReceiveAborted(ROOM, ABORTED))
    (log,) = of_kind(refuse(core, hello_to(hellos, PREFILL)), LogEvent)
    assert (log.name, log.is_warning) == ("handshake_refused", True)


def test_a_failure_to_reach_an_instance_says_what_was_missing(core: DecodeDriver) -> None:
    core(request())
    assert reasons(core.sleep(HANDSHAKE_S))[0][1].endswith("the registry does not answer")
    other = DecodeDriver()
    other(request())
    other(ev.InstanceFound("prefill", records(PREFILL, OTHER_PREFILL)[:1]))
    assert reasons(other.sleep(HANDSHAKE_S))[0][1].endswith("only ranks [0] of 2 are registered")
    third = DecodeDriver()
    third(request())
    third.found(PREFILL)
    assert reasons(third.sleep(HANDSHAKE_S))[0][1].endswith("its routes are still being compiled")


def test_further_rooms_fail_at_once_while_the_handshake_goes_on(core: DecodeDriver, hellos: list[DecodeEffect]) -> None:
    core.sleep(HANDSHAKE_S)
    effects = core(request(2))
    assert reports(effects) == FAILED
    ((reason, detail),) = reasons(effects)
    assert reason is FailureReason.PEER_FAILING
    assert "does not answer" in detail
    later = core.sleep(3.0)
    assert messages(later, Hello)
    assert LookUp("prefill") in later
    assert [item for item in of_kind(later, LogEvent) if item.is_warning] == [], "it was said once"


def test_the_first_success_lets_rooms_be_granted_again(core: DecodeDriver, hellos: list[DecodeEffect]) -> None:
    core.sleep(HANDSHAKE_S)
    core(request(2))
    core.welcome(hellos)
    transfer = Transfer(core, core(request(3)))
    transfer.notice(PREFILL, 0, (0, 8), last=True)
    assert reports(transfer.notice(OTHER_PREFILL, 0, (0, 8), last=True)) == [("success", "safe")]


def test_rooms_wait_again_for_the_handshake_after_a_success(core: DecodeDriver, hellos: list[DecodeEffect]) -> None:
    core.sleep(HANDSHAKE_S)
    core.welcome(hellos)
    core.hear(PREFILL, Goodbye(peer=PREFILL))
    assert reports(core(request(2, room=8))) == []
    assert reports(core.pass_time(HANDSHAKE_S - 1)) == []
    assert reports(core.pass_time(1)) == FAILED


def test_a_room_that_is_aborted_while_it_waits_is_never_granted(core: DecodeDriver, hellos: list[DecodeEffect]) -> None:
    core(ev.ReceiveAborted(ROOM, ABORTED))
    assert messages(core.welcome(hellos), Grant) == []


def test_a_room_whose_time_is_up_while_it_waits_is_never_granted_but_declined(core: DecodeDriver) -> None:
    core(request(timeout_s=HANDSHAKE_S / 2))
    hellos = core.compiled(core.found(PREFILL, OTHER_PREFILL))
    assert reports(core.sleep(HANDSHAKE_S / 2)) == FAILED
    effects = core.welcome(hellos)
    assert not messages(effects, Grant)
    assert declined(effects) == [(PREFILL, ROOM), (OTHER_PREFILL, ROOM)]


def test_another_instance_is_not_blamed(core: DecodeDriver) -> None:
    core(request())
    core.sleep(HANDSHAKE_S)
    other = ev.ReceiveOpened(8, 4, "other", {"kv": (0, 8)}, {"kv": b""}, 1, 60.0, b"secret of the test")
    assert LookUp("other") in core(other)


# Declines ------------------------------------------------------------------------------------------------------------


def declined(effects: list[DecodeEffect]) -> list[tuple[PeerId, RoomId]]:
    return [(to, decline.room) for to, decline in messages(effects, Decline) if isinstance(decline, Decline)]


def test_rooms_that_were_given_up_are_declined_as_soon_as_the_instance_is_connected(
    core: DecodeDriver, hellos: list[DecodeEffect]
) -> None:
    core(request(2, room=8))
    assert messages(core(ev.ReceiveAborted(ROOM, ABORTED)), Decline) == []
    effects = core.welcome(hellos)
    assert declined(effects) == [(PREFILL, ROOM), (OTHER_PREFILL, ROOM)]
    assert {decline.failure for _, decline in messages(effects, Decline) if isinstance(decline, Decline)} == {ABORTED}
    assert [grant.room for _, grant in messages(effects, Grant) if isinstance(grant, Grant)] == [8, 8]


def answer(core: DecodeDriver, sender: PeerId, generation: int) -> list[DecodeEffect]:
    """Return the effects of a prefill rank's answer to a decline."""
    engine_rank = sender.rank.engine_rank
    return core.hear(sender, Drained(room=ROOM, generation=generation, engine_rank=engine_rank, failure=ABORTED))


def test_a_decline_is_retransmitted_until_each_rank_has_answered(
    core: DecodeDriver, hellos: list[DecodeEffect]
) -> None:
    """Otherwise a lost decline would cost prefill its pages for all of `grant_s`."""
    core(ev.ReceiveAborted(ROOM, ABORTED))
    core.welcome(hellos)
    assert answer(core, OTHER_PREFILL, 1) == []
    assert declined(core.pass_time(16.0)) == [(PREFILL, ROOM)] * 4, "after 1, 3, 7 and 15 s"
    assert answer(core, PREFILL, 2) == [CountAnomaly("drained_of_unknown_transfer", PREFILL, ROOM)]
    assert declined(core.pass_time(8.0)) == [(PREFILL, ROOM)]
    assert answer(core, PREFILL, 1) == []
    assert declined(core.pass_time(60.0)) == []


def test_a_decline_that_was_not_answered_is_sent_again_when_its_instance_is_connected_again(
    core: DecodeDriver, hellos: list[DecodeEffect]
) -> None:
    core(ev.ReceiveAborted(ROOM, ABORTED))
    core.welcome(hellos)
    core.hear(PREFILL, Goodbye(peer=PREFILL))
    assert declined(core.sleep(2.0)) == []
    assert declined(core.connect(AGAIN, OTHER_PREFILL)) == [(AGAIN, ROOM), (OTHER_PREFILL, ROOM)]


def test_rooms_that_could_not_wait_are_declined_too(core: DecodeDriver, hellos: list[DecodeEffect]) -> None:
    core.sleep(HANDSHAKE_S)
    core(request(2, room=8))
    assert declined(core.welcome(hellos)) == [(to, room) for room in (ROOM, 8) for to in (PREFILL, OTHER_PREFILL)]


def test_a_room_that_is_asked_for_again_is_not_declined(core: DecodeDriver, hellos: list[DecodeEffect]) -> None:
    core(ev.ReceiveAborted(ROOM, ABORTED))
    core(request(2))
    effects = core.welcome(hellos)
    assert declined(effects) == []
    assert len(messages(effects, Grant)) == 2


def test_a_room_that_was_granted_is_cancelled_and_not_declined(core: DecodeDriver, hellos: list[DecodeEffect]) -> None:
    core.welcome(hellos)
    effects = core(ev.ReceiveAborted(ROOM, ABORTED))
    assert len(messages(effects, Cancel)) == 2
    assert declined(effects) == []


def test_declines_are_kept_for_so_many_rooms(
    core: DecodeDriver, hellos: list[DecodeEffect], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(declines, "MAX_DECLINED", 2)
    core(ev.ReceiveAborted(ROOM, ABORTED))
    for generation in (2, 3):
        core(request(generation, room=generation))
        core(ev.ReceiveAborted(generation, ABORTED))
    assert [room for to, room in declined(core.welcome(hellos)) if to == PREFILL] == [2, 3]


def refused_here(room: RoomId = 8, generation: int = 2) -> ev.RoomDeclined:
    return ev.RoomDeclined(room, generation, "prefill", ABORTED)


def test_after_a_failed_handshake_only_the_first_rank_is_told_until_it_has_answered(core: DecodeDriver) -> None:
    """A directory may have named thousands of strangers."""
    core(request())
    core.found(PREFILL, OTHER_PREFILL)
    effects = core(ev.RoutesCompiled("prefill", 0, (), "no such cells"))
    assert declined(effects) == [(PREFILL, ROOM)]
    assert of_kind(effects, Connect) == [Connect(PREFILL, endpoint_of(PREFILL))]
    ((_, decline),) = messages(effects, Decline)
    assert isinstance(decline, Decline)
    assert (decline.peer, decline.to) == (DECODE, PREFILL)
    effects = answer(core, PREFILL, 1)
    assert declined(effects) == [(OTHER_PREFILL, ROOM)]
    assert of_kind(answer(core, OTHER_PREFILL, 1), Disconnect) == [Disconnect(PREFILL), Disconnect(OTHER_PREFILL)]
    assert declined(core.pass_time(60.0)) == []


def test_a_rank_that_refuses_and_does_not_answer_declines_is_told_a_few_times(
    core: DecodeDriver, hellos: list[DecodeEffect]
) -> None:
    told = [*declined(refuse(core, hello_to(hellos, PREFILL))), *declined(core.pass_time(60.0))]
    assert told == [(PREFILL, ROOM)] * declines.MAX_DECLINES
    assert not core.core.peers.all_open


def test_a_refused_request_is_declined_after_the_handshake(core: DecodeDriver) -> None:
    assert of_kind(core(refused_here()), LookUp) == [LookUp("prefill")]
    effects = core.welcome(core.compiled(core.found(PREFILL, OTHER_PREFILL)))
    assert declined(effects) == [(PREFILL, 8), (OTHER_PREFILL, 8)]
    drained = Drained(room=8, generation=2, engine_rank=0, failure=ABORTED)
    assert core.hear(PREFILL, drained) == core.hear(PREFILL, drained) == []


def test_a_refused_request_is_not_declined_while_its_room_is_received_from_there(
    core: DecodeDriver, hellos: list[DecodeEffect]
) -> None:
    assert core(refused_here(ROOM)) == []
    assert declined(core.welcome(hellos)) == []


# Suspect and lost ranks ----------------------------------------------------------------------------------------------


@pytest.fixture
def suspect(core: DecodeDriver) -> Transfer:
    """Grant a room to two ranks, and break the connection to one of them."""
    core(request())
    transfer = Transfer(core, core.connect(PREFILL, OTHER_PREFILL))
    effects = core(ev.ConnectionLost(PREFILL))
    assert ProbePeer(PREFILL, endpoint_of(PREFILL)) in effects
    assert messages(effects, Ping) == [(PREFILL, Ping(peer=DECODE, sent_at=100.0))]
    assert LookUp("prefill") in effects
    assert reports(effects) == []
    return transfer


def test_a_rank_whose_connection_broke_is_probed_until_it_is_refused(suspect: Transfer) -> None:
    """A killed process closes its sockets one by one, so the first probe may still find its port open."""
    core, probe = suspect.core, ProbePeer(PREFILL, endpoint_of(PREFILL))
    for _ in range(3):
        assert reports(core(ev.ProbeFinished(PREFILL, is_gone=False))) == []
        assert probe in core.sleep(0.2)
    assert reports(core(ev.ProbeFinished(PREFILL, is_gone=True))) == [("failed", "draining")]
    assert probe not in core.sleep(0.2)


def test_a_rank_that_is_heard_after_its_connection_broke_is_not_probed_again(suspect: Transfer) -> None:
    core = suspect.core
    core(ev.ProbeFinished(PREFILL, is_gone=False))
    core.hear(PREFILL, Pong(peer=PREFILL))
    assert ProbePeer(PREFILL, endpoint_of(PREFILL)) not in core.sleep(0.2)


def test_a_prefill_rank_that_asks_whether_this_rank_lives_is_answered(suspect: Transfer) -> None:
    assert messages(suspect.core.hear(PREFILL, Ping(peer=PREFILL)), Pong) == [(PREFILL, Pong(peer=DECODE))]


def test_nothing_new_is_granted_to_a_rank_whose_connection_broke_until_it_is_heard(suspect: Transfer) -> None:
    core = suspect.core
    assert messages(core(request(2, room=8)), Grant) == []
    assert messages(core.hear(OTHER_PREFILL, Pong(peer=OTHER_PREFILL)), Grant) == []
    grants = messages(core.hear(PREFILL, Pong(peer=PREFILL)), Grant)
    assert [to for to, _ in grants] == [PREFILL, OTHER_PREFILL]


def test_what_was_granted_before_a_connection_broke_may_finish(suspect: Transfer) -> None:
    suspect.notice(PREFILL, 0, (0, 8), last=True)
    assert reports(suspect.notice(OTHER_PREFILL, 0, (0, 8), last=True)) == [("success", "safe")]


def test_a_rank_whose_connection_broke_and_that_has_restarted_is_replaced(suspect: Transfer) -> None:
    core = suspect.core
    core(request(2, room=8))
    effects = core.welcome(core.compiled(core.found(AGAIN, OTHER_PREFILL)))
    assert reports(effects) == [("failed", "draining")], "what the former incarnation was granted"
    granted = [(to, grant.room) for to, grant in messages(effects, Grant) if isinstance(grant, Grant)]
    assert granted == [(AGAIN, 8), (OTHER_PREFILL, 8)]


def test_a_room_that_waited_in_vain_for_a_suspect_rank_says_so(suspect: Transfer) -> None:
    core = suspect.core
    core(request(2, room=8))
    effects: list[DecodeEffect] = []
    core.found(PREFILL, OTHER_PREFILL)
    core.core.peers.find(PREFILL).lease_s = 60.0  # type: ignore[union-attr]
    for _ in range(5):
        core.hear(OTHER_PREFILL, Pong(peer=OTHER_PREFILL))
        effects += core.sleep(1.0)
    ((reason, detail),) = reasons(effects)
    assert reason is FailureReason.UNREACHABLE
    assert "connection" in detail


def test_a_rank_whose_connection_breaks_while_others_have_not_answered_is_granted_when_it_is_heard(
    core: DecodeDriver, hellos: list[DecodeEffect]
) -> None:
    other = hello_to(accept(core, hello_to(hellos, PREFILL)), OTHER_PREFILL)
    core(ev.ConnectionLost(PREFILL))
    assert messages(accept(core, other), Grant) == []
    assert len(messages(core.hear(PREFILL, Pong(peer=PREFILL)), Grant)) == 2


def test_rooms_that_wait_for_a_rank_that_was_connected_before_fail_with_its_name(core: DecodeDriver) -> None:
    core(request())
    core.connect(PREFILL, OTHER_PREFILL)
    core.hear(OTHER_PREFILL, Goodbye(peer=OTHER_PREFILL))
    core(request(2, room=8))
    hellos = core.compiled(core.found(PREFILL, peer("prefill", 1, 2)))
    accept(core, hello_to(hellos, peer("prefill", 1, 2)))
    failures = [detail for reason, detail in reasons(core.pass_time(5.0)) if reason is FailureReason.UNREACHABLE]
    assert failures == [
        f"prefill was not reached within 5.0 s: rank prefill/0 at {endpoint_of(PREFILL)} does not answer"
    ]


def test_a_lost_rank_is_shaken_hands_with_again_and_rooms_wait_for_that(core: DecodeDriver) -> None:
    core(request())
    core.connect(PREFILL)
    effects = core(ev.ConnectionLost(PREFILL)) + core.sleep(3.0)
    assert reports(effects) == [("failed", "draining")]
    assert LookUp("prefill") in effects
    assert reports(core(request(2, room=8))) == []
    effects = core.connect(PREFILL)
    assert [grant.room for _, grant in messages(effects, Grant) if isinstance(grant, Grant)] == [8]


def test_an_instance_that_nobody_wants_any_more_is_forgotten(core: DecodeDriver) -> None:
    core(request())
    core.connect(PREFILL)
    core.hear(PREFILL, Goodbye(peer=PREFILL, fenced=True))
    assert not core.core.rooms.rooms
    assert LookUp("prefill") in core.sleep(1.0)
    core.sleep(2 * handshake.UNWANTED_S)
    assert core.sleep(60.0) == []
    assert len(core.core.timers) == 0


# Goodbye -------------------------------------------------------------------------------------------------------------


def test_a_goodbye_after_the_last_write_has_landed_frees_the_pages(core: DecodeDriver) -> None:
    core(request())
    core.connect(PREFILL)
    effects = core.hear(PREFILL, Goodbye(peer=PREFILL, fenced=True))
    assert reports(effects) == FAILED
    assert Disconnect(PREFILL) in effects
    assert not of_kind(effects, ProbePeer), "nothing is left to find out"


def test_a_goodbye_of_a_rank_whose_writes_may_still_land_frees_nothing(core: DecodeDriver) -> None:
    core(request())
    core.connect(PREFILL)
    effects = core.hear(PREFILL, Goodbye(peer=PREFILL, fenced=False))
    assert reports(effects) == [("failed", "draining")]
    assert ProbePeer(PREFILL, endpoint_of(PREFILL)) in effects
    assert reports(core(ev.ProbeFinished(PREFILL, is_gone=False))) == []
    assert reports(core(ev.ProbeFinished(PREFILL, is_gone=True))) == [("failed", "safe")]


def test_a_probe_that_is_asked_for_while_one_goes_on_is_made_after_it(core: DecodeDriver) -> None:
    """The running probe may have begun while the host was unreachable, so it does not answer the new question."""
    core(request())
    core.connect(PREFILL)
    probe = ProbePeer(PREFILL, endpoint_of(PREFILL))
    assert probe in core.hear(PREFILL, Goodbye(peer=PREFILL, fenced=False))
    assert probe not in core.sleep(5.0)
    assert probe in core(ev.ProbeFinished(PREFILL, is_gone=False))
    assert probe not in core(ev.ProbeFinished(PREFILL, is_gone=False))


def test_goodbye_is_said_to_every_connected_rank_when_the_transport_is_closed(core: DecodeDriver) -> None:
    core(request())
    core.connect(PREFILL, OTHER_PREFILL)
    core(ev.CloseStarted(ABORTED))
    assert messages(core(ev.TransportClosed()), Goodbye) == [
        (PREFILL, Goodbye(peer=DECODE)),
        (OTHER_PREFILL, Goodbye(peer=DECODE)),
    ]


def test_goodbye_is_said_also_to_ranks_in_the_middle_of_the_handshake(
    core: DecodeDriver, hellos: list[DecodeEffect]
) -> None:
    accept(core, hello_to(hellos, PREFILL))
    core(ev.CloseStarted(ABORTED))
    assert [to for to, _ in messages(core(ev.TransportClosed()), Goodbye)] == [PREFILL, OTHER_PREFILL]


def test_the_record_of_a_process_that_has_ended_is_not_believed(core: DecodeDriver) -> None:
    """The record stays in the registry until its lease ends, and would take a staging window again and again."""
    core(request())
    core.connect(PREFILL)
    core(ev.ConnectionLost(PREFILL))
    core(ev.ProbeFinished(PREFILL, is_gone=True))
    assert not of_kind(core(ev.InstanceFound("prefill", records(PREFILL))), CompileRoutes)
    successor = peer("prefill", incarnation=2)
    assert of_kind(core(ev.InstanceFound("prefill", records(successor))), CompileRoutes)


def test_rooms_that_were_declined_do_not_keep_the_search_for_an_instance_going(core: DecodeDriver) -> None:
    core(request())
    core.sleep(100.0)
    assert not of_kind(core.sleep(100.0), LookUp)


def test_a_rank_that_answers_although_its_port_was_refused_is_forgotten_like_any_other(core: DecodeDriver) -> None:
    """A proxy refused the probe in its place, while routes to the rank were compiled."""
    core(request())
    core.connect(PREFILL)
    core(ev.ConnectionLost(PREFILL))
    core.hear(PREFILL, Refuse(peer=PREFILL, to=DECODE, detail="look again"))
    compiling = core.found(PREFILL)
    core(ev.ProbeFinished(PREFILL, is_gone=True))
    core.welcome(core.compiled(compiling))
    core.sleep(600)
    assert core.core.counts().peers == 0

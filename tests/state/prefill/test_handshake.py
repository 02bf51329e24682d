"""Hellos of decode ranks at a prefill rank: checked, accepted or refused, and remembered until the rank leaves."""

from typing import Any

import pytest
from msgspec.structs import replace

import kvflow.state.prefill.peers
from kvflow.errors import FailureReason
from kvflow.state import events as ev
from kvflow.state.effects import CheckHello, DisconnectTransport, LogEvent, PrefillEffect, Reply
from kvflow.wire.messages import Failed, Goodbye, Grant, Hello, Notice, PeerId, Ping, Pong, Refuse, Welcome
from tests.support.cores import (
    ABORTED,
    DECODE,
    LEASE_S,
    OTHER_DECODE,
    PREFILL,
    PrefillDriver,
    abort_failure,
    anomalies,
    connection_of,
    endpoint_of,
    grant,
    messages,
    of_kind,
    peer,
    reports,
)
from tests.support.sending import ROOM, chunk, end, posted
from tests.support.small_routes import layout

LEAVING = abort_failure("leaving")
FIRST, SECOND = connection_of(DECODE, 0), connection_of(DECODE, 1)


@pytest.fixture
def core() -> PrefillDriver:
    return PrefillDriver()


def say(core: PrefillDriver, message: Hello | Goodbye, connection: bytes = FIRST) -> list[PrefillEffect]:
    return core(ev.MessageArrived(connection, message))


def replies(effects: list[PrefillEffect]) -> list[tuple[bytes, Any]]:
    return [(effect.connection, effect.message) for effect in of_kind(effects, Reply)]


# Welcome -----------------------------------------------------------------------------------------------------------


def test_a_hello_is_checked_and_then_welcomed(core: PrefillDriver) -> None:
    hello = core.hello()
    assert say(core, hello) == [CheckHello(FIRST, hello)]
    assert core.core.counts().peers == 0
    effects = core(core.checked(hello))
    assert replies(effects) == [(FIRST, Welcome(peer=PREFILL, attempt=0, version=3, endpoint=endpoint_of(PREFILL)))]
    assert of_kind(effects, LogEvent) == [LogEvent("peer_connected", {"peer": str(DECODE)})]
    assert list(core.core.peers.connections()) == [FIRST]


def test_a_hello_that_is_retransmitted_while_it_is_checked_is_checked_once(core: PrefillDriver) -> None:
    hello = core.hello()
    say(core, hello)
    assert say(core, hello) == []
    assert len(messages(core(core.checked(hello)), Welcome)) == 1


def test_a_retransmitted_hello_is_answered_at_once(core: PrefillDriver) -> None:
    hello = core.hello()
    say(core, hello)
    core(core.checked(hello))
    for _ in range(2):
        assert say(core, hello) == [
            Reply(FIRST, Welcome(peer=PREFILL, attempt=0, version=3, endpoint=endpoint_of(PREFILL)))
        ]


def test_a_later_attempt_is_checked_again_and_answered_with_its_own_number(core: PrefillDriver) -> None:
    core.connect()
    hello = core.hello()
    assert say(core, hello) == [CheckHello(FIRST, hello)]
    effects = core(core.checked(hello))
    assert replies(effects) == [(FIRST, Welcome(peer=PREFILL, attempt=1, version=3, endpoint=endpoint_of(PREFILL)))]
    assert of_kind(effects, LogEvent) == [], "it was connected before"


def test_an_older_attempt_is_ignored(core: PrefillDriver) -> None:
    old, new = core.hello(), core.hello()
    say(core, new)
    assert say(core, old) == [], "while the newer one is checked"
    core(core.checked(new))
    assert say(core, old) == [], "and after it"


def test_a_check_that_a_later_attempt_has_overtaken_counts_for_nothing(core: PrefillDriver) -> None:
    old, new = core.hello(), core.hello()
    say(core, old)
    assert say(core, new) == [CheckHello(FIRST, new)]
    assert core(core.checked(old)) == []
    assert core.core.counts().peers == 0
    assert [message.attempt for _, message in replies(core(core.checked(new)))] == [1]


def test_the_same_attempt_over_another_connection_takes_the_place_of_the_first(core: PrefillDriver) -> None:
    """The connection broke and was reestablished while the hello was retransmitted."""
    hello = core.hello()
    say(core, hello, FIRST)
    core(core.checked(hello))
    assert say(core, hello, SECOND) == [CheckHello(SECOND, hello)]
    effects = core(core.checked(hello, connection=SECOND))
    assert replies(effects) == [(SECOND, Welcome(peer=PREFILL, attempt=0, version=3, endpoint=endpoint_of(PREFILL)))]
    assert list(core.core.peers.connections()) == [SECOND]
    assert messages(core(ev.MessageArrived(FIRST, Ping(peer=DECODE))), Refuse), "the old connection is nobody's"


def test_what_was_granted_goes_on_over_a_new_connection(core: PrefillDriver) -> None:
    core.connect()
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant(tokens=(8, 8)))
    core.connect(connection=SECOND)
    effects = core(chunk(0, 8, last=True))
    assert [connection for connection, message in replies(effects) if isinstance(message, Notice)] == [SECOND]


def test_versions_are_agreed_on(core: PrefillDriver) -> None:
    hello = replace(core.hello(), versions=(1, 9))
    say(core, hello)
    ((_, welcome),) = replies(core(core.checked(hello)))
    assert welcome.version == 3


# Refusal -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "detail"),
    [
        ({"to": peer("prefill", incarnation=2)}, "Hello is for"),
        ({"versions": (4, 5)}, "no common protocol version"),
        ({"versions": (1, 2)}, "no common protocol version"),
        ({"versions": (3, 2)}, "no common protocol version"),
        ({"backend": "another"}, "transports differ"),
    ],
)
def test_a_hello_that_cannot_fit_is_refused_unchecked(
    core: PrefillDriver, changes: dict[str, object], detail: str
) -> None:
    effects = say(core, replace(core.hello(), **changes))
    assert of_kind(effects, CheckHello) == []
    ((connection, refusal),) = replies(effects)
    assert (connection, refusal.peer, refusal.to, refusal.attempt) == (FIRST, PREFILL, DECODE, 0)
    assert detail in refusal.detail
    assert anomalies(effects) == ["hello_refused"]
    assert list(core.core.peers.connections()) == []


def test_another_model_is_refused(core: PrefillDriver) -> None:
    other = replace(layout(), fingerprint="another model")
    ((_, refusal),) = replies(say(core, replace(core.hello(), layout=other)))
    assert "fingerprints differ" in refusal.detail


def test_a_route_that_does_not_fit_is_refused_with_the_reason(core: PrefillDriver) -> None:
    hello = core.hello()
    say(core, hello)
    ((_, refusal),) = replies(core(ev.HelloChecked(FIRST, hello, None, "layouts differ")))
    assert (refusal.detail, refusal.attempt) == ("layouts differ", 0)
    assert list(core.core.peers.connections()) == []
    assert say(core, hello) == [CheckHello(FIRST, hello)], "it may fit the next time"


def test_a_closing_rank_refuses_and_welcomes_nobody(core: PrefillDriver) -> None:
    hello = core.hello()
    say(core, hello)
    core(ev.CloseStarted(LEAVING))
    assert core(core.checked(hello)) == []
    ((_, refusal),) = replies(say(core, core.hello()))
    assert "closing" in refusal.detail
    assert core.core.counts().peers == 0


def test_a_draining_rank_still_welcomes(core: PrefillDriver) -> None:
    """Open rooms may still be granted."""
    core(ev.DrainStarted(LEAVING))
    assert messages(core.connect(), Welcome)


@pytest.mark.parametrize("message", [Ping(peer=DECODE), grant()], ids=["ping", "grant"])
def test_whoever_has_not_said_hello_is_told_to(core: PrefillDriver, message: Ping | Grant) -> None:
    ((connection, refusal),) = replies(core(ev.MessageArrived(SECOND, message)))
    assert (connection, refusal) == (SECOND, Refuse(peer=PREFILL, to=None, detail="handshake required"))


@pytest.mark.parametrize(
    "message", [Goodbye(peer=DECODE), Refuse(peer=DECODE, to=None, detail="")], ids=["goodbye", "refuse"]
)
def test_an_end_of_what_is_not_known_is_not_answered(core: PrefillDriver, message: Goodbye | Refuse) -> None:
    assert core(ev.MessageArrived(SECOND, message)) == []


# Other layouts, other incarnations -----------------------------------------------------------------------------------


def test_a_decode_rank_that_wants_other_cells_begins_anew(core: PrefillDriver) -> None:
    core.connect()
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant())
    hello = core.hello(wants=False)
    effects = say(core, hello)
    assert reports(effects)[-1] == ("failed", "safe")
    ((to, failed),) = messages(effects, Failed)
    assert isinstance(failed, Failed)
    assert (to, failed.failure.reason) == (DECODE, FailureReason.PEER_LOST)
    assert "wants different cells than before" in failed.failure.detail
    assert effects.index(DisconnectTransport(DECODE)) < effects.index(CheckHello(FIRST, hello))
    assert messages(core(core.checked(hello)), Welcome)


def test_a_decode_rank_with_another_layout_begins_anew(core: PrefillDriver) -> None:
    core.connect()
    moved = layout(heads=(0, 2))
    hello = replace(core.hello(), layout=moved)
    assert DisconnectTransport(DECODE) in say(core, hello)


def test_a_decode_rank_that_wants_the_same_cells_keeps_what_it_was_granted(core: PrefillDriver) -> None:
    core.connect()
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant())
    assert reports(core.connect()) == []
    assert posted(core(chunk(0, 8, last=True))) == [(0, (0, 8))]


def test_a_restarted_decode_rank_takes_the_place_of_its_former_incarnation(core: PrefillDriver) -> None:
    core.connect()
    again = peer("decode", incarnation=2)
    effects = core.connect(again)
    assert DisconnectTransport(DECODE) in effects
    (_, connected) = of_kind(effects, LogEvent)
    assert connected == LogEvent("peer_connected", {"peer": str(again)})
    assert list(core.core.peers.connections()) == [connection_of(again), FIRST], (
        "it may have been a hello of a dead one"
    )
    core.hear(again, Ping(peer=again))
    assert list(core.core.peers.connections()) == [connection_of(again)]
    assert messages(core.hear(DECODE, Ping(peer=DECODE)), Refuse)


def test_an_incarnation_that_was_superseded_cannot_come_back(core: PrefillDriver) -> None:
    """Writes to it are no longer tracked, so no answer about them would be reliable."""
    core.connect(DECODE)
    again = peer("decode", incarnation=2)
    core.connect(again)
    core.hear(again, Ping(peer=again))
    [(_, refusal)] = replies(say(core, core.hello(attempt=7)))
    assert isinstance(refusal, Refuse)
    assert (refusal.to, refusal.attempt) == (DECODE, 7)
    assert "later incarnation" in refusal.detail


# Two processes with one rank name ----------------------------------------------------------------------------------


def test_a_newcomer_is_refused_while_the_rank_that_it_claims_to_be_answers(core: PrefillDriver) -> None:
    core.connect(DECODE)
    newcomer = peer("decode", incarnation=2)
    hello = core.hello(newcomer)
    arrival = ev.MessageArrived(connection_of(newcomer), hello)
    assert replies(core(arrival)) == [(FIRST, Ping(peer=PREFILL))]
    effects = core.hear(DECODE, Pong(peer=DECODE))
    [(where, refusal)] = replies(effects)
    assert (where, refusal.to, refusal.attempt) == (connection_of(newcomer), newcomer, hello.attempt)
    assert str(DECODE) in refusal.detail
    [log] = of_kind(effects, LogEvent)
    assert log == LogEvent("rank_name_conflict", {"peer": str(DECODE), "refused": str(newcomer)}, is_warning=True)
    assert list(core.core.peers.connections()) == [FIRST]
    assert messages(core.hear(DECODE, Ping(peer=DECODE)), Pong) == [(DECODE, Pong(peer=PREFILL))]
    core(arrival)
    assert of_kind(core.hear(DECODE, Pong(peer=DECODE)), LogEvent) == []  # logged once per newcomer
    third = peer("decode", incarnation=3)
    core(ev.MessageArrived(connection_of(third), core.hello(third)))
    assert len(of_kind(core.hear(DECODE, Pong(peer=DECODE)), LogEvent)) == 1


def test_the_place_of_a_process_that_has_ended_is_taken_at_once(core: PrefillDriver) -> None:
    core.connect(DECODE)
    newcomer = peer("decode", incarnation=2)
    hello = core.hello(newcomer)
    core(ev.MessageArrived(connection_of(newcomer), hello))
    effects = core(ev.ReplyLost(FIRST))
    assert DisconnectTransport(DECODE) in effects
    assert effects[-1] == CheckHello(connection_of(newcomer), hello)
    core(core.checked(hello))
    core.hear(newcomer, Ping(peer=newcomer))
    assert list(core.core.peers.connections()) == [connection_of(newcomer)]


def test_a_lost_reply_alone_disconnects_nobody(core: PrefillDriver) -> None:
    core.connect(DECODE)
    assert core(ev.ReplyLost(FIRST)) == []
    assert core(ev.ReplyLost(b"unknown")) == []
    assert core.hear(DECODE, Pong(peer=DECODE)) == []
    assert list(core.core.peers.connections()) == [FIRST]


def test_a_newcomer_takes_the_place_of_a_silent_rank_within_its_lease(core: PrefillDriver) -> None:
    """The host is down: the connection stands until the heartbeats time out, and no answer comes."""
    core.connect(DECODE)
    newcomer = peer("decode", incarnation=2)
    arrival = ev.MessageArrived(connection_of(newcomer), core.hello(newcomer))
    assert messages(core(arrival), Welcome) == []
    assert CheckHello(connection_of(newcomer), arrival.message) in core.sleep(LEASE_S)  # type: ignore[arg-type]


def test_of_two_newcomers_that_are_checked_at_once_the_first_is_connected(core: PrefillDriver) -> None:
    newcomer = peer("decode", incarnation=2)
    hellos = [core.hello(DECODE), core.hello(newcomer)]
    for hello in hellos:
        say(core, hello, connection_of(hello.peer))
    core(core.checked(hellos[0]))
    effects = core(core.checked(hellos[1]))
    assert effects == [DisconnectTransport(newcomer), Reply(FIRST, Ping(peer=PREFILL))]
    assert len(messages(core.hear(DECODE, Pong(peer=DECODE)), Refuse)) == 1
    assert list(core.core.peers.connections()) == [FIRST]


def test_a_newcomer_that_has_said_goodbye_takes_no_place(core: PrefillDriver) -> None:
    core.connect(DECODE)
    newcomer = peer("decode", incarnation=2)
    core(ev.MessageArrived(connection_of(newcomer), core.hello(newcomer)))
    core(ev.MessageArrived(connection_of(newcomer), Goodbye(peer=newcomer)))
    assert core(ev.ReplyLost(FIRST)) == []
    assert list(core.core.peers.connections()) == [FIRST]


def test_a_newcomer_that_is_long_gone_takes_no_place(core: PrefillDriver) -> None:
    """The answer to the Ping was lost when the connection broke, and a later one arrives."""
    core.connect(DECODE)
    newcomer = peer("decode", incarnation=2)
    core(ev.MessageArrived(connection_of(newcomer), core.hello(newcomer)))
    for _ in range(4):
        core.hear(DECODE, Ping(peer=DECODE))
        core.sleep(1.0)
    assert core(ev.ReplyLost(FIRST)) == []
    assert list(core.core.peers.connections()) == [FIRST]


@pytest.mark.parametrize("is_checked_first", [True, False])
def test_a_hello_of_a_dead_incarnation_whose_check_ends_late_replaces_nobody(
    core: PrefillDriver, is_checked_first: bool
) -> None:
    """Both hellos waited in the queue of a stopped process, and their checks end in any order."""
    again = peer("decode", incarnation=2)
    late, living = core.hello(), core.hello(again)
    say(core, late)
    say(core, living, connection_of(again))
    checks = [core.checked(late), core.checked(living)]
    for check in checks if is_checked_first else checks[::-1]:
        core(check)
    if is_checked_first:
        assert core(ev.ReplyLost(FIRST))[-1] == CheckHello(connection_of(again), living)
        core(core.checked(living))
    else:
        assert len(messages(core.hear(again, Pong(peer=again)), Refuse)) == 1
    assert messages(core.hear(again, Ping(peer=again)), Pong) != []
    assert list(core.core.peers.connections()) == [connection_of(again)]


def _replaced_by_a_dead_one(core: PrefillDriver, dead: PeerId) -> None:
    """Let a hello of a dead incarnation replace DECODE while DECODE reconnects."""
    hello = core.hello(dead)
    core(ev.MessageArrived(connection_of(dead), hello))
    assert core(ev.ReplyLost(FIRST))[-1] == CheckHello(connection_of(dead), hello)
    assert messages(core(core.checked(hello)), Welcome)
    assert list(core.core.peers.connections()) == [connection_of(dead), FIRST]


@pytest.mark.parametrize("is_silent", [True, False], ids=["its host is off", "its process has ended"])
def test_a_living_rank_comes_back_after_a_hello_of_a_dead_incarnation(core: PrefillDriver, is_silent: bool) -> None:
    """Both hellos waited in the queue of a stopped process, and the connection of the live rank broke."""
    core.connect(DECODE)
    core.hear(DECODE, grant(generation=5))
    dead = peer("decode", incarnation=2)
    _replaced_by_a_dead_one(core, dead)
    again, connection = core.hello(attempt=7), connection_of(DECODE, 1)
    assert replies(say(core, again, connection)) == [(connection_of(dead), Ping(peer=PREFILL))]
    if is_silent:
        core.sleep(LEASE_S)
        say(core, again, connection)
    else:
        core(ev.ReplyLost(connection_of(dead)))
    assert messages(core(core.checked(again, connection=connection)), Welcome)
    assert list(core.core.peers.connections()) == [connection]
    assert 5 in core.core.peers[DECODE].closed, "what it was granted before is over"
    say(core, core.hello(dead), connection_of(dead, 1))
    assert messages(core(ev.MessageArrived(connection, Pong(peer=DECODE))), Refuse)
    assert list(core.core.peers.connections()) == [connection]


def test_a_goodbye_that_waited_behind_the_hello_of_a_dead_incarnation_ends_that_one_only(core: PrefillDriver) -> None:
    core.connect(DECODE)
    dead = peer("decode", incarnation=2)
    _replaced_by_a_dead_one(core, dead)
    core(ev.MessageArrived(connection_of(dead), Goodbye(peer=dead)))
    again = core.hello(attempt=7)
    assert say(core, again) == [CheckHello(FIRST, again)]
    assert messages(core(core.checked(again)), Welcome)


def test_decode_ranks_do_not_disturb_each_other(core: PrefillDriver) -> None:
    core.connect()
    core.connect(OTHER_DECODE)
    for other in (DECODE, OTHER_DECODE):
        assert messages(core.hear(other, Ping(peer=other)), Pong) == [(other, Pong(peer=PREFILL))]
    effects = core.hear(OTHER_DECODE, Ping(peer=DECODE))
    assert anomalies(effects) == ["message_in_the_name_of_another"]


@pytest.mark.parametrize("is_checked", [False, True], ids=["while it is checked", "once it is connected"])
def test_a_connection_belongs_to_one_decode_rank(core: PrefillDriver, is_checked: bool) -> None:
    """Otherwise the end of one rank would cut off the other, and messages could not be attributed."""
    connection = connection_of(DECODE)
    hello = core.hello()
    core(ev.MessageArrived(connection, hello))
    if is_checked:
        core(core.checked(hello))
    [(_, refusal)] = replies(core(ev.MessageArrived(connection, core.hello(OTHER_DECODE))))
    assert isinstance(refusal, Refuse)
    assert refusal.to == OTHER_DECODE
    assert refusal.detail == f"the connection belongs to {DECODE}"
    if not is_checked:
        core(core.checked(hello))
    assert OTHER_DECODE not in core.core.peers
    core.connect(OTHER_DECODE)
    core.hear(OTHER_DECODE, Goodbye(peer=OTHER_DECODE))
    assert messages(core.hear(DECODE, Ping(peer=DECODE)), Pong) == [(DECODE, Pong(peer=PREFILL))]
    core.hear(DECODE, Goodbye(peer=DECODE))
    assert list(core.core.peers.connections()) == []


def test_a_connection_that_a_decode_rank_has_left_may_become_anothers(core: PrefillDriver) -> None:
    core.connect(DECODE)
    core.connect(DECODE, connection=connection_of(DECODE, 1))
    core.connect(OTHER_DECODE, connection=connection_of(DECODE))
    core.hear(DECODE, Goodbye(peer=DECODE))
    assert list(core.core.peers.connections()) == [connection_of(DECODE)]
    assert messages(core.hear(OTHER_DECODE, Ping(peer=OTHER_DECODE)), Pong) == [(DECODE, Pong(peer=PREFILL))]


def test_what_only_a_decode_rank_should_hear_is_counted(core: PrefillDriver) -> None:
    core.connect()
    assert anomalies(core.hear(DECODE, Welcome(peer=DECODE, attempt=0, version=3))) == ["unexpected_welcome"]


# Closing -----------------------------------------------------------------------------------------------------------


def test_goodbye_is_said_to_every_decode_rank_when_the_transport_is_closed(core: PrefillDriver) -> None:
    core.connect()
    core.connect(OTHER_DECODE)
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant())
    core(chunk(0, 8, last=True))
    delivery = ev.DeliveryId(ROOM, DECODE, 1)
    core(ev.CloseStarted(ABORTED))
    core(ev.PostEnded(delivery, 0, ABORTED, lingers=True))
    said = dict(messages(core(ev.TransportClosed()), Goodbye))
    assert said == {
        DECODE: Goodbye(peer=PREFILL, fenced=False),
        OTHER_DECODE: Goodbye(peer=PREFILL, fenced=True),
    }


def test_a_rank_of_which_every_write_has_ended_leaves_fenced(core: PrefillDriver) -> None:
    core.connect()
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant())
    core(chunk(0, 8, last=True))
    core(ev.CloseStarted(ABORTED))
    core(ev.PostEnded(ev.DeliveryId(ROOM, DECODE, 1), 0, None))
    assert messages(core(ev.TransportClosed()), Goodbye) == [(DECODE, Goodbye(peer=PREFILL, fenced=True))]


def test_goodbye_is_said_to_who_is_in_the_middle_of_a_handshake(core: PrefillDriver) -> None:
    hello, other = core.hello(), core.hello(OTHER_DECODE)
    core(ev.MessageArrived(connection_of(DECODE), hello))
    core(ev.MessageArrived(connection_of(OTHER_DECODE), other))
    core(ev.CloseStarted(ABORTED))
    assert core(core.checked(other)) == [], "nobody is welcomed any more"
    assert messages(core(ev.TransportClosed()), Goodbye) == [
        (DECODE, Goodbye(peer=PREFILL, fenced=True)),
        (OTHER_DECODE, Goodbye(peer=PREFILL, fenced=True)),
    ]


def disconnect(core: PrefillDriver) -> ev.DeliveryId:
    """Post a write to a decode rank that then falls silent, and start to close."""
    core.connect()
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant())
    core(chunk(0, 8, last=True))
    assert DisconnectTransport(DECODE) in core.sleep(LEASE_S)
    core(ev.CloseStarted(ABORTED))
    return ev.DeliveryId(ROOM, DECODE, 1)


@pytest.mark.parametrize("lingers", [False, True])
def test_goodbye_is_said_to_a_decode_rank_that_was_disconnected(core: PrefillDriver, lingers: bool) -> None:
    """The rank may live, and wait for the proof that the write has ended."""
    delivery = disconnect(core)
    core(ev.PostEnded(delivery, 0, ABORTED, lingers=lingers))
    assert messages(core(ev.TransportClosed()), Goodbye) == [(DECODE, Goodbye(peer=PREFILL, fenced=not lingers))]


def test_goodbye_goes_over_the_connection_of_the_last_hello(core: PrefillDriver) -> None:
    disconnect(core)
    [(_, refusal)] = replies(say(core, core.hello(), SECOND))
    assert isinstance(refusal, Refuse)
    assert refusal.detail == "prefill/0 is closing"
    assert list(core.core.peers.connections()) == [SECOND]
    assert [connection for connection, _ in replies(core(ev.TransportClosed()))] == [SECOND]


def test_a_hello_to_the_former_incarnation_changes_no_connection(core: PrefillDriver) -> None:
    disconnect(core)
    say(core, core.hello(to=peer("prefill", incarnation=9)), SECOND)
    assert list(core.core.peers.connections()) == [FIRST]


@pytest.mark.parametrize("is_restarted", [False, True], ids=["said goodbye", "restarted"])
def test_goodbye_is_not_said_to_a_disconnected_decode_rank_that_is_over(
    core: PrefillDriver, is_restarted: bool
) -> None:
    core.connect()
    core.sleep(LEASE_S)
    again = peer("decode", incarnation=2)
    if is_restarted:
        core.connect(again)
        core.hear(again, Ping(peer=again))
    else:
        assert say(core, Goodbye(peer=DECODE)) == []
    said = [to for to, _ in messages(core(ev.TransportClosed()), Goodbye)]
    assert said == ([again] if is_restarted else [])


def test_an_incarnation_whose_writes_are_not_followed_any_more_cannot_come_back(
    core: PrefillDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank was evicted by many later disconnections, and would receive a proof that does not exist."""
    monkeypatch.setattr(kvflow.state.prefill.peers, "MAX_DISCONNECTED", 2)
    core.connect()
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant())
    core(chunk(0, 8, last=True))
    end(core, 0, failure=ABORTED, lingers=True)
    core.sleep(LEASE_S)
    for number in range(3):
        core.connect(peer(f"other-{number}"))
    core.sleep(LEASE_S)
    again = peer("decode", incarnation=2)
    core.connect(again)
    core.hear(again, Ping(peer=again))
    [(_, refusal)] = replies(say(core, core.hello(attempt=7)))
    assert isinstance(refusal, Refuse)


def test_a_goodbye_of_a_newcomer_ends_what_was_written_to_it(core: PrefillDriver) -> None:
    core.connect()
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant())
    core(chunk(0, 8, last=True))
    end(core, 0, failure=ABORTED, lingers=True)
    core.connect(peer("decode", incarnation=2))
    say(core, core.hello(attempt=7), connection_of(DECODE, 1))
    say(core, Goodbye(peer=DECODE), connection_of(DECODE, 1))
    assert len(core.core.rooms.unfenced) == 0


def test_a_goodbye_of_a_disconnected_decode_rank_counts(core: PrefillDriver) -> None:
    """After its Goodbye, no rank waits for the end of a lingering write to it."""
    delivery = disconnect(core)
    core(ev.PostEnded(delivery, 0, ABORTED, lingers=True))
    assert [one.id for one in core.core.rooms.unfenced] == [delivery]
    say(core, Goodbye(peer=DECODE))
    assert not core.core.rooms.unfenced
    assert list(core.core.peers.connections()) == []


def test_who_says_goodbye_while_its_hello_is_checked_is_not_welcomed(core: PrefillDriver) -> None:
    hello = core.hello()
    say(core, hello)
    assert say(core, Goodbye(peer=DECODE)) == []
    assert core(core.checked(hello)) == [DisconnectTransport(DECODE)], "which was connected for the hello"
    [(_, refusal)] = replies(say(core, core.hello()))
    assert isinstance(refusal, Refuse)
    assert refusal.detail == f"{DECODE} has said goodbye"


def test_a_hello_whose_sender_is_lost_while_it_is_checked_is_checked_again(core: PrefillDriver) -> None:
    core.connect()
    hello = core.hello()
    arrival = ev.MessageArrived(connection_of(DECODE), hello)
    core(arrival)
    assert DisconnectTransport(DECODE) in core.sleep(LEASE_S)  # after the transport was connected for the hello
    assert messages(core(core.checked(hello)), Welcome) == []
    assert core(arrival) == [CheckHello(connection_of(DECODE), hello)]
    assert messages(core(core.checked(hello)), Welcome) != []


# Checks whose hello is void ----------------------------------------------------------------------------------------


def test_a_goodbye_over_the_connection_of_a_hello_that_is_checked_ends_the_rank(core: PrefillDriver) -> None:
    core.connect(DECODE)
    core.hear(DECODE, grant())
    core(ev.SendOpened(7))
    again = core.hello()
    core(ev.MessageArrived(connection_of(DECODE, 1), again))
    effects = core(ev.MessageArrived(connection_of(DECODE, 1), Goodbye(peer=DECODE)))
    assert DisconnectTransport(DECODE) in effects
    assert not core.core.rooms.rooms
    assert list(core.core.peers.connections()) == []
    assert core(core.checked(again, connection=connection_of(DECODE, 1))) == [DisconnectTransport(DECODE)]


def test_the_transport_of_a_rank_that_is_lost_during_its_check_is_disconnected(core: PrefillDriver) -> None:
    core.connect(DECODE)
    again = core.hello()
    core(ev.MessageArrived(connection_of(DECODE, 1), again))
    assert DisconnectTransport(DECODE) in core.sleep(LEASE_S)
    assert core(core.checked(again, connection=connection_of(DECODE, 1))) == [DisconnectTransport(DECODE)]


def test_the_transport_of_a_check_that_a_refused_hello_has_overtaken_is_disconnected(core: PrefillDriver) -> None:
    first, second = core.hello(), core.hello()
    core(ev.MessageArrived(FIRST, first))
    core(ev.MessageArrived(FIRST, second))
    assert core(core.checked(first)) == []
    assert DisconnectTransport(DECODE) in core(ev.HelloChecked(FIRST, second, None, "does not fit"))

"""Quarantined pages are counted, bounded, and released by a proof or by an operator who takes the risk."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvflow.bounds import Bounds
from kvflow.config import Limits, Proofs, Timeouts
from kvflow.errors import CapacityExceeded, LocalProtocolError
from kvflow.state import events as ev
from kvflow.state.effects import Disconnect, NoteEnds, WaitForFence, WaitForLanding
from kvflow.state.quarantine import NO_MEMORY, Footprint, ProofKind, Quarantine
from kvflow.wire.messages import Cancel, Drained, Failed, Ping, Pong
from tests.support.cores import (
    ABORTED,
    DECODE,
    PREFILL,
    DecodeDriver,
    PrefillDriver,
    abort_failure,
    endpoint_of,
    grant,
    messages,
    of_kind,
    peer,
    reports,
)
from tests.support.receiving import ROOM, Transfer, request
from tests.support.sending import DELIVERY, chunk, delivery, end, posted

BROKEN = abort_failure("the write broke")
DRAINED = Drained(room=ROOM, generation=1, engine_rank=0)
CANCEL = Cancel(room=ROOM, generation=1, failure=ABORTED)
ONE_PAGE = Footprint(1, 100)

STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "remove"]), st.integers(0, 4), st.integers(0, 5), st.integers(0, 500)),
    max_size=60,
)


@given(STEPS, st.integers(1, 1_200))
def test_the_count_agrees_with_a_dictionary(steps: list[tuple[str, int, int, int]], num_bytes: int) -> None:
    quarantine = Quarantine(num_bytes)
    held: dict[int, Footprint] = {}
    for step, key, *size in steps:
        if step == "put":
            quarantine.add_pages(key, Footprint(*size))
            held.setdefault(key, Footprint(*size))
        else:
            quarantine.remove(key)
            held.pop(key, None)
        assert len(quarantine) == len(held)
        assert quarantine.total == (sum(item[0] for item in held.values()), sum(item[1] for item in held.values()))
        if quarantine.total.num_bytes >= num_bytes:
            with pytest.raises(CapacityExceeded) as refused:
                quarantine.check_admission()
            assert refused.value.values == {
                "transfers": len(held),
                "pages": quarantine.total[0],
                "num_bytes": quarantine.total[1],
                "limit": num_bytes,
                "setting": "limits.quarantined_bytes",
            }
        else:
            quarantine.check_admission()


# On a decode rank --------------------------------------------------------------------------------------------------


def open_and_quarantine(core: DecodeDriver, generation: int, room: int) -> None:
    """Receive a room whose prefill rank lives, but does not answer about the room any more."""
    core(request(generation, room=room, footprint=ONE_PAGE))
    core(ev.ReceiveAborted(room, ABORTED))
    for _ in range(5):
        core.hear(PREFILL, Pong(peer=PREFILL))
        core.sleep(Timeouts().drain_s / 5)


@pytest.fixture
def decode() -> DecodeDriver:
    core = DecodeDriver(limits=Limits(quarantined_bytes=200))
    core.connect(PREFILL)
    return core


def test_a_decode_rank_admits_until_its_quarantine_is_full(decode: DecodeDriver) -> None:
    open_and_quarantine(decode, 1, 1)
    open_and_quarantine(decode, 2, 2)
    with pytest.raises(CapacityExceeded, match="quarantine") as refused:
        decode(request(3, room=3))
    assert (refused.value.values["transfers"], refused.value.values["setting"]) == (2, "limits.quarantined_bytes")
    assert set(decode.core.rooms.rooms) == {1, 2}, "what is refused leaves nothing behind"


def test_a_late_proof_frees_capacity(decode: DecodeDriver) -> None:
    open_and_quarantine(decode, 1, ROOM)
    open_and_quarantine(decode, 2, 2)
    assert reports(decode.hear(PREFILL, DRAINED)) == [("aborted", "safe")]
    assert decode.core.quarantine.total == ONE_PAGE
    decode(request(3, room=3))


def test_an_operator_frees_capacity(decode: DecodeDriver) -> None:
    open_and_quarantine(decode, 1, 1)
    open_and_quarantine(decode, 2, 2)
    effects = decode(ev.QuarantineReleased(2))
    assert reports(effects) == [("aborted", "safe")]
    assert set(decode.core.rooms.rooms) == {1}
    decode(request(3, room=3))
    assert decode.hear(PREFILL, Drained(room=2, generation=2, engine_rank=0)) == [], "a late proof is no anomaly"


def test_what_is_released_leaves_nothing_behind() -> None:
    decode = DecodeDriver()
    decode.connect(PREFILL)
    decode.sleep(1.0)
    idle = len(decode.core.timers)
    open_and_quarantine(decode, 1, 1)
    decode(ev.QuarantineReleased(1))
    assert not decode.core.rooms.rooms
    assert (len(decode.core.timers), decode.core.quarantine.total) == (idle, NO_MEMORY)


@pytest.mark.parametrize("key", [1, 2, 99])
def test_only_what_is_in_quarantine_can_be_released(decode: DecodeDriver, key: int) -> None:
    """Neither held nor draining nor unknown pages can be released."""
    decode(request(1, room=1))
    decode(request(2, room=2))
    decode(ev.ReceiveAborted(2, ABORTED))
    with pytest.raises(LocalProtocolError, match="not in quarantine"):
        decode(ev.QuarantineReleased(key))
    assert reports(decode(ev.ReceiveAborted(1, ABORTED))) == [("aborted", "draining")]


def test_quarantine_can_be_released_while_the_rank_closes(decode: DecodeDriver) -> None:
    open_and_quarantine(decode, 1, 1)
    decode(ev.CloseStarted(ABORTED))
    assert reports(decode(ev.QuarantineReleased(1))) == [("aborted", "safe")]
    assert not decode.core.rooms.rooms


def test_a_release_does_not_touch_the_next_transfer_of_the_room(decode: DecodeDriver) -> None:
    open_and_quarantine(decode, 1, ROOM)
    transfer = Transfer(decode, decode(request(2)))
    decode(ev.QuarantineReleased(1))
    assert reports(transfer.notice(PREFILL, 0, (0, 8), last=True)) == [("success", "safe")]


# On a prefill rank -------------------------------------------------------------------------------------------------


@pytest.fixture
def prefill() -> PrefillDriver:
    """A room with a write in doubt."""
    core = PrefillDriver(limits=Bounds(quarantined_bytes=300, posts_per_peer=1))
    core.connect()
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant())
    core(chunk(0, 4, footprint=ONE_PAGE))
    core(chunk(4, 8, last=True, footprint=Footprint(2, 200)))
    assert reports(core(ev.PostInDoubt(DELIVERY, 0, BROKEN)))[-1] == ("failed", "quarantined")
    return core


def test_every_chunk_of_a_room_counts(prefill: PrefillDriver) -> None:
    assert prefill.core.quarantine.total == Footprint(3, 300)
    with pytest.raises(CapacityExceeded):
        prefill(ev.SendOpened(8))
    end(prefill, 0)
    assert prefill.core.quarantine.total == NO_MEMORY
    prefill(ev.SendOpened(8))


def test_a_released_room_can_be_used_again(prefill: PrefillDriver) -> None:
    assert reports(prefill(ev.QuarantineReleased(ROOM))) == [("failed", "safe")]
    assert not prefill.core.rooms.rooms
    prefill(ev.SendOpened(ROOM))
    assert posted(prefill(chunk(0, 8, last=True))) == []
    assert posted(prefill.hear(DECODE, grant(generation=2))) == [(0, (0, 8))]


def test_releasing_source_pages_is_no_proof_for_the_decode_rank(prefill: PrefillDriver) -> None:
    """The write may still land there, so Drained follows only the transport's proof."""
    prefill(ev.QuarantineReleased(ROOM))
    assert prefill.hear(DECODE, CANCEL) == []
    ((_, failed),) = messages(prefill.hear(DECODE, grant()), Failed)
    assert isinstance(failed, Failed)
    assert not failed.drained
    effects = end(prefill, 0)
    assert [to for to, _ in messages(effects, Drained)] == [DECODE]
    ((_, failed),) = messages(prefill.hear(DECODE, grant()), Failed)
    assert isinstance(failed, Failed)
    assert failed.drained
    assert len(messages(prefill.hear(DECODE, CANCEL), Drained)) == 1


def test_the_proof_waits_for_every_post_of_a_released_delivery() -> None:
    core = PrefillDriver()
    core.connect()
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant())
    core(chunk(0, 4))
    core(chunk(4, 8, last=True))
    core(ev.PostInDoubt(DELIVERY, 0, BROKEN))
    core.hear(DECODE, CANCEL)
    core(ev.QuarantineReleased(ROOM))
    assert end(core, 1) == []
    assert len(messages(end(core, 0), Drained)) == 1
    assert len(core.core.rooms.unfenced) == 0


def test_a_released_delivery_does_not_disturb_the_next_one_of_its_room(prefill: PrefillDriver) -> None:
    prefill(ev.QuarantineReleased(ROOM))
    prefill(ev.SendOpened(ROOM))
    prefill.hear(DECODE, grant(generation=2))
    prefill(chunk(0, 8, last=True))
    second = delivery(DECODE, generation=2)
    end(prefill, 0)
    prefill.hear(DECODE, CANCEL)
    assert reports(end(prefill, 0, second)) == [("pending", "safe")]


def test_a_prefill_rank_releases_only_what_is_in_quarantine(prefill: PrefillDriver) -> None:
    end(prefill, 0)
    prefill(ev.SendOpened(8))
    for room in (ROOM, 8):
        with pytest.raises(LocalProtocolError, match="not in quarantine"):
            prefill(ev.QuarantineReleased(room))


def test_a_release_of_one_delivery_in_doubt_ends_the_others_that_drain() -> None:
    other = peer("decode", 1)
    core = PrefillDriver()
    core.connect()
    core.connect(other)
    core(ev.SendOpened(ROOM))
    for to in (DECODE, other):
        core.hear(to, grant(num_decode_ranks=2))
    core(chunk(0, 8, last=True))
    core(ev.PostInDoubt(DELIVERY, 0, BROKEN))
    assert reports(core(ev.QuarantineReleased(ROOM))) == [("failed", "safe")]
    assert not core.core.rooms.rooms
    for to in (DECODE, other):
        assert [receiver for receiver, _ in messages(end(core, 0, delivery(to)), Drained)] == [to]


# Missing proofs ----------------------------------------------------------------------------------------------------


GONE = ev.ProbeFinished(PREFILL, is_gone=True)


def awaited(core: DecodeDriver | PrefillDriver, key: int = 1) -> list[ProofKind]:
    return [proof.awaited for proof in core.core.missing_proofs(key)]


def test_a_record_names_the_peer_and_what_would_be_a_proof() -> None:
    core = DecodeDriver(ends_with_process=False)
    core.connect(PREFILL)
    open_and_quarantine(core, 1, ROOM)
    (proof,) = core.core.missing_proofs(1)
    assert proof == (str(PREFILL), endpoint_of(PREFILL), ProofKind.DRAINED)
    assert proof.detail.startswith(f"{PREFILL} must send Drained")
    core(ev.ConnectionLost(PREFILL))
    core.sleep(10.0)
    assert awaited(core) == [ProofKind.PEER]
    core(GONE)
    assert awaited(core) == [ProofKind.LANDING]
    core(ev.FenceImpossible(PREFILL))
    assert awaited(core) == [ProofKind.OPERATOR]
    (proof,) = core.core.missing_proofs(1)
    assert endpoint_of(PREFILL) in proof.detail, "it is known although the process has ended"
    assert core.core.pages_of(1) == request().pages
    core(ev.QuarantineReleased(1))
    assert (core.core.missing_proofs(1), core.core.pages_of(1)) == ([], {})


def test_where_the_transport_looks_is_what_the_prefill_rank_has_said() -> None:
    core = DecodeDriver(ends_with_process=False)
    core.connect(PREFILL, domain=b"a kernel")
    core(request())
    assert WaitForFence(PREFILL, b"a kernel", 1) in core(GONE)


def test_the_end_of_a_process_does_not_count_where_the_settings_say_so() -> None:
    core = DecodeDriver(proofs=Proofs(process_end=False))
    core.connect(PREFILL)
    core(request())
    effects = core(GONE)
    assert reports(effects) == [("failed", "draining")]
    assert of_kind(effects, WaitForFence) == []
    core.sleep(100.0)
    assert awaited(core) == [ProofKind.OPERATOR]


def test_time_after_the_end_of_a_process_counts_only_where_the_deployment_knows_its_fabric() -> None:
    core = DecodeDriver(ends_with_process=False, proofs=Proofs(queue_pairs_die_with_process_s=60.0))
    core.connect(PREFILL)
    core(request())
    core.sleep(100.0)
    assert awaited(core) == [ProofKind.PEER], "silence does not start the clock"
    core(GONE)
    core(ev.FenceImpossible(PREFILL))
    core.sleep(59.0)
    core(GONE)
    assert awaited(core) == [ProofKind.QUEUE_PAIRS]
    assert reports(core.sleep(1.1)) == [("failed", "safe")]


def test_the_connection_to_an_ended_process_is_closed_with_its_last_proof() -> None:
    """It may have brought one until then."""
    core = DecodeDriver(ends_with_process=False)
    core.connect(PREFILL)
    core(request())
    assert Disconnect(PREFILL) not in core(GONE)
    effects = core(ev.PeerFenced(PREFILL))
    assert reports(effects) == [("failed", "safe")]
    assert Disconnect(PREFILL) in effects


def test_a_prefill_rank_waits_for_its_own_writes(prefill: PrefillDriver) -> None:
    assert prefill.core.missing_proofs(ROOM) == [(str(DECODE), "", ProofKind.WRITE_END)]


def test_what_a_living_rank_has_in_flight_is_waited_for_and_then_it_answers_with_drained() -> None:
    core = DecodeDriver(ends_with_process=False)
    core.connect(PREFILL)
    core(request())
    core(ev.ReceiveAborted(ROOM, ABORTED))
    in_flight = replace(DRAINED, in_flight=b"a kernel")
    effects = core(ev.MessageReceived(PREFILL, in_flight))
    assert of_kind(effects, WaitForLanding) == [WaitForLanding(PREFILL, in_flight, 1)]
    assert reports(effects) == []
    effects = core(ev.Landed(PREFILL, ROOM, 1))
    assert [message.has_landed for _, message in messages(effects, Cancel) if isinstance(message, Cancel)] == [True]
    assert reports(core(ev.MessageReceived(PREFILL, DRAINED))) == [("aborted", "safe")]


def test_living_ranks_are_asked_for_their_sound_connections_while_pages_wait_for_proofs() -> None:
    core = DecodeDriver(ends_with_process=False)
    core.connect(PREFILL)

    def asked() -> list[int]:
        sent = messages(core.sleep(Timeouts().ping_s), Ping)
        return [message.asks_ends for _, message in sent if isinstance(message, Ping)]

    core(request())
    assert asked() == [0]
    core(ev.ReceiveAborted(ROOM, ABORTED))
    assert asked() == [0], "no wait for last bytes has begun"
    core(ev.MessageReceived(PREFILL, replace(DRAINED, in_flight=b"a kernel")))
    assert asked() == [1]
    core(ev.MessageReceived(PREFILL, replace(DRAINED, in_flight=b"a kernel")))
    assert asked() == [2]
    pong = Pong(peer=PREFILL, asks_ends=2, ends=(b"end",))
    assert core(ev.MessageReceived(PREFILL, pong)) == [NoteEnds(PREFILL, 2, (b"end",))]
    assert core(ev.MessageReceived(PREFILL, replace(pong, asks_ends=3))) == [], "nobody has asked for it"
    core(ev.MessageReceived(PREFILL, DRAINED))
    assert asked() == [0]


@pytest.mark.parametrize("domain", [b"", b"a kernel"])
def test_a_rank_whose_writes_linger_says_where_and_drains_only_once_they_have_landed(domain: bytes) -> None:
    core = PrefillDriver(domain=domain)
    core.connect()
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant())
    core(chunk(0, 8, last=True))
    end(core, 0, failure=BROKEN, lingers=True)
    said = messages(core.hear(DECODE, CANCEL), Drained)
    assert [message.in_flight for _, message in said if isinstance(message, Drained)] == ([domain] if domain else [])
    assert len(core.core.rooms.unfenced) == 1
    said = messages(core.hear(DECODE, replace(CANCEL, has_landed=True)), Drained)
    assert [message.in_flight for _, message in said if isinstance(message, Drained)] == [b""]
    assert not core.core.rooms.unfenced

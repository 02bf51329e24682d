"""The piece that completed a transfer, as the core reports it: whose, when it arrived, and how the clocks differ."""

from kvflow.state.effects import ClockOffset, DecodeEffect, LastPiece, ReportReceiver
from kvflow.wire.messages import Pong, Stamps
from tests.support.cores import PREFILL, DecodeDriver, anomalies, peer
from tests.support.receiving import Transfer, request

OTHER = peer("prefill", 1)
HOUR = 3_600.0
STAMPS = Stamps(HOUR + 100.0, HOUR + 101.0, HOUR + 101.0, HOUR + 101.0, HOUR + 101.0)
LATER = Stamps(HOUR + 100.0, HOUR + 102.0, HOUR + 102.0, HOUR + 102.0, HOUR + 102.0)


def last_of(effects: list[DecodeEffect]) -> LastPiece | None:
    (received,) = [effect.received for effect in effects if isinstance(effect, ReportReceiver)]
    assert received is not None
    return received.last


def test_it_is_that_of_the_rank_that_completed_last() -> None:
    core = DecodeDriver()
    core(request())
    transfer = Transfer(core, core.connect(PREFILL, OTHER))
    core.now += 1.0
    transfer.notice(OTHER, 0, (0, 8), last=True, stamps=STAMPS)
    core.now += 1.0
    assert anomalies(transfer.notice(OTHER, 0, (0, 8), last=True, stamps=LATER)) == []  # repeated
    found = last_of(transfer.notice(PREFILL, 0, (0, 8), last=True, stamps=LATER))
    assert found == LastPiece(0, LATER, asked_at=100.0, landed_at=102.0, arrived_at=102.0, clock=None)


def test_clocks_are_compared_by_the_shortest_round_trip() -> None:
    core = DecodeDriver()
    core(request())
    transfer = Transfer(core, core.connect(PREFILL))
    for sent_at, answered_at, heard_at in ((100.0, 3_700.3, 100.5), (101.0, 3_701.01, 101.02), (102.0, 3_702.4, 102.9)):
        core.now = heard_at
        core.hear(PREFILL, Pong(peer=PREFILL, sent_at=sent_at, answered_at=answered_at))
    found = last_of(transfer.notice(PREFILL, 0, (0, 8), last=True, stamps=STAMPS))
    assert found is not None
    assert found.clock == ClockOffset(101.0 - 3_701.01, 101.02 - 3_701.01, 101.02)


def test_answers_that_cannot_be_true_or_tell_nothing_are_ignored() -> None:
    core = DecodeDriver()
    core(request())
    transfer = Transfer(core, core.connect(PREFILL))
    core.hear(PREFILL, Pong(peer=PREFILL, sent_at=core.now + 1.0, answered_at=5.0))
    core.hear(PREFILL, Pong(peer=PREFILL, sent_at=core.now))
    core.hear(PREFILL, Pong(peer=PREFILL, answered_at=5.0))
    found = last_of(transfer.notice(PREFILL, 0, (0, 8), last=True))
    assert found == LastPiece(0, None, asked_at=100.0, landed_at=100.0, arrived_at=100.0, clock=None)

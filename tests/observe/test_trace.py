"""Every event, effect and transfer as a log line."""

import dataclasses
import logging

import msgspec
import pytest

from kvflow.errors import FailureReason, Stage
from kvflow.observe.logs import get_logger
from kvflow.observe.trace import TransferLine, describe, log_transfer
from kvflow.state import events as ev
from kvflow.state.tables import Outcome
from kvflow.wire import messages as wm
from tests.observe.lines import printed

PREFILL = wm.PeerId(wm.RankId("prefill", 1), 0xABC)
DECODE = wm.PeerId(wm.RankId("decode", 0), 0xDEF)
DELIVERY = ev.DeliveryId(7, DECODE, 3)
FAILURE = wm.Failure(FailureReason.WRITE_FAILED, Stage.SUBMIT, "prefill/1", "why")
NOTICE = wm.Notice(
    room=7, generation=3, token=2**60, engine_rank=1, seq=4, ranges={"kv": (0, 8)}, num_bytes=512, last=True
)
OPENED = ev.ReceiveOpened(
    room=7,
    generation=3,
    instance="prefill",
    ranges={},
    pages={"kv": bytes(400)},
    num_decode_ranks=1,
    timeout_s=1.0,
    secret=b"secret-of-a-rank",
)

LINES = [
    (ev.SendOpened(7), "send_opened", {"room": 7}),
    (
        ev.PostEnded(DELIVERY, 4, FAILURE),
        "post_ended",
        {
            "room": 7,
            "generation": 3,
            "peer": str(DECODE),
            "seq": 4,
            "lingers": False,
            "reason": "write_failed",
            "detected_by": "prefill/1",
            "detail": "why",
        },
    ),
    (
        ev.NoticeDelivered(NOTICE),
        "notice_delivered",
        {
            "room": 7,
            "generation": 3,
            "seq": 4,
            "ranges": {"kv": (0, 8)},
            "num_bytes": 512,
            "last": True,
            "from_rank": 1,
        },
    ),
    (OPENED, "receive_opened", {"room": 7, "generation": 3, "ranges": {}, "prefill": "prefill"}),
    (
        ev.MessageReceived(PREFILL, wm.Refuse(peer=PREFILL, to=DECODE, detail="no", attempt=2)),
        "message_received",
        {"peer": str(PREFILL), "attempt": 2, "detail": "no", "message": "refuse"},
    ),
    (
        ev.RoutesCompiled("prefill", 2, (), "no common head"),
        "routes_compiled",
        {"attempt": 2, "prefill": "prefill", "detail": "no common head"},
    ),
    (ev.ConnectFailed(PREFILL, "no sockets"), "connect_failed", {"peer": str(PREFILL), "detail": "no sockets"}),
    (ev.ProbeFinished(PREFILL, is_gone=True), "probe_finished", {"peer": str(PREFILL), "is_gone": True}),
    (ev.TimePassed(), "time_passed", {}),
]


@pytest.mark.parametrize(("item", "name", "values"), LINES, ids=lambda item: item if isinstance(item, str) else "")
def test_line(item: ev.DecodeEvent, name: str, values: dict[str, object]) -> None:
    described, shown = describe(item)
    assert described == name
    assert shown == values


def test_secrets_and_pages_are_not_shown() -> None:
    for item in (OPENED, ev.NoticeDelivered(NOTICE)):
        text = repr(describe(item))
        assert "secret" not in text
        assert str(2**60) not in text
        assert len(text) < 1_000


def test_text_of_a_peer_is_cut() -> None:
    failure = msgspec.structs.replace(FAILURE, detail="x" * 1_000_000)
    for item in (ev.PostEnded(DELIVERY, 4, failure), ev.ConnectFailed(PREFILL, "x" * 1_000_000)):
        assert len(repr(describe(item))) < 2_000


RECEIVED = TransferLine(
    role="receive",
    room=7,
    outcome=Outcome.SUCCESS,
    prefill="prefill",
    num_bytes=8_388_608,
    num_pages=64,
    elapsed_s=0.0335,
)


def test_transfer_is_one_debug_line_that_names_prefill_bytes_pages_and_time() -> None:
    with printed("json", logging.DEBUG) as lines:
        log_transfer(get_logger(instance="decode"), RECEIVED)
    (line,) = lines.objects()
    del line["timestamp"]
    assert line == {
        "event": "receive_finished",
        "level": "debug",
        "instance": "decode",
        "room": 7,
        "outcome": "success",
        "prefill": "prefill",
        "num_bytes": 8_388_608,
        "num_pages": 64,
        "elapsed_ms": 33.5,
    }


def test_bytes_that_nobody_has_counted_are_left_out() -> None:
    line = dataclasses.replace(RECEIVED, outcome=Outcome.FAILED, num_bytes=None, failure=FAILURE)
    with printed() as lines:
        log_transfer(get_logger(), line)
    (shown,) = lines.named("receive_failed")
    assert not shown.keys() & {"num_bytes", "label"}


@pytest.mark.parametrize(
    ("outcome", "level"), [(Outcome.SUCCESS, "debug"), (Outcome.ABORTED, "debug"), (Outcome.FAILED, "warning")]
)
def test_only_a_failure_is_shown_to_operators(outcome: Outcome, level: str) -> None:
    line = TransferLine(
        role="send", room=7, outcome=outcome, prefill=None, num_bytes=0, num_pages=1, elapsed_s=0.1, failure=FAILURE
    )
    with printed("json", logging.DEBUG) as lines:
        log_transfer(get_logger(), line)
    (shown,) = lines.named("send_failed" if outcome is Outcome.FAILED else "send_finished")
    assert (shown["level"], shown["reason"], shown["detected_by"]) == (level, "write_failed", "prefill/1")
    assert shown["stage"] == FAILURE.stage.value
    with printed("json", logging.INFO) as lines:
        log_transfer(get_logger(), line)
    assert len(lines.texts()) == (level == "warning")

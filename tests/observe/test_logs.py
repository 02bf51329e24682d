"""What is printed, to whom, and that each line says what it is about."""

import datetime
import io
import logging
import re
import subprocess
import sys
from functools import partial

import anyio
import pytest

from kvflow.observe.logs import LOGGER, LogFormat, configure_logging, get_logger
from kvflow.wire.channel import Dialer
from tests.observe.lines import Lines, printed
from tests.support.failures import catch
from tests.support.instances import deploy
from tests.support.waiting import until

LEVELS = {"debug", "info", "warning", "error", "critical"}


async def transfer(*, fail: bool = False) -> None:
    """One whole transfer over the memory backend, in two chunks."""
    async with deploy() as deployment:
        if fail:
            deployment.faults[0].plan.append("fail")
        request = deployment.request(77, 8)
        async with anyio.create_task_group() as tasks:
            for act in (partial(request.send, chunk=4), request.receive):
                tasks.start_soon(partial(catch, act) if fail else act)
        await deployment.settle()


def about_the_transfer(lines: Lines) -> list[dict[str, object]]:
    return [line for line in lines.objects() if line.get("room") == 77]


@pytest.mark.parametrize("fail", [False, True], ids=["success", "failure"])
@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO])
@pytest.mark.anyio
async def test_json_is_one_object_a_line(level: int, fail: bool) -> None:
    with printed("json", level) as lines:
        await transfer(fail=fail)
    assert lines.getvalue().endswith("\n")
    for line in lines.objects():
        assert re.fullmatch(r"[a-z_]+", line["event"])
        assert line["level"] in LEVELS
        when = datetime.datetime.fromisoformat(line["timestamp"].replace("Z", "+00:00"))
        assert when.utcoffset() == datetime.timedelta(0)


@pytest.mark.parametrize("fail", [False, True], ids=["success", "failure"])
@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO])
@pytest.mark.anyio
async def test_every_line_of_a_transfer_says_who_and_where(level: int, fail: bool) -> None:
    with printed("json", level) as lines:
        await transfer(fail=fail)
    about = about_the_transfer(lines)
    assert {line["instance"] for line in about} == {"prefill", "decode"}
    for line in about:
        assert line["engine_rank"] == 0, line
        assert line["stage"] in {"bootstrap", "enqueue", "planning", "submit", "aggregate"}, line


@pytest.mark.anyio
async def test_lines_below_one_transfer_say_which_delivery() -> None:
    with printed("json", logging.DEBUG) as lines:
        await transfer()
    for event in ("plan_finished", "post_settled"):
        for line in lines.named(event):
            assert line["generation"] == 1
            assert re.fullmatch(r"decode/0@[0-9a-f]{16}", line["peer"])
        assert [line["seq"] for line in lines.named(event)] == [0, 1]
    for line in lines.named("notice_delivered"):
        assert (line["generation"], line["from_rank"]) == (1, 0)
    assert {line["generation"] for line in lines.named("receiver_reported")} == {1}


@pytest.mark.anyio
async def test_line_belongs_to_the_rank_that_wrote_it() -> None:
    """What an event says about another instance must not hide whose line it is."""
    with printed("json", logging.DEBUG) as lines:
        await transfer()
    for event in ("receive_opened", "instance_greeted", "notice_delivered", "receiver_reported"):
        assert {line["instance"] for line in lines.named(event)} == {"decode"}, event
    for event in ("send_opened", "chunk_offered", "plan_finished", "post_settled", "sender_reported"):
        assert {line["instance"] for line in lines.named(event)} == {"prefill"}, event


@pytest.mark.anyio
async def test_failure_says_why_and_who_noticed_it() -> None:
    with printed() as lines:
        await transfer(fail=True)
    warnings = [line for line in about_the_transfer(lines) if line["level"] == "warning"]
    assert {line["event"] for line in warnings} == {"sender_reported", "receiver_reported"}
    for line in warnings:
        assert (line["reason"], line["noticed_by"], line["detail"]) == ("write_failed", "prefill/0", "scripted failure")


@pytest.mark.anyio
async def test_debug_shows_what_the_core_is_told_and_info_only_how_it_ended() -> None:
    with printed("json", logging.DEBUG) as detailed:
        await transfer()
    with printed("json", logging.INFO) as brief:
        await transfer()
    told = {str(line["event"]) for line in about_the_transfer(detailed)}
    assert told >= {"send_opened", "chunk_offered", "receive_opened", "plan_finished", "post_settled"}
    assert {line["event"] for line in about_the_transfer(brief)} == {"sender_reported", "receiver_reported"}
    assert "debug" not in {line["level"] for line in brief.objects()}


@pytest.mark.anyio
async def test_console_is_one_line_an_event_without_colours() -> None:
    with printed("console") as lines:
        await transfer()
    (line,) = [text for text in lines.texts() if "receiver_reported" in text]
    assert re.match(r"\d{4}-\d\d-\d\dT[\d:.]+Z \[info +\] receiver_reported ", line)
    assert {"room=77", "outcome=success", "engine_rank=0", "stage=aggregate"} <= set(line.split())
    assert "\x1b" not in lines.getvalue()


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_text_of_a_peer_cannot_forge_a_line(log_format: LogFormat) -> None:
    with printed(log_format) as lines:
        get_logger().warning("hello_refused", detail='no\n{"event": "forged"}\r\x1b[2Jforged')
    (line,) = lines.getvalue().splitlines()
    assert "hello_refused" in line
    assert "\x1b" not in line


def test_error_is_logged_with_its_traceback_in_the_same_line() -> None:
    with printed() as lines:
        get_logger().error("rank_broken", exc_info=ZeroDivisionError("why"))
    (line,) = lines.objects()
    assert "ZeroDivisionError: why" in line["exception"]


def test_values_of_any_type_can_be_printed() -> None:
    with printed() as lines:
        get_logger(rank=1).info("odd", values=[b"\xff", {1}, object, float("inf")])
    assert "odd" in lines.getvalue()


def test_level_is_obeyed() -> None:
    with printed("json", logging.WARNING) as lines:
        log = get_logger()
        log.debug("a")
        log.info("b")
        log.warning("c")
        log.error("d")
    assert [line["event"] for line in lines.objects()] == ["c", "d"]


def test_configured_twice_prints_once() -> None:
    with printed() as first:
        second = io.StringIO()
        configure_logging("json", stream=second)
        get_logger().info("once")
    assert (first.getvalue(), len(second.getvalue().splitlines())) == ("", 1)


def test_lines_do_not_reach_the_engines_own_handlers_when_printed() -> None:
    seen = io.StringIO()
    handler = logging.StreamHandler(seen)
    logging.getLogger().addHandler(handler)
    try:
        with printed() as lines:
            get_logger().info("once")
    finally:
        logging.getLogger().removeHandler(handler)
    assert (len(lines.texts()), seen.getvalue()) == (1, "")


class Keeper(logging.Handler):
    """The handler of an embedding engine."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record)


def test_engine_that_configures_logging_itself_gets_lines_with_their_values() -> None:
    handler = Keeper()
    LOGGER.addHandler(handler)
    try:
        get_logger(engine_rank=3).warning("something", room=7)
    finally:
        LOGGER.removeHandler(handler)
    (record,) = handler.seen
    assert (record.name, record.levelname) == ("kvflow", "WARNING")
    for word in ("something", "engine_rank", "3", "room", "7"):
        assert word in record.getMessage()


SILENT = """
import anyio
from tests.observe.test_logs import transfer
from kvflow.observe.logs import get_logger
get_logger().error("nobody reads this")
anyio.run(transfer)
"""


def test_nothing_is_printed_without_configuration() -> None:
    done = subprocess.run([sys.executable, "-c", SILENT], capture_output=True, check=True, timeout=50)
    assert (done.stdout, done.stderr) == (b"", b"")


@pytest.mark.anyio
async def test_rejected_message_is_counted_and_logged_with_its_stage() -> None:
    with printed() as lines:
        async with deploy() as deployment:
            (prefill,) = deployment.prefill
            dialer = Dialer(prefill.endpoint)
            dialer.send(b"garbage")
            await until(lambda: prefill.statistics().oddities)
            dialer.close()
    (line,) = lines.named("message_rejected")
    assert (line["instance"], line["engine_rank"], line["stage"], line["count"]) == ("prefill", 0, "bootstrap", 1)
    assert line["peer"] is None

"""Log output: content, destination and format."""

import datetime
import io
import logging
import re

import pytest

from kvflow.observe.logs import LOGGER, LogFormat, configure_logging, get_logger
from tests.observe.lines import printed


def test_json_is_one_object_a_line() -> None:
    with printed() as lines:
        get_logger(engine_rank=3).info("rank_opened", backend="nixl")
        get_logger().warning("message_rejected", detail="two\nlines")
    assert lines.getvalue().endswith("\n")
    for line, event, level in zip(
        lines.objects(), ("rank_opened", "message_rejected"), ("info", "warning"), strict=True
    ):
        assert (line["event"], line["level"]) == (event, level)
        when = datetime.datetime.fromisoformat(line["timestamp"].replace("Z", "+00:00"))
        assert when.utcoffset() == datetime.timedelta(0)


def test_console_is_one_line_an_event_without_colours() -> None:
    with printed("console") as lines:
        get_logger(engine_rank=3).info("rank_opened", backend="nixl")
    (line,) = lines.texts()
    assert re.match(r"\d{4}-\d\d-\d\dT[\d:.]+Z \[info +\] rank_opened ", line)
    assert {"engine_rank=3", "backend=nixl"} <= set(line.split())
    assert "\x1b" not in lines.getvalue()


def test_console_begins_with_what_a_person_looks_for_and_ends_with_the_long_text() -> None:
    with printed("console") as lines:
        get_logger(instance="decode").warning(
            "receive_failed", detail="no", num_pages=1, reason="r", outcome="o", room=7
        )
    (line,) = lines.texts()
    assert line.split()[-6:] == ["room=7", "outcome=o", "reason=r", "instance=decode", "num_pages=1", "detail=no"]


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


@pytest.mark.parametrize("name", ["self", "event", "level", "timestamp"])
def test_value_may_have_any_name(name: str) -> None:
    """A transport's library has levels of its own. The line's own values win."""
    with printed() as lines:
        get_logger().warning("library_said", **{name: "hers"})
    (line,) = lines.objects()
    assert (line["event"], line["level"]) == ("library_said", "warning")


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
    """The handler of an embedding engine, which formats records with `logging` alone."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        self.texts.append(self.format(record))


@pytest.fixture
def keeper() -> Keeper:
    handler = Keeper()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    LOGGER.addHandler(handler)
    return handler


def test_engine_that_formats_lines_itself_reads_the_event_and_its_values(keeper: Keeper) -> None:
    get_logger(engine_rank=3).warning("hello_refused", peer="decode/0@00", detail="no route", room=7, failure=None)
    assert keeper.texts == [
        "WARNING kvflow: hello_refused room=7 engine_rank=3 peer=decode/0@00 failure=None detail='no route'"
    ]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("", "''"),
        ("a b", "'a b'"),
        ("a=b", "'a=b'"),
        ("two\nlines", "'two\\nlines'"),
        ("\x1b[2J", "'\\x1b[2J'"),
        ("it's", '"it\'s"'),
        ("\u2028x", "'\\u2028x'"),
        (b"\xff", "'b\\'\\\\xff\\''"),
        ((0, 8), "'(0, 8)'"),
        (0.5, "0.5"),
    ],
    ids=repr,
)
def test_value_cannot_forge_another(keeper: Keeper, value: object, shown: str) -> None:
    get_logger().warning("odd", value=value, after=1)
    if isinstance(value, bytes):
        assert "\xff" not in keeper.texts[0]
    else:
        assert keeper.texts == [f"WARNING kvflow: odd value={shown} after=1"]


def test_engine_that_formats_lines_itself_gets_the_traceback_below(keeper: Keeper) -> None:
    get_logger(engine_rank=3).error("rank_broken", exc_info=ZeroDivisionError("why"))
    first, *below = keeper.texts[0].splitlines()
    assert first == "ERROR kvflow: rank_broken engine_rank=3"
    assert below == ["ZeroDivisionError: why"]


def test_engine_gets_the_values_as_values_too(keeper: Keeper) -> None:
    get_logger(engine_rank=3).warning("something", room=7)
    (record,) = keeper.records
    assert isinstance(record.msg, dict)
    assert record.msg.items() >= {"event": "something", "engine_rank": 3, "room": 7}.items()

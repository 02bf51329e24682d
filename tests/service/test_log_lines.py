"""Log lines of a whole transfer: none by default, unless it fails."""

import logging
import re
import subprocess
import sys
from contextlib import closing
from functools import partial

import anyio
import pytest

import kvflow
from kvflow.control.channel import ZmqControl
from tests.observe.lines import Lines, printed
from tests.support.failures import catch
from tests.support.instances import decode_config, deploy, make_pool
from tests.support.waiting import until


async def transfer(*, fail: bool = False) -> None:
    """Run one whole transfer over the memory backend, in two chunks."""
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


@pytest.mark.anyio
async def test_info_says_nothing_about_a_transfer_that_succeeds() -> None:
    with printed("json", logging.INFO) as lines:
        await transfer()
    assert about_the_transfer(lines) == []


@pytest.mark.anyio
async def test_debug_says_in_one_line_how_a_transfer_went() -> None:
    with printed("json", logging.DEBUG) as lines:
        await transfer()
    (received,), (sent,) = lines.named("receive_finished"), lines.named("send_finished")
    assert received["prefill"] == "prefill"
    for line, instance in ((received, "decode"), (sent, "prefill")):
        assert (line["instance"], line["engine_rank"], line["room"]) == (instance, 0, 77)
        assert (line["outcome"], line["level"]) == ("success", "debug")
        assert line["num_pages"] == 2
        assert line["num_bytes"] > 0
        assert line["elapsed_ms"] > 0


@pytest.mark.anyio
async def test_failure_is_one_warning_on_each_side_that_says_why_and_who_detected_it() -> None:
    with printed() as lines:
        await transfer(fail=True)
    about = about_the_transfer(lines)
    assert sorted(str(line["event"]) for line in about) == ["receive_failed", "send_failed"]
    for line in about:
        assert (line["level"], line["reason"], line["detected_by"]) == ("warning", "write_failed", "prefill/0")
        assert line["detail"] == "scripted failure"


@pytest.mark.anyio
async def test_a_refused_handshake_is_one_warning_of_the_transfer_and_says_what_it_was() -> None:
    other = make_pool(fingerprint="other-model")
    with printed() as lines:
        async with deploy() as deployment:
            config = decode_config(deployment.registry.endpoint, instance="odd")
            async with kvflow.DecodeRank(config, other.layout) as rank:
                receiver = rank.receive(77, prefill="prefill", tokens=(0, 4), pages={"kv": [1]})
                await catch(partial(finish, receiver))
    of_decode = [line for line in lines.objects() if line.get("instance") == "odd"]
    (warning,) = [line for line in of_decode if line["level"] == "warning"]
    assert (warning["event"], warning["reason"], warning["room"]) == ("receive_failed", "refused", 77)
    assert "num_bytes" not in warning
    (news,) = lines.named("handshake_refused")
    assert (news["level"], news["reason"], news["detail"]) == ("info", "refused", warning["detail"])
    assert lines.named("instance_unreachable") == []


async def finish(receiver: kvflow.RoomReceiver) -> None:
    async with receiver:
        await receiver.done()


@pytest.mark.anyio
async def test_lines_below_one_transfer_say_which_delivery() -> None:
    with printed("json", logging.DEBUG) as lines:
        await transfer()
    posted, noticed = lines.named("post_ended"), lines.named("notice_delivered")
    assert [line["seq"] for line in posted] == [line["seq"] for line in noticed] == [0, 1]
    for line in posted:
        assert line["generation"] == 1
        assert re.fullmatch(r"decode/0@[0-9a-f]{16}", line["peer"])
    for line in noticed:
        assert (line["generation"], line["from_rank"]) == (1, 0)


@pytest.mark.anyio
async def test_line_belongs_to_the_rank_that_wrote_it() -> None:
    """Fields about another instance must not replace the instance that wrote the line."""
    with printed("json", logging.DEBUG) as lines:
        await transfer()
    for event in ("receive_opened", "instance_found", "notice_delivered", "receive_finished"):
        assert {line["instance"] for line in lines.named(event)} == {"decode"}, event
    for event in ("send_opened", "chunk_offered", "post_ended", "send_finished"):
        assert {line["instance"] for line in lines.named(event)} == {"prefill"}, event


SILENT = """
import anyio
from tests.service.test_log_lines import transfer
from kvflow.observe.logs import get_logger
get_logger().error("nobody reads this")
anyio.run(transfer)
"""


def test_nothing_is_printed_without_configuration() -> None:
    done = subprocess.run([sys.executable, "-c", SILENT], capture_output=True, check=True, timeout=100)
    assert (done.stdout, done.stderr) == (b"", b"")


@pytest.mark.anyio
async def test_rejected_message_is_counted_and_logged_with_its_stage() -> None:
    with printed() as lines:
        async with deploy() as deployment:
            (prefill,) = deployment.prefill
            with closing(ZmqControl().connect(prefill.endpoint, lambda _: None, lambda: None)) as rogue:
                rogue.send(b"garbage")
                await until(lambda: prefill.statistics().anomalies)
    (line,) = lines.named("message_rejected")
    assert (line["instance"], line["engine_rank"], line["stage"], line["count"]) == ("prefill", 0, "bootstrap", 1)
    assert not line.keys() & {"peer", "room"}


@pytest.mark.anyio
async def test_a_rank_says_where_it_is_for_whom_and_with_what() -> None:
    with printed("json", logging.INFO) as lines:
        async with deploy() as deployment:
            prefill, registry = deployment.prefill[0], deployment.registry.endpoint
    opened = {line["instance"]: line for line in lines.named("rank_opened")}
    assert (
        opened["prefill"].items()
        >= {
            "engine_rank": 0,
            "backend": "memory",
            "endpoint": prefill.endpoint,
            "advertise": "127.0.0.1",
            "registry": registry,
        }.items()
    )
    assert "endpoint" not in opened["decode"]
    assert opened["decode"]["registry"] == registry
    assert "64 pages of 4 tokens" in str(opened["decode"]["layout"])

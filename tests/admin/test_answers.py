"""What a rank answers: over its own socket, as any program could ask."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest

import kvflow
from kvflow.admin import messages as msg
from kvflow.admin.client import ask, find_sockets
from kvflow.admin.server import AdminSocket
from kvflow.answers import _rows_that_fit
from kvflow.config import Limits, Timeouts
from tests.admin.test_server import names_in, talk
from tests.observe.lines import Lines, printed
from tests.service.test_closing import crash, leave_broken
from tests.service.test_quarantine import doubt
from tests.support.failures import catch
from tests.support.instances import Deployment, decode_config, deploy, make_pool, prefill_config

pytestmark = pytest.mark.anyio


async def said(path: Path, line: bytes) -> dict[str, Any]:
    answer = await anyio.to_thread.run_sync(talk, path, line + b"\n")
    parsed: dict[str, Any] = json.loads(answer)
    return parsed


async def told(path: Path, **request: object) -> dict[str, Any]:
    return await said(path, json.dumps({"v": 1} | request).encode())


def settings_in(directory: Path) -> dict[str, Any]:
    return {"sending": {"admin": str(directory / "p")}, "receiving": {"admin": directory / "d"}}


def sockets_in(directory: Path) -> tuple[Path, Path]:
    (prefill,), (decode,) = find_sockets(directory / "p"), find_sockets(directory / "d")
    return prefill, decode


async def test_status_says_who_it_is_and_how(tmp_path: Path) -> None:
    async with deploy(**settings_in(tmp_path)) as deployment:
        prefill, decode = sockets_in(tmp_path)
        await deployment.request(1, 8).hand_over()
        status = await told(prefill, ask="status")
        assert status["v"] == 1
        assert (status["instance"], status["engine_rank"], status["role"]) == ("prefill", 0, "prefill")
        assert status["incarnation"] == f"{deployment.prefill[0].me.incarnation:016x}"
        assert (status["version"], status["backend"]) == (kvflow.__version__, "memory")
        assert status["endpoint"] == deployment.prefill[0].endpoint
        assert status["health"] == {"transfer": "ok", "reason": "", "live": True, "ready": True}
        counts = deployment.prefill[0].statistics()
        assert set(status["statistics"]) == set(counts._fields)
        assert status["statistics"]["staging"] == counts.staging._asdict()
        assert sum(status["statistics"]["times"]["stages"]["submit"]["counts"]) == 1
        assert status["statistics"]["transfers"]["ended"] == {"success": 1}
        assert (await told(decode, ask="status"))["role"] == "decode"


async def test_rooms_are_listed_the_oldest_first_with_their_peers(tmp_path: Path) -> None:
    async with deploy(**settings_in(tmp_path)) as deployment:
        sender, receiver = sockets_in(tmp_path)
        prefill, decode = deployment.prefill[0], deployment.decode[0]
        request = deployment.request(2, 8)
        async with prefill.send("first", label="request-1"), anyio.create_task_group() as tasks:
            tasks.start_soon(catch, request.receive)
            async with prefill.send(2) as second:
                await second.granted()
                rows = await told(sender, ask="rooms")
                assert [row["room"] for row in rows["rooms"]] == ["first", 2]
                first, other = rows["rooms"]
                assert (first["label"], first["peers"], first["num_pages"]) == ("request-1", [], 0)
                assert (other["peers"], other["outcome"], other["memory"]) == ([str(decode.me)], "pending", "held")
                limited = await told(sender, ask="rooms", limit=1)
                assert (limited["total"], [row["room"] for row in limited["rooms"]]) == (2, ["first"])
                (row,) = (await told(receiver, ask="rooms"))["rooms"]
                assert (row["peers"], row["num_pages"], row["num_bytes"]) == ([str(prefill.me)], 2, 2 * 4 * 192)
                assert (await told(sender, ask="status"))["oldest_room_s"] >= first["age_s"]
                second.abort()
            for open_sender in list(prefill._transfers.by_key.values()):
                open_sender.abort()


async def test_pages_are_released_with_a_reason_that_is_logged(tmp_path: Path) -> None:
    with printed() as lines:
        limits = Limits(quarantined_bytes=4 * 192)
        async with deploy(timeouts=Timeouts(drain_s=0.1), limits=limits, **settings_in(tmp_path)) as deployment:
            await check_release(deployment, tmp_path, lines)


async def check_release(deployment: Deployment, directory: Path, lines: Lines) -> None:
    _, decode = sockets_in(directory)
    await doubt(deployment, 7)
    listed = await told(decode, ask="quarantine")
    (row,) = listed["quarantine"]
    assert (listed["total"], row["room"], row["pages"]) == (1, 7, {"kv": 2})
    (record,) = deployment.decode[0].quarantined()
    assert [proof["detail"] for proof in row["missing"]] == [proof.detail for proof in record.missing]
    health = (await told(decode, ask="health"))["health"]
    assert (health["transfer"], health["live"], health["ready"]) == ("degraded", True, False)
    assert "limits.quarantined_bytes" in health["reason"]
    for because in ("", "  ", 5, "x" * 501, None):
        refused = await told(decode, ask="release", id=row["id"], because=because)
        assert "malformed request" in refused["error"]
    assert "no transfer in quarantine" in (await told(decode, ask="release", id="12345", because="a guess"))["error"]
    assert deployment.decode[0].quarantined()
    assert (await told(decode, ask="release", id=row["id"], because="its host is off"))["room"] == 7
    assert deployment.decode[0].quarantined() == []
    (line,) = lines.named("quarantine_released")
    assert (line["room"], line["because"]) == (7, "its host is off")
    assert (await told(decode, ask="health"))["health"]["transfer"] == "ok"


async def test_quarantine_that_leaves_room_degrades_a_rank_that_stays_ready(tmp_path: Path) -> None:
    async with deploy(timeouts=Timeouts(drain_s=0.1), **settings_in(tmp_path)) as deployment:
        _, decode = sockets_in(tmp_path)
        await doubt(deployment, 7)
        health = (await told(decode, ask="health"))["health"]
        assert (health["transfer"], health["live"], health["ready"]) == ("degraded", True, True)
        assert "room 7" in health["reason"]


async def test_drain_refuses_new_rooms_and_tells_when_it_is_done(tmp_path: Path) -> None:
    async with deploy(**settings_in(tmp_path)) as deployment:
        socket, _ = sockets_in(tmp_path)
        prefill = deployment.prefill[0]
        async with prefill.send(1) as sender:
            assert await told(socket, ask="drain") == {"v": 1, "is_drained": False, "num_unsettled": 1}
            with pytest.raises(kvflow.RankDraining):
                await prefill.send(2).__aenter__()
            health = (await told(socket, ask="health"))["health"]
            assert health == {"transfer": "degraded", "reason": "the rank is draining", "live": True, "ready": False}
            sender.abort()
        assert await told(socket, ask="drain") == {"v": 1, "is_drained": True, "num_unsettled": 0}


async def test_a_rank_that_announces_a_drain_is_not_ready_and_accepts_new_rooms(tmp_path: Path) -> None:
    async with deploy(**settings_in(tmp_path)) as deployment:
        socket, _ = sockets_in(tmp_path)
        assert await told(socket, ask="announce_drain") == {"v": 1, "is_drained": False, "num_unsettled": 0}
        await deployment.request(1, 8).hand_over()
        health = (await told(socket, ask="health"))["health"]
        assert health == {"transfer": "degraded", "reason": "the rank is about to drain", "live": True, "ready": False}
        assert await told(socket, ask="drain") == {"v": 1, "is_drained": True, "num_unsettled": 0}
        assert (await told(socket, ask="health"))["health"]["reason"] == "the rank is draining"


async def test_a_broken_rank_is_not_live(tmp_path: Path) -> None:
    async with deploy(**settings_in(tmp_path)) as deployment:
        _, decode = sockets_in(tmp_path)
        rank = deployment.decode[0]
        await crash(rank)
        health = (await told(decode, ask="health"))["health"]
        assert (health["transfer"], health["live"], health["ready"]) == ("broken", False, False)
        assert "boom" in health["reason"]
        assert (await told(decode, ask="status"))["health"] == health
        assert "rank has failed" in (await told(decode, ask="drain"))["error"]
        await leave_broken(deployment, rank)


JUNK: Sequence[bytes] = (
    b"",
    b"GET / HTTP/1.1",
    b"\x00\xff\xfe",
    b'"\xff"',
    b"[" * 4_000,
    b'{"v":1}',
    b'{"v":1,"ask":"' + b"a" * 1_000 + b'"}',
    b'{"v":1,"ask":["status"]}',
    b'{"v":1,"ask":"rooms","limit":0}',
    b'{"v":1,"ask":"rooms","limit":1e9}',
    b'{"v":1,"ask":"status"}{"v":1,"ask":"drain"}',
    b'{"v":1,"ask":"release","id":"\\ud800","because":"x"}',
    b'{"v":2,"ask":"drain"}',
    b'{"v":null,"ask":"drain"}',
)


@pytest.mark.parametrize("junk", JUNK)
async def test_junk_is_answered_with_what_is_wrong_and_changes_nothing(tmp_path: Path, junk: bytes) -> None:
    async with deploy(**settings_in(tmp_path)) as deployment:
        socket, _ = sockets_in(tmp_path)
        answer = await said(socket, junk)
        assert set(answer) == {"v", "error"}
        assert not deployment.prefill[0].is_draining
        await deployment.request(1, 8).hand_over()


async def test_later_versions_may_add_fields(tmp_path: Path) -> None:
    async with deploy(**settings_in(tmp_path)):
        socket, _ = sockets_in(tmp_path)
        assert "health" in await told(socket, ask="health", colour="red")


def test_rows_that_do_not_fit_are_left_out() -> None:
    row = msg.MissingRow(peer="p", endpoint="", awaited="peer", detail="x" * 10_000)
    rows = _rows_that_fit([row] * 1_000)
    assert 100 < len(rows) < 110
    assert len(msgspec.json.encode(rows)) < 1.1 * msg.MAX_ANSWER_BYTES


async def test_a_rank_works_on_without_a_socket(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = prefill_config(None, admin=str(tmp_path / "file"))
    with printed() as lines:
        async with kvflow.PrefillRank(config, make_pool().layout) as rank:
            assert rank.statistics().rooms == 0
    (line,) = lines.named("admin_unavailable")
    assert (line["level"], "not a directory" in line["detail"]) == ("warning", True)


async def test_no_socket_is_made_if_none_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    async with kvflow.DecodeRank(decode_config(None, admin=False), make_pool().layout):
        assert names_in(tmp_path) == set()
    async with kvflow.DecodeRank(decode_config(None), make_pool().layout):
        assert len(find_sockets(tmp_path / "kvflow")) == 1
    assert find_sockets(tmp_path / "kvflow") == []


async def test_client_tells_what_is_wrong_with_an_answer(tmp_path: Path) -> None:
    admin = AdminSocket(tmp_path, "name", lambda _: b'{"v":9}\n')
    reply = await anyio.to_thread.run_sync(ask, admin.path, msg.StatusRequest(), 30.0)
    assert "malformed" in str(reply.parse(msg.StatusAnswer))
    admin.close()
    reply = await anyio.to_thread.run_sync(ask, admin.path, msg.StatusRequest(), 30.0)
    assert (reply.line, reply.problem) == (b"", "")

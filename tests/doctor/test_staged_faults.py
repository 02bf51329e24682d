"""Faults as operators meet them: what the doctor, `kvflow status`, the log and the metrics say of each.

Each row names the cause in at least one of the four at once. The two faults that need two hosts are in
`test_two_hosts.py`; a server without a connector, whose process can be seen, is in `test_peer.py`.
"""

import contextlib
import io
import re
import resource
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from prometheus_client import CollectorRegistry, generate_latest

import kvflow
from kvflow.cli import main as cli
from kvflow.doctor import rooms
from kvflow.doctor.findings import DoctorOptions, run_checks
from kvflow.doctor.peer import Visit, examine_peer
from kvflow.doctor.ranks import running_ranks
from kvflow.prometheus import RankCollector
from tests.admin.test_commands import is_granted
from tests.doctor.test_peer import with_draft_layer
from tests.observe.lines import Lines, printed
from tests.service.test_quarantine import doubt
from tests.support.failures import catch
from tests.support.instances import QUICK, decode_config, deploy, make_pool, prefill_config
from tests.support.ports import unused_port
from tests.support.prefill_client import hand_over, prefill_process
from tests.support.prefill_process import hold_interpreter
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

AnyRank = kvflow.PrefillRank | kvflow.DecodeRank


@pytest.fixture(autouse=True)
def commands_run_in_any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the main thread may set a handler of signals, and it runs the ranks."""
    monkeypatch.setattr(cli, "_ended_by_interrupt", lambda _: nullcontext())


@dataclass
class Scene:
    """A host with a fault.

    Attributes:
        place: Where the sockets of its ranks are.
        lines: What they log.
        ranks: Those of this process, whose metrics are read.
        target: Address that `kvflow doctor` is asked about, if any.
    """

    place: Path
    lines: Lines
    ranks: Sequence[AnyRank] = ()
    target: str = ""
    said: dict[str, str] = field(default_factory=dict)

    async def look(self) -> None:
        """Ask the four that may name a cause."""
        options = DoctorOptions(socket=self.place, timeout_s=20.0, backend="memory")
        findings = await anyio.to_thread.run_sync(run_checks, [running_ranks], options)
        if self.target:
            findings += await examine_peer(Visit(DoctorOptions(socket=self.place, timeout_s=1.0), self.target))
        registry = CollectorRegistry()
        registry.register(RankCollector(*self.ranks))
        series = generate_latest(registry).decode().splitlines()
        self.said = {
            "doctor": "\n".join(one.text for one in findings if one.status != "ok"),
            "status": await anyio.to_thread.run_sync(self._status),
            "log": self.lines.getvalue(),
            "metrics": "\n".join(line for line in series if "_bucket" not in line and not line.startswith("#")),
        }

    def _status(self) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            cli.main(["status", "--socket", str(self.place), "--timeout", "20"])
        return out.getvalue()

    def check(self, **expected: str) -> None:
        """Check that each of the four named says a text; a doctor that finds something also says what fixes it."""
        for who, text in expected.items():
            assert text in self.said[who], f"{who} does not say {text!r}:\n{self.said[who]}"
        assert "doctor" not in expected or "fix: " in self.said["doctor"]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path / "s", Lines())


@asynccontextmanager
async def decoding(scene: Scene, **settings: Any) -> AsyncIterator[kvflow.DecodeRank]:
    """Open a decode rank of this host, whose log is kept."""
    config = decode_config(settings.pop("registry", None), timeouts=QUICK, admin=str(scene.place), **settings)
    with printed() as scene.lines:
        async with kvflow.DecodeRank(config, make_pool().layout) as rank:
            scene.ranks = [rank]
            yield rank


async def receive(rank: kvflow.DecodeRank, prefill: str | kvflow.Endpoint) -> None:
    async with rank.receive(1, prefill=prefill, tokens=(0, 4), pages={"kv": [0]}) as receiver:
        await receiver.done()


async def ask(rank: kvflow.DecodeRank, prefill: str | kvflow.Endpoint) -> None:
    """Try to receive a room, which fails."""
    await catch(partial(receive, rank, prefill))


UNREACHABLE = (
    'kvflow_failed_transfers_total{engine_rank="0",instance_name="decode",reason="unreachable",role="decode"} 1.0'
)


async def test_1_wrong_address_is_advertised(scene: Scene) -> None:
    port = unused_port()
    config = prefill_config(None, bind=f"tcp://127.0.0.1:{port}", advertise="192.0.2.1", trust=kvflow.Trust.none())
    async with kvflow.PrefillRank(config, make_pool().layout), decoding(scene, trust=kvflow.Trust.none()) as decode:
        scene.target = f"tcp://127.0.0.1:{port}"
        await ask(decode, kvflow.Endpoint.parse(scene.target))
        await scene.look()
    scene.check(doctor=f"tcp://192.0.2.1:{port}", status="0", log=f"tcp://192.0.2.1:{port}", metrics=UNREACHABLE)


async def test_2_nobody_listens(scene: Scene) -> None:
    scene.target = f"tcp://127.0.0.1:{unused_port()}"
    async with decoding(scene) as decode:
        await ask(decode, kvflow.Endpoint.parse(scene.target))
        await scene.look()
    said = "no process listens there"
    scene.check(doctor=said, status="decode/0", log=said, metrics=UNREACHABLE)


async def test_2b_an_http_server_listens(scene: Scene) -> None:
    async def serve(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.send(b"HTTP/1.1 400 Bad Request\r\n\r\n".ljust(64))

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        _, port = listener.extra_attributes[anyio.abc.SocketAttribute.local_address]()
        scene.target = f"tcp://127.0.0.1:{port}"
        async with decoding(scene) as decode:
            await ask(decode, kvflow.Endpoint.parse(scene.target))
            await scene.look()
        tasks.cancel_scope.cancel()
    said = "it is an HTTP server"
    scene.check(doctor=said, status="decode/0", log=said, metrics=UNREACHABLE)


async def test_3_quarantine_grows(scene: Scene) -> None:
    settings = {"admin": str(scene.place)}
    with printed() as scene.lines:
        async with deploy(sending=settings, receiving=settings) as deployment:
            scene.ranks = [*deployment.prefill, *deployment.decode]
            await doubt(deployment, 1)
            await scene.look()
            for rank in scene.ranks:
                rank.release(1)
    said = "transfers in quarantine: 1; the oldest is room 1"
    gauge = 'kvflow_quarantined_pages{engine_rank="0",instance_name="decode",role="decode"} 2.0'
    scene.check(doctor=said, status=said, log="pages_quarantined", metrics=gauge)


async def test_4_registry_is_down(scene: Scene) -> None:
    scene.target = f"tcp://127.0.0.1:{unused_port()}"
    async with decoding(scene, registry=scene.target) as decode:
        await ask(decode, "prefill")
        await scene.look()
    scene.check(
        doctor=f"{scene.target} refuses the connection",
        status="decode/0",
        log="registry_unreachable",
        metrics=UNREACHABLE,
    )


@pytest.mark.parametrize(
    ("other", "log", "doctor"),
    [
        ({"fingerprint": "another"}, "model fingerprints differ", "fingerprints differ, so every handshake is refused"),
        ({"head_bytes": 16}, "layouts differ", "handshakes were refused 1 times: the two sides do not match"),
    ],
    ids=["5_other_model", "6_other_layout"],
)
async def test_sides_do_not_match(scene: Scene, other: dict[str, Any], log: str, doctor: str) -> None:
    config = prefill_config(None, admin=str(scene.place))
    async with kvflow.PrefillRank(config, make_pool(**other).layout) as prefill, decoding(scene) as decode:
        await ask(decode, kvflow.Endpoint.parse(prefill.endpoint))
        scene.target = prefill.endpoint
        await scene.look()
    scene.check(doctor=doctor, status="decode/0", log=log, metrics=UNREACHABLE.replace("unreachable", "refused"))


async def test_7_engine_holds_the_interpreter(scene: Scene) -> None:
    settings = {"admin": str(scene.place)}
    with printed() as scene.lines:
        async with deploy(sending=settings, receiving=settings) as deployment:
            scene.ranks = deployment.decode
            async with deployment.request(1, 8).receiver() as receiver:
                await anyio.wait_all_tasks_blocked()
                hold_interpreter(2)
                await anyio.sleep(0.1)
                receiver.abort()
            await scene.look()
    lag = next(line for line in scene.said["metrics"].splitlines() if "event_loop_lag_seconds_sum" in line)
    assert float(lag.rpartition(" ")[2]) > 1.0
    scene.check(doctor="its event loop was blocked for", status="decode/0", log="event_loop")


async def test_8_prefill_is_killed(scene: Scene, tmp_path: Path) -> None:
    async with prefill_process(None, unused_port(), admin=str(tmp_path / "p")) as prefill:
        await prefill.tell("ticket", room=1)
        ticket = (await prefill.expect("ticket", 1))["ticket"]
        async with decoding(scene, backend="nixl") as decode:
            await hand_over(decode, prefill, 1, ticket)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask, decode, kvflow.Endpoint.parse(ticket["address"]))
                await prefill.tell("send", room=1)
                await prefill.expect("half", 1)
                while not await anyio.to_thread.run_sync(is_granted, tmp_path / "p", prefill.pid):
                    pass
                prefill.send_signal(signal.SIGKILL)
            await scene.look()
    lost = UNREACHABLE.replace("unreachable", "peer_lost")
    scene.check(doctor="1 have failed: peer_lost 1", status="decode/0", log="has ended", metrics=lost)


async def test_9_only_tcp_may_be_used(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    async with prefill_process(None, unused_port(), admin=str(scene.place)) as prefill:
        await scene.look()
        await prefill.tell("end")
    scene.check(doctor="prefill/0 may only use TCP: TCP (UCX_TLS=tcp)", status="prefill/0")
    assert "fix: unset UCX_TLS" in scene.said["doctor"]


async def test_10_staging_windows_are_all_taken(scene: Scene) -> None:
    slot = 8 * 2**20
    settings = {"staging_bytes": slot, "staging_slots": 1}
    one, two = (prefill_config(None, instance=name, staging_bytes=slot) for name in ("one", "two"))
    async with (
        decoding(scene, **settings) as decode,
        kvflow.PrefillRank(one, make_pool().layout) as first,
        kvflow.PrefillRank(two, make_pool().layout) as second,
    ):
        for prefill in (first, second):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(receive, decode, kvflow.Endpoint.parse(prefill.endpoint))
                async with prefill.send(1) as sender:
                    await sender.finish((0, 4), {"kv": [0]})
        await scene.look()
    gauge = 'kvflow_staging_windows{engine_rank="0",instance_name="decode",role="decode",state="free"} 0.0'
    scene.check(doctor="staging windows are taken", status="decode/0", log="staging_windows_exhausted", metrics=gauge)


async def test_11_decode_has_no_connector(scene: Scene) -> None:
    """And the router sends each request to both servers."""
    with printed() as scene.lines:
        async with deploy(sending={"admin": str(scene.place)}, timeouts=kvflow.Timeouts(grant_s=0.1)) as deployment:
            scene.ranks = deployment.prefill
            await catch(deployment.request(1, 8).send)
            await scene.look()
    metric = UNREACHABLE.replace("unreachable", "not_granted").replace("decode", "prefill")
    said = "no decode rank asked for the room within 0.1 s"
    scene.check(doctor="decode did not ask for in time", status="prefill/0", log=said, metrics=metric)


async def test_11b_the_sides_were_given_different_rooms(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "WAITED_S", 0.0)
    settings = {"admin": str(scene.place)}
    async with deploy(sending=settings, receiving=settings) as deployment:
        scene.ranks = deployment.prefill
        async with deployment.request(2, 8).receiver() as receiver:
            await until(lambda: deployment.prefill[0].statistics().waiting_grants == 1)
            async with deployment.prefill[0].send(1) as sender:
                await scene.look()
                sender.abort()
            receiver.abort()
    gauge = 'kvflow_waiting_grants{engine_rank="0",instance_name="prefill",role="prefill"} 1.0'
    scene.check(
        doctor="prefill/0: nobody has asked for room 1, open for 0 s",
        status="rooms that decode has asked for: 1",
        metrics=gauge,
    )
    assert "decode/0 waits for room 2, open for" in scene.said["doctor"]
    assert "correct the router" in scene.said["doctor"]


async def test_11c_draft_layers_are_on_one_side_only(scene: Scene) -> None:
    settings: dict[str, Any] = {"admin": str(scene.place)}
    layout = with_draft_layer(make_pool().layout)
    async with kvflow.PrefillRank(prefill_config(None, **settings), layout), decoding(scene):
        await scene.look()
    scene.check(doctor="draft layers on one side only: prefill/0 has 1, decode/0 has 0", status="decode/0")


async def test_12_descriptors_run_out(scene: Scene) -> None:
    async with prefill_process(None, unused_port(), admin=str(scene.place)) as prefill:
        num_open = len(DoctorOptions().list_names(f"proc/{prefill.pid}/fd"))
        resource.prlimit(prefill.pid, resource.RLIMIT_NOFILE, (num_open + 10, 20_000))
        await scene.look()
        resource.prlimit(prefill.pid, resource.RLIMIT_NOFILE, (10_000, 20_000))
        await prefill.tell("end")
    assert re.search(r"prefill/0: its process may open \d+ more descriptors only", scene.said["doctor"])
    assert "prefill/0" in scene.said["status"]
    assert f"prlimit --pid {prefill.pid} --nofile=65536" in scene.said["doctor"]

"""What `kvflow doctor ADDRESS` says of a peer that cannot be used, and of running ranks."""

import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest

import kvflow
from kvflow.doctor import ranks
from kvflow.doctor.checks import CHECKS
from kvflow.doctor.findings import DoctorOptions, Finding, run_checks
from kvflow.doctor.peer import PEER_CHECKS, Visit, examine_peer, read_target
from kvflow.doctor.probe import ProbeOrder, serve_logged_probe
from kvflow.errors import ConfigError, TicketError
from kvflow.geometry.layout import KVLayout
from kvflow.hosts import default_host, host_towards
from kvflow.keys import add_peer, make_keys
from tests.doctor.test_report import make_private
from tests.support.http_servers import HTTP_SERVERS
from tests.support.instances import QUICK, decode_config, deploy, make_pool, prefill_config
from tests.support.ports import unused_port
from tests.support.prefill_client import prefill_process
from tests.support.stopping import is_stopped
from tests.support.trusts import trusts
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

NOWHERE = Path("/nowhere")
"""No rank of this machine takes part."""


def visit(target: str, fingerprint: str | None = None, **options: Any) -> Visit:
    chosen: dict[str, Any] = {"socket": NOWHERE, "timeout_s": 20.0, "backend": "memory"} | options
    return Visit(DoctorOptions(**chosen), *read_target(target), fingerprint)


async def findings_of(target: str, fingerprint: str | None = None, **options: Any) -> dict[str, list[Finding]]:
    found: dict[str, list[Finding]] = {}
    for one in await examine_peer(visit(target, fingerprint, **options)):
        found.setdefault(one.check, []).append(one)
    return found


def has_finding(findings: list[Finding], status: str, cause: str, fix: str) -> bool:
    """Return whether a finding has a status, and a cause and a fix with these texts."""
    return any(one.status == status and cause in one.cause and fix in one.fix for one in findings)


@asynccontextmanager
async def serving(layout: KVLayout | None = None, **settings: Any) -> AsyncIterator[kvflow.PrefillRank]:
    async with kvflow.PrefillRank(prefill_config(None, **settings), layout or make_pool().layout) as rank:
        yield rank


def with_draft_layer(layout: KVLayout) -> KVLayout:
    """Return a layout whose last layer is optional."""
    (pool,) = layout.components
    last = max(region.layer for region in pool.regions)
    regions = tuple(msgspec.structs.replace(region, optional=region.layer == last) for region in pool.regions)
    return msgspec.structs.replace(layout, components=(msgspec.structs.replace(pool, regions=regions),))


async def test_rank_that_serves_is_described(tmp_path: Path) -> None:
    async with serving(admin=str(tmp_path)) as rank:
        found = await findings_of(rank.endpoint, "test-model", socket=tmp_path)
        assert list(found) == [check.__name__.replace("_", " ") for check in PEER_CHECKS]
        statuses = {name: [one.status for one in findings] for name, findings in found.items()}
        assert statuses.pop("data transfer") == ["unknown"]
        assert set(map(tuple, statuses.values())) == {("ok",)}
        (who,) = found["who answers"]
        assert str(rank.me) in who.cause
        assert f"kvflow {kvflow.__version__}, up " in who.cause
        assert "--listen" in found["data transfer"][0].fix
        assert "is that of --fingerprint; prefill has" in found["fingerprint and layout"][0].cause
        assert "layers 0-1" in found["fingerprint and layout"][0].cause


async def test_rank_with_several_hosts_is_described() -> None:
    async with serving(bind="tcp://127.0.0.3:0", advertise="127.0.0.2,127.0.0.3") as rank:
        found = await findings_of(rank.endpoint, "test-model")
        assert "127.0.0.2,127.0.0.3 is 127.0.0.2, 127.0.0.3" in found["name resolution"][0].cause
        assert has_finding(found["tcp connection"], "ok", "tcp://127.0.0.3:", "")
        assert str(rank.me) in found["who answers"][0].cause
        assert not [one for findings in found.values() for one in findings if one.status == "fail"]


async def test_other_model_is_found() -> None:
    async with serving() as rank:
        found = (await findings_of(rank.endpoint, "another-model"))["fingerprint and layout"]
        assert has_finding(found, "fail", "'test-model' on prefill, 'another-model' here", "set `fingerprint`")
        found = (await findings_of(rank.endpoint))["fingerprint and layout"]
        assert has_finding(found, "unknown", "no decode rank runs here", "--fingerprint")


async def test_decode_rank_of_this_host_is_compared(tmp_path: Path) -> None:
    layout = with_draft_layer(make_pool().layout)
    settings = decode_config(None, admin=str(tmp_path))
    async with serving() as rank, kvflow.DecodeRank(settings, layout):
        found = (await findings_of(rank.endpoint, socket=tmp_path))["fingerprint and layout"]
        assert has_finding(found, "ok", "'test-model' is that of decode/0 here", "")
        cause = "draft layers on one side only: prefill/0 has 0, decode/0 has 1"
        assert has_finding(found, "warn", cause, "speculative decoding on both sides")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_port_that_is_not_open_is_found(host: str) -> None:
    """A name may have several addresses, which are all tried."""
    found = await findings_of(f"tcp://{host}:{unused_port()}")
    assert list(found) == ["name resolution", "tcp connection"]
    assert has_finding(
        found["tcp connection"], "fail", "refuses the connection: no process listens", "start the server"
    )


async def test_name_that_does_not_resolve_is_found() -> None:
    found = await findings_of("tcp://prefill.invalid:7000")
    assert list(found) == ["name resolution"]
    assert has_finding(
        found["name resolution"], "fail", "prefill.invalid does not resolve", "getent hosts prefill.invalid"
    )


async def test_another_program_is_found() -> None:
    async def serve(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.send(b"SSH-2.0-OpenSSH_9.2\r\n".ljust(64))

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        _, port = listener.extra_attributes[anyio.abc.SocketAttribute.local_address]()
        found = await findings_of(f"tcp://127.0.0.1:{port}", timeout_s=0.5)
        tasks.cancel_scope.cancel()
    assert has_finding(found["greeting and key"], "fail", "it is another program", f"sport = :{port}")


@pytest.mark.parametrize("server", HTTP_SERVERS)
async def test_http_server_is_found(server: str) -> None:
    async with HTTP_SERVERS[server]() as address:
        found = (await findings_of(address, timeout_s=0.5))["greeting and key"]
    assert has_finding(found, "fail", "it is an HTTP server", "use the port of the rank")
    assert "keys" not in found[0].fix


async def test_stopped_peer_is_found() -> None:
    async with prefill_process(None, unused_port()) as prefill:
        await prefill.tell("ticket", room=1)
        ticket = (await prefill.expect("ticket", 1))["ticket"]
        prefill.send_signal(signal.SIGSTOP)
        await until(lambda: is_stopped(prefill.pid))
        try:
            found = await findings_of(json.dumps(ticket), timeout_s=0.5)
        finally:
            prefill.send_signal(signal.SIGCONT)
        await prefill.tell("end")
    assert found["tcp connection"][0].status == "ok"
    assert has_finding(found["greeting and key"], "fail", "a process that is stopped", "kill -CONT")


async def test_stopped_rank_of_this_host_is_found(tmp_path: Path) -> None:
    async with prefill_process(None, unused_port(), admin=str(tmp_path)) as prefill:
        prefill.send_signal(signal.SIGSTOP)
        await until(lambda: is_stopped(prefill.pid))
        try:
            options = DoctorOptions(socket=tmp_path, timeout_s=0.5)
            found = await anyio.to_thread.run_sync(run_checks, [ranks.running_ranks], options)
        finally:
            prefill.send_signal(signal.SIGCONT)
        await prefill.tell("end")
    assert has_finding(found, "fail", f"process {prefill.pid} of a rank is stopped", f"kill -CONT {prefill.pid}")


async def test_missing_and_wrong_keys_are_found() -> None:
    _, keys = trusts("prefill", "decode")
    _, strangers = trusts("prefill", "decode")
    async with serving(trust=keys["prefill"]) as rank:
        found = await findings_of(rank.endpoint, timeout_s=0.5)
        assert has_finding(found["greeting and key"], "fail", "it requires a key", "--keys DIRECTORY")
        known = replace(strangers["decode"], peers=keys["decode"].peers)
        found = await findings_of(rank.endpoint, trust=known, timeout_s=2.0)
        assert has_finding(found["greeting and key"], "fail", "", "kvflow keys trust")
        found = await findings_of(rank.endpoint, trust=keys["decode"])
        assert found["greeting and key"][0].cause == "it answers, and both keys are accepted"


async def test_ticket_of_an_ended_rank_and_instance_with_missing_ranks_are_found() -> None:
    port = unused_port()
    async with serving(bind=f"tcp://127.0.0.1:{port}") as rank:
        ticket = rank.ticket(7)
    async with serving(bind=f"tcp://127.0.0.1:{port}", num_ranks=2):
        found = await findings_of(json.dumps(ticket), timeout_s=4.0)
    assert has_finding(found["who answers"], "fail", "which has ended", "send the request to prefill again")
    assert has_finding(found["who answers"], "fail", "only ranks [0] of 2 are registered", "registry")
    assert has_finding(found["name resolution"], "warn", "the ticket has the address tcp://127.0.0.1", "`advertise`")


@pytest.mark.parametrize(
    ("advertise", "cause"), [("127.0.0.1", "no other host can reach"), ("192.0.2.1", "192.0.2.1:")]
)
async def test_wrong_advertised_address_is_found(advertise: str, cause: str) -> None:
    host, port = await default_host(host_towards), unused_port()
    if host is None:
        pytest.skip("this host has no address but the loopback one")
    settings: dict[str, Any] = {"bind": f"tcp://0.0.0.0:{port}", "advertise": advertise, "trust": kvflow.Trust.none()}
    async with serving(**settings):
        found = (await findings_of(f"tcp://{host}:{port}"))["who answers"]
    assert has_finding(found, "fail", cause, "`advertise`")


async def test_rank_that_has_a_registry_refers_to_it() -> None:
    config = prefill_config("tcp://127.0.0.1:1")
    async with kvflow.PrefillRank(config, make_pool().layout) as rank:
        found = await findings_of(rank.endpoint)
    assert list(found)[-1] == "greeting and key"
    assert has_finding(found["greeting and key"], "unknown", "it has a registry", "ask its registry")


async def test_registry_is_recognised_and_one_that_does_not_know_the_instance_is_found() -> None:
    async with kvflow.Registry() as registry:
        found = await findings_of(registry.endpoint)
        assert has_finding(found["who answers"], "unknown", "it is a registry", "kvflow registry list")
        rank = kvflow.PrefillRank(prefill_config(registry.endpoint), make_pool().layout)
        async with rank:
            ticket = json.dumps(rank.ticket(7))
            await until(lambda: registry.statistics().ranks == 1)
            assert str(rank.me) in (await findings_of(ticket))["who answers"][0].cause
        found = await findings_of(ticket, timeout_s=2.0)
    assert has_finding(found["who answers"], "fail", "it answers for no rank", "the name of the instance")


async def test_probe_is_measured_with_the_keys_of_an_instance(tmp_path: Path) -> None:
    make_private(tmp_path)
    one, two = tmp_path / "prefill-0", tmp_path / "decode-0"
    public = {path.name: make_keys(path) for path in (one, two)}
    add_peer(one, public["decode-0"], "decode-0")
    add_peer(two, public["prefill-0"], "prefill-0")
    order = ProbeOrder(instance="prefill-0")
    async with serve_logged_probe(order, "tcp://127.0.0.1:0", trust=kvflow.load_trust(one)) as address:
        options: dict[str, Any] = {"backend": "nixl", "keys": str(two), "trust": kvflow.load_trust(two)}
        found = (await findings_of(address, instance="decode-0", **options))["data transfer"]
        assert "fail" not in [one.status for one in found]
        assert [one.cause.partition(" ")[0] for one in found] == ["kvflow", "path:", "latency"]
        found = (await findings_of(address, instance="decode-1", **options))["data transfer"]
        assert has_finding(found, "fail", "", "the --instance for which the other side lists them")


async def test_transports_that_differ_do_not_reach_each_other() -> None:
    async with serve_logged_probe(ProbeOrder(), "tcp://127.0.0.1:0") as address:
        found = (await findings_of(address, backend="mooncake"))["data transfer"]
    assert has_finding(found, "fail", "the other side refuses", "the same --backend")
    assert "mooncake" in found[0].cause


@pytest.mark.parametrize("text", ["localhost:7000", "tcp://*:7000", "prefill"])
def test_target_is_an_address_or_a_ticket(text: str) -> None:
    with pytest.raises(ConfigError):
        read_target(text)
    with pytest.raises(TicketError):
        read_target('{"room": 7')
    with pytest.raises(TicketError):
        read_target("{}")


async def examine_ranks(place: Path) -> list[Finding]:
    options = DoctorOptions(socket=place, timeout_s=30.0)
    return await anyio.to_thread.run_sync(run_checks, [ranks.running_ranks], options)


async def test_ranks_that_nobody_uses_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with deploy(sending={"admin": str(tmp_path)}, receiving={"admin": str(tmp_path)}) as deployment:
        found = await examine_ranks(tmp_path)
        assert has_finding(found, "ok", "decode/0, prefill/0: nothing stands out", "")
        monkeypatch.setattr(ranks, "IDLE_S", 0.0)
        found = await examine_ranks(tmp_path)
        assert has_finding(found, "warn", "decode/0 has received nothing", "router sends each request to prefill first")
        assert has_finding(found, "warn", "prefill/0 has sent nothing", "decode has the connector")
        await deployment.request(1, 8).hand_over()
        found = await examine_ranks(tmp_path)
        assert has_finding(found, "ok", "nothing stands out", "")


async def test_prompts_that_are_computed_twice_and_refusals_are_found(tmp_path: Path) -> None:
    settings = {"admin": str(tmp_path), "timeouts": replace(QUICK, grant_s=0.1)}
    async with deploy(sending=settings) as deployment:
        with pytest.raises(kvflow.TransferFailed):
            await deployment.request(1, 8).send()
        found = await examine_ranks(tmp_path)
        assert has_finding(found, "warn", "of 1 transfers, 1 have failed: not_granted 1", "docs/failure-model.md")
        assert has_finding(
            found, "warn", "decode did not ask for in time: these prompts are computed again", "both sides"
        )
        stranger = decode_config(deployment.registry.endpoint, instance="other", admin=str(tmp_path))
        async with kvflow.DecodeRank(stranger, make_pool(fingerprint="another").layout) as rank:
            with pytest.raises(kvflow.TransferFailed):
                async with rank.receive(2, prefill="prefill", tokens=(0, 4), pages={"kv": [0]}) as receiver:
                    await receiver.done()
            found = await examine_ranks(tmp_path)
    assert has_finding(found, "fail", "other/0: handshakes were refused 1 times", "kvflow doctor ADDRESS-OF-PREFILL")
    assert has_finding(found, "warn", "other/0 matches no prefill rank of this host", "same model")


async def test_drafts_on_one_side_and_address_for_this_host_only_are_found(tmp_path: Path) -> None:
    async with serving(with_draft_layer(make_pool().layout), admin=str(tmp_path)) as rank:
        found = await examine_ranks(tmp_path)
        assert has_finding(found, "warn", f"advertises {rank.endpoint}, which no other host can reach", "`advertise`")
        async with kvflow.DecodeRank(decode_config(None, admin=str(tmp_path)), make_pool().layout):
            found = await examine_ranks(tmp_path)
    assert has_finding(found, "warn", "prefill/0 has 1, decode/0 has 0", "on both sides")
    assert not any("advertises" in one.cause for one in found)


@pytest.mark.parametrize(
    ("command", "fix"),
    [
        ("python3\0-m\0vllm.entrypoints.openai.api_server\0--model\0m\0", "--kv-transfer-config"),
        ("python3\0-m\0sglang.launch_server\0--model-path\0m\0", "--disaggregation-transfer-backend kvflow"),
    ],
)
def test_server_without_connector_is_found(command: str, fix: str, tmp_path: Path) -> None:
    (tmp_path / "proc/42").mkdir(parents=True)
    (tmp_path / "proc/42/cmdline").write_text(command)
    found = run_checks([ranks.running_ranks], DoctorOptions(socket=NOWHERE, root=tmp_path))
    assert has_finding(found, "warn", "process 42 is a server of", fix)
    (tmp_path / "proc/42/cmdline").write_text(f"{command}{fix.partition(' ')[0]}\0")
    found = run_checks([ranks.running_ranks], DoctorOptions(socket=NOWHERE, root=tmp_path))
    assert [one.status for one in found] == ["unknown"]


def test_every_check_says_what_it_looks_at() -> None:
    assert all(check.__doc__ for check in (*CHECKS, *PEER_CHECKS))

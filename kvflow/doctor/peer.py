"""Looks at a prefill rank, a registry or a probe at an address, from the host of decode."""

import asyncio
import ipaddress
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, TypeVar

import anyio
import anyio.to_thread
import msgspec

from kvflow.addresses import check_endpoint, is_loopback, join_address, split_address, split_hosts
from kvflow.admin.messages import StatusAnswer
from kvflow.control.diagnosis import CONNECT_S, diagnose
from kvflow.doctor.devices import has_active_rdma
from kvflow.doctor.findings import UNKNOWN, DoctorOptions, Finding, fail, name_of, ok, unknown, warn
from kvflow.doctor.probe import FINGERPRINT, ProbeOrder, run_in_child
from kvflow.doctor.ranks import judge_drafts, local_ranks
from kvflow.doctor.transport import judge_probe
from kvflow.errors import ConfigError, FailureReason, RemoteProtocolError, TicketError, describe, shorten
from kvflow.hosts import host_of, host_towards, resolve_hosts
from kvflow.system import system_ports
from kvflow.trust import Trust
from kvflow.wire.codec import Reader, encode
from kvflow.wire.messages import (
    EVERY_INSTANCE,
    MAX_LISTED,
    Lookup,
    Message,
    RankAddress,
    RankRecord,
    Records,
    Refuse,
    SealedRecords,
)
from kvflow.wire.ticket import Ticket

__all__ = ["MAX_LISTED", "PEER_CHECKS", "Visit", "examine_peer", "list_ranks", "read_target"]

ANSWERS: Final[Reader[Records | Refuse]] = Reader(Records | Refuse)
LISTS: Final[Reader[SealedRecords | Refuse]] = Reader(SealedRecords | Refuse)

AnyAnswer = TypeVar("AnyAnswer", bound=Message)

ADVERTISE: Final = "on prefill, set `host` in the options of the adapter, or `bind` and `advertise`"

FIXES: Final = {
    "requires a key": "kvflow doctor ADDRESS --keys DIRECTORY; kvflow keys new DIRECTORY",
    "has no keys": "start the peer with keys, or leave out --keys",
    "says nothing": "ss -ltnp 'sport = :{port}' on that host; if its process is stopped: kill -CONT PID",
    "HTTP server": "use the port of the rank, which its log line `rank_opened` has, not that of the engine's API",
    "another program": "ss -ltnp 'sport = :{port}' on that host; correct the port",
    "": "kvflow keys trust DIRECTORY PUBLIC-KEY INSTANCE on the other host; kvflow keys show DIRECTORY here",
}
"""What fixes a connection without an answer, by what `diagnose` says."""


@dataclass
class Visit:
    """What is asked for, and what is known of the peer so far.

    Attributes:
        options: As for the checks of this host.
        address: "tcp://host:port".
        ticket: The ticket that has the address; None if there was none.
        fingerprint: Of the layout on this side; None to take that of running ranks.
        hosts: Addresses of the host.
        records: Ranks that the peer answers for.
        is_registry: It is a registry, and no instance was named.
    """

    options: DoctorOptions
    address: str
    ticket: Ticket | None = None
    fingerprint: str | None = None
    hosts: list[str] = field(default_factory=list)
    records: Sequence[RankRecord] = ()
    is_registry: bool = False


def read_target(text: str) -> tuple[str, Ticket | None]:
    """Return the address in the argument of the command, and the ticket if it is one.

    Raises:
        ConfigError, TicketError: It is neither an address nor a ticket.
    """
    if not text.lstrip().startswith("{"):
        check_endpoint("target", text)
        return text, None
    try:
        ticket = Ticket.parse(json.loads(text))
    except json.JSONDecodeError as error:
        raise TicketError("ticket is not valid JSON", detail=str(error)) from error
    return ticket.address, ticket


async def name_resolution(visit: Visit) -> AsyncIterator[Finding]:
    """Whether the name of the host resolves, and whether the address can be meant for other hosts."""
    host, _ = split_address("target", visit.address)
    try:
        visit.hosts = await anyio.to_thread.run_sync(resolve_hosts, host)
    except (OSError, UnicodeError) as error:
        yield fail(f"{host} does not resolve: {error}", f"getent hosts {host}; add it to DNS or /etc/hosts")
        return
    own = await host_towards(visit.address)
    text = f"{host} is {', '.join(visit.hosts)}; this host is {own or 'without a route'} towards it"
    if visit.ticket is not None and is_loopback(host):
        cause = f"the ticket has the address {visit.address}, which means another host wherever it is read"
        yield warn(cause, ADVERTISE)
    yield ok(text)


async def tcp_connection(visit: Visit) -> AsyncIterator[Finding]:
    """Whether a TCP connection to the control port can be made: refused, dropped, or no route."""
    yield await _connect(visit.address)


async def _connect(address: str) -> Finding:
    host, port = split_address("address", address)
    *hosts, host = split_hosts(host)
    for one in hosts:
        if (found := await _connect(join_address(one, port))).status == "ok":
            return found
    address = join_address(host, port)
    began_at = anyio.current_time()
    try:
        with anyio.fail_after(CONNECT_S):
            stream = await anyio.connect_tcp(host, port)
    except TimeoutError:
        cause = f"{address} does not answer within {CONNECT_S:g} s: the host is down, or a firewall drops it"
        return fail(cause, f"ping {host}; allow TCP port {port}; check `advertise` of the peer")
    except (OSError, UnicodeError) as error:
        why: BaseException = error.__cause__ or error
        while isinstance(why, BaseExceptionGroup):  # one for each address of the host
            why = why.exceptions[0]
        if isinstance(why, ConnectionRefusedError):
            cause = f"{address} refuses the connection: no process listens there"
            return fail(cause, f"ss -ltn 'sport = :{port}' on {host}; start the server, or correct the address")
        return fail(f"no connection to {address}: {why}", f"ip route get {host}")
    took_s = anyio.current_time() - began_at
    await stream.aclose()
    return ok(f"{address} accepts connections, within {took_s * 1e3:.1f} ms")


async def greeting_and_key(visit: Visit) -> AsyncIterator[Finding]:
    """Whether the peer speaks kvflow's protocol and answers, and whether both sides accept each other's keys."""
    trust, timeout_s = visit.options.trust, visit.options.timeout_s
    instance = None if visit.ticket is None else visit.ticket.issuer.rank.instance
    answer, refusal = await look_up(visit.address, instance, trust, timeout_s, ANSWERS)
    if isinstance(answer, Records):
        visit.records, visit.is_registry = answer.records, answer.instance is None
        yield ok(f"it answers, {'without keys' if trust.is_plain else 'and both keys are accepted'}")
    elif isinstance(answer, Refuse):
        yield unknown(
            f"it is a rank, but does not answer for its instance: {answer.detail}", "ask its registry instead"
        )
    else:
        detail = refusal or (await diagnose(visit.address, is_encrypted=not trust.is_plain)).detail
        port = split_address("target", visit.address)[1]
        fix = next(fix for part, fix in FIXES.items() if part in detail).format(port=port)
        yield fail(f"it does not answer within {timeout_s:g} s: {detail}", fix)


async def look_up(
    address: str, instance: str | None, trust: Trust, timeout_s: float, answers: Reader[AnyAnswer]
) -> tuple[AnyAnswer | None, str]:
    """Ask a directory for ranks; return the answer, or None and why a key was refused.

    Raises:
        Shortage: This process has no descriptors left.
    """
    answered: asyncio.Future[AnyAnswer] = asyncio.get_running_loop().create_future()
    refusals: list[str] = []

    def take(frames: Sequence[bytes]) -> None:
        with suppress(RemoteProtocolError):
            if not answered.done():
                answered.set_result(answers.read_frames(frames))

    control = system_ports().control
    control.reserve()
    keys = trust.for_registry() if instance == EVERY_INSTANCE else trust.for_address(instance)
    connection = control.connect(address, take, lambda: None, keys=keys, on_refused=refusals.append)
    try:
        connection.send(encode(Lookup(instance=instance, timeout_s=timeout_s / 2, number=1)))
        async with asyncio.timeout(timeout_s):
            return await answered, ""
    except TimeoutError:
        return None, refusals[-1] if refusals else ""
    finally:
        connection.close()


async def list_ranks(address: str, trust: Trust, timeout_s: float) -> tuple[RankAddress, ...]:
    """Return all ranks that are registered with a registry.

    Raises:
        ConfigError: It does not answer, or is no registry.
    """
    answer, refusal = await look_up(address, EVERY_INSTANCE, trust, timeout_s, LISTS)
    if isinstance(answer, SealedRecords):
        return answer.records
    if isinstance(answer, Refuse):
        raise ConfigError("this is no registry", registry=address, detail=answer.detail)
    detail = refusal or (await diagnose(address, is_encrypted=not trust.is_plain)).detail
    raise ConfigError("the registry does not answer", registry=address, detail=detail)


async def who_answers(visit: Visit) -> AsyncIterator[Finding]:
    """Which ranks answer, whether all of them can be reached at what they advertise, and whether a ticket is theirs."""
    if visit.is_registry:
        yield unknown(
            "it is a registry; ask about one of its ranks", f"kvflow registry list --registry {visit.address}"
        )
        return
    if not visit.records:
        cause = "it answers for no rank: it is a registry without this instance, or a rank that drains"
        yield fail(cause, "check the name of the instance, and the registry that prefill registers with")
        return
    known = {answer.incarnation: answer for answer in await _local_ranks(visit)}
    for record in visit.records:
        yield ok(f"{record.peer} at {record.endpoint}, {record.backend}{_described(record, known)}")
        if is_loopback(host_of(record.endpoint)) and not is_loopback(host_of(visit.address)):
            cause = f"{record.peer.rank} advertises {record.endpoint}, which no other host can reach"
            yield fail(cause, ADVERTISE)
        elif record.endpoint != visit.address:
            found = await _connect(record.endpoint)
            is_open = found.status == "ok"
            yield found if is_open else msgspec.structs.replace(found, fix=f"{ADVERTISE}; or {found.fix}")
    num_ranks = visit.records[0].num_ranks
    if len(visit.records) < num_ranks:
        ranks = sorted(record.peer.rank.engine_rank for record in visit.records)
        cause = f"only ranks {ranks} of {num_ranks} are registered: requests wait, and fail"
        yield fail(cause, "start the others; give them the same `registry`, the first rank for example")
    if visit.ticket is not None and visit.ticket.issuer not in [record.peer for record in visit.records]:
        cause = f"the ticket was issued by {visit.ticket.issuer}, which has ended: its room will fail as stale_ticket"
        yield fail(cause, "send the request to prefill again; give decode the new ticket")


def _described(record: RankRecord, known: dict[str, StatusAnswer]) -> str:
    """Return version and uptime, which only ranks of this host tell."""
    answer = known.get(f"{record.peer.incarnation:016x}")
    return "" if answer is None else f", kvflow {answer.version}, up {answer.uptime_s:.0f} s"


async def fingerprint_and_layout(visit: Visit) -> AsyncIterator[Finding]:
    """Whether this side keeps the same cache: fingerprint, transport, draft layers, and version of the protocol."""
    if not visit.records or _is_probe(visit):
        return
    record = visit.records[0]
    theirs = shorten(record.layout.fingerprint)  # as ranks tell theirs
    own = [answer for answer in await _local_ranks(visit) if answer.role == "decode"]
    fingerprints = [answer.fingerprint for answer in own] if visit.fingerprint is None else [shorten(visit.fingerprint)]
    if not fingerprints:
        cause = f"fingerprint {theirs!r}, {record.layout.summary}; no decode rank runs here to compare"
        yield unknown(cause, "--fingerprint TEXT, or run it on the host of decode")
    elif theirs in fingerprints:
        ranks = ", ".join(f"{one.instance}/{one.engine_rank} here" for one in own if one.fingerprint == theirs)
        compared = ranks if visit.fingerprint is None else "--fingerprint"
        yield ok(f"fingerprint {theirs!r} is that of {compared}; prefill has {record.layout.summary}")
    else:
        cause = f"fingerprints differ, so every handshake is refused: {theirs!r} on prefill, {fingerprints[0]!r} here"
        yield fail(cause, "serve the same model, revision and cache dtype on both sides, or set `fingerprint`")
    for answer in own:
        name = f"{answer.instance}/{answer.engine_rank}"
        if answer.fingerprint == theirs:
            for found in judge_drafts(str(record.peer.rank), record.layout.num_draft_layers, name, answer.draft_layers):
                yield found
        if answer.backend != record.backend:
            cause = f"transports differ: {record.backend} on prefill, {answer.backend} on {name}"
            yield fail(cause, "set the same `backend` on both sides")
    if visit.ticket is not None:
        try:
            visit.ticket.check_compatible(record.layout.fingerprint)
        except TicketError as error:
            yield fail(str(error), "serve the same model and version of kvflow on both sides")


async def data_transfer(visit: Visit) -> AsyncIterator[Finding]:
    """Move 16 MiB from the peer to this host, if it is a probe: path, latency, rates, right bytes; ports in between."""
    if not visit.records:
        return
    if not _is_probe(visit):
        host = host_of(visit.address)
        cause = "a serving rank takes part in no probe transfer, so the data path is not tested"
        listen = f"kvflow doctor --listen {join_address(host, 7199)} --plain"
        yield unknown(cause, f"on {host}: {listen}; then here: kvflow doctor {join_address(host, 7199)}")
        return
    options = visit.options
    order = ProbeOrder(
        address=visit.address,
        instance=options.instance,
        backend=options.backend,
        backend_options=options.backend_options,
        keys=options.keys,
    )
    result = await anyio.to_thread.run_sync(run_in_child, "ask", order, {}, options.probe_s or DoctorOptions.probe_s)
    own = await host_towards(visit.address) or "this host"
    if result is not None and result.reason == FailureReason.REFUSED:
        fix = "give both sides the same --backend and, with --keys, the --instance for which the other side lists them"
        yield fail(f"the other side refuses: {result.failure}", fix)
        return
    if result is None or result.failure:
        detail = "it has not ended in time" if result is None else result.failure
        cause = f"the control port answers, but data does not arrive: {detail}"
        fix = (
            f"allow TCP connections from {visit.hosts[0]} to {own} on its ephemeral ports (sysctl "
            "net.ipv4.ip_local_port_range); if hosts have several networks, set `advertise` and UCX_NET_DEVICES"
        )
        yield fail(cause, fix)
        return
    if result.facts is not None:
        facts = result.facts
        yield ok(f"kvflow {facts.version} serves probe transfers on {facts.host}, up {facts.uptime_s:.0f} s")
    is_same_host = own in visit.hosts or ipaddress.ip_address(visit.hosts[0]).is_loopback
    for found in judge_probe(result, is_same_host=is_same_host, has_rdma=has_active_rdma(options)):
        yield found


def _is_probe(visit: Visit) -> bool:
    return bool(visit.records) and visit.records[0].layout.fingerprint == FINGERPRINT


async def _local_ranks(visit: Visit) -> list[StatusAnswer]:
    answers, _ = await anyio.to_thread.run_sync(local_ranks, visit.options)
    return answers


PeerCheck = Callable[[Visit], AsyncIterator[Finding]]

PEER_CHECKS: Final[tuple[PeerCheck, ...]] = (
    name_resolution,
    tcp_connection,
    greeting_and_key,
    who_answers,
    fingerprint_and_layout,
    data_transfer,
)
"""In this order, until one fails or is unknown before anybody has answered for a rank."""


async def examine_peer(visit: Visit) -> list[Finding]:
    """Run the checks of a peer until one fails without which the others make no sense."""
    findings: list[Finding] = []
    for check in PEER_CHECKS:
        found = []
        try:
            found = [one async for one in check(visit)]
        except Exception as error:  # noqa: BLE001 - as in `run_checks`
            found = [unknown(f"the check has failed: {shorten(describe(error))}")]
        findings += [msgspec.structs.replace(one, check=name_of(check)) for one in found]
        if not visit.records and any(one.status in ("fail", UNKNOWN) for one in found):
            break
    return findings

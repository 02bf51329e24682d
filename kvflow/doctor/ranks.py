"""What the ranks of this host say of themselves, above all what fails without a failure."""

from collections.abc import Iterator, Sequence
from typing import Final

from kvflow.addresses import is_loopback
from kvflow.admin.client import ask_all, find_sockets
from kvflow.admin.messages import StatusAnswer, StatusRequest
from kvflow.doctor.findings import DoctorOptions, Finding, fail, ok, unknown, warn
from kvflow.doctor.rooms import judge_rooms
from kvflow.hosts import host_of

__all__ = ["judge_drafts", "local_ranks", "running_ranks"]

IDLE_S: Final = 60.0
"""How long a rank may run before it is strange that nobody uses it."""

LAG_S: Final = 1.0
FEW_DESCRIPTORS: Final = 64

SERVERS: Final = {
    "vllm": (
        ("vllm.entrypoints", "vllm serve", "bin/vllm"),
        "--kv-transfer-config",
        """vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvflowConnector", ...}', see docs/vllm.md""",
    ),
    "SGLang": (
        ("sglang.launch_server", "sglang serve"),
        "--disaggregation-transfer-backend",
        "python -m sglang.launch_server --disaggregation-mode ... --disaggregation-transfer-backend kvflow",
    ),
}
"""How servers are started, their option without which nothing is handed over, and what fixes it."""


def local_ranks(options: DoctorOptions) -> tuple[list[StatusAnswer], list[tuple[str, str]]]:
    """Return what the ranks of this host answer, and the process and the problem of those that do not."""
    replies = ask_all(find_sockets(options.socket), StatusRequest(), options.timeout_s)
    parsed = [(reply.pid, reply.parse(StatusAnswer)) for reply in replies if reply.line or reply.problem]
    answers = [answer for _, answer in parsed if not isinstance(answer, str)]
    return answers, [(pid, answer) for pid, answer in parsed if isinstance(answer, str)]


def running_ranks(options: DoctorOptions) -> Iterator[Finding]:
    """Ask running ranks: unused, refused or failed transfers, rooms and draft layers on one side, TCP, addresses."""
    answers, silent = local_ranks(options)
    yield from _servers_without_kvflow(options)
    if not answers and not silent:
        yield unknown("no rank of this user runs on this host", "run it as the user of the engine, in its container")
        return
    for pid, problem in silent:
        yield _judge_silence(options, pid, problem)
    found = [finding for answer in answers for finding in _judge(answer, answers, options)]
    found += _judge_pairs(answers)
    if any(answer.statistics["waiting_grants"] or answer.statistics["rooms"] for answer in answers):
        found += judge_rooms(options)
    yield from found
    if not found and not silent:
        yield ok(f"{', '.join(sorted(map(_name, answers)))}: nothing stands out")


def _name(answer: StatusAnswer) -> str:
    return f"{answer.instance}/{answer.engine_rank}"


def _servers_without_kvflow(options: DoctorOptions) -> Iterator[Finding]:
    for pid in options.list_names("proc"):
        command = options.read(f"proc/{pid}/cmdline").replace("\0", " ") if pid.isdigit() else ""
        for engine, (marks, option, fix) in SERVERS.items():
            if "python" in command and any(mark in command for mark in marks) and option not in command:
                yield warn(
                    f"process {pid} is a server of {engine} without {option}: nothing is handed over to or from it",
                    fix,
                )


def _judge_silence(options: DoctorOptions, pid: str, problem: str) -> Finding:
    state = options.read(f"proc/{pid}/stat").rpartition(") ")[2][:1]
    if state in ("T", "t"):
        return fail(f"process {pid} of a rank is stopped (SIGSTOP, or a debugger): its peers wait", f"kill -CONT {pid}")
    return fail(f"process {pid} of a rank: {problem}", f"py-spy dump --pid {pid}")


def _judge(answer: StatusAnswer, answers: Sequence[StatusAnswer], options: DoctorOptions) -> Iterator[Finding]:
    name, health, counts = _name(answer), answer.health, answer.statistics
    if health.transfer != "ok":
        fix = (
            f"restart process {answer.pid}" if health.transfer == "broken" else "kvflow quarantine list; kvflow status"
        )
        yield (fail if health.transfer == "broken" else warn)(f"{name} is {health.transfer}: {health.reason}", fix)
    ended: dict[str, int] = counts["transfers"]["ended"]
    failed = {key.removeprefix("failed "): count for key, count in ended.items() if key.startswith("failed ")}
    if failed:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(failed.items()))
        cause = f"{name}: of {sum(ended.values())} transfers, {sum(failed.values())} have failed: {reasons}"
        yield warn(cause, "look for receive_failed and send_failed in the log; docs/failure-model.md, Reasons")
    yield from _judge_use(answer, ended, failed)
    yield from _judge_path(answer, answers)
    if counts["loop_lag"]["maximum"] > LAG_S:
        cause = f"{name}: its event loop was blocked for {counts['loop_lag']['maximum']:.1f} s at most"
        yield warn(cause, f"py-spy dump --pid {answer.pid}, to find who holds the GIL; or set `affinity`")
    staging = counts["staging"]
    if staging["windows_taken"] and not staging["windows_free"]:
        cause = f"{name}: all {staging['windows_taken']} staging windows are taken: further prefill ranks send unpacked"
        yield warn(cause, "raise `staging_bytes` of decode, see docs/packing.md")
    left = _descriptors_left(options, answer.pid)
    if left is not None and left < FEW_DESCRIPTORS:
        cause = f"{name}: its process may open {left} more descriptors only"
        yield warn(cause, f"prlimit --pid {answer.pid} --nofile=65536")


def _judge_use(answer: StatusAnswer, ended: dict[str, int], failed: dict[str, int]) -> Iterator[Finding]:
    """Tell of prompts that are computed twice, because nobody asks for them or nothing is asked for."""
    name, counts = _name(answer), answer.statistics
    if not ended and not counts["rooms"] and answer.uptime_s > IDLE_S:
        if answer.role == "decode":
            cause = f"{name} has received nothing in {answer.uptime_s:.0f} s: prompts are computed here instead"
            fix = "check that the router sends each request to prefill first, and passes its ticket on to decode"
        else:
            cause = (
                f"{name} has sent nothing in {answer.uptime_s:.0f} s, and {counts['peers']} decode ranks are connected"
            )
            fix = "check that decode has the connector (kv_role, --disaggregation-mode decode), and the router's list"
        yield warn(cause, fix)
    never = failed.get("not_granted", 0) + failed.get("unknown_room", 0)
    if never > ended.get("success", 0):
        side = "decode did not ask for" if answer.role == "prefill" else "prefill did not open"
        cause = f"{name}: {never} rooms that {side} in time: these prompts are computed again instead of received"
        yield warn(
            cause, "check that the connector is configured on both sides, and that the router passes the ticket on"
        )
    refused = counts["anomalies"].get("hello_refused", 0)
    if refused or failed.get("refused"):
        cause = f"{name}: handshakes were refused {refused or failed['refused']} times: the two sides do not match"
        yield fail(cause, "kvflow doctor ADDRESS-OF-PREFILL on the host of decode compares fingerprints and layouts")


def _judge_path(answer: StatusAnswer, answers: Sequence[StatusAnswer]) -> Iterator[Finding]:
    name = _name(answer)
    is_met_here = any(other.role != answer.role and other.fingerprint == answer.fingerprint for other in answers)
    if "UCX_TLS=tcp" in answer.paths:
        yield warn(f"{name} may only use TCP: {answer.paths}", "unset UCX_TLS, and restart the engine")
    elif "TCP" in answer.statistics["paths"] and (is_met_here or "RDMA" in answer.paths):
        other = "RDMA" if "RDMA" in answer.paths else "shared memory, if its peer is the rank on this host"
        yield warn(
            f"{name} writes over TCP, where it could use {other}", "kvflow doctor, and see `transfer on this host`"
        )
    if answer.endpoint and is_loopback(host_of(answer.endpoint)) and not is_met_here:
        cause = f"{name} advertises {answer.endpoint}, which no other host can reach"
        yield warn(
            cause, "set `host` in the options of the adapter, or `bind` and `advertise`, to an address of this host"
        )


def _judge_pairs(answers: Sequence[StatusAnswer]) -> Iterator[Finding]:
    """Compare prefill and decode ranks of one host."""
    prefill = [answer for answer in answers if answer.role == "prefill"]
    for decode in (answer for answer in answers if answer.role == "decode"):
        matching = [one for one in prefill if one.fingerprint == decode.fingerprint]
        if prefill and not matching:
            cause = f"{_name(decode)} matches no prefill rank of this host: {decode.fingerprint!r} against "
            known = ", ".join(dict.fromkeys(repr(one.fingerprint) for one in prefill))
            yield warn(
                cause + known, "serve the same model, revision and cache dtype on both sides, or set `fingerprint`"
            )
        for one in matching:
            yield from judge_drafts(_name(one), one.draft_layers, _name(decode), decode.draft_layers)


def judge_drafts(prefill: str, prefill_layers: int, decode: str, decode_layers: int) -> Iterator[Finding]:
    """Tell of draft layers on one side only, which are not moved, and then drafts are worse than they could be."""
    if bool(prefill_layers) != bool(decode_layers):
        cause = f"draft layers on one side only: {prefill} has {prefill_layers}, {decode} has {decode_layers}"
        yield warn(f"{cause}; drafts are made without the prompt", "set the same speculative decoding on both sides")


def _descriptors_left(options: DoctorOptions, pid: int) -> int | None:
    limits = options.read(f"proc/{pid}/limits").splitlines()
    words = next((line.split() for line in limits if line.startswith("Max open files")), [])
    opened = options.list_names(f"proc/{pid}/fd")
    return int(words[3]) - len(opened) if opened and len(words) > 3 and words[3].isdigit() else None

"""Measure kvflow on this machine."""

import argparse
import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import anyio
import msgspec

from kvflow.cli.bench import comparisons
from kvflow.cli.bench.comparisons import counts
from kvflow.cli.bench.hetero import command as hetero
from kvflow.cli.bench.scale import command as scale
from kvflow.cli.transport import add_backend_option, check_backend
from kvflow.config import check_duration
from kvflow.errors import ConfigError

if TYPE_CHECKING:
    from kvflow.cli.bench.rows import Row

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the measurements and their options."""
    cases = parser.add_subparsers(dest="case", required=True, metavar="CASE")
    idle = cases.add_parser("idle", help="CPU of connected ranks with nothing to do")
    add_backend_option(idle)
    idle.add_argument("--pairs", type=int, default=1, metavar="N", help="prefill and decode ranks (default: 1 each)")
    idle.add_argument("--seconds", type=float, default=10.0, metavar="S", help="how long (default: %(default)s)")
    comparisons.add_output_arguments(idle)
    idle.set_defaults(measure=_idle)
    plan = cases.add_parser("plan", help="time and memory of planning, and of compiling routes")
    plan.add_argument("--layers", type=counts, default=(32, 64, 80), metavar="N,...", help="default: 32,64,80")
    plan.add_argument(
        "--tokens",
        type=counts,
        default=(1_024, 8_192, 32_768, 131_072),
        metavar="N,...",
        help="default: 1k to 128k",
    )
    plan.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    plan.set_defaults(measure=_plan)
    digest = cases.add_parser("digest", help="speed of digests, and what they cost a transfer")
    add_backend_option(digest)
    digest.add_argument("--megabytes", type=_count, default=64, metavar="N", help="of a transfer (default: 64)")
    digest.add_argument("--rounds", type=_count, default=21, metavar="N", help="of each kind (default: 21)")
    digest.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    digest.set_defaults(measure=_digest)
    failures = cases.add_parser("failures", help="processes that die, freeze or give up in the middle of a transfer")
    add_backend_option(failures)
    failures.add_argument("--rounds", type=_count, default=50, metavar="N", help="of each case (default: %(default)s)")
    failures.add_argument("--cases", default="all", metavar="NAME,...", help="some of them (default: %(default)s)")
    failures.add_argument("--lease", type=float, default=3.0, metavar="S", help="of the ranks (default: %(default)s)")
    failures.add_argument("--seed", type=int, default=0, metavar="N", help="of the moments (default: %(default)s)")
    failures.add_argument("--json", action="store_true", help="print one JSON object a case and nothing else")
    failures.set_defaults(measure=_failures)
    comparisons.add_arguments(cases)
    hetero.add_arguments(cases)
    scale.add_arguments(cases)


def run(arguments: argparse.Namespace) -> int:
    """Run one measurement and print it."""
    text: str = arguments.measure(arguments)
    print(text)
    return 0


def _idle(arguments: argparse.Namespace) -> str:
    if arguments.pairs < 1 or not 0 < arguments.seconds < math.inf:
        raise ConfigError("options must be positive", pairs=arguments.pairs, seconds=arguments.seconds)
    from kvflow.cli.bench.idle import measure_idle  # noqa: PLC0415 - `kvflow --help` works without torch

    backend = check_backend(arguments.backend)

    async def measure(report: "Callable[[Row], None]") -> list["Row"]:
        row = await measure_idle(backend, arguments.pairs, arguments.seconds)
        report(row)
        return [row]

    return comparisons.shown(arguments, lambda report: anyio.run(measure, report))


def _count(text: str) -> int:
    (count,) = counts(text)
    return count


def _plan(arguments: argparse.Namespace) -> str:
    from kvflow.cli.bench.plan import measure_handshake, measure_plans  # noqa: PLC0415 - numpy is not needed for help

    rows = list(measure_plans(arguments.layers, arguments.tokens))
    handshake = measure_handshake()
    if arguments.json:
        return msgspec.json.encode({"handshake": handshake, "rows": rows}).decode()
    heads = f"{'split':8} {'layers':>6} {'tokens':>7} {'page':>5} {'table':10}"
    lines = [f"{heads} {'rows':>9} {'ms':>9} {'ns/row':>8} {'memory':>7}"]
    lines += [
        f"{row.split:8} {row.layers:6} {row.tokens:7} {row.page_size:5} {row.table:10} {row.descriptors:9} "
        f"{row.plan_ms:9.3f} {row.ns_per_descriptor:8.1f} {row.memory_ratio:6.2f}x"
        for row in rows
    ]
    lines.append(
        f"handshake, {handshake.prefill_ranks} x {handshake.decode_ranks} ranks of {handshake.layers} layers: "
        f"routes compiled in {handshake.routes_ms:.1f} ms and bound in {handshake.bind_ms:.1f} ms per decode rank"
    )
    return "\n".join(lines)


def _digest(arguments: argparse.Namespace) -> str:
    from kvflow.cli.bench.digest import measure_digests, measure_transfers  # noqa: PLC0415 - help works without torch

    megabytes = arguments.megabytes
    backend = check_backend(arguments.backend)
    rows = list(measure_digests(megabytes))
    transfer = anyio.run(measure_transfers, backend, megabytes, arguments.rounds)
    if arguments.json:
        return msgspec.json.encode({"transfer": transfer, "rows": rows}).decode()
    lines = [f"{'order':5} {'page':>5} {'heads':>6} {'table':10} {'GB/s':>6}"]
    lines += [f"{row.order:5} {row.page_size:5} {row.heads:>6} {row.table:10} {row.gb_per_s:6.2f}" for row in rows]
    lines.append(
        f"{megabytes} MB over {transfer.backend}: {transfer.plain_ms:.1f} ms without digests, "
        f"{transfer.digest_ms:.1f} ms with digests on both sides (medians of {transfer.rounds} each, in turn)"
    )
    return "\n".join(lines)


def _failures(arguments: argparse.Namespace) -> str:
    from kvflow.cli.bench.failures import CASES, FailureSettings, measure_failures  # noqa: PLC0415 - as above
    from kvflow.cli.bench.workers.options import WorkerOptions  # noqa: PLC0415

    cases = comparisons.cases_of(arguments.cases, CASES)
    check_duration("--lease", arguments.lease)
    backend = check_backend(arguments.backend, between_processes=True)
    worker = WorkerOptions(backend=backend, lease_s=arguments.lease)
    settings = FailureSettings(cases=cases, rounds=arguments.rounds, worker=worker, seed=arguments.seed)

    def show(case: str, number: int) -> None:
        if not arguments.json:
            print(f"\r{case}: {number} of {settings.rounds}", end="", file=sys.stderr, flush=True)

    rows = anyio.run(measure_failures, settings, show)
    if arguments.json:
        return "\n".join(msgspec.json.encode(row).decode() for row in rows)
    heads = f"{'case':16} {'rounds':>6} {'ok':>4} {'next':>5} {'p50 ms':>9} {'p99 ms':>9} {'max ms':>9}"
    lines = ["\r" + heads + f" {'quarantined':>11} {'MB':>13} {'fds':>4} {'most':>4} {'threads':>7}"]
    lines += [
        f"{row.case:16} {row.rounds:6} {row.ok:4} {row.next_transfer_ok:5} {row.known_ms_p50:9.2f} "
        f"{row.known_ms_p99:9.2f} {row.known_ms_max:9.2f} {row.quarantined_pages:11} "
        f"{row.rss_start_mb:6.1f}-{row.rss_end_mb:6.1f} {row.fds:+4} {row.fds_max:+4} {row.threads:+7}"
        + "".join(f"\n  {count} x {fault}" for fault, count in row.faults.items())
        for row in rows
    ]
    return "\n".join(lines)

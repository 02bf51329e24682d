"""Run one fault by hand: `python -m tests.hosts --fault partition --duration 15 --after 25` prints a table."""

import argparse
import logging
import sys
import tempfile
from pathlib import Path

from tests.hosts import lines
from tests.hosts.deployment import Deployment
from tests.hosts.faults import FAULTS
from tests.hosts.hosts import unavailable

WITHIN_S = 3.0
"""A request that takes longer does not count as served."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hosts", description=__doc__)
    parser.add_argument("--fault", choices=FAULTS, default="partition", help="what happens")
    parser.add_argument("--duration", type=float, default=15.0, metavar="S", help="how long it lasts")
    parser.add_argument("--before", type=float, default=5.0, metavar="S", help="load before it")
    parser.add_argument("--after", type=float, default=25.0, metavar="S", help="load after it")
    parser.add_argument("--rate", type=float, default=20.0, metavar="N", help="requests a second, of 1 MiB each")
    parser.add_argument("--backend", default="nixl", help="transport")
    parser.add_argument("--ipv6", action="store_true", help="no IPv4")
    parser.add_argument("--names", action="store_true", help="endpoints with names instead of addresses")
    parser.add_argument("--registry-on", choices=["a", "b"], default="a", help="prefill is on a, decode on b")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="where the workers' logs go")
    parser.add_argument("--debug", action="store_true", help="log every event of both ranks")
    arguments = parser.parse_args()
    reason = unavailable()
    if reason is not None:
        parser.error(reason)
    logs = arguments.logs or Path(tempfile.mkdtemp(prefix="kvflow-hosts-logs-"))
    logs.mkdir(parents=True, exist_ok=True)
    deployment = Deployment(
        logs,
        backend=arguments.backend,
        rate=arguments.rate,
        is_ipv6=arguments.ipv6,
        by_name=arguments.names,
        registry_on=arguments.registry_on,
        log_level=logging.DEBUG if arguments.debug else logging.INFO,
    )
    with deployment:
        deployment.run(arguments.before)
        over = FAULTS[arguments.fault](deployment, arguments.duration)
        deployment.run_until(over + arguments.after)
        end = deployment.mark("end")
        recovered = deployment.recovered_after(over, end - WITHIN_S, WITHIN_S)
        sys.stdout.write(deployment.table())
    landed = [report for process in (deployment.prefill, deployment.decode) for report in process.of(lines.Landed)]
    sys.stdout.write(f"rooms: {deployment.totals()}\n")
    sys.stdout.write(f"last request that was not served: {recovered:.1f} s after the fault was over\n")
    sys.stdout.write(f"late landings: {[(it.room, round(it.at - it.failed_at, 1), it.memory) for it in landed]}\n")
    sys.stdout.write(f"broken promises: {deployment.wrong() or 'none'}\n")
    sys.stdout.write(f"logs: {logs}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

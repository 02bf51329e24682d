"""A probe between two hosts, with and without a firewall that lets nothing but the control port through."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import lines
from tests.hosts.deployment import CONTROL_PORT, REGISTRY_PORT, Deployment
from tests.hosts.hosts import Host, TwoHosts, pipe

pytestmark = [pytest.mark.hosts, pytest.mark.usefixtures("two_hosts")]

PORT = 7199
DOCTOR = [sys.executable, "-m", "kvflow.cli", "doctor"]


@contextmanager
def listening(host: Host) -> Iterator[str]:
    """Serve probes on a host."""
    command = [*DOCTOR, "--listen", f"tcp://{host.url_host}:{PORT}", "--plain"]
    with host.spawn(command, stderr=subprocess.DEVNULL) as process:
        try:
            yield pipe(process.stdout).readline().strip()
        finally:
            process.kill()


def ask(host: Host, address: str) -> dict[str, list[dict[str, Any]]]:
    """Run the doctor on a host, and return its findings by check."""
    with host.spawn([*DOCTOR, address, "--json", "--timeout", "20"], stderr=subprocess.PIPE) as process:
        output, errors = process.communicate(timeout=100)
    assert output, errors
    found: dict[str, list[dict[str, Any]]] = {}
    for one in json.loads(output):
        found.setdefault(one["check"], []).append(one)
    return found


def test_path_between_hosts_is_measured() -> None:
    with TwoHosts() as net, listening(net.a) as address:
        found = ask(net.b, address)
    assert {one["status"] for findings in found.values() for one in findings} == {"ok"}
    probe, path, rates = found["data transfer"]
    assert "kvflow-host-a" in probe["cause"]
    assert path["cause"] == "path: tcp/eth0"
    assert "GB/s in one piece" in rates["cause"]


@pytest.mark.slow
def test_firewall_in_front_of_the_data_is_found() -> None:
    with TwoHosts() as net, listening(net.a) as address:
        net.pass_only(PORT)
        found = ask(net.b, address)
        host, near = net.a.address, net.b.address
    assert found["greeting and key"][0]["status"] == "ok"
    (blocked,) = found["data transfer"]
    assert blocked["status"] == "fail"
    assert "the control port answers, but data does not arrive" in blocked["cause"]
    assert f"allow TCP connections from {host} to {near}" in blocked["fix"]


def test_packets_that_are_dropped_are_told_from_a_port_that_is_closed() -> None:
    with TwoHosts() as net, listening(net.a) as address:
        net.cut("b")
        (dropped,) = ask(net.b, address)["tcp connection"]
        net.heal()
        (closed,) = ask(net.b, address.replace(str(PORT), "7198"))["tcp connection"]
    assert dropped["status"] == closed["status"] == "fail"
    assert "does not answer within 1 s: the host is down, or a firewall drops it" in dropped["cause"]
    assert "allow TCP port 7199" in dropped["fix"]
    assert "refuses the connection" in closed["cause"]


@pytest.mark.slow
def test_loss_on_the_data_port_alone_is_named_by_the_log_of_running_ranks(tmp_path: Path) -> None:
    """The same fault while requests are served: the control port answers, and writes do not end."""
    with Deployment(tmp_path) as deployment:
        deployment.net.pass_only(CONTROL_PORT, REGISTRY_PORT)
        deployment.decode.wait_for(lines.Ended, where=lambda ended: ended.reason == "write_failed")
        prefill = tmp_path / "prefill.log"
        while "data_connection_silent" not in prefill.read_text():
            deployment.run(0.2)
        decode = (tmp_path / "decode.log").read_text()
    assert '"reason": "write_failed"' in decode

"""kvflow between two hosts under steady load: faults of the network, of processes and of a host.

Both ranks have the default settings, including timeouts. Every test checks each page of each request, and that freed
pages are never written (`deploy`).
"""

from typing import Any, Final

import pytest

from tests.hosts import faults, lines
from tests.hosts.conftest import Deploy
from tests.hosts.deployment import Deployment, Process
from tests.hosts.hosts import HostsUnavailable
from tests.hosts.pool import LANE_BYTES

pytestmark = pytest.mark.hosts

slow = pytest.mark.slow
both = pytest.mark.parametrize("backend", ["nixl", "mooncake"])

ADAPTED_S: Final = 20.0
"""How soon a request has to be served while TCP adapts to a longer round trip."""

BEFORE_S: Final = 3.0
"""Steady load before a fault."""

WITHIN_S: Final = 3.0
"""How soon a request has to be served; without a fault it takes 0.3 s."""

OBSERVED_S: Final = 8.0
"""How long full service is observed."""

RECOVERY_S: Final = 10.0
"""How soon full service is due after a partition, or after the return of a host: 1.5 s, and 3.6 s beside four processes
that keep two cores busy (`python -m tests.hosts --fault partition --duration 60 --backend mooncake`)."""

HALF_OPEN_S: Final = 10.0
"""How soon it is due after a control connection was swallowed."""

SILENT_S: Final = 10.0
"""How soon it is due after the transport's connections were swallowed, which is noticed after 4 s."""

PROVED_S: Final = 30.0
"""How soon all pages are safe after a fault, at most: TCP's next retransmission may be 12.8 s away."""

NOTICED_S: Final = 1.5
"""How soon the death of a process is noticed; its kernel closes the connections at once."""

RETURNED_S: Final = 1.0
"""How soon a replacement process serves requests."""

QUIET_S: Final = 20.0
"""How soon all pages are safe after a heal; TCP's next retransmission may be 12.8 s away."""

CLOSING_RATE: Final = 1_000.0
"""Requests a second while a rank closes, enough to hit each stage of the close."""

CLOSING_OPEN: Final = 400
"""How many of them are open at most: more than either rank has pages for, and no backlog if the machine is busy."""

CLOSED_S: Final = 10.0
"""How soon all pages are safe after a peer has closed."""


def assert_served(
    deployment: Deployment, since: float, within_s: float = WITHIN_S, observed_s: float = OBSERVED_S
) -> None:
    """Keep up the load, and check that every request sent after `since` is served in time."""
    deployment.run_until_ended(since, since + observed_s, within_s)
    unserved = deployment.unserved(since, since + observed_s, within_s)
    served = len(deployment.ended())
    assert not unserved, f"{len(unserved)} requests not served, {served} ended: {unserved}"


def steady(deploy: Deploy, **options: Any) -> Deployment:
    """Start a deployment, and let it serve for `BEFORE_S`."""
    deployment = deploy(**options)
    deployment.run(BEFORE_S)
    return deployment


def assert_quiet(deployment: Deployment, since: float, within_s: float, *ranks: Process) -> None:
    """Stop the load, and check that all pages of some ranks become safe in time."""
    deployment.router.workers = []
    for rank in ranks:
        assert deployment.is_quiet(rank, since, within_s)


def test_partition_of_1_s_fails_nothing(deploy: Deploy) -> None:
    """TCP retransmits 1.4 s after the cut, well before a lease of 3 s expires."""
    deployment = deploy()
    started = deployment.mark("steady")
    deployment.run(1.0)
    healed = faults.partition(deployment, 1.0)
    assert_served(deployment, healed + 1.0, observed_s=2.0)
    assert not deployment.unserved(started, healed + 1.0, within_s=5.0)


@slow
@both
def test_pages_cross_the_network(deploy: Deploy, backend: str) -> None:
    deployment = deploy(backend=backend)
    before = deployment.net.num_bytes_from("a")
    started = deployment.mark("steady")
    assert_served(deployment, started)
    sent, ended = dict(deployment.router.sent), deployment.ended()
    assert sum(started <= it.at for it in ended.values()) >= deployment.rate * OBSERVED_S
    num_served = sum(sent[room] >= started and it.reason == lines.SUCCESS for room, it in ended.items())
    assert num_served
    assert deployment.net.num_bytes_from("a") - before >= num_served * LANE_BYTES


@slow
def test_mooncake_needs_no_options(deploy: Deploy) -> None:
    deployment = deploy(backend="mooncake", needs_options=False)
    assert_served(deployment, deployment.mark("steady"), observed_s=3.0)


@slow
@pytest.mark.parametrize("by_name", [False, True], ids=["addresses", "names"])
def test_hosts_without_ipv4(deploy: Deploy, by_name: bool) -> None:
    deployment = deploy(is_ipv6=True, by_name=by_name)
    assert_served(deployment, deployment.mark("steady"), observed_s=3.0)


@slow
@both
def test_200_mbit(deploy: Deploy, backend: str) -> None:
    deployment = steady(deploy, backend=backend, rate=10.0)
    started = deployment.mark("200 Mbit/s")
    deployment.net.limit("200mbit")
    assert_served(deployment, started, within_s=5.0)


@slow
def test_one_direction_takes_50_ms(deploy: Deploy) -> None:
    """TCP retransmits until it has adapted to the longer round trip: for seconds, on a busy machine."""
    deployment = steady(deploy, rate=5.0)
    try:
        deployment.net.delay("b", 0.05)
    except HostsUnavailable as error:
        pytest.skip(str(error))
    assert_served(deployment, deployment.mark("50 ms more from decode to prefill"), within_s=ADAPTED_S)


@slow
@both
def test_pages_are_safe_after_a_partition(deploy: Deploy, backend: str) -> None:
    deployment = steady(deploy, backend=backend)
    healed = faults.partition(deployment, 15.0)
    assert_quiet(deployment, healed, QUIET_S, deployment.decode, deployment.prefill)


@slow
def test_registry_connection_of_prefill_is_swallowed(deploy: Deploy) -> None:
    """A decode rank that starts later has to find prefill."""
    deployment = steady(deploy, registry_on="b")
    swallowed = faults.half_open_registry(deployment)
    deployment.run_until(swallowed + HALF_OPEN_S)
    deployment.router.workers = []
    deployment.decode.kill()
    deployment.start_decode()
    assert_served(deployment, deployment.mark("another decode is up") + RETURNED_S)


@slow
def test_registry_connection_of_decode_is_swallowed(deploy: Deploy) -> None:
    """Decode has to find the replacement of a prefill rank."""
    deployment = steady(deploy, registry_on="a")
    swallowed = faults.half_open_registry(deployment)
    deployment.run_until(swallowed + HALF_OPEN_S)
    returned = faults.kill(deployment, 0.0)
    assert_served(deployment, returned + RECOVERY_S)


@slow
@both
def test_killed_prefill_is_noticed(deploy: Deploy, backend: str) -> None:
    deployment = steady(deploy, backend=backend)
    killed = faults.kill_for_good(deployment)
    failed = deployment.decode.wait_for(
        lines.Ended, 30.0, where=lambda ended: ended.at > killed and ended.reason != lines.SUCCESS
    )
    assert failed.at - killed <= NOTICED_S


@slow
@both
def test_pages_of_a_killed_prefill_come_back(deploy: Deploy, backend: str) -> None:
    """Decode sees the connections end after the last byte."""
    deployment = steady(deploy, backend=backend)
    killed = faults.kill_for_good(deployment)
    assert_quiet(deployment, killed, CLOSED_S, deployment.decode)


@slow
@both
def test_pages_do_not_wait_for_a_neighbour_of_a_killed_prefill(deploy: Deploy, backend: str) -> None:
    """The connections of a living instance on the same host stay open."""
    deployment = steady(deploy, backend=backend, has_neighbour=True)
    killed = faults.kill_for_good(deployment)
    assert_quiet(deployment, killed, CLOSED_S, deployment.decode)


@slow
@both
@pytest.mark.parametrize(
    ("fault", "duration_s"),
    [
        ("partition", 60.0),
        ("kill", 0.0),
        ("half-open-data", 0.0),
        ("power-off", 6.0),
        ("stop-prefill", 40.0),
        ("stop-decode", 40.0),
    ],
)
def test_no_page_needs_an_operator_after(deploy: Deploy, backend: str, fault: str, duration_s: float) -> None:
    deployment = steady(deploy, backend=backend, registry_on="b" if fault == "power-off" else "a")
    over = faults.FAULTS[fault](deployment, duration_s)
    assert_quiet(deployment, over, PROVED_S, deployment.decode, deployment.prefill)


@slow
@both
@pytest.mark.parametrize(
    ("fault", "duration_s", "due_s"),
    [
        ("partition", 2.0, RECOVERY_S),
        ("partition", 15.0, RECOVERY_S),
        ("partition", 60.0, RECOVERY_S),
        ("half-open-control", 0.0, HALF_OPEN_S),
        ("half-open-data", 0.0, SILENT_S),
        ("kill", 0.0, RETURNED_S),
        ("power-off", 6.0, RECOVERY_S),
    ],
)
def test_full_service_is_back_after(deploy: Deploy, backend: str, fault: str, duration_s: float, due_s: float) -> None:
    deployment = steady(deploy, backend=backend, registry_on="b" if fault == "power-off" else "a")
    over = faults.FAULTS[fault](deployment, duration_s)
    assert_served(deployment, over + due_s)


@slow
@both
def test_drained_close_leaves_no_quarantine(deploy: Deploy, backend: str) -> None:
    deployment = steady(deploy, backend=backend)
    deployment.router.rate, deployment.router.max_open = CLOSING_RATE, CLOSING_OPEN
    deployment.mark("drain")
    deployment.prefill.order(lines.Drain(timeout_s=20.0))
    drained = deployment.prefill.wait_for(lines.Drained, 60.0)
    assert drained.is_settled
    assert not drained.quarantined_pages
    assert not deployment.prefill.close().quarantined_pages
    closed = deployment.mark("closed")
    assert_quiet(deployment, closed, CLOSED_S, deployment.decode)


@slow
@both
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_close_under_load_leaves_no_quarantine(deploy: Deploy, backend: str, role: str) -> None:
    deployment = steady(deploy, backend=backend)
    leaves, stays = deployment.prefill, deployment.decode
    if role == "decode":
        leaves, stays = stays, leaves
    deployment.router.rate, deployment.router.max_open = CLOSING_RATE, CLOSING_OPEN
    deployment.mark(f"{role} closes")
    assert not leaves.close().quarantined_pages
    closed = deployment.mark("closed")
    assert_quiet(deployment, closed, CLOSED_S, stays)


@slow
def test_closed_prefill_returns_on_the_same_port(deploy: Deploy) -> None:
    deployment = steady(deploy)
    returned = faults.restart(deployment, 20.0)
    assert_served(deployment, returned + RETURNED_S)


@slow
@both
def test_bytes_of_a_dead_process_land_in_pages_that_are_held(deploy: Deploy, backend: str) -> None:
    """Neither the writer's death nor a delay proves pages safe: its kernel retransmits for a minute.

    The heal must come before decode gives the silent connection up, which resets what comes later.
    """
    deployment = steady(deploy, backend=backend, registry_on="b")
    healed = faults.late_landing(deployment, 2.0)
    landed = deployment.decode.wait_for(lines.Landed, 20.0, where=lambda report: report.at > healed)
    assert landed.memory in ("draining", "quarantined")
    assert_quiet(deployment, landed.at, QUIET_S, deployment.decode)  # the connections end after the last byte

"""Faults of a deployment on two hosts. Each function returns the monotonic time at which the fault is over."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from tests.hosts import lines
from tests.hosts.deployment import CONTROL_PORT, REGISTRY_PORT, Deployment, Process

__all__ = [
    "FAULTS",
    "half_open_registry",
    "kill",
    "kill_for_good",
    "late_landing",
    "partition",
    "restart",
]

WAY_BACK_S: Final = 0.05
"""How long decode can still send after prefill is cut off. Prefill reads everything that has arrived; when it dies, its
kernel then closes the connection instead of resetting it, and keeps retransmitting what it holds."""

LAST_WORDS_S: Final = 0.4
"""How long prefill lives after that: it posts what it has computed, and decode acknowledges none of it."""


def partition(deployment: Deployment, duration_s: float) -> float:
    """Partition the hosts for some time."""
    started = deployment.mark("partition")
    deployment.net.cut()
    deployment.run_until(started + duration_s)
    deployment.net.heal()
    return deployment.mark("healed")


def half_open_control(deployment: Deployment, _: float = 0.0) -> float:
    """Swallow the control connection for good; kvflow has to open a new one."""
    return _swallow(deployment, {CONTROL_PORT}, "control connection swallowed")


def half_open_registry(deployment: Deployment, _: float = 0.0) -> float:
    """Swallow the registry connection of the rank on the other host."""
    return _swallow(deployment, {REGISTRY_PORT}, "registry connection swallowed")


def half_open_data(deployment: Deployment, _: float = 0.0) -> float:
    """Swallow all connections of the transport."""
    others = {connection.a_port for connection in deployment.net.connections()} - {CONTROL_PORT, REGISTRY_PORT}
    return _swallow(deployment, others, "data connections swallowed")


def _swallow(deployment: Deployment, a_ports: set[int], what: str) -> float:
    net = deployment.net
    connections = [it for it in net.connections() if it.a_port in a_ports or it.b_port in a_ports]
    if not connections:
        raise LookupError(f"no connection to swallow among {net.connections()}")
    for connection in connections:
        net.swallow(connection)
    return deployment.mark(f"{what}: {connections}")


def kill_for_good(deployment: Deployment) -> float:
    """Kill the prefill process."""
    killed = deployment.mark("prefill killed")
    deployment.prefill.kill()
    return killed


def kill(deployment: Deployment, duration_s: float) -> float:
    """Kill the prefill process, and start another one on the same port after some time."""
    prepared = deployment.prepare_prefill()
    deployment.run_until(kill_for_good(deployment) + duration_s)
    return _restart(deployment, prepared)


def stop_decode(deployment: Deployment, duration_s: float) -> float:
    """Suspend the decode process for some time."""
    return _stop(deployment, deployment.decode, duration_s)


def stop_prefill(deployment: Deployment, duration_s: float) -> float:
    """Suspend the prefill process for some time."""
    return _stop(deployment, deployment.prefill, duration_s)


def _stop(deployment: Deployment, process: Process, duration_s: float) -> float:
    started = deployment.mark(f"{process.role} stopped")
    process.suspend()
    deployment.run_until(started + duration_s)
    process.resume()
    return deployment.mark(f"{process.role} continues")


def power_off(deployment: Deployment, duration_s: float) -> float:
    """Power off prefill's host, and bring it back with the same address and a new prefill process."""
    off = deployment.mark("host of prefill off")
    deployment.net.cut()
    deployment.prefill.kill()
    deployment.net.power_off("a")
    deployment.net.heal()
    deployment.run_until(off + duration_s)
    deployment.net.power_on("a")
    return _restart(deployment)


def late_landing(deployment: Deployment, duration_s: float) -> float:
    """Kill prefill while the hosts are partitioned and its kernel holds bytes that it will retransmit.

    They land at the first retransmission after the heal. TCP doubles the interval each time, so the unacknowledged
    bytes go out 0.2, 0.6, 1.4, 3, 6.2, 12.6, 25.4, ... seconds after the first transmission.
    """
    deployment.mark("way out of prefill cut")
    deployment.net.cut("a")
    deployment.run(WAY_BACK_S)
    deployment.net.cut("b")
    deployment.run(LAST_WORDS_S)
    deployment.run_until(kill_for_good(deployment) + duration_s)
    deployment.net.heal()
    return deployment.mark("healed")


def restart(deployment: Deployment, duration_s: float) -> float:
    """Drain and close prefill in an orderly way, and start another one on the same port."""
    prepared = deployment.prepare_prefill()
    deployment.mark("drain")
    deployment.prefill.order(lines.Drain(timeout_s=duration_s))
    deployment.prefill.wait_for(lines.Drained)
    deployment.mark("close")
    deployment.prefill.close()
    return _restart(deployment, prepared)


def slow_network(deployment: Deployment, duration_s: float) -> float:
    """Limit both directions to 200 Mbit/s."""
    started = deployment.mark("200 Mbit/s")
    deployment.net.limit("200mbit")
    deployment.run_until(started + duration_s)
    deployment.net.remove_limit()
    return deployment.mark("limit removed")


def slow_answers(deployment: Deployment, duration_s: float) -> float:
    """Delay packets from decode's host by 50 ms."""
    started = deployment.mark("50 ms more from decode to prefill")
    deployment.net.delay("b", 0.05)
    deployment.run_until(started + duration_s)
    deployment.net.remove_delay()
    return deployment.mark("delay removed")


def nothing(deployment: Deployment, duration_s: float) -> float:
    """Keep up the load without a fault."""
    deployment.run(duration_s)
    return deployment.mark("nothing happened")


def _restart(deployment: Deployment, prepared: Process | None = None) -> float:
    deployment.mark("prefill starts again")
    deployment.start_prefill(prepared)
    return deployment.mark("prefill is up")


FAULTS: Final[Mapping[str, Callable[[Deployment, float], float]]] = MappingProxyType(
    {
        "none": nothing,
        "partition": partition,
        "half-open-control": half_open_control,
        "half-open-registry": half_open_registry,
        "half-open-data": half_open_data,
        "kill": kill,
        "stop-decode": stop_decode,
        "stop-prefill": stop_prefill,
        "power-off": power_off,
        "late-landing": late_landing,
        "restart": restart,
        "slow-network": slow_network,
        "slow-answers": slow_answers,
    }
)
"""Faults by name, for `python -m tests.hosts`."""

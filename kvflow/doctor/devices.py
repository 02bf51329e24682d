"""RDMA devices and GPUs of this host, as the kernel lists them."""

import os
from collections.abc import Iterator
from typing import Final

from kvflow.doctor.findings import DoctorOptions, Finding, fail, ok, unknown, warn

__all__ = ["gpu_peer_memory", "has_active_rdma", "numa_affinity", "rdma_devices"]

INFINIBAND: Final = "sys/class/infiniband"


def rdma_devices(options: DoctorOptions) -> Iterator[Finding]:
    """Which RDMA devices there are, whether their ports are active, and whether this process may open them."""
    devices = options.list_names(INFINIBAND)
    if not devices:
        yield ok("none: between hosts, data goes over TCP")
        return
    for device in devices:
        for port in options.list_names(f"{INFINIBAND}/{device}/ports"):
            place = f"{INFINIBAND}/{device}/ports/{port}"
            state, rate = options.read(f"{place}/state"), options.read(f"{place}/rate")
            if "ACTIVE" in state:
                yield ok(f"{device} port {port}: {state}, {rate}")
            else:
                fix = f"ibstat {device}; ip link set dev INTERFACE up; or choose others with UCX_NET_DEVICES"
                yield warn(f"{device} port {port} is not active ({state or 'state unknown'})", fix)
    yield _openable(options)


def has_active_rdma(options: DoctorOptions) -> bool:
    """Return whether an RDMA device has an active port."""
    devices = options.list_names(INFINIBAND)
    ports = [(device, port) for device in devices for port in options.list_names(f"{INFINIBAND}/{device}/ports")]
    return any("ACTIVE" in options.read(f"{INFINIBAND}/{device}/ports/{port}/state") for device, port in ports)


def _openable(options: DoctorOptions) -> Finding:
    verbs = [name for name in options.list_names("dev/infiniband") if name.startswith("uverbs")]
    if not verbs:
        fix = "docker run --device=/dev/infiniband; modprobe ib_uverbs"
        return fail("the host has RDMA devices, but there is no /dev/infiniband/uverbs* here: data goes over TCP", fix)
    closed = [name for name in verbs if not os.access(options.root / "dev/infiniband" / name, os.R_OK | os.W_OK)]
    if closed:
        return fail(f"this user may not open /dev/infiniband/{closed[0]}", f"chmod 666 /dev/infiniband/{closed[0]}")
    return ok(f"{', '.join(verbs)} can be opened")


def gpu_peer_memory(options: DoctorOptions) -> Finding:
    """Whether RDMA devices can read and write the memory of NVIDIA GPUs directly."""
    driver = options.read("proc/driver/nvidia/version")
    if not driver:
        return ok("no NVIDIA driver: pools are in host memory, or on other devices")
    if not options.list_names(INFINIBAND):
        return ok("no RDMA device that could access the memory of GPUs")
    if "nvidia_peermem" in options.list_names("sys/module"):
        return ok("the module nvidia_peermem is loaded")
    if "Open Kernel Module" in driver:
        return ok("the driver is NVIDIA's open one, which exports memory as dma-buf")
    cause = "the module nvidia_peermem is not loaded: writes to GPU memory are copied through the host, or fail"
    return warn(cause, "modprobe nvidia-peermem")


def numa_affinity(options: DoctorOptions) -> Iterator[Finding]:
    """Whether this process runs on the NUMA nodes to which the network devices are connected."""
    nodes = [name for name in options.list_names("sys/devices/system/node") if name.removeprefix("node").isdigit()]
    if len(nodes) < 2:
        yield ok(f"NUMA nodes: {len(nodes) or 'unknown'}")
        return
    allowed = os.sched_getaffinity(0)
    own = {name for name in nodes if allowed & _cpus(options.read(f"sys/devices/system/node/{name}/cpulist"))}
    names = [f"{INFINIBAND}/{name}" for name in options.list_names(INFINIBAND)]
    names = names or [f"sys/class/net/{name}" for name in options.list_names("sys/class/net")]
    at = {name: options.read(f"{name}/device/numa_node") for name in names}
    known = {name.rpartition("/")[2]: f"node{node}" for name, node in at.items() if node.isdigit()}
    if not known:
        yield unknown(f"{len(nodes)} NUMA nodes, and no network device says which it is connected to")
    elif own & set(known.values()):
        yield ok(f"runs on {', '.join(sorted(own))}; {', '.join(f'{one} is on {node}' for one, node in known.items())}")
    else:
        device, node = next(iter(known.items()))
        cause = f"runs on {', '.join(sorted(own))}, but {device} is on {node}: each byte crosses the link between nodes"
        yield warn(cause, f"numactl --cpunodebind={node[4:]} --membind={node[4:]} COMMAND")


def _cpus(text: str) -> set[int]:
    """Return the CPUs of a list like "0-3,8"."""
    ends = [part.partition("-") for part in text.split(",") if part]
    return {cpu for first, _, last in ends for cpu in range(int(first), int(last or first) + 1)}

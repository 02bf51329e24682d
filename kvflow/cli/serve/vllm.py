"""Command lines of vLLM servers."""

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from kvflow.cli.serve.server import Server

__all__ = [
    "CPU_ARGUMENTS",
    "CPU_ENVIRONMENT",
    "KVFLOW",
    "Role",
    "VllmServer",
    "halves_of_cpus",
    "pair",
    "router",
    "vllm_server",
]

Role = Literal["kv_producer", "kv_consumer", "kv_both"]

KVFLOW: Final = {
    "kv_connector": "KvflowConnector",
    "kv_connector_module_path": "kvflow.engines.vllm.connector",
}
"""The connector, in a form that vLLM finds without further configuration."""

CPU_ARGUMENTS: Final = (
    *("--dtype", "float32", "--enforce-eager"),
    *("--max-model-len", "2048", "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(256 * 2**20)),
)
"""Arguments with which a small model runs on few cores and little memory.

Most small machines have no bf16 instructions.
"""

CPU_ENVIRONMENT: Final = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}


class VllmServer(msgspec.Struct, frozen=True, kw_only=True):
    """One server.

    Attributes:
        name: Name in errors and of its log.
        model: Directory or name.
        served_name: Name that clients use for the model.
        port: Port on loopback.
        role: Whether it computes prompts, continues them, or both; None for no connector.
        connector: The connector and its settings: vLLM's `--kv-transfer-config` without the role.
        cpus: CPUs of its compute threads; None lets vLLM choose.
        arguments: Additional arguments for vLLM's command line.
        environment: Additional environment variables.
    """

    name: str
    model: str
    served_name: str
    port: int
    role: Role | None = None
    connector: Mapping[str, Any] = msgspec.field(default_factory=lambda: KVFLOW)
    cpus: tuple[int, ...] | None = None
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = {}


def vllm_server(options: VllmServer, logs: Path) -> Server:
    """Create a server, without starting it; its log will be in the directory `logs`."""
    # Not the `vllm` command, which is missing in builds distributed under another name.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", options.model, "--served-model-name", options.served_name]
    command += ["--host", "127.0.0.1", "--port", str(options.port)]
    command += ["--shutdown-timeout", "20"]  # otherwise its workers are killed while they close
    if options.role is not None:
        config = json.dumps({**options.connector, "kv_role": options.role})
        command += ["--kv-transfer-config", config]
    environment = dict(options.environment)
    if options.cpus is not None:
        environment |= CPU_ENVIRONMENT
        environment["OMP_NUM_THREADS"] = str(len(options.cpus))
        environment["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, options.cpus))
    url, log = f"http://127.0.0.1:{options.port}", logs / f"{options.name}.log"
    return Server(options.name, [*command, *options.arguments], environment, url=url, log=log)


def router(servers: Sequence[Server], host: str, port: int, logs: Path, *, is_concurrent: bool) -> Server:
    """Create a router, without starting it: vLLM's own, or `kvflow proxy` if that is not installed.

    With `is_concurrent`, it is `kvflow proxy` in any case. Its log will be in the directory `logs`.
    """
    program = None if is_concurrent else shutil.which("vllm-router")
    if program is None:
        name, command = "proxy", [sys.executable, "-m", "kvflow.cli", "proxy"]
    else:
        name, command = "router", [program, "--vllm-pd-disaggregation", "--kv-connector", "nixl"]
        command += ["--policy", "round_robin", "--prometheus-host", host, "--prometheus-port", str(port + 3)]
    command += [word for server in servers for word in (f"--{server.name}", server.url)]
    command += ["--host", host, "--port", str(port)]
    return Server(name, command, {}, url=f"http://{host}:{port}", log=logs / f"{name}.log")


def halves_of_cpus() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Split the CPUs of this process between two servers; a single CPU is shared by both.

    By default, vLLM would bind both to the same CPUs.
    """
    cpus: Sequence[int] = sorted(os.sched_getaffinity(0))
    middle = len(cpus) // 2
    return tuple(cpus[:middle] or cpus), tuple(cpus[middle:])


def pair(
    *,
    model: str,
    served_name: str,
    first_port: int,
    extra_config: Mapping[str, Any],
    arguments: tuple[str, ...],
    is_cpu: bool,
) -> tuple[VllmServer, VllmServer]:
    """Describe a prefill and a decode server on this machine, each with half of the CPUs or its own GPU.

    Decode uses the port after `first_port`. `extra_config` has settings of kvflow's connector. `is_cpu` says for what
    vLLM is built. The rest is as in `VllmServer`.
    """
    halves = halves_of_cpus()

    def one(number: int, name: str, role: Role) -> VllmServer:
        return VllmServer(
            name=name,
            model=model,
            served_name=served_name,
            port=first_port + number,
            role=role,
            connector={**KVFLOW, "kv_connector_extra_config": dict(extra_config)},
            cpus=halves[number] if is_cpu else None,
            arguments=(*(CPU_ARGUMENTS if is_cpu else ()), *arguments),
            environment={} if is_cpu else {"CUDA_VISIBLE_DEVICES": str(number)},
        )

    return one(0, "prefill", "kv_producer"), one(1, "decode", "kv_consumer")

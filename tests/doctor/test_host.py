"""Each test breaks one thing, in a child process or in copies of the kernel's files, and expects it to be named."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvflow.cli.main import main
from kvflow.doctor import checks, devices, host, software, transport
from kvflow.doctor.findings import Check, DoctorOptions, Finding, ok, run_checks
from kvflow.keys import make_keys

EXAMINE = """
import os, resource, sys
from pathlib import Path
import msgspec
from kvflow.doctor import checks
from kvflow.doctor.findings import DoctorOptions, run_checks
chosen = [check for check in checks.CHECKS if check.__name__ in sys.argv[2:]]
{breaking}
found = run_checks(chosen, DoctorOptions(root=Path(sys.argv[1])))
print(msgspec.json.encode(found).decode())
"""

DEVICE = "sys/class/infiniband/mlx5_0"


def examine_in_child(breaking: str, *names: str, root: Path = Path("/"), **environment: str) -> list[dict[str, Any]]:
    """Run checks in a process that first breaks something for itself; return their findings."""
    script = EXAMINE.format(breaking=breaking)
    command = [sys.executable, "-c", script, str(root), *names]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=100, env={**os.environ, **environment}
    )
    assert (done.returncode, done.stderr) == (0, "")
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., DoctorOptions]:
    """Write files of a root directory, and return options to look at it."""

    def write_files(files: dict[str, str]) -> DoctorOptions:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return DoctorOptions(root=tmp_path)

    return write_files


def only(check: Check, options: DoctorOptions, status: str) -> Finding:
    """Return the only finding of a check with a status."""
    (found,) = [one for one in run_checks([check], options) if one.status == status]
    return found


def test_few_descriptors_are_found() -> None:
    breaking = "resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))"
    (found,) = examine_in_child(breaking, "file_descriptors")
    assert (found["check"], found["status"]) == ("file descriptors", "fail")
    assert "RLIMIT_NOFILE is 40" in found["cause"]
    assert "ulimit -n" in found["fix"]


def test_threads_that_cannot_start_are_found() -> None:
    breaking = """
size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + 2**24
resource.setrlimit(resource.RLIMIT_AS, (size, size))
"""
    (found,) = examine_in_child(breaking, "threads")
    assert found["status"] == "fail"
    assert "threads cannot be started" in found["cause"]
    assert "ulimit -u" in found["fix"]


def test_one_cpu_is_found() -> None:
    (found,) = examine_in_child("os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])", "cpu_pinning")
    assert found["status"] == ("warn" if (os.cpu_count() or 1) > 1 else "ok")
    assert found["cause"].startswith("1 of ")
    assert not found["fix"] or "taskset" in found["fix"]


def test_memory_that_cannot_be_locked_matters_with_rdma(write: Callable[..., DoctorOptions]) -> None:
    root = write({f"{DEVICE}/ports/1/state": "4: ACTIVE\n"}).root
    breaking = "resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))"
    (found,) = examine_in_child(breaking, "locked_memory", root=root)
    assert found["status"] == "fail"
    assert "RLIMIT_MEMLOCK is 65536 bytes" in found["cause"]
    assert "ulimit -l unlimited" in found["fix"]
    (found,) = examine_in_child(breaking, "locked_memory", root=root / "nothing")
    assert found["status"] == "ok"


def test_rdma_port_that_is_down_and_devices_that_are_not_passed_on_are_found(
    write: Callable[..., DoctorOptions],
) -> None:
    options = write({f"{DEVICE}/ports/1/state": "1: DOWN\n", f"{DEVICE}/ports/2/state": "4: ACTIVE\n"})
    down = only(devices.rdma_devices, options, "warn")
    assert "mlx5_0 port 1 is not active (1: DOWN)" in down.cause
    assert "ibstat mlx5_0" in down.fix
    closed = only(devices.rdma_devices, options, "fail")
    assert "no /dev/infiniband/uverbs" in closed.cause
    assert "--device=/dev/infiniband" in closed.fix
    write({"dev/infiniband/uverbs0": ""})
    assert run_checks([devices.rdma_devices], options)[-1].status == "ok"


def test_gpu_memory_that_rdma_cannot_reach_is_found(write: Callable[..., DoctorOptions]) -> None:
    options = write({"proc/driver/nvidia/version": "NVRM version: 550", f"{DEVICE}/ports/1/state": "4: ACTIVE"})
    found = only(devices.gpu_peer_memory, options, "warn")
    assert "nvidia_peermem is not loaded" in found.cause
    assert found.fix == "modprobe nvidia-peermem"
    write({"sys/module/nvidia_peermem/refcnt": "1"})
    assert "is loaded" in only(devices.gpu_peer_memory, options, "ok").cause


def test_wrong_numa_node_is_found(write: Callable[..., DoctorOptions]) -> None:
    nodes = {"sys/devices/system/node/node0/cpulist": "0-511", "sys/devices/system/node/node1/cpulist": "512-1023"}
    options = write({**nodes, f"{DEVICE}/device/numa_node": "1"})
    found = only(devices.numa_affinity, options, "warn")
    assert "runs on node0, but mlx5_0 is on node1" in found.cause
    assert "numactl --cpunodebind=1" in found.fix
    write({f"{DEVICE}/device/numa_node": "0"})
    assert "mlx5_0 is on node0" in only(devices.numa_affinity, options, "ok").cause
    write({f"{DEVICE}/device/numa_node": "-1"})
    assert "no network device says" in only(devices.numa_affinity, options, "unknown").cause


def test_cpu_quota_is_found(write: Callable[..., DoctorOptions]) -> None:
    place = "sys/fs/cgroup/pod"
    files = {"proc/self/cgroup": "0::/pod\n", f"{place}/cpu.max": "50000 100000", f"{place}/cpu.stat": "nr_throttled 7"}
    found = only(host.cpu_quota, write(files), "warn")
    assert "0.5 CPUs, throttled 7 times" in found.cause
    assert "CPU limit" in found.fix
    assert only(host.cpu_quota, write({f"{place}/cpu.max": "max 100000"}), "ok").cause == "no CPU quota"


def test_slow_clock_is_found(write: Callable[..., DoctorOptions]) -> None:
    options = write({"sys/devices/system/clocksource/clocksource0/current_clocksource": "hpet\n"})
    found = only(host.monotonic_clock, options, "warn")
    assert "clock source hpet" in found.cause
    assert "current_clocksource" in found.fix


def test_secret_that_others_can_read_is_found(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    make_keys(tmp_path / "keys")
    options = DoctorOptions(keys=str(tmp_path / "keys"))
    found = only(software.key_files, options, "warn")
    assert "lists no key" in found.cause
    assert "kvflow keys trust" in found.fix
    (tmp_path / "keys/secret.key").chmod(0o644)
    found = only(software.key_files, options, "fail")
    assert "readable by other users" in found.cause
    assert found.fix == f"chmod o= {tmp_path}/keys/secret.key"
    found = only(software.key_files, DoctorOptions(keys=str(tmp_path / "none")), "fail")
    assert found.fix == f"kvflow keys new {tmp_path}/none"


def test_transport_that_is_not_installed_is_found() -> None:
    breaking = "sys.modules['nixl_cu12'] = sys.modules['nixl_cu13'] = None"
    (found,) = examine_in_child(breaking, "transport_library")
    assert found["status"] == "fail"
    assert "'nixl' is not installed" in found["cause"]
    assert "pip install 'kvflow[nixl-cu12]'" in found["fix"]
    assert only(software.transport_library, DoctorOptions(backend="nixel"), "fail").fix.startswith("choose one of")


def test_library_that_does_not_load_is_found_by_the_probe(tmp_path: Path) -> None:
    for name in ("nixl_cu12", "nixl_cu13"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('libcuda.so.1 is missing')\n")
    (found,) = examine_in_child("", "transfer_on_this_host", PYTHONPATH=str(tmp_path))
    assert found["status"] == "fail"
    assert "libcuda.so.1 is missing" in found["cause"]
    assert "pip install" in found["fix"]


def test_path_that_ucx_has_chosen_is_told() -> None:
    path, rates = run_checks([transport.transfer_on_this_host], DoctorOptions())
    assert path.cause == "path: cma/memory" or "tcp" in path.cause  # where processes may not share memory
    assert path.status == ("warn" if "tcp" in path.cause else "ok")
    assert rates.status == "ok"
    assert "GB/s in one piece" in rates.cause


def test_tcp_where_memory_could_be_shared_is_found() -> None:
    path, rates = examine_in_child("", "transfer_on_this_host", UCX_TLS="tcp")
    assert path["status"] == "warn"
    assert "tcp/lo" in path["cause"]
    assert "although both processes are on one host" in path["cause"]
    assert "unset UCX_TLS" in path["fix"]
    assert rates["status"] == "ok"


def test_probe_that_does_not_end_is_found() -> None:
    found = only(transport.transfer_on_this_host, DoctorOptions(probe_s=0.01), "fail")
    assert "has not ended within 0.01 s" in found.cause
    assert "py-spy" in found.fix
    assert run_checks([transport.transfer_on_this_host], DoctorOptions(probe_s=0)) == []


def test_check_that_raises_could_not_look_and_others_go_on() -> None:
    def broken_check(_: DoctorOptions) -> Finding:
        raise ZeroDivisionError("no")

    def sound_check(_: DoctorOptions) -> Finding:
        return ok("well")

    broken, sound = run_checks([broken_check, sound_check], DoctorOptions())
    assert (broken.check, broken.status) == ("broken check", "unknown")
    assert "ZeroDivisionError: no" in broken.cause
    assert (sound.check, sound.status) == ("sound check", "ok")


def test_command_prints_findings_and_says_by_its_exit_code_whether_one_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["doctor", "--keys", str(tmp_path / "none")]
    monkeypatch.setattr(checks, "CHECKS", (software.versions, software.key_files))
    assert main(command) == 1
    first, second, fix = capsys.readouterr().out.splitlines()
    assert first.startswith("ok       versions: python ")
    assert second.startswith("fail     key files: key file does not exist")
    assert fix == f"         fix: kvflow keys new {tmp_path}/none"
    assert main([*command, "--json"]) == 1
    assert [one["status"] for one in json.loads(capsys.readouterr().out)] == ["ok", "fail"]
    assert main(["doctor"]) == 0
    assert main(["doctor", "tcp://*:1"]) == 2
    with pytest.raises(SystemExit):
        main(["doctor", "--backend-options", "7"])

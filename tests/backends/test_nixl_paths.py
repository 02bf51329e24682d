"""Whether every path that NIXL may write over ends with its process, or can be observed."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from kvflow.backends.nixl.library import ENGINE_CONFIG
from kvflow.backends.nixl.paths import can_be_seen, may_use_rdma


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    """Create the files of a host with an RDMA device."""
    (tmp_path / "mlx5_0").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("plugin", "options", "environment", "is_seen"),
    [
        ("UCX", {}, {}, True),
        ("UCX", {"engine_config": ENGINE_CONFIG}, {"UCX_TLS": "tcp", "UCX_LOG_LEVEL": "fatal"}, True),
        ("UCX", {"engine_config": f"{ENGINE_CONFIG},MM_ERROR_HANDLING=y"}, {}, False),
        ("UCX", {"engine_config": f"{ENGINE_CONFIG},MM_ERROR_HANDLING=y"}, {"UCX_MM_ERROR_HANDLING": "n"}, True),
        ("UCX", {}, {"UCX_MM_ERROR_HANDLING": "y"}, False),
        ("UCX", {}, {"UCX_POSIX_ERROR_HANDLING": "try"}, False),
        ("UCX", {}, {"UCX_CMA_ERROR_HANDLING": "y"}, True),
        ("UCX", {"ucx_error_handling_mode": "none"}, {}, False),
        ("UCX", {"num_threads": "2"}, {}, False),
        ("LIBFABRIC", {}, {}, False),
    ],
)
def test_queues_in_shared_memory_and_other_plugins_cannot_be_seen(
    plugin: str, options: Mapping[str, str], environment: Mapping[str, str], is_seen: bool, tmp_path: Path
) -> None:
    assert can_be_seen(plugin, options, environment, tmp_path) is is_seen


@pytest.mark.parametrize(
    ("transports", "may_use"), [(None, True), ("tcp,cma", False), ("rc,tcp", True), ("^ib", True), ("all", True)]
)
def test_a_device_for_rdma_is_used_unless_the_transports_are_others(
    transports: str | None, may_use: bool, devices: Path
) -> None:
    environment = {} if transports is None else {"UCX_TLS": transports}
    assert may_use_rdma(environment, devices) is may_use
    assert can_be_seen("UCX", {}, environment, devices) is not may_use
    assert not may_use_rdma(environment, devices / "missing")

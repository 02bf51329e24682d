"""Rows of metadata buffers as bytes, and the settings of the adapter."""

import ctypes
import mmap

import msgspec
import numpy as np
import pytest

from kvflow import ConfigError, LocalProtocolError
from kvflow.engines.sglang.metadata import MetadataRows
from kvflow.engines.sglang.settings import default_limits, default_timeouts, read_settings

Arrays = tuple[np.ndarray, np.ndarray]


def buffers() -> tuple[Arrays, MetadataRows]:
    arrays = np.arange(12, dtype=np.int32).reshape(4, 3), np.arange(4, dtype=np.int64)
    rows = MetadataRows(
        [one.ctypes.data for one in arrays], [one.nbytes for one in arrays], [one[0].nbytes for one in arrays]
    )
    return arrays, rows


def test_rows_travel() -> None:
    arrays, rows = buffers()
    data = rows.read(2)
    assert len(data) == rows.num_bytes == 20
    rows.write(0, data)
    assert arrays[0].tolist() == [[6, 7, 8], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert arrays[1].tolist() == [2, 1, 2, 3]


@pytest.mark.parametrize("index", [-1, 4])
def test_rows_that_there_are_not_are_refused(index: int) -> None:
    _, rows = buffers()
    with pytest.raises(LocalProtocolError, match="no such row"):
        rows.read(index)
    with pytest.raises(LocalProtocolError, match="no such row"):
        rows.write(index, bytes(20))


class Changing:
    """A number that is another row whenever it is asked."""

    def __init__(self, *numbers: int) -> None:
        self._numbers = iter(numbers)

    def __index__(self) -> int:
        return next(self._numbers)


def test_row_that_lies_is_asked_once() -> None:
    """Whatever it says later, no row of another request is read or written."""
    arrays, rows = buffers()
    assert rows.read(Changing(2, 1)) == rows.read(2)  # type: ignore[arg-type]
    rows.write(Changing(0, 1), rows.read(2))  # type: ignore[arg-type]
    assert arrays[1].tolist() == [2, 1, 2, 3]


def test_rows_of_other_buffers_are_refused() -> None:
    arrays, rows = buffers()
    with pytest.raises(ValueError, match="19 bytes"):
        rows.write(1, bytes(19))
    assert arrays[0][1].tolist() == [3, 4, 5]


def test_rows_that_the_cpu_cannot_read_are_refused() -> None:
    """Reading them later would end the scheduler with SIGSEGV."""
    with mmap.mmap(-1, 2 * mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as memory:
        buffer = (ctypes.c_char * len(memory)).from_buffer(memory)
        libc, second = ctypes.CDLL(None, use_errno=True), ctypes.addressof(buffer) + mmap.PAGESIZE
        assert libc.mprotect(ctypes.c_void_p(second), mmap.PAGESIZE, 0) == 0  # as device memory is to the CPU
        with pytest.raises(ConfigError, match="CPU can read"):
            MetadataRows([ctypes.addressof(buffer)], [len(memory)], [64])
        del buffer


@pytest.mark.parametrize(
    ("settings", "devices", "plugin", "expected"),
    [
        ({}, [], None, {"plugin_options": {"a": "1"}}),
        ({}, ["mlx5_0", "mlx5_1"], None, {"plugin_options": {"a": "1", "device_list": "mlx5_0, mlx5_1"}}),
        (
            {"backend_options": {"plugin_options": {"b": "2"}, "inline_bytes": 5}},
            [],
            "UCX",
            {"plugin": "UCX", "plugin_options": {"a": "1", "b": "2"}, "inline_bytes": 5},
        ),
        ({"backend": "mooncake"}, ["mlx5_0"], "UCX", {"protocol": "rdma", "devices": ["mlx5_0"]}),
        ({"backend": "memory"}, [], "UCX", {}),
    ],
)
def test_sglangs_options_reach_the_transport(
    settings: dict[str, object], devices: list[str], plugin: str | None, expected: dict[str, object]
) -> None:
    read = read_settings({"KVFLOW_SGLANG": msgspec.json.encode(settings).decode()})
    assert read.options_for(devices, plugin, {"a": "1"}) == expected


@pytest.mark.parametrize(
    ("settings", "devices", "plugin"),
    [
        ({"backend": "memory"}, ["mlx5_0"], None),
        ({}, ["mlx5_0"], "Mooncake"),
        ({"backend_options": {"plugin": "GDS"}}, ["mlx5_0"], None),
        ({"backend_options": {"plugin": "UCX"}}, [], "Mooncake"),
        ({"backend_options": {"plugin_options": {"device_list": "mlx5_1"}}}, ["mlx5_0"], None),
        ({"backend": "mooncake", "backend_options": {"protocol": "tcp"}}, ["mlx5_0"], None),
        ({}, ["mlx5_0:1"], None),
    ],
)
def test_options_that_cannot_reach_the_transport_are_refused(
    settings: dict[str, object], devices: list[str], plugin: str | None
) -> None:
    read = read_settings({"KVFLOW_SGLANG": msgspec.json.encode(settings).decode()})
    with pytest.raises(ConfigError):
        read.options_for(devices, plugin, {})


def test_settings_have_defaults_that_leave_waiting_to_sglang() -> None:
    settings = read_settings({})
    made = settings.for_rank(default_timeouts(300.0), default_limits(3_000_000))
    timeouts = made["timeouts"]
    assert (made["backend"], timeouts.grant_s, timeouts.transfer_s, timeouts.lease_s) == ("nixl", 300.0, 300.0, 10.0)
    assert (timeouts.progress_s, timeouts.transfer_s) == (300.0, 300.0)
    assert settings.for_decode()["proofs"].process_end
    assert made["limits"].metadata_bytes == 3_000_000


def test_settings_are_read() -> None:
    text = (
        '{"backend": "memory", "timeouts": {"lease_s": 2}, "limits": {"transfers": 9}, "affinity": [0, 1], '
        '"proofs": {"process_end": false}}'
    )
    settings = read_settings({"KVFLOW_SGLANG": text})
    assert (settings.backend, settings.affinity) == ("memory", (0, 1))
    made = settings.for_rank(default_timeouts(1.0), default_limits(1))
    assert (made["timeouts"].lease_s, made["limits"].transfers) == (2, 9)
    assert not settings.for_decode()["proofs"].process_end


@pytest.mark.parametrize("text", ["{", '{"lease_s": 3}', '{"backend": 3}', "[]"])
def test_settings_that_are_wrong_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="KVFLOW_SGLANG"):
        read_settings({"KVFLOW_SGLANG": text})


@pytest.mark.parametrize("text", ['{"timeouts": {"leasing_s": 3}}', '{"timeouts": {"lease_s": -3}}'])
def test_timeouts_that_are_wrong_are_refused(text: str) -> None:
    settings = read_settings({"KVFLOW_SGLANG": text})
    with pytest.raises(ConfigError):
        settings.for_rank({}, {})

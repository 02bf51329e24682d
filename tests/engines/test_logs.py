"""What clients send is cut in the log lines of adapters."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from kvflow.engines.vllm.scheduler import ConnectorScheduler

HUGE = "A" * 5_000_000


@pytest.mark.parametrize(
    ("request_id", "params"),
    [
        ("r", {"transfer_id": "x", "remote_engine_id": HUGE}),
        ("r", {HUGE: 1}),
        (HUGE, {}),
    ],
    ids=["address", "name", "request id"],
)
def test_a_long_parameter_of_a_client_is_cut(
    request_id: str, params: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    request = SimpleNamespace(request_id=request_id, kv_transfer_params={"do_remote_prefill": True, **params})
    with caplog.at_level(logging.WARNING, "vllm.kvflow"):
        ConnectorScheduler([], is_prefill=False, is_decode=True).add(request)
    (record,) = caplog.records
    assert "is computed here" in record.getMessage() or request_id is HUGE
    assert len(record.getMessage()) < 3_000

"""What vLLM discovers of kvflow: the connector by its name, and its metrics."""

import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from prometheus_client import REGISTRY, Counter, Gauge, Histogram, generate_latest

from kvflow import ConfigError, FailureReason, Outcome
from kvflow.engines.vllm import connector
from kvflow.engines.vllm.metrics import Metrics, Stats
from kvflow.engines.vllm.options import Options

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]

FIND = """
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
print(KVConnectorFactory._registry["KvflowConnector"]().__name__)
"""


def test_connector_is_found_by_its_name() -> None:
    done = subprocess.run([sys.executable, "-c", FIND], check=True, capture_output=True, text=True, env=os.environ)
    assert done.stdout.split()[-1] == "KvflowConnector"


def ended(reason: FailureReason) -> SimpleNamespace:
    return SimpleNamespace(outcome=Outcome.FAILED, failure=SimpleNamespace(reason=reason))


def test_series_are_filled() -> None:
    """Statistics of two workers are added and sent to the process that exports them. Those of others stay empty."""
    workers = [Stats(), Stats()]
    for stats in workers:
        for reason in (FailureReason.NOT_GRANTED, FailureReason.ABORTED):
            stats.note(ended(reason))  # type: ignore[arg-type]
        stats.data["kvflow_transfer_bytes"].append(2**20)
        stats.note_blocks(held=3, freed=1)
    assert not workers[0].is_empty()
    sent = workers[0].aggregate(workers[1]).take_values().data
    assert workers[0].is_empty()
    config = SimpleNamespace(kv_transfer_config=None)
    kinds = {kind: kind for kind in (Gauge, Counter, Histogram)}
    Metrics(config, kinds, ["model_name", "engine"], {0: ["model", "0"]}).observe(sent, 0)
    found = {}
    for line in generate_latest(REGISTRY).decode().splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name.partition("{")[0] + (name.partition("reason=")[2].strip('"}'))] = float(value)
    assert found["vllm:kvflow_failed_transfers_totalnot_granted"] == 2
    assert found["vllm:kvflow_aborted_transfers_total"] == 2
    assert (found["vllm:kvflow_held_blocks_total"], found["vllm:kvflow_freed_blocks_total"]) == (6, 2)
    assert found["vllm:kvflow_transfer_bytes_sum"] == 2**21
    assert not [name for name in found if name.startswith("vllm:nixl")]
    assert Stats.from_data(sent).reduce()["Failures"] == "not_granted"


def test_what_would_corrupt_caches_is_refused() -> None:
    """VLLM 0.33 asks the connector; 0.32 does not."""
    parallel = SimpleNamespace(
        data_parallel_size=1,
        data_parallel_index=0,
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
    )
    model = SimpleNamespace(enable_sleep_mode=False)
    config = SimpleNamespace(parallel_config=parallel, model_config=model, num_prefill_lookahead_tokens=1)
    connector._refuse_unserved(config, Options())
    config.num_prefill_lookahead_tokens = 3
    with pytest.raises(ConfigError, match="several MTP modules"):
        connector._refuse_unserved(config, Options())
    config.num_prefill_lookahead_tokens, model.enable_sleep_mode = 1, True
    with pytest.raises(ConfigError, match="sleep mode"):
        connector._refuse_unserved(config, Options())
    assert not connector.KvflowConnector.supports_sleep_mode(None)


def test_another_version_of_vllm_is_named(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    connector._warn_of_other_version()
    assert not caplog.messages
    monkeypatch.setattr(connector, "vllm_version", "0.99.1")
    connector._warn_of_other_version()
    assert "0.99.1" in caplog.text

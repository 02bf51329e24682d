"""What vLLM discovers of kvflow: the connector by its name, and its metrics."""

import json
import logging
import os
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from prometheus_client import REGISTRY, Counter, Gauge, Histogram, generate_latest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.worker import kv_connector_model_runner_mixin
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from kvflow import ConfigError, FailureReason, Outcome
from kvflow.engines.vllm import connector
from kvflow.engines.vllm.connector import KvflowConnector
from kvflow.engines.vllm.metrics import Metrics, Stats
from kvflow.engines.vllm.offloading import KvflowOffloadingConnector
from kvflow.engines.vllm.options import Options
from kvflow.engines.vllm.worker import _Move
from tests.engines.test_vllm_adapter import DECODE, PREFILL, PROMPT, asked, begin_decode, reply_of, scheduled, servers
from tests.support.manifests import SERVERS, Server

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]

FIND = """
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
print(*(KVConnectorFactory._registry[name]().__name__ for name in ("KvflowConnector", "KvflowOffloadingConnector")))
"""


def test_connectors_are_found_by_their_names() -> None:
    done = subprocess.run([sys.executable, "-c", FIND], check=True, capture_output=True, text=True, env=os.environ)
    assert done.stdout.split()[-2:] == ["KvflowConnector", "KvflowOffloadingConnector"]


@pytest.mark.parametrize("server", SERVERS, ids=lambda server: server.file)
def test_arguments_of_manifests_are_those_of_vllm(server: Server) -> None:
    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers())
    arguments = parser.parse_args(["serve", *server.expand_arguments()])
    assert arguments.port == 8000
    assert isinstance(arguments.kv_transfer_config, KVTransferConfig)
    assert arguments.kv_transfer_config.kv_connector_extra_config["host"] == "the-pod_ip"
    assert (arguments.nnodes, arguments.node_rank) == ((2, 1) if server.kind == "LeaderWorkerSet" else (1, 0))


def test_nixl_connector_lives_on_if_it_is_given_a_ticket() -> None:
    """Its scheduler ends the engine with an assertion if tokens are elsewhere and no blocks are named."""
    scheduler = NixlPullConnectorScheduler.__new__(NixlPullConnectorScheduler)
    scheduler.use_host_buffer = scheduler.is_bidirectional_kv_xfer_enabled = False
    scheduler._reqs_need_recv = {}
    scheduler.get_exchange_clipped_blocks = lambda blocks: blocks
    scheduler._get_remote_prefill_token_count = lambda count: count
    with servers() as (source, _):
        params = json.loads(json.dumps(reply_of(source)))
    request = asked("d", params)
    count, is_async = scheduler.get_num_new_matched_tokens(request, 0)
    assert (count, is_async) == (PROMPT, True)
    blocks = SimpleNamespace(blocks=[[]], get_unhashed_block_ids_all_groups=lambda: ([1, 2, 3],))
    scheduler.update_state_after_alloc(request, blocks, count)
    assert list(scheduler._reqs_need_recv) == ["d"]
    metadata = NixlConnectorMetadata()
    metadata.add_new_req_to_recv("d", ([1, 2, 3],), params)
    assert metadata.reqs_to_recv["d"].remote.port == params["remote_port"]


def ended(reason: FailureReason) -> SimpleNamespace:
    return SimpleNamespace(outcome=Outcome.FAILED, failure=SimpleNamespace(reason=reason))


def test_counters_are_right_in_the_step_that_vllm_is_told_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls are those of vLLM itself. A server that is idle afterwards has said all there is."""
    monkeypatch.setattr(kv_connector_model_runner_mixin, "get_forward_context", lambda: None)
    with servers() as (source, target):
        source.scheduler.add(asked("p", {"do_remote_decode": True}))
        source.step({"p": (0, 6, PREFILL)})
        begin_decode(target, reply_of(source))
        target.until(lambda: all(move.transfer and move.blocks for move in target.worker._receiving.values()))
        stats, called = Stats(), KvflowConnector.__new__(KvflowConnector)
        called._stats, called._worker, called._connector_metadata = stats, target.worker, None
        called._options = Options(spin=True)
        monkeypatch.setattr(target.worker, "_on_blocks", stats.note_blocks)
        monkeypatch.setattr(kv_connector_model_runner_mixin, "get_kv_transfer_group", lambda: called)

        def step(*finished: str) -> Any:
            orders = target.scheduler.step(scheduled({}))
            given = SimpleNamespace(kv_connector_metadata=orders, has_sync_kv_loads=False, finished_req_ids={*finished})
            with KVConnectorModelRunnerMixin._get_kv_connector_output(given) as output:
                pass
            if output.kv_connector_worker_meta is not None:
                target.scheduler.take_report(output.kv_connector_worker_meta)
            return output

        with monkeypatch.context() as patch:
            patch.setattr(_Move, "is_safe", property(lambda _: False))
            output = step("d")
            while not output.finished_recving:
                output = step()
        assert output.kv_connector_stats.data["kvflow_held_blocks"] == [len(DECODE)]
        freed = list[int]()
        move = next(iter(target.worker._moves.values()))
        assert move.transfer is not None
        move.transfer.until_safe(10.0)
        monkeypatch.setattr(target.ranks, "completed", lambda: [SimpleNamespace(transfer=move.transfer)])
        while target.scheduler.awaits_report:
            output = step()
            freed += output.kv_connector_stats.data["kvflow_freed_blocks"] if output.kv_connector_stats else []
        assert freed == [len(DECODE)]
        assert stats.is_empty()


def test_series_are_filled() -> None:
    """Statistics of two workers are added and sent to the process that exports them. Those of others stay empty."""
    workers = [Stats(), Stats()]
    for stats in workers:
        for reason in (FailureReason.NOT_GRANTED, FailureReason.ABORTED):
            stats.note(ended(reason))  # type: ignore[arg-type]
        stats.data["kvflow_transfer_bytes"].append(2**20)
        stats.note_blocks(held=3, freed=1)
        stats.note_recomputed("no_ticket", 100)
        stats.data["kvflow_handover_part_seconds"].append({"queue": 0.1, "wire": 0.5})
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
    assert found["vllm:kvflow_recomputed_tokens_totalno_ticket"] == 200
    assert (found["vllm:kvflow_held_blocks_total"], found["vllm:kvflow_freed_blocks_total"]) == (6, 2)
    assert found["vllm:kvflow_transfer_bytes_sum"] == 2**21
    exported = generate_latest(REGISTRY).decode()
    for part, seconds in (("queue", 0.2), ("wire", 1.0)):
        assert f'seconds_sum{{engine="0",model_name="model",part="{part}"}} {seconds}' in exported
    assert not [name for name in found if name.startswith("vllm:nixl")]
    assert (Stats(sent).reduce()["Failures"], Stats(sent).reduce()["Mostly"]) == ("not_granted", "wire")


def config_of(role: str, pcp_size: int = 1) -> SimpleNamespace:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            data_parallel_size=1, data_parallel_index=0, prefill_context_parallel_size=pcp_size
        ),
        model_config=SimpleNamespace(enable_sleep_mode=False),
        kv_transfer_config=KVTransferConfig(kv_connector="KvflowConnector", kv_role=role),
    )


def test_prefill_context_parallelism_is_for_prefill_servers() -> None:
    connector._refuse_unserved(config_of("kv_producer", 2), Options())
    for role in ("kv_consumer", "kv_both"):
        with pytest.raises(ConfigError, match="prefill context parallelism"):
            connector._refuse_unserved(config_of(role, 2), Options())


def test_what_would_corrupt_caches_is_refused() -> None:
    """VLLM 0.33 asks the connector; 0.32 does not."""
    config = config_of("kv_consumer")
    model = config.model_config
    connector._refuse_unserved(config, Options())
    model.enable_sleep_mode = True
    with pytest.raises(ConfigError, match="sleep mode"):
        connector._refuse_unserved(config, Options())
    assert not connector.KvflowConnector.supports_sleep_mode(None)


@pytest.mark.parametrize("kind", [OffloadingConnector, KvflowOffloadingConnector])
def test_a_tier_without_a_fence_is_refused_on_decode(kind: Any) -> None:
    group = SimpleNamespace(sub_connectors=[object.__new__(kind)])
    with nullcontext() if kind is KvflowOffloadingConnector else pytest.raises(ConfigError, match="being received"):
        connector._refuse_unfenced(group)
    connector._refuse_unfenced(object())  # kvflow's connector alone


def test_another_version_of_vllm_is_named(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    connector._warn_of_other_version()
    assert not caplog.messages
    monkeypatch.setattr(connector, "vllm_version", "0.99.1")
    connector._warn_of_other_version()
    assert "0.99.1" in caplog.text

"""What the connector overrides, calls and reads of vLLM exists, in the version under test and in the newest one."""

import ast
import inspect
from pathlib import Path
from typing import Final

import pytest

pytest.importorskip("vllm")

from kvflow.engines.vllm.connector import KvflowConnector
from kvflow.engines.vllm.offloading import KvflowOffloadingConnector
from tests.engines.vllm.sources import VERSIONS, Sources, signature_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]

ADAPTER: Final = Path(inspect.getfile(KvflowConnector)).parent
V1: Final = "vllm.distributed.kv_transfer.kv_connector.v1"
BASES: Final[dict[type[object], tuple[str, ...]]] = {
    KvflowConnector: (f"{V1}.base.KVConnectorBase_V1", f"{V1}.base.SupportsHMA"),
    KvflowOffloadingConnector: (f"{V1}.offloading_connector.OffloadingConnector",),
}

HOOKS: Final = {"supports_sleep_mode", "unregister_kv_caches", "restore_kv_caches"}
"""Overridden methods that the version under test does not have."""

LEFT: Final = {
    "bind_kv_cache_manager": "its pool is enough",
    "clear_connector_metadata": "the base class does what is wanted",
    "has_connector_metadata": "the base class does what is wanted",
    "_get_connector_metadata": "the base class does what is wanted",
    "role": "the base class does what is wanted",
    "finish_forward": "pages are read after the event of the step that computed them",
    "get_block_ids_with_load_errors": "replaced by get_transfer_results",
    "get_external_cache_hit_sources": "the base class returns _cache_hit_source",
    "get_finished": "replaced by get_transfer_results",
    "get_finished_count": "every worker reports",
    "get_handshake_metadata": "kvflow's ranks find each other",
    "get_kv_connector_kv_cache_events": "vLLM announces received blocks itself",
    "get_mem_pool_context": "any memory can be registered",
    "has_pending_block_frees": "finished_sending reports them",
    "register_finished_partial_tail": "only full blocks are shared, and nothing is kept here",
    "request_finished": "replaced by request_finished_all_groups",
    "requires_kv_delivery": "True for prefill servers, as wanted",
    "reset_capture_state": "nothing is captured",
    "set_host_xfer_buffer_ops": "kvflow has its own host buffers",
    "set_xfer_handshake_metadata": "replaced by set_xfer_handshake_metadata_pp_aware",
    "supports_divergent_local_hybrid_hits": "all groups begin at the same token",
    "take_events": "vLLM announces received blocks itself",
}
"""Methods of vLLM's interface that the connector does not override, each with the reason."""

ADDED: Final = {"take_first_tokens"}
"""Methods of the connector that only a vLLM with `first_token.patch` calls."""

READ: Final = {
    "vllm.v1.request.Request": {
        "_all_token_ids",
        "all_token_ids",
        "kv_transfer_params",
        "max_tokens",
        "mm_features",
        "num_computed_tokens",
        "num_output_tokens",
        "num_prompt_tokens",
        "output_token_ids",
        "priority",
        "prompt_token_ids",
        "request_id",
        "resumable",
        "sampling_params",
        "status",
        "trace_headers",
    },
    "vllm.sampling_params.SamplingParams": {
        "bad_words",
        "extra_args",
        "frequency_penalty",
        "min_tokens",
        "num_logprobs",
        "presence_penalty",
        "prompt_logprobs",
        "repetition_detection",
        "seed",
        "stop",
        "structured_outputs",
        "temperature",
        "thinking_token_budget",
    },
    "vllm.v1.core.sched.output.SchedulerOutput": {
        "has_sync_kv_loads",
        "kv_connector_block_state",
        "num_scheduled_tokens",
        "preempted_req_ids",
        "scheduled_cached_reqs",
        "scheduled_new_reqs",
        "total_num_scheduled_tokens",
    },
    "vllm.v1.core.sched.output.NewRequestData": {"num_computed_tokens", "req_id"},
    "vllm.v1.core.sched.output.CachedRequestData": {"num_computed_tokens", "req_ids"},
    "vllm.v1.core.block_pool.BlockPool": {"blocks", "free_blocks", "get_num_free_blocks", "touch"},
    "vllm.v1.core.kv_cache_manager.KVCacheBlocks": {"blocks", "get_block_ids"},
    "vllm.v1.outputs.KVConnectorOutput": {"finished_recving", "finished_sending", "kv_connector_worker_meta"},
    "vllm.config.parallel.ParallelConfig": {
        "cp_kv_cache_interleave_size",
        "data_parallel_index",
        "data_parallel_rank_local",
        "data_parallel_size",
        "decode_context_parallel_size",
        "rank",
        "tensor_parallel_size",
        "world_size",
    },
    "vllm.config.model.ModelConfig": {
        "dtype",
        "enable_sleep_mode",
        "get_head_size",
        "get_total_num_hidden_layers",
        "get_total_num_kv_heads",
        "get_vocab_size",
        "logits_processors",
        "logprobs_mode",
        "model",
        "revision",
        "use_mla",
    },
    "vllm.config.speculative.SpeculativeConfig": {"draft_model_config", "uses_draft_kv_cache"},
    "vllm.config.vllm.VllmConfig": {
        "cache_config",
        "model_config",
        "num_prefill_lookahead_tokens",
        "parallel_config",
        "scheduler_config",
        "speculative_config",
        "structured_outputs_config",
    },
    "vllm.config.kv_transfer.KVTransferConfig": {
        "engine_id",
        "is_kv_consumer",
        "is_kv_producer",
        "kv_connector_extra_config",
        "kv_load_failure_policy",
        "kv_role",
    },
    "vllm.distributed.device_communicators.shm_broadcast.SpinCondition": {"busy_loop_s", "last_read", "wait"},
    "vllm.distributed.kv_transfer.kv_connector.factory.KVConnectorFactory": {"_registry", "register_connector"},
}
"""What the adapter reads or replaces of objects that vLLM passes to it."""


@pytest.fixture(params=[*VERSIONS.values()], ids=[*VERSIONS])
def sources(request: pytest.FixtureRequest) -> Sources:
    found: Sources = request.param
    return found


def overridden(connector: type[object]) -> dict[str, ast.FunctionDef]:
    """Return the methods of a connector."""
    (found,) = ast.parse(inspect.getsource(connector)).body
    assert isinstance(found, ast.ClassDef)
    return {one.name: one for one in found.body if isinstance(one, ast.FunctionDef)}


def test_the_newest_version_is_unpacked() -> None:
    assert len(VERSIONS) > 1


@pytest.mark.parametrize("connector", BASES)
def test_methods_accept_what_vllm_calls_them_with(sources: Sources, connector: type[object]) -> None:
    theirs = {name: it for base in BASES[connector] for name, it in sources.methods(base).items()}
    own = overridden(connector)
    refused = {
        name: (signature_of(own[name]), theirs[name])
        for name in own.keys() & theirs.keys()
        if name != "__init__" and not signature_of(own[name]).accepts(theirs[name])
    }
    assert not refused


@pytest.mark.parametrize(
    ("own", "theirs", "is_accepted"),
    [
        ("self, request, count", "self, request, count", True),
        ("self, request, count=0", "self, request", True),
        ("self, request, **_", "self, request", True),
        ("self, request", "self, request, **_", False),
        ("self, request", "self, request, count", False),
        ("self, asked, count", "self, request, count", False),
        ("self, request, count", "self, request", False),
        ("self, request, count", "self, request, count=0", False),
    ],
)
def test_other_parameters_are_noticed(own: str, theirs: str, is_accepted: bool) -> None:
    made = []
    for parameters in (own, theirs):
        (function,) = ast.parse(f"def method({parameters}): pass").body
        assert isinstance(function, ast.FunctionDef)
        made.append(signature_of(function))
    assert made[0].accepts(made[1]) == is_accepted


def test_what_is_overridden_exists_in_the_newest_version() -> None:
    newest = list(VERSIONS.values())[-1]
    methods = {name for base in BASES[KvflowConnector] for name in newest.methods(base)}
    own = {name for name in overridden(KvflowConnector) if not name.startswith("_")}
    assert own - methods == ADDED
    assert own >= HOOKS


def test_each_method_is_overridden_or_left_for_a_reason() -> None:
    newest = list(VERSIONS.values())[-1]
    methods = {name for base in BASES[KvflowConnector] for name in newest.methods(base)} - {"__init__"}
    assert methods == (methods & overridden(KvflowConnector).keys()) | (
        LEFT.keys() - overridden(KvflowConnector).keys()
    )


def test_what_is_imported_exists(sources: Sources) -> None:
    missing = [
        f"{node.module}.{one.name}"
        for file in ADAPTER.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "vllm"
        for one in node.names
        if not sources.has(str(node.module), one.name)
    ]
    assert not missing


@pytest.mark.parametrize("path", READ)
def test_what_is_read_exists(sources: Sources, path: str) -> None:
    assert READ[path] <= sources.members(path)


@pytest.mark.parametrize("path", READ)
def test_what_is_said_to_be_read_is_read(path: str) -> None:
    code = "\n".join(file.read_text() for file in ADAPTER.glob("*.py"))
    assert not [name for name in READ[path] if name not in code]

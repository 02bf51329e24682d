"""The class that vLLM loads, once for its scheduler and once for each worker. It only delegates."""

import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
from typing_extensions import override
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_dcp_group, get_pcp_group, get_pp_group, get_tp_group
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import RequestStatus
from vllm.version import __version__ as vllm_version

from kvflow import ConfigError
from kvflow.engines.doctor import start_doctor
from kvflow.engines.logs import adapter_logger
from kvflow.engines.times import RequestTimes
from kvflow.engines.vllm.dialect import add_trace_context
from kvflow.engines.vllm.first_token import FirstTokens
from kvflow.engines.vllm.groups import describe_groups
from kvflow.engines.vllm.layout import describe_caches
from kvflow.engines.vllm.metadata import StepOrders, WorkerReport
from kvflow.engines.vllm.metrics import Metrics, Stats
from kvflow.engines.vllm.options import Options, read_options
from kvflow.engines.vllm.ranks import Place, open_ranks
from kvflow.engines.vllm.scheduler import ConnectorScheduler
from kvflow.engines.vllm.waiting import sleep_while
from kvflow.engines.vllm.worker import ConnectorWorker
from kvflow.geometry import TokenShard

__all__ = ["KvflowConnector"]

LOGGER: Final = adapter_logger("vllm.kvflow")

COMPLETE: Final = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)

SUPPORTED: Final = "0.32"
"""The version of vLLM with which this connector is tested."""

DRAFT: Final = "draft_model."
"""Prefix of vLLM's names of the layers of a separate draft model."""

EMPTY_STEP_S: Final = 3e-3
"""How long a step that computes nothing waits for kvflow; a request that arrives meanwhile is delayed by up to that."""


KVConnectorMetadata.register(StepOrders)
KVConnectorWorkerMetadata.register(WorkerReport)


class KvflowConnector(KVConnectorBase_V1, SupportsHMA):
    """KV connector over kvflow.

    Raises:
        ConfigError: vLLM is configured in a way that kvflow does not support, or an option is invalid.
    """

    _cache_hit_source = CacheHitSource.P2P
    _scheduler: ConnectorScheduler

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._options = read_options(transfer.kv_connector_extra_config)
        _refuse_unserved(vllm_config, self._options)
        _warn_of_other_version()
        self._groups = describe_groups(
            kv_cache_config.kv_cache_groups,
            channels_first=is_conv_state_dim_first(),
            dcp_size=vllm_config.parallel_config.decode_context_parallel_size,
        )
        self._stats = Stats()
        # With data parallelism, all ranks compute each step together, even those that have nothing to compute.
        self._patience_s = 0.0 if vllm_config.parallel_config.data_parallel_size > 1 else EMPTY_STEP_S
        self._worker: Any = None
        if role == KVConnectorRole.SCHEDULER:
            self._first_tokens = _first_tokens(vllm_config)
            self._times = RequestTimes(LOGGER, time.monotonic)
            self._scheduler = ConnectorScheduler(
                self._groups,
                is_prefill=transfer.is_kv_producer,
                is_decode=transfer.is_kv_consumer,
                is_by_priority=vllm_config.scheduler_config.policy == "priority",
                num_left_out=_num_left_out(vllm_config),
                trust=self._options.load_trust(),
                first_tokens=self._first_tokens,
                keep_turns_s=_keep_turns_s(vllm_config, self._options),
                num_workers=vllm_config.parallel_config.world_size,
                max_running=vllm_config.scheduler_config.max_num_seqs,
                on_recomputed=self._stats.note_recomputed,
            )

    @classmethod
    @override
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        model = vllm_config.model_config
        return None if model is None or model.use_mla else "LBHNC"  # the tokens of a head are adjacent

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Return whether vLLM calls `unregister_kv_caches` and `restore_kv_caches`, as it does from 0.33."""
        return hasattr(KVConnectorBase_V1, "unregister_kv_caches")

    @classmethod
    @override
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return read_options(extra_config).layerwise

    # The scheduler side ----------------------------------------------------------------------------------------------

    @override
    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        """Note that a connector beside this one in a MultiConnector hands requests over, too.

        kvflow's workers report their tickets otherwise: a MultiConnector passes on the metadata of one connector alone.
        """
        self._scheduler.answers.is_shared = bool(metadata)

    @override
    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._scheduler.held.pool = gpu_block_pool

    @override
    def on_new_request(self, request: Any) -> None:
        self._times.arrived(request.request_id)
        self._scheduler.add(request)

    @override
    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        groups: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return groups

    @override
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        count = self._scheduler.num_elsewhere(request, num_computed_tokens)
        return count, bool(count)

    @override
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._times.note((request.request_id,), "scheduled")
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    @override
    def build_connector_meta(self, scheduler_output: Any) -> StepOrders:
        self._times.step(scheduler_output.num_scheduled_tokens)
        orders = self._scheduler.step(scheduler_output)
        if orders.is_empty and self._patience_s and not self._options.spin:
            sleep_while(self._awaits_empty_step)
        return orders

    def _awaits_empty_step(self) -> bool:
        return self._scheduler.is_empty

    @override
    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.sending.take_sent(connector_output.finished_sending or ())
        received = connector_output.finished_recving or ()
        self._times.note(received, "received")
        self._scheduler.receiving.take_received(received)
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._scheduler.take_report(report)
            if self._first_tokens is not None:
                self._first_tokens.keep(report.first_tokens)

    def take_first_tokens(self, request: Any) -> tuple[list[int], LogprobsLists | None] | None:
        """Return the first token of a request, if prefill has sampled it. No release of vLLM asks for it yet."""
        first = None if self._first_tokens is None else self._first_tokens.take_token(request)
        if first is None:
            return None
        if first.logprobs is None:
            return [first.token], None
        tokens, logprobs, rank = (np.array([values]) for values in first.logprobs)
        return [first.token], LogprobsLists(tokens, logprobs.astype(np.float32), rank)

    @override
    def reset_cache(self) -> bool:
        """Forget tickets: vLLM calls this before it goes to sleep, and workers open new ranks when it wakes up."""
        self._scheduler.reset()
        return True

    @override
    def has_pending_push_work(self) -> bool:
        return self._scheduler.awaits_report

    @override
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._times.ended(request.request_id)
        is_needed, params = self._scheduler.finished(
            request, block_ids, is_complete=request.status in COMPLETE, status=request.status.name
        )
        add_trace_context(params, getattr(request, "trace_headers", None))
        return is_needed, params

    # The worker side -------------------------------------------------------------------------------------------------

    @override
    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        config, transfer = self._vllm_config, self._kv_transfer_config
        _log_with_vllm()
        if transfer.is_kv_consumer:
            _refuse_unfenced(get_kv_transfer_group())
        parallel = config.parallel_config
        layers = _number_layers(config, kv_caches)
        caches = describe_caches(
            kv_caches,
            self._groups,
            backend=_attention_backend(config),
            layers=layers,
            total_kv_heads={
                name: _model_of(config, number).get_total_num_kv_heads() for name, number in layers.items()
            },
            tp_size=parallel.tensor_parallel_size,
            tp_rank=parallel.rank % parallel.tensor_parallel_size,
            fingerprint=_fingerprint(config, self._options),
            shard=_token_shard(parallel),
        )
        place = Place(
            instance=transfer.engine_id,
            engine_rank=parallel.rank,
            num_ranks=parallel.world_size,
            is_prefill=transfer.is_kv_producer,
            is_decode=transfer.is_kv_consumer,
            share=_share,
            port=self._options.port and self._options.port + (parallel.data_parallel_rank_local or 0),
        )
        ranks = open_ranks(self._options, place, caches.layout)
        start_doctor(self._options, LOGGER)
        self._worker = ConnectorWorker(
            caches,
            ranks,
            layerwise=self._options.layerwise,
            patience_s=self._patience_s,
            on_end=self._stats.note,
            on_blocks=self._stats.note_blocks,
        )

    def unregister_kv_caches(self) -> None:
        """Close the ranks. In sleep mode, vLLM maps other memory to the addresses of the caches."""
        self._worker.suspend()

    def restore_kv_caches(self) -> None:
        """Open the ranks again, at the same address of this server."""
        self._worker.resume()

    @override
    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self._worker.preempt(kv_connector_metadata)

    @override
    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._worker.begin(connector_metadata)
        if self._worker.is_moving and not self._options.spin:
            sleep_while(self._has_moves)

    def _has_moves(self) -> bool:
        return bool(self._worker.is_moving)

    @override
    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        self._worker.receive(self._get_connector_metadata())

    @override
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request is scheduled only after it has arrived."""

    @override
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        self._worker.layer_saved(layer_name)

    @override
    def wait_for_save(self) -> None:
        self._worker.saved(self._get_connector_metadata())

    @override
    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = self._worker.take_results(finished_req_ids)
        return KVConnectorTransferResults(results.sent, results.received, results.failed)

    @override
    def build_connector_worker_meta(self) -> WorkerReport | None:
        report: WorkerReport | None = self._worker.take_report()
        return report

    @override
    def get_kv_connector_stats(self) -> Any:
        return None if self._stats.is_empty() else self._stats.take_values()

    @override
    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()

    # Metrics ---------------------------------------------------------------------------------------------------------

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """Create statistics from what another process sent."""
        return Stats(data)

    @classmethod
    @override
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> Any:
        return Metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _refuse_unserved(config: Any, options: Options) -> None:
    """Raise ConfigError, before anything is opened, for an unsupported configuration; it names what is unsupported."""
    parallel, transfer = config.parallel_config, config.kv_transfer_config
    # vLLM sets the size to 1 in the engines of dense models, which are independent; their index remains.
    is_data_parallel = parallel.data_parallel_size > 1 or parallel.data_parallel_index > 0
    unserved = {
        "mooncake_port with data parallelism": is_data_parallel and options.mooncake_port is not None,
        # With another policy, a turn that is gone would fail the next one.
        "keep_turns_s without the role kv_both and the kv_load_failure_policy recompute": (
            options.keep_turns_s > 0 and (transfer.kv_role, transfer.kv_load_failure_policy) != ("kv_both", "recompute")
        ),
        "sleep mode before 0.33": bool(getattr(config.model_config, "enable_sleep_mode", False))
        and not KvflowConnector.supports_sleep_mode(transfer),
        # vLLM's NixlConnector refuses it as well: only prefill servers are meant to have it.
        "prefill context parallelism of a server that decodes": (
            parallel.prefill_context_parallel_size > 1 and transfer.is_kv_consumer
        ),
    }
    found = [name for name, is_used in unserved.items() if is_used]
    if found:
        raise ConfigError("kvflow does not serve this configuration of vLLM", found=found)


def _refuse_unfenced(group: Any) -> None:
    """Raise ConfigError if vLLM's own connector would copy blocks into its tier while kvflow writes to them."""
    if any(type(it).__name__ == "OffloadingConnector" for it in getattr(group, "sub_connectors", ())):
        raise ConfigError(
            "this connector beside kvflow's would offload blocks that are being received, with the bytes of others",
            found="OffloadingConnector",
            use="KvflowOffloadingConnector",
        )


def _warn_of_other_version() -> None:
    if not vllm_version.startswith(f"{SUPPORTED}."):
        LOGGER.warning("kvflow's connector is tested with vLLM %s, but this is %s", SUPPORTED, vllm_version)


def _share(value: str | None) -> str:
    """Broadcast a value from the first worker of a server, and return it in each worker."""
    for group in (get_tp_group(), get_pcp_group(), get_pp_group()):
        if group.world_size > 1:
            value = group.broadcast_object(value, src=0)
    return str(value)


def _token_shard(parallel: Any) -> TokenShard:
    """Return the tokens that this worker holds; without DCP, prefill context parallelism leaves all to each worker."""
    if parallel.decode_context_parallel_size == 1:
        return TokenShard()
    group = get_dcp_group()
    return TokenShard(group.world_size, group.rank_in_group, parallel.cp_kv_cache_interleave_size)


def _num_left_out(config: Any) -> int:
    """Return how many tokens at the end of a prompt only decode may compute.

    Each of several MTP modules reads one token further ahead than the one before it; at the end of a prompt, prefill
    would fill their caches from drafts that nothing verifies.
    """
    return max(int(config.num_prefill_lookahead_tokens) - 1, 0)


def _first_tokens(config: Any) -> FirstTokens | None:
    """Return what keeps first tokens, if vLLM can begin with the second one; drafts would need more than the token."""
    if config.speculative_config is not None or not hasattr(KVConnectorBase_V1, "take_first_tokens"):
        return None
    model = config.model_config
    settings = (model.logprobs_mode, model.logits_processors, config.structured_outputs_config)
    return FirstTokens(repr(settings), model.get_vocab_size())


def _keep_turns_s(config: Any, options: Options) -> float:
    """Return how long turns are kept: not at all with a draft model, which has not computed the last tokens."""
    speculation = config.speculative_config
    if options.keep_turns_s and speculation is not None and speculation.uses_draft_kv_cache():
        LOGGER.warning("kvflow: turns are not kept: the cache of the draft model is behind")
        return 0.0
    return options.keep_turns_s


def _number_layers(config: Any, names: Iterable[str]) -> dict[str, int]:
    """Return numbers of layers; those of a separate draft model begin at 0 again, and come after those of the model."""
    count = config.model_config.get_total_num_hidden_layers()
    return {name: extract_layer_index(name) + (count if name.startswith(DRAFT) else 0) for name in names}


def _model_of(config: Any, layer: int) -> Any:
    """Return the configuration of the model that a layer belongs to: the model, or its draft model."""
    model, speculation = config.model_config, config.speculative_config
    is_draft = speculation is not None and layer >= model.get_total_num_hidden_layers()
    return speculation.draft_model_config if is_draft else model


def _attention_backend(config: Any) -> str:
    from vllm.config import get_layers_from_vllm_config  # noqa: PLC0415 - in a worker, once the model is loaded
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase  # noqa: PLC0415
    from vllm.model_executor.layers.mamba.abstract import MambaBase  # noqa: PLC0415

    layers = get_layers_from_vllm_config(config, AttentionLayerBase)
    names = {layer.get_attn_backend().get_name() for layer in layers.values() if not isinstance(layer, MambaBase)}
    if len(names) > 1:
        raise ConfigError("models with several attention backends are not served", found=sorted(names))
    return str(names.pop()) if names else ""


def _fingerprint(config: Any, options: Options) -> str:
    """Return the fingerprint of the caches: everything that changes the meaning of a block's bytes."""
    if options.fingerprint is not None:
        return options.fingerprint
    model, cache = config.model_config, config.cache_config
    backend = _attention_backend(config)
    parts = [model.model, model.revision, model.dtype, cache.cache_dtype, backend, _block_order(config, backend)]
    speculation = config.speculative_config
    if speculation is not None and speculation.uses_draft_kv_cache():
        draft = speculation.draft_model_config
        parts += ["draft", draft.model, draft.revision, _num_left_out(config)]
    return "/".join(str(part) for part in ("vllm", *parts) if part is not None)


def _block_order(config: Any, backend: str) -> str | None:
    """Return what determines the order within a block in the CPU backend; None for others, whose strides show it."""
    if backend != "CPU_ATTN":
        return None
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: PLC0415 - it has no public name

    model, cache = config.model_config, config.cache_config
    isa = _get_attn_isa(model.dtype, cache.block_size, model.get_head_size(), cache.cache_dtype)
    return f"{isa}/{vllm_version}"  # another version may order them differently


def _log_with_vllm() -> None:
    """Send kvflow's log lines to vLLM's handlers."""
    logger = logging.getLogger("kvflow")
    logger.handlers = logging.getLogger("vllm").handlers
    logger.setLevel(logging.getLogger("vllm").level)
    logger.propagate = False

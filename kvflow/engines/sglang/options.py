"""SGLang's own options: which reach the transport, which are refused, and which have no effect."""

import os
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import get_ib_devices_for_gpu
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_device, get_disagg, get_memory, get_parallel, get_spec

from kvflow import ConfigError
from kvflow.engines.logs import adapter_logger
from kvflow.engines.sglang.settings import IB_DEVICE, Settings

__all__ = ["WITHOUT_EFFECT", "log_what_has_no_effect", "refuse_turns", "refuse_unserved", "transport_options"]

LOGGER: Final = adapter_logger(__name__)

WITHOUT_EFFECT: Final = (
    "SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER",
    "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT",
    "SGLANG_DISAGGREGATION_ENGINE_INIT_TIMEOUT",
    "SGLANG_DISAGGREGATION_QUEUE_SIZE",
    "SGLANG_DISAGGREGATION_THREAD_POOL_SIZE",
    "SGLANG_DISAGGREGATION_ZMQ_MAX_SOCKETS",
    "SGLANG_DISAGGREGATION_ZMQ_SEND_TIMEOUT",
    "SGLANG_DISAGG_STAGING_POOL_SIZE_MB",
)
"""Environment variables about SGLang's own threads, sockets and staging memory, or about what is refused."""


def refuse_unserved(mode: Any) -> None:
    """Raise ConfigError, before anything is opened, for an unsupported configuration; it names what is unsupported."""
    parallel, disagg = get_parallel(), get_disagg()
    unserved = {
        "context parallelism": parallel.attn_cp_size > 1 or parallel.enable_cp_tp_group_sharing,
        "sharding of the KV cache": parallel.enable_kv_cache_sharding,
        "layer split of DSA's cache": parallel.enable_dsa_cache_layer_split,
        "pipeline stages on decode": mode == DisaggregationMode.DECODE and parallel.pp_size > 1,
        "the allocation policy prefill_complete": disagg.disaggregation_decode_allocation_policy != "early",
        "destinations in host memory": disagg.disaggregation_decode_host_receive_threshold < 1,
        "switching roles": disagg.enable_pd_role_switch,
        "HiSparse": get_memory().enable_hisparse,
        "NPUs": get_device().device == "npu",
        "the staging buffer of SGLang": envs.SGLANG_DISAGG_STAGING_BUFFER.get(),
        "release of pages without a proof": not envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE.get(),
    }
    _refuse(unserved, "kvflow does not serve this configuration of SGLang")


def refuse_turns(mode: Any, args: Any) -> None:
    """Raise ConfigError for configurations in which turns do not go back to prefill; it names what is unsupported."""
    parallel, memory = get_parallel(), get_memory()
    tiers = "enable_hierarchical_cache enable_lmcache enable_flexkv enable_unified_cache_external_linker"
    unserved = {
        "several ranks": parallel.tp_size * parallel.pp_size * parallel.num_dp_ranks > 1,
        "states beside K and V or latents": bool(args.state_types),
        "draft models": bool(args.num_draft_entries or get_spec().speculative_algorithm),
        "prefill without a radix cache": mode == DisaggregationMode.PREFILL and memory.disable_radix_cache,
        "other caches than SGLang's on the device": memory.radix_cache_backend
        or any(getattr(memory, name) for name in tiers.split()),
        "decode's offload of its cache": get_disagg().disaggregation_decode_enable_offload_kvcache,
        "checks of memory in each step": envs.SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY.get(),
    }
    _refuse(unserved, "turns do not go back to prefill with this configuration of SGLang: set return_turns to false")


def _refuse(unserved: Mapping[str, object], message: str) -> None:
    found = [name for name, is_used in unserved.items() if is_used]
    if found:
        raise ConfigError(message, found=found)


def log_what_has_no_effect() -> None:
    """Log which of SGLang's settings are set although they have no effect."""
    found = [name for name in WITHOUT_EFFECT if name in os.environ]
    if found:
        LOGGER.warning("these settings of SGLang have no effect with kvflow: %s", ", ".join(found))


def transport_options(settings: Settings, args: Any) -> dict[str, Any]:
    """Return the options of the transport, with SGLang's for its own backends: NIXL's plugin, and the RDMA devices.

    Raises:
        ConfigError: They contradict each other, or the transport cannot be told which devices to use.
        ValueError, RuntimeError: SGLang cannot read its option for devices.
    """
    plugin = envs.SGLANG_DISAGGREGATION_NIXL_BACKEND
    parameters = envs.SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS
    try:
        plugin_options = msgspec.json.decode(parameters.get(), type=dict[str, str])
    except msgspec.MsgspecError as error:
        raise ConfigError(
            "parameters of NIXL's plugin must be a JSON object of texts",
            setting=parameters.name,
            value=parameters.get(),
            error=str(error),
        ) from error
    named = get_ib_devices_for_gpu(args.ib_device, args.gpu_id)
    devices = [name.strip() for name in named.split(",")] if named else []
    if devices and settings.backend == "nixl" and os.environ.get("UCX_NET_DEVICES"):
        LOGGER.warning("%s has no effect, because UCX_NET_DEVICES is set", IB_DEVICE)
        devices = []
    return settings.options_for(devices, plugin.get() if plugin.is_set() else None, plugin_options)

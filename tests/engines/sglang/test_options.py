"""Every option that SGLang has for transfers is used, refused, SGLang's own affair, or logged as having no effect."""

import json
from typing import Any, Final

import pytest

from tests.engines.raising import ERRORS, name_of
from tests.engines.sglang.test_plugin import run

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(200)]

START: Final = """
import json
os.environ["KVFLOW_SGLANG"] = '{"backend": "memory"}'
os.environ["SGLANG_HOST_IP"] = "127.0.0.1"
from sglang.srt.plugins.hook_registry import HookRegistry
from kvflow.engines.sglang import plugin
plugin.activate()
HookRegistry.apply_hooks()
from kvflow import ConfigError, Endpoint, KvflowError
from kvflow.engines.sglang import options
from tests.engines.sglang import sides
from tests.engines.sglang.models import Model, Rank
from tests.engines.sglang.processes import free_port
"""

UNREAD: Final = {
    "draft_kv_layers": "NPUs, which are refused",
    "engine_rank": "the base class reads it only to find the ranks that it connects to",
    "hidden_kv_layers": "NPUs, which are refused",
    "prefill_end_layer": "layers have numbers",
    "rust_http_port": "SGLang's Rust server reads it",
    "total_kv_head_num": "the configuration of the model says it",
}

SERVER: Final = {
    "used": "mode bootstrap_port ib_device transfer_backend",
    "refused": "decode_allocation_policy decode_host_receive_threshold",
    "sglang": "enable_kv_checksum decode_enable_radix_cache decode_enable_offload_kvcache decode_retraction_backup "
    "decode_extra_slots decode_polling_interval",
}
ALIKE: Final = {
    "refused": "enable_pd_role_switch",
    "sglang": "num_reserved_decode_tokens optimistic_prefill_attempts decoupled_spec_bind_endpoint "
    "decoupled_spec_connect_endpoints decoupled_spec_rank decoupled_spec_role encoder_only language_only "
    "language_model_only encoder_transfer_backend encoder_urls encoder_bootstrap_port encoder_register_urls "
    "enable_adaptive_dispatch_to_encoder enable_pdmux pdmux_config_path sm_group_num",
}

ENVIRONMENT: Final = {
    "used": "DISAGGREGATION_BOOTSTRAP_TIMEOUT DISAGGREGATION_WAITING_TIMEOUT DISAGGREGATION_HEARTBEAT_INTERVAL "
    "DISAGGREGATION_HEARTBEAT_MAX_FAILURE DISAGGREGATION_NIXL_BACKEND DISAGGREGATION_NIXL_BACKEND_PARAMS",
    "refused": "DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE DISAGG_STAGING_BUFFER",
    "sglang": "DISAGGREGATION_BOOTSTRAP_ENTRY_CLEANUP_INTERVAL DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK "
    "DISAGGREGATION_SAMPLING_MASK_MAX_TOKENS DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX ENABLE_DISAGG_SAMPLING_MASK "
    "ENABLE_DISAGG_PREFILL_CONTINUOUS_INPUT_POLLING",
}


def words(text: str, prefix: str = "") -> set[str]:
    return {prefix + word for word in text.split()}


def answer(script: str) -> Any:
    return json.loads(run(START + script + "\nprint(json.dumps(found).replace(' ', '~'))")[-1].replace("~", " "))


def test_every_field_of_kv_args_is_read_or_known() -> None:
    """By the adapter or SGLang's base class; a field that SGLang adds has to be looked at."""
    found = answer("""
from sglang.srt.disaggregation.base.conn import KVArgs
read = set()
class Watched(KVArgs):
    def __getattribute__(self, name):
        read.add(name)
        return super().__getattribute__(name)
describe, port = sides.describe, free_port()
def describe_only(*given, **more):
    described = describe(*given, **more)
    read.clear()
    return described
sides.KVArgs, sides.describe = Watched, describe_only
fields = set(KVArgs.__annotations__)
for mode, name in (("prefill", "swa"), ("decode", "swa"), ("decode", "gdn")):
    side = sides.Side(mode, name, port)
    fields -= read
found = sorted(fields)
""")
    assert sorted(found) == sorted(UNREAD)


def test_every_option_of_the_command_line_and_the_environment_is_known() -> None:
    found = answer("""
from sglang.srt.arg_groups.fields.disagg import Disagg
from sglang.srt.environ import Envs
found = {"server": Disagg.__struct_fields__, "no effect": options.WITHOUT_EFFECT,
    "environment": [name for name in vars(Envs) if "DISAGG" in name and "_TEST_" not in name]}
""")
    server = {name for text in SERVER.values() for name in words(text, "disaggregation_")}
    server |= {name for text in ALIKE.values() for name in words(text)}
    assert set(found["server"]) == server
    environment = {name for text in ENVIRONMENT.values() for name in words(text, "SGLANG_")}
    assert set(found["environment"]) == environment | set(found["no effect"])


def test_what_is_not_served_is_refused() -> None:
    refused = answer("""
import sglang.srt.runtime_context as runtime
from sglang.srt.disaggregation.utils import DisaggregationMode
sides.prepare("decode", 1, Model())
sides.set_rank(Rank(1, 0))
found = []
def attempt(**server):
    try:
        with runtime.get_context().override_server_args(**server):
            options.refuse_unserved(DisaggregationMode.DECODE)
    except ConfigError as error:
        found.extend(error.values["found"])
attempt()
attempt(disaggregation_decode_allocation_policy="prefill_complete")
attempt(disaggregation_decode_host_receive_threshold=0.5)
attempt(enable_pd_role_switch=True)
attempt(enable_hisparse=True)
attempt(device="npu")
for name, value in (("SGLANG_DISAGG_STAGING_BUFFER", "1"), ("SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE", "0")):
    os.environ[name] = value
    attempt()
    del os.environ[name]
for size, stages in ((2, 1), (1, 2)):
    runtime.get_parallel().override_permanently(attn_cp_size=size, tp_size=size, moe_tp_size=size, pp_size=stages)
    attempt()
""")
    assert refused == [
        "the allocation policy prefill_complete",
        "destinations in host memory",
        "switching roles",
        "HiSparse",
        "NPUs",
        "the staging buffer of SGLang",
        "release of pages without a proof",
        "context parallelism",
        "pipeline stages on decode",
    ]


def test_turns_do_not_go_back_with_what_is_not_served() -> None:
    refused = answer("""
from contextlib import ExitStack
from types import SimpleNamespace
import sglang.srt.runtime_context as runtime
from sglang.srt.disaggregation.utils import DisaggregationMode
sides.prepare("decode", 1, Model())
sides.set_rank(Rank(1, 0))
found = []
def attempt(*states, draft=0, mode="PREFILL", **server):
    try:
        with runtime.get_context().override_server_args(**server):
            options.refuse_turns(DisaggregationMode[mode], SimpleNamespace(state_types=states, num_draft_entries=draft))
    except ConfigError as error:
        found.append(error.values["found"])
attempt()
attempt(disable_radix_cache=True, mode="DECODE")
attempt("mamba")
attempt(draft=2)
attempt(speculative_algorithm="EAGLE")
attempt(disable_radix_cache=True)
for name in ("enable_hierarchical_cache", "enable_lmcache", "enable_flexkv", "enable_unified_cache_external_linker"):
    attempt(**{name: True})
attempt(radix_cache_backend="mine")
attempt(disaggregation_decode_enable_offload_kvcache=True)
os.environ["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY"] = "1"
attempt()
del os.environ["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY"]
one = {"tp_size": 1, "moe_tp_size": 1, "attn_tp_size": 1, "pp_size": 1, "num_dp_ranks": 1}
for more in ({"tp_size": 2, "moe_tp_size": 2, "attn_tp_size": 2}, {"pp_size": 2}, {"num_dp_ranks": 2}):
    runtime.get_parallel().override_permanently(**one | more)
    attempt()
""")
    assert refused == [
        ["states beside K and V or latents"],
        *[["draft models"]] * 2,
        ["prefill without a radix cache"],
        *[["other caches than SGLang's on the device"]] * 5,
        ["decode's offload of its cache"],
        ["checks of memory in each step"],
        *[["several ranks"]] * 3,
    ]


def test_prompts_are_remembered_up_to_a_limit() -> None:
    found = answer("""
from array import array
from types import SimpleNamespace
from kvflow.engines.sglang.turns import PromptBook
book, found = PromptBook(maximum=50), []
def note(room, count, **more):
    names = ("multimodal_inputs", "positional_embed_overrides", "input_embeds", "session", "beam_group")
    names += ("extra_key", "cache_salt", "priority", "skip_radix_cache_insert")
    request = dict.fromkeys(names) | {"bootstrap_room": room, "origin_input_ids": array("q", range(count))} | more
    book.note_request(SimpleNamespace(**request))
for room in (1, 2, 3, 2):
    note(room, 20)
note(4, 1, multimodal_inputs=object())
note(5, 1, skip_radix_cache_insert=True)
for room in (1, 2, 2, 3, 4, 5):
    prompt = book.take_prompt(f"turn-{room}")
    found.append(prompt and len(prompt.token_ids))
note(6, 50)
found.append(len(book.take_prompt("turn-6").token_ids))
""")
    assert found == [None, 20, None, 20, None, None, 50]


def test_devices_reach_the_transport() -> None:
    """NIXL cannot start with a device that this host does not have."""
    found = answer("""
os.environ["SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS"] = '{"engine_config": "CMA_ERROR_HANDLING=n"}'
os.environ["SGLANG_DISAGGREGATION_THREAD_POOL_SIZE"] = "3"
import logging
lines = []
class Kept(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
logging.getLogger().addHandler(Kept())
describe, port, found = sides.describe, free_port(), []
def start(settings):
    os.environ["KVFLOW_SGLANG"] = json.dumps(settings)
    try:
        side = sides.Side("decode", "mha", port)
    except KvflowError as error:
        found.append([type(error).__name__, str(error)])
    else:
        found.append(side.managers[0]._transport_options)
        side.close()
def with_device(*given, **more):
    args, metadata = describe(*given, **more)
    args.ib_device = '{"0": "mlx5_76, mlx5_77", "1": "mlx5_0"}'
    return args, metadata
start({"backend": "nixl"})
sides.describe = with_device
start({"backend": "nixl"})
start({"backend": "memory"})
start({"backend": "mooncake", "backend_options": {"protocol": "tcp"}})
os.environ["UCX_NET_DEVICES"] = "lo"
start({"backend": "nixl"})
found.append([line for line in lines if "no effect" in line][-2:])
""")
    parameters = {"engine_config": "CMA_ERROR_HANDLING=n"}
    assert found[0] == {"plugin_options": parameters}
    kind, text = found[1]
    assert (kind, "mlx5_76, mlx5_77" in text) == ("BackendUnavailable", True)
    assert found[2][0] == found[3][0] == "ConfigError"
    assert "ib-device" in found[2][1]
    assert "contradict" in found[3][1]
    assert found[4] == {"plugin_options": parameters}
    assert ["THREAD_POOL_SIZE" in found[5][0], "ib-device" in found[5][1]] == [True, True]


def test_request_whose_indices_or_address_are_nonsense_fails_alone() -> None:
    """Its reason goes into SGLang's log, so it is short."""
    found = answer("""
from sglang.srt.disaggregation.utils import KVClassType, TransferBackend, get_kv_class
from tests.engines.raising import ERRORS, Raising
side = sides.Side("decode", "mha", free_port())
kind, found, manager = get_kv_class(TransferBackend("kvflow"), KVClassType.RECEIVER), [], side.managers[0]
def receive(room, host, indices, row):
    end = kind(mgr=manager, bootstrap_addr=host, bootstrap_room=room)
    end.transfer = manager.rank.announce(room, prefill=Endpoint("127.0.0.1", 9)) if room else None
    manager.update_status(room, 1)
    end.send_metadata(indices, row)
    return end
found.append(sides.reason_of(receive(0, "h" * 5_000_000, [], 3)))
for room, error in enumerate(ERRORS, 1):
    found.append(sides.reason_of(receive(room, "nowhere", Raising(error), 3)))
for room, error in enumerate(ERRORS, 11):  # all of it has arrived, but there is no row for the metadata
    end = receive(room, "nowhere", [1], Raising(error))
    class Arrived:
        def result(self):
            return self
        metadata = b""
    transfer, end.transfer = end.transfer, Arrived()
    end._succeed()
    end.transfer = transfer
    found.append(sides.reason_of(end))
side.close()
""")
    assert "no prefill server" in found[0]
    assert len(found[0]) < 1_000
    assert all(name_of(error) in reason for error, reason in zip(ERRORS * 2, found[1:], strict=True))


def test_prompt_whose_indices_or_row_are_nonsense_fails_alone() -> None:
    found = answer("""
from tests.engines.raising import ERRORS, Raising
side, found = sides.Side("prefill", "mha", free_port()), []
class Count(Raising):
    def __lt__(self, other):
        raise self.error
for room, error in enumerate(ERRORS, 1):
    for number, (count, indices, row) in enumerate(
        ((1, Raising(error), 5), (1, sides.np.array([1]), Raising(error)), (Count(error), [], 5))
    ):
        other, end = side.end(0, 100 * room + number), side.end(0, 10 * room + number)
        end.init(count, row)
        end.send(indices, None, num_kv_tokens=1)
        found.append([sides.reason_of(end), other.poll() == sides.KVPoll.Bootstrapping])
side.close()
""")
    names = [name_of(error) for error in ERRORS for _ in range(3)]
    assert all(name in reason and is_undisturbed for name, (reason, is_undisturbed) in zip(names, found, strict=True))

"""Ends over SGLang's senders and receivers, its own NIXL ones or kvflow's, called as SGLang's schedulers do."""

import importlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import nixl_cu12._api
import numpy as np

from benchmarks.embedded.engines import LOOK_S, News
from benchmarks.embedded.loads import LANES, EmbeddedOptions, Load
from benchmarks.embedded.sglang_shim import install
from benchmarks.pools import PagePool
from benchmarks.sides import PREFILL
from kvflow.errors import KvflowError

__all__ = ["SglangDecode", "SglangPrefill", "open_manager"]

HOST: Final = "127.0.0.1"
BOOTSTRAP_S: Final = 0.5
RETRY_S: Final = 0.1
WORKERS: Final = 4
"""Transfer workers of SGLang's prefill by default."""


class Manager:
    """SGLang's manager of one rank, and a factory of senders or receivers.

    Attributes:
        native: SGLang's manager.
        metadata: SGLang's metadata buffers.
        address: Address of the bootstrap server.
        states: `KVPoll`.
        make: Makes a sender or a receiver for a room.
    """

    def __init__(self, native: Any, metadata: Any, address: str, states: Any, make: Callable[..., Any]) -> None:
        self.native = native
        self.metadata = metadata
        self.address = address
        self.states = states
        self.make: Callable[[int], Any] = lambda room: make(mgr=native, bootstrap_addr=address, bootstrap_room=room)


def open_manager(options: EmbeddedOptions, pool: PagePool) -> Manager:
    """Start SGLang's manager over a pool, and on prefill the bootstrap server. Logging is disabled."""
    logging.disable(logging.CRITICAL)
    os.environ.setdefault("SGLANG_HOST_IP", HOST)
    os.environ["SGLANG_DISAGGREGATION_QUEUE_SIZE"] = str(min(WORKERS, options.threads))
    if options.side == PREFILL and options.way == "sglang":
        os.environ["SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS"] = json.dumps({"num_threads": str(options.threads)})
    install()
    sys.modules["nixl"], sys.modules["nixl._api"] = nixl_cu12, nixl_cu12._api  # the name that SGLang imports
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    utils = importlib.import_module("sglang.srt.disaggregation.utils")
    base = importlib.import_module("sglang.srt.disaggregation.base.conn")
    context = importlib.import_module("sglang.srt.runtime_context")
    is_prefill = options.side == PREFILL
    settings = {"page_size": pool.shape.page_size, "disaggregation_mode": options.side, "tp_size": 1, "device": "cpu"}
    arguments = (
        context.get_context()
        .override_server_args(host=HOST, disaggregation_bootstrap_port=options.port, **settings)
        .install()
    )
    names = ("attn_dcp_rank", "attn_tp_rank", "attn_dp_rank", "attn_cp_rank", "tp_rank", "pp_rank")
    sizes = dict.fromkeys(("tp_size", "moe_tp_size", "attn_tp_size", "pp_size"), 1)
    context.get_parallel().override_permanently(**dict.fromkeys(names, 0), **sizes, pp_group=None)
    metadata = utils.MetadataBuffers(
        LANES, hidden_size=4096, hidden_states_dtype=torch.bfloat16, max_sampling_mask_tokens=0
    )
    classes = _classes(options, utils, pool)
    if is_prefill:
        classes(utils.KVClassType.BOOTSTRAP_SERVER)(HOST, options.port)
        time.sleep(BOOTSTRAP_S)
    mode = utils.DisaggregationMode.PREFILL if is_prefill else utils.DisaggregationMode.DECODE
    native = classes(utils.KVClassType.MANAGER)(_arguments(base.KVArgs(), pool, metadata), mode, arguments, False)
    make = classes(utils.KVClassType.SENDER if is_prefill else utils.KVClassType.RECEIVER)
    return Manager(native, metadata, f"{HOST}:{options.port}", base.KVPoll, make)


def _classes(options: EmbeddedOptions, utils: Any, pool: PagePool) -> Callable[[Any], Any]:
    """Return SGLang's function that looks up the classes of a backend."""
    if options.way == "sglang":
        return partial(utils.get_kv_class, utils.TransferBackend.NIXL)
    plugin = importlib.import_module("kvflow.engines.sglang.plugin")
    manager = importlib.import_module("kvflow.engines.sglang.manager")
    plugin.activate()
    importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry.apply_hooks()
    config = SimpleNamespace(
        get_total_num_kv_heads=lambda: pool.shape.num_heads,
        num_hidden_layers=pool.shape.layers,
        hidden_size=4096,
        hf_config=SimpleNamespace(architectures=["Benchmark"]),
    )
    vars(manager)["process_model_config"] = lambda: config  # SGLang reads a model's directory
    return partial(utils.get_kv_class, utils.TransferBackend(plugin.NAME))


def _arguments(found: Any, pool: PagePool, metadata: Any) -> Any:
    """Fill in SGLang's description of a pool."""
    shape, count = pool.shape, pool.shape.num_tensors
    found.kv_data_ptrs = [pool.range.address + number * pool.tensor_bytes for number in range(count)]
    found.kv_data_lens = [pool.num_pages * shape.page_bytes] * count
    found.kv_item_lens = [shape.page_bytes] * count
    found.kv_data_mem_kinds = ["DRAM"] * count
    found.kv_cache_dtype_str = shape.dtype
    found.aux_data_ptrs, found.aux_data_lens, found.aux_item_lens = metadata.get_buf_infos()
    for name in ("kv_layer_ids", "state_types", "state_data_ptrs", "state_data_lens"):
        setattr(found, name, [])
    for name in ("state_item_lens", "state_layer_ids", "state_dim_per_tensor"):
        setattr(found, name, [])
    for name in ("engine_rank", "gpu_id", "system_dp_rank", "pp_rank", "prefill_start_layer", "num_draft_entries"):
        setattr(found, name, 0)
    found.prefill_end_layer = shape.layers
    found.kv_head_num = found.total_kv_head_num = shape.num_heads
    found.page_size = shape.page_size
    found.ib_device = ""
    found.rust_http_port = found.mla_compression_ratios = None
    found.is_hybrid_mla_backend = False
    return found


class SglangPrefill:
    """A `PrefillEnd` over SGLang's interfaces."""

    nap_s = LOOK_S
    is_quiet = False

    def __init__(self, manager: Manager, tables: list[list[int]], page_size: int, load: Load) -> None:
        self._manager = manager
        self._tables = [np.asarray(table, np.int32) for table in tables]
        self._page_size = page_size
        self._chunks = load.chunks
        self._senders: dict[int, Any] = {}
        self._granted: set[int] = set()

    def send(self, room: int) -> None:
        """Start a request."""
        self._senders[room] = self._manager.make(room)

    def chunk(self, room: int) -> None:
        """Do nothing: `finish` sends everything."""

    def finish(self, room: int, *, is_rest: bool) -> None:
        """Send all tokens that decode lacks and the metadata, which ends the room."""
        sender, slot = self._senders[room], room % LANES
        pages = self._tables[slot][sender.pop_decode_prefix_len() // self._page_size :]
        sender.init(len(pages), slot)
        self._manager.metadata.bootstrap_room[slot, 0] = room
        for chunk in np.array_split(pages, self._chunks):
            sender.send(chunk)

    def completed(self) -> list[News]:
        """Poll each sender."""
        states, news = self._manager.states, []
        for room, sender in list(self._senders.items()):
            state = sender.poll()
            if state == states.WaitingForInput and room not in self._granted:
                self._granted.add(room)
                news.append(News(room, granted=True))
            elif state == states.Success:
                news.append(News(room, freed=True, ended=True))
                sender.clear()
                del self._senders[room]
            elif state == states.Failed:
                sender.failure_exception()
        return news


class SglangDecode:
    """A `DecodeEnd` over SGLang's interfaces."""

    nap_s = LOOK_S

    def __init__(self, manager: Manager, tables: list[list[int]], page_size: int, load: Load) -> None:
        self._manager = manager
        self._tables = [np.asarray(table[load.prefix :], np.int32) for table in tables]
        self._prefix_tokens = load.prefix * page_size
        self._receivers: dict[int, Any] = {}
        while not manager.native.try_ensure_parallel_info(manager.address):
            time.sleep(RETRY_S)

    def receive(self, room: int) -> None:
        """Start a request."""
        receiver = self._manager.make(room)
        receiver.init(0)
        slot = room % LANES
        receiver.send_metadata(self._tables[slot], slot, None, decode_prefix_len=self._prefix_tokens)
        self._receivers[room] = receiver

    def completed(self) -> list[News]:
        """Poll each receiver."""
        states, news = self._manager.states, []
        for room, receiver in list(self._receivers.items()):
            state = receiver.poll()
            if state == states.Success:
                if int(self._manager.metadata.bootstrap_room[room % LANES, 0]) != room:
                    raise KvflowError("metadata of another room has arrived", room=room)
                news.append(News(room, ended=True))
                receiver.clear()
                del self._receivers[room]
            elif state == states.Failed:
                receiver.failure_exception()
        return news

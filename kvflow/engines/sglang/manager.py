"""One manager for each scheduler of SGLang: holds the rank that all of its requests share, and connects the two sides.

SGLang's `Common*` classes keep the state of each room, the timeouts and the bootstrap server. kvflow replaces what they
do with their own sockets: page lists, aborts and their acknowledgements, statuses. Prefill ranks register with the
bootstrap server the address of the first rank of their group, which answers for all of them.
"""

import os
import time
import uuid
from collections import defaultdict
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVManager
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_device, get_parallel, process_model_config
from typing_extensions import override

import kvflow
import kvflow.blocking
from kvflow import Endpoint, Memory, Outcome, SharedBackend
from kvflow.blocking import LoopThread
from kvflow.engines.doctor import start_doctor
from kvflow.engines.logs import adapter_logger
from kvflow.engines.sglang.bootstrap import name_of_transport, transport_named_in
from kvflow.engines.sglang.buffers import Shard
from kvflow.engines.sglang.memory import PoolMap, describe_pools
from kvflow.engines.sglang.metadata import MetadataRows
from kvflow.engines.sglang.options import (
    log_what_has_no_effect,
    refuse_turns,
    refuse_unserved,
    transport_options,
)
from kvflow.engines.sglang.quarantine import QuarantineWatch
from kvflow.engines.sglang.settings import default_limits, default_timeouts, read_settings
from kvflow.engines.sglang.turns import TURN_S, TurnHolder, TurnOwner
from kvflow.engines.times import RequestTimes
from kvflow.errors import shorten
from kvflow.geometry import Location, TokenShard

if TYPE_CHECKING:
    from kvflow.engines.sglang.ends import TransferEnd

__all__ = ["KvflowKVManager"]

LOGGER: Final = adapter_logger(__name__)


class KvflowKVManager(CommonKVManager):
    """The manager that SGLang creates for each of its prefill and decode schedulers; `args` describe the pools.

    Raises:
        ConfigError: SGLang is configured in a way that kvflow does not support.
        LayoutError: A pool is of a kind that kvflow does not move.
    """

    supports_deferred_decode_kv_release = True
    reports_transfer_latency = True
    local_ip: str
    rank_port: int

    def __init__(
        self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool | None = False
    ) -> None:
        refuse_unserved(disaggregation_mode)
        log_what_has_no_effect()
        self.settings = read_settings(os.environ)
        self._transport_options = transport_options(self.settings, args)
        self.pools: PoolMap = _describe(args, is_mla=bool(is_mla_backend), fingerprint=self.settings.fingerprint)
        self.metadata = MetadataRows(args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens)
        self.request_times = RequestTimes(LOGGER, time.monotonic)
        self._ends: dict[Any, TransferEnd] = {}
        self._held: defaultdict[int, list[TransferEnd]] = defaultdict(list)
        self._quarantine = QuarantineWatch(self.settings.releases)
        self.turns: TurnHolder | TurnOwner | None = None
        self._threads = ExitStack()
        self._placement: dict[str, Any] = {"affinity": self.settings.affinity}
        try:
            if self.settings.return_turns:
                refuse_turns(disaggregation_mode, args)
                loop = self._threads.enter_context(LoopThread(self.settings.affinity))
                backend = SharedBackend(self.settings.backend, self._transport_options)
                self._placement = {"backend": backend, "loop": loop}
            super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
            start_doctor(self.settings, LOGGER, self._transport_options)
            if disaggregation_mode == DisaggregationMode.DECODE:
                self._open_decode()
                self._start_heartbeat_checker_thread()
        except BaseException:  # when SGLang's ZMQ context is garbage-collected, it waits for sockets that are open
            self._close_ranks()
            self._threads.close()
            if hasattr(self, "server_socket"):
                self.server_socket.close(linger=0)
            raise

    # Ranks

    @override
    def register_to_bootstrap(self) -> None:
        """Open the prefill rank, and register the address of the rank that answers for its group."""
        self._host = self.local_ip
        self.kv_layout = name_of_transport(self.settings.backend)
        self._open_prefill()
        super().register_to_bootstrap()

    def _open_prefill(self, port: int = 0) -> None:
        dp_rank = self.attn_dp_rank if self.system_dp_size == 1 else self.system_dp_rank
        instance = self._share(f"{self._host}:{self.bootstrap_port}/{dp_rank}")  # ranks may be on several hosts
        leads = self.attn_tp_rank == self.pp_rank == 0
        if leads:
            self._make_prefill(instance, None, port)
        found = self._share(self.rank.endpoint if leads else None)
        if not leads:
            self._make_prefill(instance, found, port)
        leader = Endpoint.parse(found)
        self.local_ip, self.rank_port = leader.host, leader.port

    def _make_prefill(self, instance: str, leader: str | None, port: int) -> None:
        try:
            self._open_rank(instance, leader, port)
        except kvflow.ConfigError:
            if not port:
                raise
            self._open_rank(instance, leader, 0)  # the previous rank keeps its port while one of its writes may land

    def _open_rank(self, instance: str, leader: str | None, port: int) -> None:
        wait_s = envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get()
        self.rank: Any = self._open_sending(instance, wait_s, registry=leader, port=port)
        if self.settings.return_turns:
            receives = self._open_receiving(instance, TURN_S)
            self.turns = TurnOwner(self.rank, receives, self.pools, QuarantineWatch(self.settings.releases))

    def _open_decode(self) -> None:
        self._host = self.local_ip
        instance = self._share(f"{self.local_ip}/{uuid.uuid4().hex[:12]}")
        wait_s = max(self.waiting_timeout, envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get())
        self.rank = self._open_receiving(instance, wait_s)
        if self.settings.return_turns:
            self.turns = TurnHolder(self.rank, self._open_sending(instance, TURN_S), self.pools)

    def _open_sending(self, instance: str, wait_s: float, *, registry: str | None = None, port: int = 0) -> Any:
        config = kvflow.PrefillConfig(
            instance=instance,
            engine_rank=self._prefill_unique_rank(),
            num_ranks=self.attn_tp_size * self.pp_size,
            registry=registry,
            bind=self.settings.bind_to(self._host, port),
            takes_offers=self.settings.return_turns and self.disaggregation_mode == DisaggregationMode.PREFILL,
            **self._common_settings(wait_s),
        )
        return kvflow.blocking.PrefillRank(config, self.pools.layout, **self._placement).open()

    def _open_receiving(self, instance: str, wait_s: float) -> Any:
        config = kvflow.DecodeConfig(
            instance=instance,
            engine_rank=self.attn_tp_rank,
            num_ranks=self.attn_tp_size,
            advertise=self._host,
            **self.settings.for_decode(),
            **self._common_settings(wait_s),
        )
        return kvflow.blocking.DecodeRank(config, self.pools.layout, **self._placement).open()

    def _close_ranks(self) -> None:
        for one in (self.turns, getattr(self, "rank", None)):
            if one is not None:
                one.close()

    def _common_settings(self, wait_s: float) -> dict[str, Any]:
        timeouts = default_timeouts(wait_s)
        limits = default_limits(self.metadata.num_bytes, returns_turns=self.settings.return_turns)
        return self.settings.for_rank(timeouts, limits) | {"backend_options": self._transport_options}

    def _share(self, value: Any) -> Any:
        """Broadcast a value from the first rank of the group, and return it on each rank."""
        parallel = get_parallel()
        if self.attn_tp_size > 1:
            value = parallel.attn_tp_group.broadcast_object(value, src=0)
        if self.pp_size > 1:
            value = parallel.pp_group.broadcast_object(value, src=0)
        return value

    def deregister_buffer_to_engine(self) -> None:
        """Close the ranks, because SGLang is about to free the pools."""
        self._close_ranks()

    def register_buffer_to_engine(self) -> None:
        """Open a rank on the pools again, at the same address if it is free."""
        self._ends.clear()
        self._held.clear()
        if self.disaggregation_mode == DisaggregationMode.PREFILL:
            before = self.local_ip, self.rank_port
            self._open_prefill(Endpoint.parse(self.rank.endpoint).port)
            if (self.local_ip, self.rank_port) != before:
                super().register_to_bootstrap()
        else:
            self._open_decode()

    def teardown(self) -> None:
        """Close the ranks, and stop the threads and sockets of the base class."""
        if self.disaggregation_mode == DisaggregationMode.DECODE:
            self._heartbeat_shutdown.set()
        self._close_ranks()
        self._threads.close()
        self.server_socket.close(linger=0)

    # Requests

    def has(self, room: int) -> bool:
        """Return whether a room is in use by a request. SGLang itself rejects a room that has failed."""
        return self.request_status.get(room) not in (None, KVPoll.Failed)

    def follow(self, end: "TransferEnd") -> None:
        """Pass each update of an end's transfer to the end, until the transfer is over and safe."""
        self._ends[end.transfer] = end
        self._held[end.bootstrap_room].append(end)

    def advance(self) -> None:
        """Process the updates since the last step. This is cheap if there are none."""
        for update in self.rank.completed():
            end = self._ends.get(update.transfer)
            if end is None:
                continue
            end.apply_update(update)
            if update.outcome is not Outcome.PENDING and update.memory is Memory.SAFE:
                self._forget(end)
        if self._ends:
            self._quarantine.check_pages(self.rank, self._ends, time.monotonic())

    def _forget(self, end: "TransferEnd") -> None:
        self._ends.pop(end.transfer, None)
        held = self._held[end.bootstrap_room]
        held.remove(end)
        if not held:
            del self._held[end.bootstrap_room]

    def find_misfit(self, bootstrap_addr: str) -> str | None:
        """Return why requests of a prefill server cannot be received here; None if its transport is kvflow's, too."""
        if transport_named_in(self.prefill_info_table[bootstrap_addr].kv_layout) is not None:
            return None
        own = name_of_transport(self.settings.backend)
        return (
            f"prefill server {bootstrap_addr} uses a transfer backend of SGLang's own, such as nixl or mooncake, and "
            f"this decode server {own}; start both with --disaggregation-transfer-backend kvflow"
        )

    def reason_of(self, room: int) -> str:
        """Return why SGLang has failed a room; empty if it has not."""
        with self.failure_lock:
            return str(self.failure_records.get(room, ""))

    def fail(self, room: int, reason: str) -> None:
        """Fail a room, unless it has failed already or is over."""
        if self.request_status.get(room) in (None, KVPoll.Failed, KVPoll.Success):
            return
        with self.failure_lock:
            self.failure_records.setdefault(room, shorten(reason))
        self.update_status(room, KVPoll.Failed)

    @override
    def get_kv_replica_factor(self) -> int:
        """Return 1: bytes are counted once, however many decode ranks receive a copy of the latents."""
        return 1

    @override
    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """Return whether nothing can write to the pages of a room any more; elapsed time is not a proof."""
        self.advance()
        return all(end.is_safe for end in self._held.get(bootstrap_room, ()))

    @override
    def clear_deferred_abort_state(self, bootstrap_room: int) -> None:
        """Do nothing: an end is removed when it is safe."""

    @override
    def add_transfer_request(
        self,
        bootstrap_room: int,
        kv_indices: Any,
        index_slice: slice,
        is_last_chunk: bool,
        aux_index: int | None = None,
        state_indices: Any = None,
        *,
        num_kv_tokens: int | None = None,
        wait_event: Any = None,
        **_: Any,
    ) -> None:
        """Send a chunk, for `KvflowKVSender.send`, which fails the request if it does not fit.

        SGLang computes further chunks without polling the request. If the request has failed meanwhile and nothing is
        held for it, the chunk is dropped, and the next poll reports the failure.

        Raises:
            BaseException: The chunk does not fit, or whatever SGLang's arrays raise.
        """
        held = self._held.get(bootstrap_room)
        if not held:
            return
        sender: Any = held[-1]
        first = index_slice.start
        if is_last_chunk:
            row = -1 if aux_index is None else aux_index
            sender.offer_last(first, kv_indices, state_indices, num_kv_tokens, metadata_row=row, ready=wait_event)
        else:
            sender.offer(first, kv_indices, num_kv_tokens, ready=wait_event)
        if self.request_status.get(bootstrap_room) == KVPoll.WaitingForInput:
            self.update_status(bootstrap_room, KVPoll.Transferring)


def _describe(args: Any, *, is_mla: bool, fingerprint: str | None) -> PoolMap:
    parallel = get_parallel()
    is_mla = is_mla or bool(getattr(args, "is_hybrid_mla_backend", False))
    model = process_model_config()
    shard = Shard(
        kv_heads=1 if is_mla else model.get_total_num_kv_heads(),
        tp_size=parallel.attn_tp_size,
        tp_rank=parallel.attn_tp_rank,
        pp_size=parallel.pp_size,
        pp_rank=args.pp_rank,
        is_mla=is_mla,
        has_unknown_order=_is_vectorized(),
        tokens=TokenShard(parallel.attn_dcp_size, parallel.attn_dcp_rank),
    )
    if fingerprint is None:
        sizes = f"{model.num_hidden_layers}x{model.hidden_size}"
        fingerprint = f"{model.hf_config.architectures[0]}/{sizes}/{args.kv_cache_dtype_str}/{args.kv_layout}"
    location = Location("DRAM", 0) if get_device().device == "cpu" else Location("VRAM", args.gpu_id)
    # Rows that differ, such as those of an option that only one side has, could not be told apart in the metadata.
    fingerprint += f"/metadata {'+'.join(map(str, args.aux_item_lens))}"
    return describe_pools(args, shard, fingerprint=fingerprint, location=location)


def _is_vectorized() -> bool:
    """Return whether AITER may have reordered the pages of the main pool, which `KVArgs` does not show."""
    return bool(envs.SGLANG_USE_AITER.get()) and envs.SGLANG_AITER_KV_CACHE_LAYOUT.get().lower() != "nhd"

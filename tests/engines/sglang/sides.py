"""One side of a deployment in one process: managers of all its ranks, created as SGLang's schedulers do."""

import functools
import itertools
import logging
import sys
import time
from types import SimpleNamespace
from typing import Any, ClassVar

import nixl_cu12._api
import numpy as np
import sglang.srt.runtime_context as runtime
import torch
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll
from sglang.srt.disaggregation.utils import (
    DisaggregationMode,
    KVClassType,
    MetadataBuffers,
    TransferBackend,
    build_kv_layer_ids,
    get_kv_class,
    get_kv_transfer_buf_infos,
    setup_state_kv_args,
)

from kvflow.engines.sglang import manager as adapter
from tests.engines.sglang.models import MODELS, PAGES, Held, Model, Rank
from tests.engines.sglang.opaque import OPAQUE

__all__ = ["FIRST_TOKEN", "Side", "leftovers", "prepare", "reason_of"]

ROWS = 64
FIRST_TOKEN = 42


class Group:
    """A fake group of ranks that live in this process and are created in order; it keeps the values of rank 0.

    Args:
        name: Name of the group.
        rank: Number of the rank within it.
    """

    _kept: ClassVar[dict[tuple[str, int], Any]] = {}

    def __init__(self, name: str, rank: int) -> None:
        self.rank_in_group = rank
        self._name = name
        self._calls = itertools.count()

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """Return the value that rank `src` gave in its call of the same number."""
        key = (self._name, next(self._calls))
        if self.rank_in_group == src:
            self._kept[key] = value
        return self._kept[key]


def prepare(mode: str, port: int, model: Model) -> Any:
    """Install SGLang's settings in this process."""
    configuration = SimpleNamespace(
        get_total_num_kv_heads=lambda: model.heads,
        num_hidden_layers=model.layers,
        hidden_size=64,
        hf_config=SimpleNamespace(architectures=["Example"]),
    )
    vars(adapter)["process_model_config"] = lambda: configuration
    return (
        runtime.get_context()
        .override_server_args(
            host="127.0.0.1",
            disaggregation_bootstrap_port=port,
            device="cpu",
            page_size=model.page,
            disaggregation_mode=mode,
            tp_size=1,
            load_balance_method="follow_bootstrap_room" if mode == "prefill" else "round_robin",
        )
        .install()
    )


def set_rank(rank: Rank) -> None:
    """Set SGLang's global context to that of a rank."""
    runtime.get_parallel().override_permanently(
        tp_size=rank.tp_size * rank.dp_size,
        moe_tp_size=rank.tp_size * rank.dp_size,
        tp_rank=rank.tp_size * rank.dp_rank + rank.tp_rank,
        attn_tp_size=rank.tp_size,
        attn_tp_rank=rank.tp_rank,
        attn_tp_group=Group(f"tp of stage {rank.pp_rank}", rank.tp_rank),
        dcp_size=rank.dcp_size,
        dcp_enabled=rank.dcp_size > 1,
        attn_dcp_size=rank.dcp_size,
        attn_dcp_rank=rank.tp_rank % rank.dcp_size,
        attn_dp_size=rank.dp_size,
        attn_dp_rank=rank.dp_rank,
        dp_size=rank.replicas,
        dp_rank=rank.replica,
        num_dp_ranks=rank.dp_size * rank.replicas,
        attn_cp_rank=0,
        pp_size=rank.pp_size,
        pp_rank=rank.pp_rank,
        pp_group=Group(f"pp of {rank.tp_rank}", rank.pp_rank),
    )


def describe(
    pool: Any, draft: Any, model: Model, rank: Rank, side: str, *, has_checksum: bool = False
) -> tuple[KVArgs, MetadataBuffers]:
    """Fill `KVArgs` as SGLang's queues do."""
    args = KVArgs()
    args.engine_rank, args.pp_rank, args.system_dp_rank, args.gpu_id = rank.tp_rank, rank.pp_rank, 0, 0
    lists = [list(values) for values in get_kv_transfer_buf_infos(pool)]
    args.num_draft_entries = 0
    if draft is not None:
        more = draft.get_contiguous_buf_infos()
        args.num_draft_entries = len(more[0])
        lists = [own + list(added) for own, added in zip(lists, more, strict=True)]
    args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = lists
    args.kv_layer_ids = build_kv_layer_ids(
        token_to_kv_pool=pool,
        draft_token_to_kv_pool=draft,
        num_draft_entries=args.num_draft_entries,
        num_hidden_layers=model.layers,
    )
    setup_state_kv_args(args, pool, draft, model.layers)
    args.kv_cache_dtype_str, args.page_size, args.ib_device, args.rust_http_port = model.dtype, model.page, None, None
    if side == "prefill":
        args.total_kv_head_num, args.kv_head_num = model.heads, max(1, model.heads // rank.tp_size)
        args.prefill_start_layer = rank.pp_rank * model.layers // rank.pp_size
        args.prefill_end_layer = None
    buffers = MetadataBuffers(
        ROWS,
        hidden_size=64,
        hidden_states_dtype=torch.bfloat16,
        max_sampling_mask_tokens=0,
        kv_checksum_enabled=has_checksum,
    )
    args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = buffers.get_buf_infos()
    return args, buffers


class Side:
    """All ranks of one side.

    Args:
        mode: "prefill" or "decode".
        name: Name of the model.
        port: Port of the bootstrap server.
        tp_size: Ranks that share the heads.
        pp_size: Pipeline stages.
        dcp_size: Ranks that share the tokens of latents.
        has_checksum: SGLang's checksums are on, which adds a row of metadata.
        backend: Name of the transfer backend, as on SGLang's command line.
    """

    def __init__(
        self,
        mode: str,
        name: str,
        port: int,
        tp_size: int = 1,
        pp_size: int = 1,
        dcp_size: int = 1,
        *,
        has_checksum: bool = False,
        backend: str = "kvflow",
    ) -> None:
        if backend == "nixl":
            sys.modules["nixl"], sys.modules["nixl._api"] = nixl_cu12, nixl_cu12._api  # the name that SGLang imports
        self._backend = TransferBackend(backend)
        self.mode, self.model, self.address = mode, (MODELS | OPAQUE)[name](), f"127.0.0.1:{port}"
        self._args = prepare(mode, port, self.model)
        server = get_kv_class(self._backend, KVClassType.BOOTSTRAP_SERVER)
        self._server = server("127.0.0.1", port) if mode == "prefill" else None
        time.sleep(0.3 if self._server else 0)  # SGLang offers no way to tell when it listens
        self._has_checksum = has_checksum
        self.ranks = [
            Rank(tp_size, tp, pp_size, pp, dcp_size=dcp_size) for tp in range(tp_size) for pp in range(pp_size)
        ]
        self._dcp_size, self._entry = dcp_size, self.model.page * dcp_size
        self.pools: list[Any] = []
        self.drafts: list[Any] = []
        self.metadata: list[Any] = []
        self.managers: list[Any] = []
        self._random = np.random.default_rng(7 if mode == "prefill" else 8)
        for rank in self.ranks:
            self._add(rank)

    def _add(self, rank: Rank) -> None:
        set_rank(rank)
        pool, draft = self.model.pool(rank), self.model.draft(self.mode, rank)
        args, metadata = describe(pool, draft, self.model, rank, self.mode, has_checksum=self._has_checksum)
        args.kv_data_mem_kinds = ["DRAM"] * len(args.kv_data_ptrs)  # SGLang's NIXL would take it for a device's
        kind = get_kv_class(self._backend, KVClassType.MANAGER)
        self.managers.append(kind(args, DisaggregationMode(self.mode), self._args, self.model.is_mla))
        self.pools.append(pool)
        self.drafts.append(draft)
        self.metadata.append(metadata)

    def close(self) -> None:
        """Close all ranks."""
        for manager in self.managers:
            if self._backend.value == "kvflow":
                manager.teardown()
        if self._server is not None:
            self._server.close()

    def hold(self, tokens: int, prefix: int) -> Held:
        """Choose pages for a request."""
        page = self._entry
        first = self.model.window_start(tokens, prefix)
        return Held(
            self._random.permutation(PAGES - 1)[: -(-tokens // page)].astype(np.int32) + 1,
            self._random.permutation(PAGES - 1)[: -(-(tokens - first) // page)].astype(np.int32) + 1,
            int(self._random.integers(1, 8)),
            prefix // page,
        )

    def end(self, number: int, room: int) -> Any:
        """Create the sender or receiver of a rank."""
        kind = KVClassType.SENDER if self.mode == "prefill" else KVClassType.RECEIVER
        made = get_kv_class(self._backend, kind)(
            mgr=self.managers[number], bootstrap_addr=self.address, bootstrap_room=room
        )
        if self.mode == "decode":
            made.init(0)
        return made

    def begin(self, room: int) -> list[str]:
        """Create the first rank's end of a request, and return what SGLang logs meanwhile."""
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        logger = logging.getLogger("sglang.srt.disaggregation.common.conn")
        logger.addHandler(handler)
        if self.mode == "decode":
            assert self.managers[0].try_ensure_parallel_info(self.address)
        self._begun = self.end(0, room)
        logger.removeHandler(handler)
        return lines

    def failure(self, timeout_s: float = 20) -> str:
        """Return why that end has failed, or "" if it has not within the timeout."""
        wait_for([self._begun], time.monotonic() + timeout_s, KVPoll.Success)
        return reason_of(self._begun) if self._begun.poll() == KVPoll.Failed else ""

    def transfer(
        self, room: int, tokens: int, prefix: int = 0, chunks: int = 2, timeout_s: float = 20
    ) -> dict[str, Any]:
        """Send or receive one request on all ranks; return statuses, failure reasons and differences."""
        held = self.hold(tokens, prefix)
        step = self._send if self.mode == "prefill" else self._receive
        ends = step(room, held, tokens, prefix, chunks, time.monotonic() + timeout_s)
        statuses = [end.poll() for end in ends]
        reasons = [reason_of(end) for end in ends if end.poll() == KVPoll.Failed]
        wrong = []
        if self.mode == "decode" and not reasons:
            wrong = [
                problem for number in range(len(ends)) for problem in self._compare(number, room, held, tokens, prefix)
            ]
        for end in ends:
            end.clear()
        return {"statuses": statuses, "reasons": reasons, "wrong": wrong}

    def give_up(self, room: int, tokens: int, timeout_s: float = 20) -> list[int]:
        """Send or receive half of a request on all ranks, let decode abort it, and return the statuses.

        Decode waits until each of its ranks may reuse the pages.
        """
        held, deadline = self.hold(tokens, 0), time.monotonic() + timeout_s
        if self.mode == "prefill":
            ends = [self.end(number, room) for number in range(len(self.ranks))]
            wait_for(ends, deadline, KVPoll.WaitingForInput)
            for end in ends:
                end.init(len(held.pages), 5)
                end.send(held.pages[:2], None, num_kv_tokens=2 * self.model.page)
            wait_for(ends, deadline, KVPoll.Success)
        else:
            for manager in self.managers:
                assert manager.try_ensure_parallel_info(self.address)
            ends = [self.end(number, room) for number in range(len(self.ranks))]
            for end in ends:
                end.send_metadata(held.pages, 3, self.model.state_indices(held, tokens), decode_prefix_len=0)
                end.abort()
            while time.monotonic() < deadline and not all(end.is_abort_release_safe() for end in ends):
                time.sleep(2e-4)
            assert all(end.is_abort_release_safe() for end in ends)
        statuses = [end.poll() for end in ends]
        for end in ends:
            end.clear()
        return statuses

    def _request(self, number: int, held: Held, tokens: int, prefix: int) -> tuple[Any, ...]:
        return self.pools[number], self.drafts[number], self.ranks[number], held, tokens, prefix

    def _send(self, room: int, held: Held, tokens: int, prefix: int, chunks: int, deadline: float) -> list[Any]:
        for number in range(len(self.ranks)):
            self.model.write(*self._request(number, held, tokens, prefix))
        ends = [self.end(number, room) for number in range(len(self.ranks))]
        wait_for(ends, deadline, KVPoll.WaitingForInput)
        for number, end in enumerate(ends):
            if end.poll() == KVPoll.WaitingForInput:
                self.offer(number, end, held, (prefix, tokens), chunks)
        wait_for(ends, deadline, KVPoll.Success)
        return ends

    def offer(self, number: int, end: Any, held: Held, span: tuple[int, int], chunks: int) -> None:
        """Send all chunks of a request, from the prefix to the last token."""
        prefix, tokens = span
        found = end.pop_decode_prefix_len()
        assert found == prefix, (found, prefix)
        end.init(len(held.pages), 5)
        self.metadata[number].bootstrap_room[5, 0] = end.bootstrap_room
        self.metadata[number].output_ids[5, 0] = FIRST_TOKEN
        parts = np.array_split(held.pages, max(1, min(chunks, len(held.pages))))
        for place, part in enumerate(parts):
            states = self.model.state_indices(held, tokens, self._dcp_size) if place == len(parts) - 1 else None
            count = min(len(part) * self._entry, tokens - prefix)
            end.send(part, states, num_kv_tokens=count)
            prefix += count

    def _receive(self, room: int, held: Held, tokens: int, prefix: int, _: int, deadline: float) -> list[Any]:
        for number in range(len(self.ranks)):
            self.model.blank(*self._request(number, held, tokens, prefix))
            assert self.managers[number].try_ensure_parallel_info(self.address)
        ends = [self.end(number, room) for number in range(len(self.ranks))]
        for end in ends:
            self._grant(end, held, tokens, prefix)
        wait_for(ends, deadline, KVPoll.Success)
        return ends

    def _grant(self, end: Any, held: Held, tokens: int, prefix: int) -> None:
        """Send the pages of a request as SGLang's queue does, which alone knows the number of its tokens."""
        from sglang.srt.disaggregation.decode import DecodePreallocQueue  # noqa: PLC0415 - takes seconds

        queue = SimpleNamespace(
            req_to_metadata_buffer_idx_allocator=SimpleNamespace(alloc=lambda: 3),
            transfer_queue=SimpleNamespace(enable_staging=False),
            _num_published_destinations=0,
            _transfer_page_indices=functools.partial(DecodePreallocQueue._transfer_page_indices, None),
        )
        stamps = SimpleNamespace(set_decode_transfer_queue_entry_time=lambda: None)
        request = SimpleNamespace(kv_receiver=end, is_rebootstrap=False, req=SimpleNamespace(time_stats=stamps))
        places = (np.asarray(held.pages, np.int64)[:, None] * self._entry + np.arange(self._entry)).reshape(-1)
        DecodePreallocQueue._send_kv_metadata(
            queue,
            request,
            torch.as_tensor(places[: tokens - prefix]),
            self._entry,
            self.model.state_indices(held, tokens, self._dcp_size),
            decode_prefix_len=prefix,
        )

    def _compare(self, number: int, room: int, held: Held, tokens: int, prefix: int) -> list[str]:
        found = self.model.differences(*self._request(number, held, tokens, prefix))
        metadata = self.metadata[number]
        if (int(metadata.bootstrap_room[3, 0]), int(metadata.output_ids[3, 0])) != (room, FIRST_TOKEN):
            found.append("metadata differs")
        return [f"rank {number}: {problem}" for problem in found]


def wait_for(ends: list[Any], deadline: float, status: int) -> None:
    """Poll as a scheduler does, until all ends have reached a status or one has failed."""
    while time.monotonic() < deadline:
        found = [end.poll() for end in ends]
        if KVPoll.Failed in found or min(found) >= status:
            return
        time.sleep(2e-4)


def reason_of(end: Any) -> str:
    """Return why an end has failed, as SGLang's queues ask."""
    try:
        end.failure_exception()
    except Exception as error:  # noqa: BLE001 - whatever it is
        return str(error)
    return ""


def leftovers(manager: Any) -> dict[str, int]:
    """Count a manager's leftover state of requests, after it has processed all changes as in any poll."""
    manager.advance()
    names = ["request_status", "failure_records", "_ends", "_held", "transfer_infos", "prefill_response_tracker"]
    names += ["req_to_decode_prefix_len", "required_prefill_response_num_table"]
    return {name: len(getattr(manager, name)) for name in names if getattr(manager, name, None)}

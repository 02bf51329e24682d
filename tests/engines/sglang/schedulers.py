"""The parts of SGLang's schedulers that transfers use: its own queues, pools, allocators and requests, without a model.

The queues' own constructors create the manager. Everything else that they need from a scheduler is a stub.
"""

import functools
import itertools
import logging
import tempfile
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import MagicMock

import numpy as np
import sglang.srt.disaggregation.decode as decode_module
import sglang.srt.disaggregation.prefill as prefill_module
import sglang.srt.runtime_context as runtime
import torch
from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferDestination
from sglang.srt.disaggregation.common.conn import CommonKVManager, KVTransferError
from sglang.srt.disaggregation.utils import (
    FAKE_BOOTSTRAP_HOST,
    MetadataBuffers,
    ReqToMetadataIdxAllocator,
    TransferBackend,
)
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.managers.scheduler_pp_mixin import SchedulerPPMixin
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.sampling.sampling_params import SamplingParams
from torch import distributed

from kvflow.backends.nixl import library
from kvflow.engines.sglang.bootstrap import KvflowKVBootstrapServer
from tests.engines.sglang import sides
from tests.engines.sglang.models import PAGES, UNTOUCHED, Model, Rank, content, same, share

__all__ = ["SCHEDULERS", "DecodeScheduler", "PrefillScheduler"]

ROWS: Final = 8
LONGEST: Final = 512


class Forward:
    """A fake `torch.cuda.Event` of a forward pass, which ends when the test says so."""

    def __init__(self) -> None:
        self._is_over = threading.Event()

    def end(self) -> None:
        """End the forward pass."""
        self._is_over.set()

    def synchronize(self) -> None:
        """Wait until the forward pass has ended."""
        self._is_over.wait(20)


class Group(sides.Group):
    """A group of ranks in processes of their own, with collectives and point-to-point messages.

    Args:
        rank: Number of this rank.
        cpu_group: Its torch process group.
    """

    def __init__(self, rank: int, cpu_group: Any) -> None:
        super().__init__("of processes", rank)
        self.cpu_group = cpu_group
        self.is_last_rank = rank == distributed.get_world_size(cpu_group) - 1

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """Return the value of rank `src`."""
        said = [value]
        if distributed.get_world_size(self.cpu_group) > 1:
            distributed.broadcast_object_list(said, src=src)
        return said[0]

    def send_object(self, value: Any, dst: int, **_: Any) -> list[Any]:
        """Send an object to another rank; blocks, so there is nothing left to wait for."""
        distributed.send_object_list([value], dst=dst)
        return []

    def recv_object(self, src: int, **_: Any) -> Any:
        """Receive an object from another rank."""
        said = [None]
        distributed.recv_object_list(said, src=src)
        return said[0]

    def agree(self, values: list[str]) -> list[str]:
        """Return the values that all ranks have in their lists."""
        lists: list[list[str]] = [[] for _ in range(distributed.get_world_size(self.cpu_group))]
        distributed.all_gather_object(lists, values, group=self.cpu_group)
        return [value for value in values if all(value in one for one in lists)]


def make_groups(rank: Rank, store: str) -> tuple[Group, Group]:
    """Create the tensor-parallel and the pipeline group of a rank; one of them holds this rank alone.

    Args:
        rank: This rank.
        store: File through which ranks find each other; a single rank needs none.
    """
    size, number = rank.tp_size * rank.pp_size * rank.dp_size * rank.replicas, sum(rank[1::2])
    if not distributed.is_initialized():
        place = store or Path(tempfile.mkdtemp()) / "store"
        distributed.init_process_group("gloo", init_method=f"file://{place}", rank=number, world_size=size)
    alone = Group(0, [distributed.new_group([one]) for one in range(size)][number])
    everybody = Group(number, distributed.group.WORLD)
    if rank.dp_size * rank.replicas > 1:
        return alone, alone
    return (everybody, alone) if rank.tp_size > 1 else (alone, everybody)


class Scheduler:
    """Common base of both roles.

    Args:
        port: Port of the bootstrap server.
        rank: This rank; each other rank is a process of its own.
        store: See `make_groups`.
    """

    mode = ""
    manager: Any
    queue: Any

    def __init__(self, port: int, rank: Rank, store: str = "") -> None:
        self.port, self.model, self.rank = port, Model(), rank
        self.server_args = sides.prepare(self.mode, port, self.model)
        sides.set_rank(rank)
        self.group, self.stages = make_groups(rank, store)
        runtime.get_parallel().override_permanently(attn_tp_group=self.group, pp_group=self.stages)
        self.pool = self.model.pool(rank)
        self.allocator = PagedTokenToKVPoolAllocator(
            self.model.page * PAGES, self.model.page, torch.bfloat16, "cpu", self.pool, need_sort=False
        )
        self.free = self.allocator.available_size()
        self.metadata = MetadataBuffers(ROWS, 64, torch.bfloat16, max_sampling_mask_tokens=0)
        self.rows = ReqToMetadataIdxAllocator(ROWS)
        self.told: list[tuple[str, str]] = []
        self.requests: dict[int, Any] = {}
        self._numbers = itertools.count()
        self.scheduler = self._scheduler()

    def _scheduler(self) -> Any:
        """Return the attributes of a scheduler that the queues need."""
        configuration = SimpleNamespace(
            num_hidden_layers=self.model.layers,
            get_total_num_kv_heads=lambda: self.model.heads,
            hf_text_config=SimpleNamespace(),
        )
        runner = SimpleNamespace(
            kv_cache_dtype_str="bfloat16",
            effective_logical_max_total_num_tokens=self.free,
            max_token_pool_size=self.free,
            dcp_size=1,
        )
        return {
            "server_args": self.server_args,
            "tp_worker": SimpleNamespace(model_runner=runner, is_hybrid_swa=False),
            "model_config": configuration,
            "token_to_kv_pool_allocator": self.allocator,
            "metrics_reporter": MagicMock(enable_metrics=False, current_scheduler_metrics_enabled=False),
            "output_streamer": SimpleNamespace(stream_output=self._stream),
            "enable_hisparse": False,
            "kv_checksum_computer": None,
            "waiting_queue": [],
        }

    def _stream(self, requests: list[Any], *_: Any) -> None:
        for request in requests:
            self.told.append((request.rid, getattr(request.finished_reason, "message", "")))

    def request(
        self, room: int, tokens: int, host: str = "127.0.0.1", port: int = 0, dp_rank: int | None = None
    ) -> Any:
        """Make a request as the tokenizer does."""
        made = Req(
            f"request {next(self._numbers)}",
            "",
            array("q", range(tokens)),
            SamplingParams(max_new_tokens=8),
            bootstrap_host=host,
            bootstrap_port=port or self.port,
            bootstrap_room=room,
            disagg_prefill_dp_rank=dp_rank,
            vocab_size=1000,
        )
        made.time_stats = MagicMock()
        self.requests[room] = made
        return made

    def cells(self, room: int, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Return tensor, index and expected content for each buffer of a request."""
        found = self.table()[self.requests[room].kv.req_pool_idx, :tokens].long()
        pairs = []
        for layer, number in enumerate(self.model.span(self.rank)):
            for buffers, seed in ((self.pool.k_buffer, 2 * number), (self.pool.v_buffer, 2 * number + 1)):
                data = content(seed + 1_000 * self.seed(room), tokens, self.model.heads, self.model.dim)
                pairs.append((buffers[layer], found, data[:, share(self.model.heads, self.rank)]))
        return pairs

    def seed(self, room: int) -> int:
        """Return the seed of a request's content."""
        return room

    def table(self) -> torch.Tensor:
        """Return the `req_to_token` table."""
        raise NotImplementedError

    def step(self) -> None:
        """Run one step of the scheduler."""
        raise NotImplementedError

    def until(self, condition: Callable[[], object], timeout_s: float = 20) -> bool:
        """Run steps until a condition holds; return whether it did within the timeout."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.step()
            if condition():
                return True
            time.sleep(5e-4)
        return False

    def was_told(self, room: int) -> str:
        """Return the error message that the client of a request received, or ""."""
        return next((message for rid, message in self.told if rid == self.requests[room].rid), "")

    def add_twin(self, room: int, tokens: int) -> None:
        """Add a second request of a room; queries name it by the negative room."""
        first = self.requests[room]
        self.add(room, tokens)
        self.requests[-room], self.requests[room] = self.requests[room], first

    def forget(self, room: int) -> None:
        """Forget the messages to a request's client, so that another request can use its room."""
        rid = self.requests.pop(room).rid
        self.told = [entry for entry in self.told if entry[0] != rid]

    def add(self, room: int, tokens: int) -> None:
        """Add a request."""
        raise NotImplementedError

    def end(self, room: int) -> Any:
        """Return the sender or receiver of a request."""
        raise NotImplementedError

    def break_rank(self) -> None:
        """Break the rank as an internal error does, which no input should cause."""
        rank = self.manager.rank
        rank._portal.call(rank._rank._dispatcher.break_down, RuntimeError("on purpose"))

    def has_noticed_quarantine(self) -> bool:
        """Return whether the manager has seen pages without a proof."""
        return bool(self.manager._quarantine._touched)

    def reminders(self) -> list[str]:
        """Return the log lines of the manager about such pages a minute later."""
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        logger, watch = logging.getLogger("kvflow.engines.sglang"), self.manager._quarantine
        logger.addHandler(handler)
        due = watch._remind_at
        watch.check_pages(self.manager.rank, self.manager._ends, due)
        watch._asked.exception(20)  # has been answered
        watch.check_pages(self.manager.rank, self.manager._ends, due)
        logger.removeHandler(handler)
        watch._look_at = 0.0
        return lines

    def poll(self, room: int) -> int:
        """Return the status of a request, as the queues do."""
        return int(self.end(room).poll())

    def clear(self, room: int) -> None:
        """Clear a request, as the queues do at its end."""
        self.end(room).clear()

    def lose(self, room: int) -> None:
        """Drop the status of a request, as if it had been cleared."""
        self.manager.request_status.pop(room)

    def failure(self, room: int) -> tuple[str, bool]:
        """Return why a request has failed, and whether the failure comes from another rank."""
        try:
            self.end(room).failure_exception()
        except KVTransferError as error:
            return error.failure_reason, error.is_from_another_rank
        return "", False

    def release_memory(self) -> None:
        """Release the memory of the pools, as SGLang does between training steps."""
        self.queue.release_memory_occupation()

    def resume_memory(self) -> None:
        """Restore the memory, at the same addresses."""
        self.queue.resume_memory_occupation()

    def is_free(self) -> bool:
        """Return whether every page and every metadata row is free again."""
        return (self.allocator.available_size(), self.rows.available_size()) == (self.free, ROWS)

    def has_forgotten(self) -> bool:
        """Return whether the manager holds no state of any request."""
        return not self.leftovers()

    def leftovers(self) -> dict[str, int]:
        """Count the manager's leftover state of requests."""
        return sides.leftovers(self.manager)

    def close(self) -> None:
        """Close the manager."""
        self.manager.teardown()


class SlowLink:
    """Makes NIXL hold back writes, and report them as in progress, for as long as it is slow.

    Attributes:
        is_slow: Whether writes are held back.
    """

    def __init__(self) -> None:
        self.is_slow = False
        self._waiting: dict[int, Any] = {}
        agent: Any = library.load().nixl_agent
        transfer, check = agent.transfer, agent.check_xfer_state

        def begin(this: Any, handle: Any) -> Any:
            if not self.is_slow:
                return transfer(this, handle)
            self._waiting[id(handle)] = handle
            return "PROC"

        def look(this: Any, handle: Any) -> Any:
            if id(handle) not in self._waiting:
                return check(this, handle)
            return "PROC" if self.is_slow else transfer(this, self._waiting.pop(id(handle)))

        agent.transfer, agent.check_xfer_state = begin, look


@functools.cache
def slow_link() -> SlowLink:
    """Return the `SlowLink` of this process."""
    return SlowLink()


class PrefillScheduler(Scheduler):
    """Prefill: bootstrap queue, chunks, in-flight queue."""

    mode = "prefill"

    def __init__(self, port: int, rank: Rank, store: str = "") -> None:
        super().__init__(port, rank, store)
        self._server = KvflowKVBootstrapServer("127.0.0.1", port) if not any(rank[1::2]) else None
        time.sleep(0.3)

        class Mixed(prefill_module.SchedulerDisaggregationPrefillMixin, SchedulerPPMixin):
            """SGLang's own methods."""

        mixed: Any = Mixed()
        self.released: list[str] = []
        vars(mixed).update(
            self.scheduler,
            attn_cp_cpu_group=(self.stages if rank.tp_size > 1 else self.group).cpu_group,
            attn_tp_cpu_group=self.group.cpu_group,
            pp_group=self.stages,
            enable_staging=False,
            enable_overlap=False,
            disagg_metadata_buffers=self.metadata,
            disagg_prefill_inflight_queue=[],
            disagg_prefill_pending_chunk_rids=set(),
            req_to_metadata_buffer_idx_allocator=self.rows,
            req_to_token_pool=ReqToTokenPool(ROWS, LONGEST, "cpu", enable_memory_saver=False),
            tree_cache=MagicMock(),
            batch_result_processor=MagicMock(),
            metrics_collector=None,
            scheduler_stage_metrics=None,
            processed_tokens_counter=0,
            kv_shard_widening=1,
            rust_server=None,
            _release_aborted_request=lambda _: None,
        )
        self.mixed = mixed
        self.queue = prefill_module.PrefillBootstrapQueue(
            self.pool, None, self.rows, self.metadata, 0, port, self.free, mixed, None, TransferBackend("kvflow")
        )
        mixed.disagg_prefill_bootstrap_queue = self.queue
        self.manager = self.queue.kv_manager
        self.bootstrapped: list[Any] = []
        prefill_module.release_kv_cache = self._release

    def _release(self, request: Any, *_: Any, **__: Any) -> None:
        pages = self.table()[request.kv.req_pool_idx, : len(request.origin_input_ids)].long()
        self.allocator.free(pages)
        self.released.append(request.rid)

    def table(self) -> torch.Tensor:
        found: torch.Tensor = self.mixed.req_to_token_pool.req_to_token
        return found

    def end(self, room: int) -> Any:
        return self.requests[room].disagg_kv_sender

    def add(self, room: int, tokens: int, *, fake: bool = False, dp_rank: int | None = None) -> None:
        """Add a request; a fake one is a health check, and the router may name the rank."""
        host = {"host": FAKE_BOOTSTRAP_HOST} if fake else {}
        self.queue.add(self.request(room, tokens, dp_rank=dp_rank, **host), self.model.heads)

    def park(self, room: int, tokens: int) -> None:
        """Compute a request before decode has sent its pages."""
        request = self.requests[room]
        self.queue.queue.remove(request)
        assert self.queue.ensure_metadata_buffer(request)
        self.compute(room, tokens)
        request.extend_end = tokens
        self.mixed.disagg_prefill_inflight_queue.append(request)

    def stop_server(self) -> None:
        """Stop the bootstrap server; the ranks live on."""
        if self._server is not None:
            self._server.close()

    def start_server(self) -> None:
        """Start a bootstrap server at the same port, and register with it again."""
        self._server = KvflowKVBootstrapServer("127.0.0.1", self.port)
        time.sleep(0.3)
        CommonKVManager.register_to_bootstrap(self.manager)

    def spoil(self, room: int, tokens: int) -> None:
        """Overwrite the pages of a request with foreign content."""
        for tensor, index, data in self.cells(room, tokens):
            tensor[index] = torch.ones_like(data)

    def restore(self, room: int, tokens: int) -> None:
        """Write the proper content to the pages of a request."""
        for tensor, index, data in self.cells(room, tokens):
            tensor[index] = data

    def send_early(self, room: int, end: int) -> None:
        """Send a prefix that the forward pass of another request may still be writing."""
        self.forward = Forward()
        self.requests[room].disagg_kv_sender._early_send_wait_event = self.forward
        self.mixed.send_kv_chunk(self.requests[room], last_chunk=False, end_idx=end)

    def end_forward(self) -> None:
        """End that forward pass."""
        self.forward.end()

    def retire(self, room: int) -> bool:
        """Retire the forward pass of a request that was aborted meanwhile, as SGLang does."""
        self.requests[room].to_finish = FINISH_ABORT()
        retired: bool = self.mixed._retire_aborted_prefill_result(self.requests[room])
        return retired

    def break_off(self, room: int) -> None:
        """Fail the transfer of this rank, as a network failure would."""
        self.requests[room].disagg_kv_sender.transfer.abort()

    def metric(self, room: int) -> tuple[float, int]:
        """Return the latency in seconds and the bytes of a transfer, as SGLang reports them."""
        found = self.requests[room].disagg_kv_sender.get_transfer_metric()
        return found.transfer_latency_s, found.transfer_total_bytes

    def compute(self, room: int, tokens: int) -> None:
        """Fill the cache of a whole request, in place of a model."""
        request = self.requests[room]
        (request.kv.req_pool_idx,) = self.mixed.req_to_token_pool.alloc([request])
        pages = self.allocator.alloc(-(-tokens // self.model.page) * self.model.page)
        self.table()[request.kv.req_pool_idx, :tokens] = pages[:tokens].to(torch.int32)
        self.restore(room, tokens)
        request.output_ids.append(sides.FIRST_TOKEN)

    def send(self, room: int, end: int, *, last: bool) -> None:
        """Send a chunk as SGLang does after a forward pass."""
        request = self.requests[room]
        request.extend_end = end
        self.mixed.send_kv_chunk(request, last_chunk=last)
        if last:
            self.mixed.disagg_prefill_inflight_queue.append(request)

    def offered(self, room: int, end: int) -> tuple[str, list[str]]:
        """Send a chunk, and return the type of the indices that the sender got, and the names of its options."""
        sender, found = self.requests[room].disagg_kv_sender, list[tuple[str, list[str]]]()
        original = sender.send

        def send(indices: Any, *states: Any, **options: Any) -> None:
            found.append((type(indices).__name__, sorted(options)))
            original(indices, *states, **options)

        sender.send = send
        self.send(room, end, last=False)
        del sender.send
        return found[0]

    def is_bootstrapped(self, room: int) -> bool:
        """Return whether SGLang may compute a request."""
        return self.requests[room] in self.bootstrapped

    def is_over(self, room: int) -> bool:
        """Return whether SGLang has released the pages of a request."""
        return self.requests[room].rid in self.released

    def abort(self, room: int) -> None:
        """Abort a request."""
        self.requests[room].disagg_kv_sender.abort()

    def slow_down(self) -> None:
        """Hold back the reads of the transport until `speed_up`."""
        slow_link().is_slow = True

    def speed_up(self) -> None:
        """Let the held-back reads start."""
        slow_link().is_slow = False

    def step(self) -> None:
        self.bootstrapped += self.queue.pop_bootstrapped()
        agreed = None
        if self.rank.pp_size > 1:  # SGLang passes them from stage to stage, with the same result
            ended = self.mixed.get_rids(self.mixed.disagg_prefill_inflight_queue, True, [KVPoll.Success, KVPoll.Failed])
            agreed = self.stages.agree(ended)
        self.mixed.process_disagg_prefill_inflight_queue(agreed)

    def close(self) -> None:
        super().close()
        self.stop_server()


class DecodeScheduler(Scheduler):
    """Decode: preallocation and transfer queue."""

    mode = "decode"

    def __init__(self, port: int, rank: Rank, store: str = "") -> None:
        super().__init__(port, rank, store)
        self.blank()
        scheduler = SimpleNamespace(
            **self.scheduler,
            enable_decode_hicache=False,
            enable_priority_scheduling=False,
            enable_lora=False,
            batch_result_processor=MagicMock(),
            spec_algorithm=SimpleNamespace(is_none=lambda: True),
            running_batch=SimpleNamespace(reqs=[]),
            last_batch=None,
            random_seed=0,
            disagg_decode_prealloc_queue=None,
        )
        pool = decode_module.DecodeReqToTokenPool(ROWS, LONGEST, "cpu", enable_memory_saver=False, pre_alloc_size=ROWS)
        tree = self._make_tree(pool)
        self.transfers = decode_module.DecodeTransferQueue(self.rows, self.metadata, scheduler, tree)
        self.queue = decode_module.DecodePreallocQueue(
            req_to_token_pool=pool,
            token_to_kv_pool_allocator=self.allocator,
            draft_token_to_kv_pool=None,
            req_to_metadata_buffer_idx_allocator=self.rows,
            metadata_buffers=self.metadata,
            scheduler=scheduler,
            transfer_queue=self.transfers,
            tree_cache=tree,
            gpu_id=0,
            bootstrap_port=port,
            max_total_num_tokens=self.free,
            num_reserved_decode_tokens=0,
            transfer_backend=TransferBackend("kvflow"),
        )
        scheduler.disagg_decode_prealloc_queue = self.queue
        self.manager = self.queue.kv_manager
        self.arrived: list[Any] = []
        self.released: list[str] = []
        self.proofs: list[str] = []
        self.transfers._observe_deferred_kv_release = lambda duration_seconds, outcome: self.proofs.append(outcome)
        decode_module.release_kv_cache = self._release

    def _make_tree(self, rows: Any) -> Any:
        """Return a stub of the cache of prefixes."""
        tree = MagicMock()
        tree.supports_mamba.return_value = False
        return tree

    def _release(self, request: Any, *_: Any, **__: Any) -> None:
        if request.kv.req_pool_idx is not None:
            pages = self.table()[request.kv.req_pool_idx, : len(request.origin_input_ids)].long()
            self.allocator.free(pages)
        self.released.append(request.rid)

    def table(self) -> torch.Tensor:
        found: torch.Tensor = self.queue.req_to_token_pool.req_to_token
        return found

    def end(self, room: int) -> Any:
        waiting = [*self.queue.queue, *self.transfers.queue]
        return next(one.kv_receiver for one in waiting if one.req.bootstrap_room == room)

    def add(self, room: int, tokens: int, port: int = 0, *, fake: bool = False, dp_rank: int | None = None) -> None:
        """Add a request; a fake one is a health check, and `port` selects another prefill server."""
        host = {"host": FAKE_BOOTSTRAP_HOST} if fake else {}
        self.queue.add(self.request(room, tokens, port=port, dp_rank=dp_rank, **host))

    def prioritize(self, priorities: dict[str, int | None], *, is_low_first: bool, is_on: bool = True) -> None:
        """Let SGLang schedule by priority, and add requests with these, by room."""
        scheduler = self.queue.scheduler
        scheduler.enable_priority_scheduling, scheduler.schedule_low_priority_values_first = is_on, is_low_first
        for room, priority in priorities.items():
            made = self.request(int(room), 8)
            made.priority = priority
            self.queue.add(made)

    def classes(self) -> dict[int, int]:
        """Return kvflow's priority class of each request, once all have been announced."""

        def transfers() -> list[tuple[int, Any]]:
            waiting = [*self.queue.pending_reqs, *self.queue.queue, *self.transfers.queue]
            return [(one.req.bootstrap_room, one.kv_receiver.transfer) for one in waiting]

        assert self.until(lambda: all(transfer is not None for _, transfer in transfers()))
        return {room: transfer._receiver._opened.priority for room, transfer in transfers()}

    def is_asked_for(self, room: int) -> bool:
        """Return whether prefill has received the pages of a request."""
        return any(one.req.bootstrap_room == room for one in self.transfers.queue)

    def has_arrived(self, room: int) -> bool:
        """Return whether SGLang goes on with a request and has its first token."""
        request = self.requests[room]
        return request in self.arrived and list(request.output_ids) == [sides.FIRST_TOKEN]

    def blank(self) -> None:
        """Fill the pool with a marker."""
        for tensor in (*self.pool.k_buffer, *self.pool.v_buffer):
            tensor.view(torch.uint8).fill_(UNTOUCHED)

    def ask_for_host(self, room: int) -> str:
        """Ask for pages in host memory, and return the error message, or ""."""
        try:
            self.end(room).send_metadata(np.array([1]), 0, destination=KVTransferDestination.HOST)
        except NotImplementedError as error:
            return str(error)
        return ""

    def is_safe(self, room: int) -> bool:
        """Return whether nothing can write to the pages of a request any more."""
        safe: bool = self.manager.is_abort_release_safe(room, 1)
        return safe

    def is_done(self, room: int) -> bool:
        """Return whether SGLang goes on with a request, whatever it has received."""
        return self.requests[room] in self.arrived

    def is_over(self, room: int) -> bool:
        """Return whether SGLang has released the pages of a request."""
        return self.requests[room].rid in self.released

    def finish(self, room: int) -> None:
        """Release the pages of a request that has arrived."""
        self._release(self.requests[room])

    def outcomes(self) -> list[str]:
        """Return how each deferred release of pages ended."""
        return self.proofs

    def step(self) -> None:
        ready, _ = self.queue.pop_preallocated()
        self.transfers.extend(ready)
        self.arrived += self.transfers.pop_transferred()
        self.transfers.resolve_deferred_releases()

    def abort(self, room: int) -> None:
        """Abort a request as SGLang does when its client disconnects."""
        waiting = [*self.queue.queue, *self.transfers.queue]
        for one in waiting:
            if one.req.bootstrap_room == room:
                one.kv_receiver.abort()

    def wrong(self, room: int, tokens: int) -> list[int]:
        """Return the numbers of the tensors with wrong content."""
        return [
            number
            for number, (tensor, index, data) in enumerate(self.cells(room, tokens))
            if not same(tensor[index], data)
        ]


SCHEDULERS: Final = {"prefill": PrefillScheduler, "decode": DecodeScheduler}

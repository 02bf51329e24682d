"""Hooks an end into a manager's generation loop, and holds the manager's blocks.

transformers provides no hooks for this, so this module replaces eight of its functions, on the objects of one manager:

- `add_request` rejects the id of a request that is being handed over, because the two would share its blocks;
- `prepare_next_batch` starts with the end's step, on the thread of the generation loop;
- `free_blocks` first asks the end, which keeps blocks that may still be read or written;
- `_handle_request_error`, which fails a request that may have no blocks yet, also ends its transfer;
- `schedule_batch` waits while such blocks are missing, where the manager would fail all requests;
- `fail_all_requests`, which runs when a generation loop fails, also ends the transfers;
- `has_pending_requests` is true while transfers are in flight, so that `manager.stop()` lets them end;
- the event that wakes an idle loop is also set for updates of transfers.
"""

import abc
import importlib.metadata
import operator
import os
import select
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Any, ClassVar, Final, Generic, Self, TypeVar

from typing_extensions import override

from kvflow import ConfigError, DecodeConfig, LocalProtocolError, Memory, PrefillConfig
from kvflow.blocking import BlockingReceiver, BlockingSender, DecodeRank, PrefillRank
from kvflow.engines.containment import contained
from kvflow.engines.logs import adapter_logger
from kvflow.engines.transformers.memory import CacheMap

__all__ = ["End", "Engine"]

AnyRank = TypeVar("AnyRank", bound=PrefillRank | DecodeRank)

LOGGER: Final = adapter_logger(__name__)

VERSIONS: Final = ("5.23", "5.24")
"""Supported versions of transformers."""

NAMES: Final = """
    add_request background_thread_status.can_accept_new_requests cancel_request generation_config
    input_queue.mutex input_queue.queue is_running pause _wake_up_loop.set

    batch_processor._handle_request_error batch_processor.config.vocab_size batch_processor.fail_all_requests
    batch_processor.has_pending_requests batch_processor.logit_processor.check_kwargs
    batch_processor.output_router.deliver batch_processor.output_router.fail_and_deliver
    batch_processor.prepare_next_batch

    batch_processor.scheduler.active_requests batch_processor.scheduler.add_waiting_request
    batch_processor.scheduler.finish_request
    batch_processor.scheduler.safety_margin batch_processor.scheduler.schedule_batch
    batch_processor.scheduler.starved_requests batch_processor.scheduler.waiting_requests

    batch_processor.cache.cache_allocators batch_processor.cache.cache_tensor
    batch_processor.cache.can_store_request_tokens batch_processor.cache.compute_free_capacity
    batch_processor.cache.evict_cached_blocks batch_processor.cache.free_blocks
    batch_processor.cache.mark_complete_blocks batch_processor.cache.num_sectors
    batch_processor.cache.pool.try_to_free_sectors batch_processor.cache.search_prefix_match
    batch_processor.cache.use_prefix_sharing
"""
"""Attributes of a manager that this package uses or replaces, most of them private."""

ALLOCATOR_NAMES: Final = """
    block_physical_stride block_table blocks_per_sector bytes_per_block cache_dtype head_dim layer_indices
    needs_new_blocks num_key_value_heads tokens_per_page
"""
"""Attributes of the allocator for each kind of attention."""

HELD: Final = "__kvflow_held__"
"""Reserved request id under which held blocks are freed."""


class Engine:
    """A `ContinuousBatchingManager` that is not running, as seen by an end.

    Raises:
        ConfigError: Its configuration or its version is not supported.
        LocalProtocolError: It is running.
    """

    def __init__(self, manager: Any) -> None:
        _refuse_unserved(manager)
        if manager.batch_processor is None:
            manager.warmup()  # creates it
        _check_names(manager)
        self.manager = manager
        self.processor = manager.batch_processor
        self.scheduler = self.processor.scheduler
        self.cache = self.processor.cache
        self._held: list[tuple[BlockingSender | BlockingReceiver, dict[str, list[int]]]] = []
        # The manager's own functions, which `join` replaces:
        self.free: Callable[..., None] = self.cache.free_blocks
        self.add_request: Callable[..., str | None] = manager.add_request
        self._undo: list[tuple[Any, str, Any]] = []

    # Taking part

    def join(self, end: "End[Any]") -> None:
        """Make an end part of the generation loop."""
        prepare, schedule = self.processor.prepare_next_batch, self.scheduler.schedule_batch
        has_pending, fail_all = self.processor.has_pending_requests, self.processor.fail_all_requests
        fail_one = self.processor._handle_request_error
        wake_up = WakeUp(end, self.manager._wake_up_loop)

        def add_request(input_ids: Any, request_id: str | None = None, *rest: Any, **settings: Any) -> str | None:
            if request_id is not None and end.has(request_id):
                raise LocalProtocolError("id is in use by a request that is handed over", request_id=request_id)
            return self.add_request(input_ids, request_id, *rest, **settings)

        def prepare_next_batch() -> bool:
            end.step()
            self._give_back_safe()
            is_ready: bool = prepare()
            return is_ready

        def free_blocks(request_id: str, no_cache: bool = False) -> None:
            if not end.lose(request_id):
                self.free(request_id, no_cache)

        def schedule_batch(*budgets: int) -> tuple[Any, ...]:
            batch, *rest = schedule(*budgets)
            if batch is None and (self._held or end.is_busy) and not self._can_offload:
                self.cache.evict_cached_blocks()
                batch = []
            return batch, *rest

        def fail_all_requests(error: Exception) -> None:
            try:
                fail_all(error)
            finally:
                end.fail_all(error)

        def handle_request_error(error: Exception, state: Any) -> None:
            try:
                fail_one(error, state)
            finally:
                end.lose(state.request_id)

        self._replace(self.manager, "add_request", add_request)
        self._replace(self.processor, "_handle_request_error", handle_request_error)
        self._replace(self.processor, "fail_all_requests", fail_all_requests)
        self._replace(self.processor, "prepare_next_batch", prepare_next_batch)
        self._replace(self.cache, "free_blocks", free_blocks)
        self._replace(self.scheduler, "schedule_batch", schedule_batch)
        self._replace(self.processor, "has_pending_requests", lambda: has_pending() or end.is_busy)
        self._replace(self.manager, "_wake_up_loop", wake_up)

    def leave(self) -> None:
        """Undo all hooks, and free what is safe. Blocks that are not safe stay allocated for good."""
        self._give_back_safe()
        while self._undo:
            setattr(*self._undo.pop())
        self.wake()

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def wake(self) -> None:
        """Make the loop take its next step soon."""
        self.manager._wake_up_loop.set()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the loop, if it is running."""
        with ExitStack() as stack:
            if self.manager.is_running():
                with suppress(RuntimeError):  # it has ended meanwhile
                    stack.enter_context(self.manager.pause())
            yield

    def check_accepts(self, settings: Mapping[str, Any]) -> None:
        """Check that the manager accepts requests, and these settings of one for its logits processors.

        Raises:
            LocalProtocolError: It is stopping, has failed, or was restarted without this end.
            ConfigError: A setting is unknown or has the wrong type.
        """
        reason = self.manager.background_thread_status.can_accept_new_requests()
        if reason is None and self.manager.batch_processor is not self.processor:
            reason = "it was restarted; make a new end of kvflow"
        if reason is not None:
            raise LocalProtocolError("manager takes no requests", detail=reason)
        try:
            self.processor.logit_processor.check_kwargs(dict(settings))
        except (TypeError, ValueError) as error:
            raise ConfigError("settings of the request cannot be used", detail=str(error)) from error

    def has(self, request_id: str) -> bool:
        """Return whether the manager or an end of kvflow has a request. Callable from any thread."""
        waiting = self.manager.input_queue
        with waiting.mutex:
            if any(state.request_id == request_id for state in waiting.queue):
                return True
        wake_up = self.manager._wake_up_loop
        if isinstance(wake_up, WakeUp) and any(end.has(request_id) for end in wake_up.ends):
            return True
        return request_id in self.scheduler.active_requests or request_id in self.scheduler.waiting_requests

    @property
    def _can_offload(self) -> bool:
        """The manager can free blocks itself, by offloading an active request."""
        return bool(self.scheduler.starved_requests) and len(self.scheduler.active_requests) > 1

    # Blocks

    def blocks(self, request_id: str) -> dict[str, list[int]]:
        """Return the blocks of a request for each kind of attention."""
        return {name: one.block_table.get(request_id, []) for name, one in self.cache.cache_allocators.items()}

    def allocate(self, state: Any, prefix: int) -> bool:
        """Allocate blocks for the prompt of a request, after its cached prefix; return whether there were enough."""
        state.position_offset = prefix
        num_tokens = len(state.initial_tokens) - prefix
        self.cache.pool.try_to_free_sectors()
        if self._has_room and self.cache.can_store_request_tokens(state, num_tokens):
            return True
        if not self.cache.evict_cached_blocks():
            return False
        return self._has_room and bool(self.cache.can_store_request_tokens(state, num_tokens))

    @property
    def _has_room(self) -> bool:
        """The scheduler would admit new requests: active ones keep enough blocks to continue."""
        is_idle = not self.scheduler.active_requests
        return is_idle or bool(self.cache.compute_free_capacity() >= self.scheduler.safety_margin)

    def hold(self, request_id: str, transfer: BlockingSender | BlockingReceiver) -> None:
        """Take the blocks of a request out of its tables, and free them once the memory of a transfer is safe."""
        allocators = self.cache.cache_allocators.items()
        self._held.append((transfer, {name: one.block_table.pop(request_id, []) for name, one in allocators}))

    def _give_back_safe(self) -> None:
        held, self._held = self._held, []
        for transfer, blocks in held:
            if transfer.memory is not Memory.SAFE:
                self._held.append((transfer, blocks))
                continue
            for name, allocator in self.cache.cache_allocators.items():
                allocator.block_table[HELD] = blocks[name]
            self.free(HELD)

    # Outputs

    def deliver(self, state: Any) -> None:
        """Deliver the output of a request so far; if its receiver cannot take it, that concerns this request alone."""
        with _undelivered_logged(state):
            self.processor.output_router.deliver(state.to_generation_output())

    def fail(self, state: Any, error: Exception) -> None:
        """Fail a request, and deliver the failure; see `deliver`."""
        with _undelivered_logged(state):
            self.processor.output_router.fail_and_deliver(state, error)


def _undelivered_logged(state: Any) -> AbstractContextManager[None]:
    return contained(partial(LOGGER.error, "output of request %s could not be delivered: %s", state.request_id))


class End(abc.ABC, Generic[AnyRank]):
    """One end of kvflow; its methods are called on the thread of the generation loop, or while the loop is paused.

    Args:
        manager: A `ContinuousBatchingManager` that is not running.
        config: Settings of the rank, which is opened and closed with the end.
        fingerprint: What makes two caches interchangeable: model, revision, and anything else that changes their
            content.

    Raises:
        ConfigError, LocalProtocolError: As the constructor of `Engine`.
        LayoutError: The cache has a kind of attention that kvflow does not move.
    """

    _kind: ClassVar[Callable[..., Any]]
    """The rank of such an end."""

    def __init__(self, manager: Any, config: PrefillConfig | DecodeConfig, *, fingerprint: str) -> None:
        self.engine = Engine(manager)
        self._map = CacheMap(self.engine.cache, fingerprint)
        self.rank: AnyRank = self._kind(config, self._map.layout)

    def __enter__(self) -> Self:
        self.rank.open()
        self.engine.join(self)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.rank.close()
        with self.engine.paused():
            self.step()
            self.fail_all(LocalProtocolError("kvflow's end is closed"))
            self.engine.leave()

    @abc.abstractmethod
    def step(self) -> None:
        """Do what is due between two batches."""

    @abc.abstractmethod
    def has(self, request_id: str) -> bool:
        """Return whether a request is being handed over. Callable from any thread."""

    @abc.abstractmethod
    def lose(self, request_id: str) -> bool:
        """Handle that a request loses its blocks; return whether the end holds those that may be read or written."""

    @abc.abstractmethod
    def fail_all(self, error: Exception) -> None:
        """End all transfers, because the generation loop has failed."""

    @property
    @abc.abstractmethod
    def is_busy(self) -> bool:
        """Transfers are in flight."""


class WakeUp(threading.Event):
    """The event on which an idle generation loop waits: set for new requests, and while transfers have updates.

    Args:
        end: An end of kvflow.
        replaced: The event that it replaces, which may be that of another end.

    Attributes:
        ends: All ends of the manager.
    """

    def __init__(self, end: "End[Any]", replaced: threading.Event) -> None:
        super().__init__()
        self.ends: list[End[Any]] = [end, *(replaced.ends if isinstance(replaced, WakeUp) else [])]
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __del__(self) -> None:
        os.close(self._fd)

    @override
    def set(self) -> None:
        super().set()
        os.eventfd_write(self._fd, 1)

    @override
    def clear(self) -> None:
        super().clear()
        with suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    @override
    def wait(self, timeout: float | None = None) -> bool:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        for end in self.ends:
            with suppress(LocalProtocolError):  # the rank is closed
                poll.register(end.rank.fileno(), select.POLLIN)
        poll.poll(None if timeout is None else timeout * 1e3)
        return self.is_set()


def _refuse_unserved(manager: Any) -> None:
    """Reject unsupported configurations, with the errors of `Engine`."""
    found = importlib.metadata.version("transformers")
    if ".".join(found.split(".")[:2]) not in VERSIONS:
        raise ConfigError("kvflow does not know this version of transformers", found=found, expected=VERSIONS)
    if manager.is_running():
        raise LocalProtocolError("manager is running; make kvflow's end before `start`")
    config = manager.continuous_batching_config
    unserved = {
        "tensor parallelism": manager.distributed_helper.tp_size > 1,
        "use_async_batching": bool(config.use_async_batching),
        "num_return_sequences": manager.num_return_sequences != 1,
    }
    names = [name for name, is_used in unserved.items() if is_used]
    if names:
        raise ConfigError("kvflow does not serve this configuration of continuous batching", found=names)


def _check_names(manager: Any) -> None:
    """Raise ConfigError if this version of transformers lacks what kvflow uses of it."""
    missing = _missing(manager, NAMES)
    if not missing:
        for kind, allocator in manager.batch_processor.cache.cache_allocators.items():
            missing += [f"{kind}.{name}" for name in _missing(allocator, ALLOCATOR_NAMES)]
    if missing:
        raise ConfigError(
            "this version of transformers lacks names that kvflow uses",
            missing=missing,
            version=importlib.metadata.version("transformers"),
        )


def _missing(owner: Any, names: str) -> list[str]:
    missing = []
    for name in names.split():
        try:
            operator.attrgetter(name)(owner)
        except AttributeError:
            missing.append(name)
    return missing

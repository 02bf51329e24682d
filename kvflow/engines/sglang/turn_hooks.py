"""Where turns meet SGLang's schedulers: the end of a request, the steps, and what must not happen while pages move."""

import functools
from collections.abc import Callable
from typing import Any, Final

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from kvflow.engines.sglang.ends import KvflowKVReceiver, KvflowKVSender
from kvflow.engines.sglang.turns import TurnHolder, TurnOwner

__all__ = ["hook_turns"]


def _take_back(requests: Any, queue: Any) -> None:
    """Remember the prompts that are about to be computed, and advance the turns of this prefill server."""
    turns = queue.kv_manager.turns
    if isinstance(turns, TurnOwner):
        for request in requests:
            if isinstance(request.disagg_kv_sender, KvflowKVSender):
                turns.prompts.note_request(request)
        tree = queue.scheduler.tree_cache
        tree.kvflow_turns = turns
        turns.advance_turns(tree)


def _note_receiver(result: Any, queue: Any, request: Any, *_: Any, **__: Any) -> None:
    """Let a request know its receiver, which SGLang drops before the request ends."""
    request.kvflow_receiver = result.kv_receiver


def _advance(queue: Any) -> None:
    """Advance the turns of this decode server."""
    turns = queue.scheduler.disagg_decode_prealloc_queue.kv_manager.turns
    if isinstance(turns, TurnHolder):
        turns.advance_turns(queue.tree_cache)


def _hold(original: Callable[..., None], request: Any, tree: Any, *, checkpoint: bool) -> None:
    """Release a request of decode only when its turn has gone back."""
    release = functools.partial(original, request, tree, checkpoint=checkpoint)
    receiver = getattr(request, "kvflow_receiver", None)
    is_held = False
    if isinstance(receiver, KvflowKVReceiver) and receiver.prefill and checkpoint and request.finished():
        turns = receiver.kv_mgr.turns
        is_held = isinstance(turns, TurnHolder) and turns.hold_turn(request, tree, receiver.prefill, release)
    if not is_held:
        release()


def _is_idle(original: Callable[..., bool], scheduler: Any, **options: bool) -> bool:
    """Return False while pages move: SGLang looks for lost pages, and flushes its cache, only when it is idle."""
    is_idle = original(scheduler, **options)
    names = ("disagg_prefill_bootstrap_queue", "disagg_decode_prealloc_queue")
    managers = [queue.kv_manager for name in names if (queue := getattr(scheduler, name, None)) is not None]
    turns = getattr(managers[0], "turns", None) if managers else None
    if not is_idle or turns is None or options.get("for_health_check"):
        return is_idle
    if "ignore_waiting" in options:  # SGLang is about to flush its cache or to free its pools
        turns.give_up_turns(scheduler.tree_cache)
    return bool(turns.is_idle)


def _forget(tree: Any) -> None:
    """Forget the prompts that were computed before the cache is reset, with other weights perhaps."""
    turns = getattr(tree, "kvflow_turns", None)
    if turns is not None:
        turns.prompts.clear()


HOOKS: Final = {
    "disaggregation.prefill.PrefillBootstrapQueue.pop_bootstrapped": (HookType.AFTER, _take_back),
    "disaggregation.decode.DecodePreallocQueue._create_receiver_and_enqueue": (HookType.AFTER, _note_receiver),
    "disaggregation.decode.DecodeTransferQueue.resolve_deferred_releases": (HookType.BEFORE, _advance),
    "mem_cache.common.release_kv_cache": (HookType.AROUND, _hold),
    "mem_cache.unified_radix_cache.UnifiedRadixCache.reset": (HookType.BEFORE, _forget),
    "managers.scheduler.Scheduler.is_fully_idle": (HookType.AROUND, _is_idle),
}


@functools.cache
def hook_turns() -> None:
    """Add the hooks to SGLang, once in a process."""
    for target, (kind, hook) in HOOKS.items():
        HookRegistry._apply_target(f"sglang.srt.{target}", [(kind, hook, None)])

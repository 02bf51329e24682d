"""Entry point of the group `sglang.srt.plugins`: SGLang calls `activate` in each process before it parses arguments.

SGLang provides a hook for the classes of a transfer backend, and a list of choices for its option. Only the member of
its closed enum `TransferBackend` has to be added without such an interface.
"""

import functools
import importlib.metadata
import math
import os
from typing import Any, Final

from sglang.srt.arg_groups import choices
from sglang.srt.disaggregation import utils
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from kvflow import ConfigError
from kvflow.engines.priority import priority_class
from kvflow.engines.sglang.settings import read_settings

__all__ = ["NAME", "activate"]

NAME: Final = "kvflow"
SERVED: Final = "0.5.23"
CREATE: Final = "sglang.srt.disaggregation.decode.DecodePreallocQueue._create_receiver_and_enqueue"
GRANT: Final = "sglang.srt.disaggregation.decode.DecodePreallocQueue._send_kv_metadata"
DEFER: Final = "sglang.srt.disaggregation.decode.DecodeTransferQueue._defer_release"
AGREE: Final = "sglang.srt.disaggregation.utils.poll_and_all_reduce_attn_cp_tp_group"
AGREE_STAGES: Final = "sglang.srt.disaggregation.utils.poll_and_all_reduce_prefill_pp"


def activate() -> None:
    """Register `--disaggregation-transfer-backend kvflow`. May be called twice."""
    members = utils.TransferBackend._value2member_map_  # there is no other way to extend a closed enum
    if NAME in members:
        return
    member = object.__new__(utils.TransferBackend)
    member._name_, member._value_ = NAME.upper(), NAME
    members[NAME] = utils.TransferBackend._member_map_[member._name_] = member
    utils.TransferBackend._member_names_.append(member._name_)
    choices.add_disagg_transfer_backend_choices([NAME])
    HookRegistry.register("sglang.srt.disaggregation.utils.get_kv_class", _kv_class, HookType.AROUND)


def _kv_class(original: Any, transfer_backend: Any, class_type: Any) -> Any:
    """Return the classes of this backend; leave other backends to SGLang."""
    kinds = utils.KVClassType
    if transfer_backend.value != NAME or class_type == kinds.KVARGS:
        known = utils.TransferBackend.NIXL if transfer_backend.value == NAME else transfer_backend
        return original(known, class_type)
    # Imported on demand: this module is loaded in processes that never transfer anything.
    from kvflow.engines.sglang.bootstrap import KvflowKVBootstrapServer  # noqa: PLC0415
    from kvflow.engines.sglang.ends import KvflowKVReceiver, KvflowKVSender  # noqa: PLC0415
    from kvflow.engines.sglang.manager import KvflowKVManager  # noqa: PLC0415

    if class_type == kinds.MANAGER:
        _check_version()
        _hook_queues()
        if read_settings(os.environ).return_turns:
            from kvflow.engines.sglang.turn_hooks import hook_turns  # noqa: PLC0415

            hook_turns()
    return {
        kinds.MANAGER: KvflowKVManager,
        kinds.SENDER: KvflowKVSender,
        kinds.RECEIVER: KvflowKVReceiver,
        kinds.BOOTSTRAP_SERVER: KvflowKVBootstrapServer,
    }[class_type]


@functools.cache
def _hook_queues() -> None:
    """Keep SGLang's queues from freeing pages that may still be written to or read, and poll every stage.

    Receivers get the priority and the number of tokens of their requests.
    """
    # `register` and `apply_hooks` would skip what another plugin has already hooked, and only log failures.
    HookRegistry._apply_target(CREATE, [(HookType.AFTER, _pass_priority, None)])
    HookRegistry._apply_target(GRANT, [(HookType.BEFORE, _pass_num_tokens, None)])
    HookRegistry._apply_target(DEFER, [(HookType.AFTER, _forget_deadline, None)])
    HookRegistry._apply_target(AGREE, [(HookType.AROUND, _await_readers, None)])
    HookRegistry._apply_target(AGREE_STAGES, [(HookType.BEFORE, _take_changes, None)])


def _check_version() -> None:
    """Raise ConfigError for other versions of SGLang, because the adapter relies on its internals."""
    found = importlib.metadata.version("sglang")
    if found.split("+")[0].split(".post")[0] != SERVED:
        raise ConfigError("kvflow does not serve this version of SGLang", served=SERVED, found=found)


def _pass_priority(result: Any, queue: Any, req: Any, *_: Any, **__: Any) -> Any:
    """Let a receiver know the priority of its request, if SGLang schedules by priority."""
    if queue.scheduler.enable_priority_scheduling and req.priority is not None:
        sign = 1 if queue.scheduler.schedule_low_priority_values_first else -1
        result.kv_receiver.priority = priority_class(sign * req.priority)
    return result


def _pass_num_tokens(queue: Any, decode_req: Any, kv_indices: Any, *_: Any, **__: Any) -> None:
    """Let a receiver know how many tokens it gets pages for."""
    decode_req.kv_receiver.num_tokens = len(kv_indices)


def _forget_deadline(result: Any, queue: Any, decode_req: Any) -> Any:
    from kvflow.engines.sglang.ends import KvflowKVReceiver  # noqa: PLC0415

    if isinstance(decode_req.kv_receiver, KvflowKVReceiver):
        request, started_at, _, *rest = queue._deferred_releases[-1]
        queue._deferred_releases[-1] = (request, started_at, math.inf, *rest)
    return result


def _await_readers(original: Any, pollers: Any, attn_cp_cpu_group: Any, attn_tp_cpu_group: Any) -> Any:
    """Let a request fail on prefill only once no rank's transport reads its pages; SGLang fails it with the first rank.

    All ranks get the same result from SGLang, so they ask each other about the same requests.
    """
    polls = list(original(pollers, attn_cp_cpu_group, attn_tp_cpu_group))
    failed = [place for place, status in enumerate(polls) if status == KVPoll.Failed]
    flags = [int(getattr(pollers[place], "is_read", False)) for place in failed]
    flags = utils.all_reduce_flags(flags, attn_tp_cpu_group, utils.dist.ReduceOp.MAX)
    for place, is_read in zip(failed, flags, strict=True):
        if is_read:
            polls[place] = KVPoll.Transferring
    return polls


def _take_changes(pollers: Any, *_: Any) -> None:
    """Process updates on this stage: SGLang polls only on the first stage, which sees what the others have recorded."""
    from kvflow.engines.sglang.manager import KvflowKVManager  # noqa: PLC0415

    for manager in {poller.kv_mgr for poller in pollers}:
        if isinstance(manager, KvflowKVManager):
            manager.advance()

"""Sender and receiver of one request, driven by SGLang's queues.

All methods are called on the scheduler's thread, and return at once. `poll` first processes the updates on the
manager's rank, for all rooms together, and then returns SGLang's own state of the room. SGLang's timeouts and its
consensus of pipeline stages therefore work unchanged.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferDestination
from sglang.srt.disaggregation.common.conn import (
    CommonKVReceiver,
    CommonKVSender,
    KVTransferError,
    _get_bootstrap_session,
)
from typing_extensions import override

from kvflow import ConfigError, Endpoint, FailureReason, Memory, Outcome, TransferFailed
from kvflow.blocking import BlockingReceiver, BlockingSender, TransferUpdate
from kvflow.engines.containment import contained
from kvflow.engines.sglang.bootstrap import HEADER
from kvflow.engines.sglang.manager import KvflowKVManager

__all__ = ["KvflowKVReceiver", "KvflowKVSender", "TransferEnd"]

ELSEWHERE: Final = frozenset(
    {
        FailureReason.UNREACHABLE,
        FailureReason.REFUSED,
        FailureReason.PEER_LOST,
        FailureReason.PEER_FAILING,
        FailureReason.PEER_CLOSED,
    }
)
"""Failures after which the prefill server may have restarted at another address."""


class TransferEnd:
    """Base class of sender and receiver.

    Attributes:
        kv_mgr: Manager of this scheduler.
        bootstrap_room: The router's number of the request.
        transfer: kvflow's transfer; None until it starts.
        conclude_state: SGLang's final state of the request; None until it has ended.
    """

    kv_mgr: KvflowKVManager
    bootstrap_room: int
    transfer: BlockingSender | BlockingReceiver | None = None
    conclude_state: Any
    _is_over = False
    _owns_bootstrap_room: bool
    """SGLang's own flag: its state of the room is about this request."""

    def _leave_room(self) -> None:
        """Fail this request alone, because another one has its room."""
        self._owns_bootstrap_room = False
        self.conclude_state = KVPoll.Failed

    def failure_exception(self) -> None:
        """Raise the failure recorded for the room, if that is the failure of this request."""
        if not self._owns_bootstrap_room:
            raise KVTransferError(self.bootstrap_room, "another request has this room")
        super().failure_exception()  # type: ignore[misc] # of SGLang's class, with which this one is combined

    @property
    def is_safe(self) -> bool:
        """Nothing can access the pages any more."""
        return self.transfer is None or self.transfer.memory is Memory.SAFE

    def apply_update(self, update: "TransferUpdate[Any]") -> None:
        """Apply an update to SGLang's state of the room, unless this request is over: another one may have the room."""
        if self._is_over:
            return
        if update.outcome is Outcome.PENDING:
            self._go_on()
            return
        self._is_over = True
        if update.outcome is Outcome.SUCCESS:
            self._succeed()
        else:
            self._fail(update)

    def _go_on(self) -> None:
        """Handle an update of a pending transfer."""

    def _succeed(self) -> None:
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Success)

    def _fail(self, update: "TransferUpdate[Any]") -> None:
        """Fail the request; raise RankBroken if it could not start because this rank has failed."""
        failure = update.failure
        if failure is not None and failure.reason is FailureReason.BROKEN:
            # This ends SGLang's server, which would otherwise fail all requests but still pass its health checks.
            with suppress(TransferFailed):  # a peer is broken, or this rank broke after the transfer had started
                update.transfer.result()
        reason = (
            "kvflow gave no reason"
            if failure is None
            else f"{failure.reason}: {failure.detail} ({failure.detected_by})"
        )
        self.kv_mgr.fail(self.bootstrap_room, reason)

    def _refuse(self, reason: str) -> None:
        """Fail the request on both sides."""
        self.kv_mgr.fail(self.bootstrap_room, reason)
        self._give_up()

    def _give_up(self) -> None:
        """Abort the transfer, and tell the other side why SGLang has failed the request, if it has."""
        if self.transfer is not None:
            self.transfer.abort(self.kv_mgr.reason_of(self.bootstrap_room))


class KvflowKVSender(TransferEnd, CommonKVSender):
    """One request on prefill."""

    supports_host_tensor_indices = False
    """kvflow checks the indices of a chunk when it is offered, so SGLang must not hand over ones that are still being
    copied from the device. For early chunks, it waits for the copy in the scheduler's thread."""

    transfer: BlockingSender | None = None
    _is_offered = False

    def __init__(
        self, mgr: Any, bootstrap_addr: str, bootstrap_room: int, req_has_disagg_prefill_dp_rank: bool = False
    ) -> None:
        is_taken = mgr.has(bootstrap_room)
        super().__init__(mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank)
        self._prefix = 0
        if is_taken:
            self._leave_room()
            return
        if self.kv_mgr.request_status.get(bootstrap_room) == KVPoll.Failed:  # SGLang rejects it
            return
        self.kv_mgr.request_times.arrived(bootstrap_room)
        with contained(partial(self.kv_mgr.fail, bootstrap_room)):
            self.transfer = self.kv_mgr.rank.send(bootstrap_room)
            self.kv_mgr.follow(self)

    @override
    def _go_on(self) -> None:
        """Let SGLang compute the request once every decode rank has requested its tokens."""
        wanted = None if self.transfer is None else self.transfer.wanted
        room, manager = self.bootstrap_room, self.kv_mgr
        if wanted is None or manager.request_status.get(room) != KVPoll.Bootstrapping:
            return
        tokens = wanted.get("kv")
        if tokens is None or tokens[0] % manager.pools.index_tokens:
            self._refuse(f"decode wants tokens {tokens}, which do not start at a page")
            return
        self._prefix = manager.req_to_decode_prefix_len[room] = tokens[0]
        manager.update_status(room, KVPoll.WaitingForInput)

    @override
    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        self.kv_mgr.request_times.note((self.bootstrap_room,), "scheduled")
        with contained(self._refuse):
            super().init(num_kv_indices, aux_index)
            if num_kv_indices < 0:
                self._refuse(f"decode wants tokens from {self._prefix} on, which is behind the end of the prompt")

    @override
    def send(self, *args: Any, **options: Any) -> None:
        with contained(self._refuse):
            super().send(*args, **options)

    @override
    def poll(self) -> Any:
        self.kv_mgr.advance()
        return self._while_read(super().poll())

    @override
    def poll_pp_consensus(self) -> Any:
        self.kv_mgr.advance()
        return self._while_read(super().poll_pp_consensus())

    @property
    def is_read(self) -> bool:
        """The transport may still read pages, although everything was offered."""
        return self._is_offered and not self.is_safe

    def _while_read(self, status: Any) -> Any:
        """Hide a failure while pages are read: SGLang would free them at once, and decode may still succeed.

        This includes pages of other ranks: in `plugin`, the ranks ask each other.
        """
        return KVPoll.Transferring if status == KVPoll.Failed and self.is_read else status

    def offer(self, first: int, kv_indices: Any, num_tokens: int | None, *, ready: Any) -> None:
        """Send pages that are not the last ones; raise KvflowError if they do not fit or the transfer has failed."""
        pools = self.kv_mgr.pools
        tokens = pools.tokens(self._prefix, first, len(kv_indices), num_tokens)
        if self.transfer is not None:
            self.transfer.chunk(tokens, pools.pages(tokens, kv_indices), ready=ready)

    def offer_last(
        self,
        first: int,
        kv_indices: Any,
        states: Sequence[Any] | None,
        num_tokens: int | None,
        *,
        metadata_row: int,
        ready: Any,
    ) -> None:
        """Send the last pages, the states and the metadata; see `offer`."""
        pools = self.kv_mgr.pools
        tokens = pools.tokens(self._prefix, first, len(kv_indices), num_tokens)
        pages = pools.pages(tokens, kv_indices) | pools.state_pages((0, tokens[1]), states)
        if self.transfer is not None:
            self._is_offered = True
            self.kv_mgr.request_times.note((self.bootstrap_room,), "last prefill step ended")
            self.transfer.finish(tokens, pages, metadata=self.kv_mgr.metadata.read(metadata_row), ready=ready)

    @override
    def abort(self) -> None:
        """Abort the request, unless all of it has been offered: then it ends by itself, and its pages stay until then.

        Ranks that share a request would otherwise end differently, because some may be done already.
        """
        if self._is_offered or not self._owns_bootstrap_room:
            return
        super().abort()
        self._give_up()

    @override
    def clear(self) -> None:
        self._give_up()
        self._is_over = True
        if self._owns_bootstrap_room:
            self.kv_mgr.request_times.ended(self.bootstrap_room)
            super().clear()


class KvflowKVReceiver(TransferEnd, CommonKVReceiver):
    """One request on decode."""

    priority = 0
    """kvflow's priority class of the request; see `plugin`, because SGLang does not pass the request on."""

    num_tokens: int | None = None
    """Tokens of the request without its prefix; see `plugin`, because SGLang passes on only their pages."""

    prefill: Endpoint | None = None
    """The prefill rank that computes the request, once it is announced."""

    transfer: BlockingReceiver | None = None
    _metadata_row = -1

    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int) -> None:
        is_taken = mgr.has(bootstrap_room)
        super().__init__(mgr, bootstrap_addr, bootstrap_room)
        if is_taken:
            self._leave_room()
        else:
            mgr.request_times.arrived(bootstrap_room)

    @override
    def _register_kv_args(self) -> bool:
        """Do nothing: ranks exchange the layout of their pools in kvflow's handshake."""
        return self.bootstrap_infos is not None

    @override
    def init(self, prefill_dp_rank: int) -> None:
        """Announce the request to every prefill rank."""
        manager = self.kv_mgr
        _get_bootstrap_session(self.bootstrap_addr).headers[HEADER] = manager.settings.backend
        super().init(prefill_dp_rank)
        is_waiting = manager.request_status.get(self.bootstrap_room) == KVPoll.WaitingForInput
        if not is_waiting or not self._owns_bootstrap_room:
            return
        if misfit := manager.find_misfit(self.bootstrap_addr):
            manager.fail(self.bootstrap_room, misfit)
            super()._send_abort_notification()  # in SGLang's own protocol
            return
        with contained(partial(manager.fail, self.bootstrap_room)):
            self.prefill = _address_in(self.bootstrap_infos[0])
            self.transfer = manager.rank.announce(self.bootstrap_room, prefill=self.prefill, priority=self.priority)
            manager.follow(self)

    @override
    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: Sequence[Any] | None = None,
        decode_prefix_len: int | None = None,
        destination: Any = KVTransferDestination.DEVICE,
        device_kv_indices: Any = None,
    ) -> None:
        """Grant the pages; raise NotImplementedError if they are not in the pool that the manager was given."""
        if destination != KVTransferDestination.DEVICE or device_kv_indices is not None:
            raise NotImplementedError("kvflow receives into one pool of each kind")
        if self.transfer is None:
            self.kv_mgr.fail(self.bootstrap_room, f"no prefill server was found at {self.bootstrap_addr}")
            return
        self.kv_mgr.request_times.note((self.bootstrap_room,), "scheduled")
        pools = self.kv_mgr.pools
        self._metadata_row = -1 if aux_index is None else aux_index
        with contained(self._refuse):
            tokens = pools.tokens(decode_prefix_len or 0, 0, len(kv_indices), self.num_tokens)
            pages = pools.pages(tokens, kv_indices) | pools.state_pages(tokens, state_indices)
            self.transfer.grant(tokens=tokens, pages=pages)
            self.init_time = time.time()  # noqa: TID251 - SGLang compares it with the wall clock

    @override
    def poll(self) -> Any:
        self.kv_mgr.advance()
        return super().poll()

    @override
    def _succeed(self) -> None:
        if self.transfer is None:
            return
        with contained(partial(self.kv_mgr.fail, self.bootstrap_room)):
            self.kv_mgr.metadata.write(self._metadata_row, self.transfer.result().metadata)
            self.kv_mgr.request_times.note((self.bootstrap_room,), "received")
            super()._succeed()

    @override
    def _fail(self, update: "TransferUpdate[Any]") -> None:
        super()._fail(update)
        if update.failure is not None and update.failure.reason in ELSEWHERE:
            self.invalidate_cached_bootstrap_infos()

    @override
    def _send_abort_notification(self, *, force_arm: bool = False) -> None:
        """Abort kvflow's transfer, which notifies every prefill rank and collects the proofs."""
        self._give_up()

    @override
    def is_abort_release_safe(self) -> bool:
        self.kv_mgr.advance()
        return self.is_safe

    @override
    def clear(self) -> None:
        self._give_up()
        self._is_over = True
        if self._owns_bootstrap_room:
            self.kv_mgr.request_times.ended(self.bootstrap_room)
        super().clear()


def _address_in(info: Mapping[str, Any]) -> Endpoint:
    """Return the address of a prefill rank from an answer of the bootstrap server; ConfigError if there is none."""
    try:
        return Endpoint(info["rank_ip"], int(info["rank_port"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError("bootstrap server gave no address of a prefill rank", found=dict(info)) from error

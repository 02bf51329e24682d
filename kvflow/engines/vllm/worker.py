"""The worker side: one transfer for each request that moves.

vLLM's worker thread calls everything, in this order in each step: `preempt`, `begin`, the model, `receive`, `saved` and
`take_results`. Two of these wait for kvflow's threads, for a few milliseconds: `preempt`, because vLLM is about to
overwrite the pages, and `take_results`, in a step that computes nothing. No kvflow error leaves this module, because it
would end vLLM.

vLLM is told that a request has ended as soon as its outcome is decided. Blocks that are not safe by then are held until
they are; see `ConnectorScheduler.take_report`.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch

from kvflow import FailureReason, KvflowError, LayersReady, Memory, Outcome
from kvflow.blocking import BlockingReceiver, BlockingSender, TransferUpdate
from kvflow.engines.containment import contained
from kvflow.engines.logs import adapter_logger
from kvflow.engines.vllm.first_token import split_metadata
from kvflow.engines.vllm.layout import Caches
from kvflow.engines.vllm.metadata import ChunkOrder, GrantOrder, GroupBlocks, StepOrders, WorkerReport
from kvflow.engines.vllm.ranks import Ranks
from kvflow.engines.vllm.turn_senders import TurnSenders

__all__ = ["ConnectorWorker", "Results"]

LOGGER: Final = adapter_logger("vllm.kvflow")

LABEL_LENGTH: Final = 200
"""Maximum length of a label. Request ids may be longer; the room has the complete id."""

PREEMPTION_S: Final = 0.01
"""How long vLLM waits for the pages of a preempted request; afterwards, the request is not handed over."""


@dataclass
class Results:
    """Requests that have ended since the last step, by vLLM's ids, each reported once.

    Attributes:
        sent: Requests whose blocks are no longer needed.
        received: Requests that have their blocks, or have failed.
        failed: The requests in `received` that have failed.
    """

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.sent or self.received)


class Gate:
    """An event that is set when a layer has been computed; a `ready` object for kvflow."""

    def __init__(self) -> None:
        self._is_open = threading.Event()
        self._event: Any = None

    def open(self, event: Any) -> None:
        """Let kvflow read the layer, on a device once `event` has occurred."""
        self._event = event
        self._is_open.set()

    def synchronize(self) -> None:
        """Wait, on a thread of kvflow."""
        self._is_open.wait()
        if self._event is not None:
            self._event.synchronize()


@dataclass(eq=False)
class _Move:
    """A request that moves.

    Attributes:
        request_id: vLLM's id.
        transfer: kvflow's transfer; None if it could not start.
        prompt: `digest_of` the prompt, to compare with that of a received one.
        blocks: Blocks that kvflow was given.
        is_offered: All of its tokens were offered.
        is_awaited: vLLM waits to be told of its end.
        is_over: The request has ended in vLLM.
        is_told: vLLM was told of its end.
        is_held: Its blocks are kept out of vLLM's pool until they are safe.
        is_asked: The scheduler was told that decode has blocks for it.
    """

    request_id: str
    transfer: BlockingSender | BlockingReceiver | None
    prompt: str = ""
    blocks: dict[int, None] = field(default_factory=dict)
    is_offered: bool = False
    is_awaited: bool = False
    is_over: bool = False
    is_told: bool = False
    is_held: bool = False
    is_asked: bool = False

    @property
    def is_decided(self) -> bool:
        """The transfer has succeeded or failed."""
        return self.transfer is None or self.transfer.outcome is not Outcome.PENDING

    @property
    def has_arrived(self) -> bool:
        """The request was received, and was computed from the expected prompt."""
        transfer = self.transfer
        if not isinstance(transfer, BlockingReceiver) or transfer.outcome is not Outcome.SUCCESS:
            return False
        return split_metadata(transfer.result().metadata)[0] == self.prompt

    @property
    def first_token(self) -> bytes:
        """The packed first token of a request that has arrived; empty if there is none."""
        transfer = self.transfer
        return split_metadata(transfer.result().metadata)[1] if isinstance(transfer, BlockingReceiver) else b""

    @property
    def is_returned(self) -> bool:
        """Prefill needed its blocks for other requests before there were blocks for it here."""
        failure = None if self.transfer is None or self.is_awaited or self.is_over else self.transfer.failure
        return failure is not None and failure.reason is FailureReason.CAPACITY

    @property
    def is_safe(self) -> bool:
        """Nothing can access its blocks any more."""
        return self.transfer is None or self.transfer.memory is Memory.SAFE

    def note(self, blocks: Iterable[GroupBlocks | None]) -> None:
        """Record blocks that kvflow is given."""
        for given in blocks:
            self.blocks.update(dict.fromkeys(given.blocks if given is not None else ()))

    def abort(self, why: str = "") -> None:
        """Abort the transfer, and tell the other side why."""
        if self.transfer is not None:
            self.transfer.abort(why)


class ConnectorWorker:
    """Moves the requests that the scheduler orders to be moved.

    Args:
        caches: Memory of the worker.
        ranks: Open ranks.
        layerwise: Send each layer when it has been computed.
        patience_s: How long a step that computes nothing waits for a transfer to end.
        on_end: Called with each transfer that has ended.
        on_blocks: Called with the number of blocks that are newly held until they are safe, and of those safe by now.
    """

    def __init__(
        self,
        caches: Caches,
        ranks: Ranks,
        *,
        layerwise: bool,
        patience_s: float,
        on_end: Callable[[BlockingSender | BlockingReceiver], None],
        on_blocks: Callable[[int, int], None],
    ) -> None:
        self._caches = caches
        self._ranks = ranks
        self._layerwise = layerwise
        self._patience_s = patience_s
        self._is_empty_step = False
        self._awaited: frozenset[str] = frozenset()
        self._given_up: Mapping[str, str] = {}
        self._on_end = on_end
        self._on_blocks = on_blocks
        self._sending: dict[str, _Move] = {}
        self._receiving: dict[str, _Move] = {}
        self._moves: dict[object, _Move] = {}
        self._turns = TurnSenders(caches)
        self._gates: list[dict[str, Gate]] = []
        self._results = Results()
        self._report = WorkerReport()
        self._report_ticket()
        self._is_suspended = False

    @property
    def is_moving(self) -> bool:
        """Requests are moving, or have blocks that are not safe."""
        return bool(self._moves)

    def close(self) -> None:
        """Close the ranks."""
        self._open_gates(None)
        self._ranks.close()

    def suspend(self) -> None:
        """Abort what moves and close the ranks, so that vLLM can unmap the caches; nothing if it is suspended."""
        for move in self._moves.values():
            move.abort("the server goes to sleep")
        self._turns.abort("the server goes to sleep")
        self.close()
        self._apply_updates(self._ranks.completed())
        self._is_suspended = True

    def resume(self) -> None:
        """Register the caches again, and report new tickets; nothing unless it is suspended.

        Raises:
            KvflowError: As in `open_ranks`; the worker remains suspended.
        """
        if self._is_suspended:
            self._ranks = self._ranks.reopen()
            self._report_ticket()
            self._is_suspended = False

    def _report_ticket(self) -> None:
        if self._ranks.ticket is not None:
            self._report.tickets.append(self._ranks.ticket)

    # A step ----------------------------------------------------------------------------------------------------------

    def preempt(self, orders: StepOrders) -> None:
        """Wait until nothing reads the pages of preempted requests any more."""
        for request_id in orders.preempted:
            move = self._sending.get(request_id)
            if move is not None and isinstance(move.transfer, BlockingSender):
                self._quiesce(move, move.transfer)

    def _quiesce(self, move: _Move, sender: BlockingSender) -> None:
        try:
            sender.quiesce()
        except KvflowError as error:
            LOGGER.warning("kvflow: %s was preempted, and is not sent: %s", move.request_id, error)
        until = time.monotonic() + PREEMPTION_S
        while not (sender.is_quiesced or move.is_safe) and (left_s := until - time.monotonic()) > 0:
            self._apply_updates(self._ranks.wait_any(left_s))
        move.blocks.clear()  # vLLM takes them in any case
        if not (sender.is_quiesced or move.is_safe):
            LOGGER.warning("kvflow: %s was preempted while it was read, and is not handed over", move.request_id)
            move.abort("preempted while it was read")  # chunks are missing, so decode cannot succeed from now on

    def begin(self, orders: StepOrders) -> None:
        """Start new transfers, before the model runs."""
        self._is_empty_step, self._awaited = orders.is_empty, frozenset(orders.awaited)
        self._given_up = orders.given_up
        if orders.wants_ticket and not self._is_suspended:
            self._report_ticket()
        for request_id, room in orders.opened.items():
            self._sending[request_id] = self._begin(request_id, partial(self._ranks.send, room))
        for request_id, reference in orders.announced.items():
            move = self._begin(request_id, partial(self._ranks.announce, reference))
            move.prompt = reference.prompt or ""
            self._receiving[request_id] = move
        for request_id, chunk in orders.completed.items():
            self._send(request_id, chunk)
        for request_id in orders.declined:
            self._give_up(self._receiving[request_id], "the decode server computes it")
        for reference in orders.refused:
            self._ranks.decline(reference, "the other server computes all of it")
        if orders.turns:
            self._turns.begin(self._ranks, orders.turns, _record(self._caches))
        self._settle_ended(orders)
        if self._layerwise:
            for request_id, chunk in orders.chunks.items():
                self._gates.append({name: Gate() for name in self._caches.layers})
                self._send(request_id, chunk, gates=self._gates[-1])

    def _settle_ended(self, orders: StepOrders) -> None:
        for request_id in orders.leased:
            if (sender := self._sender(request_id)) is not None:
                sender.start_lease()
        for request_id, why in orders.abandoned.items():
            if (sender := self._sender(request_id)) is not None:
                sender.abort(why)
        for request_id, with_announced in orders.reclaimed.items():
            if (sender := self._sender(request_id)) is not None:
                sender.reclaim(with_announced=with_announced)
            else:
                self._turns.give_up(request_id)

    def _sender(self, request_id: str) -> BlockingSender | None:
        move = self._sending.get(request_id)
        return move.transfer if move is not None and isinstance(move.transfer, BlockingSender) else None

    def receive(self, orders: StepOrders) -> None:
        """Grant pages to announced requests."""
        for request_id, order in orders.granted.items():
            move = self._receiving[request_id]
            move.is_awaited = True
            self._grant(move, order)
            self._end_if_decided(move)  # it had failed before there were pages, or could not start

    def layer_saved(self, name: str) -> None:
        """Release a layer that was just computed."""
        if self._gates:
            event = _record(self._caches)
            for gates in self._gates:
                if name in gates:  # layers of a draft model, for example, are not moved
                    gates[name].open(event)

    def saved(self, orders: StepOrders) -> None:
        """Release everything that this step has computed."""
        ready = _record(self._caches) if orders.chunks else None
        if self._layerwise:
            self._open_gates(ready)  # for layers that vLLM did not report
            return
        for request_id, chunk in orders.chunks.items():
            self._send(request_id, chunk, ready=ready)

    def take_results(self, finished: Iterable[str]) -> Results:
        """Return what has ended since the last call; `finished` are requests that have ended in vLLM since then."""
        for request_id in finished:
            if request_id in self._sending:
                self._over(self._sending[request_id], is_awaited=request_id in self._awaited)
            if request_id in self._receiving:
                self._give_up(self._receiving[request_id], self._given_up.get(request_id, ""))
        self._apply_updates(self._ranks.completed())
        if self._is_empty_step:
            self._await_results()
        results, self._results = self._results, Results()
        return results

    def _await_results(self) -> None:
        """Wait up to `patience_s` for a transfer to end, because vLLM has nothing else to do."""
        until = time.monotonic() + self._patience_s
        while self._moves and not self._results and (left_s := until - time.monotonic()) > 0:
            self._apply_updates(self._ranks.wait_any(left_s))

    def take_report(self) -> WorkerReport | None:
        """Return a report for the scheduler, or None if there is nothing to report."""
        report, self._report = self._report, WorkerReport()
        report.released = self._turns.take_released()
        return report or None

    # Requests --------------------------------------------------------------------------------------------------------

    def _begin(self, request_id: str, begin: Callable[[str], BlockingSender | BlockingReceiver]) -> _Move:
        move = _Move(request_id, None)
        with self._contained(move, "does not move"):
            move.transfer = begin(request_id[:LABEL_LENGTH])
            self._moves[move.transfer] = move
        if move.is_decided:
            self._report.lost.append(request_id)
        return move

    @contextmanager
    def _contained(self, move: _Move, what: str) -> Iterator[None]:
        """Abort a request if the block raises; see `contained`."""

        def fail(reason: str) -> None:
            LOGGER.warning("kvflow: %s %s: %s", move.request_id, what, reason)
            move.abort(reason)

        with contained(fail):
            yield

    def _send(
        self, request_id: str, order: ChunkOrder, *, ready: Any = None, gates: Mapping[str, Gate] | None = None
    ) -> None:
        move = self._sending.get(request_id)
        if move is None:
            return
        move.is_offered = order.is_last
        if not isinstance(move.transfer, BlockingSender):
            return
        layers = [LayersReady(number + 1, gates[name]) for name, number in self._caches.layers.items()] if gates else ()
        offer = move.transfer.chunk
        if order.is_last:
            offer = partial(move.transfer.finish, metadata=order.metadata)
        with self._contained(move, "is not sent"):
            move.note(order.blocks)
            offer((order.start, order.stop), self._caches.pages(order.blocks, order.stop), ready=ready, layers=layers)

    def _grant(self, move: _Move, order: GrantOrder) -> None:
        if not isinstance(move.transfer, BlockingReceiver):
            return
        with self._contained(move, "is not received"):
            move.note(order.blocks)
            pages = self._caches.pages(order.blocks, order.stop)
            move.transfer.grant(tokens=(order.start, order.stop), pages=pages, timeout_s=order.timeout_s)

    def _over(self, move: _Move, *, is_awaited: bool) -> None:
        """Handle the end of a request in vLLM: let it move on to decode if all of it was computed, else abort it."""
        move.is_over, move.is_awaited = True, is_awaited
        if not move.is_offered:
            move.abort()
        if move.is_awaited:
            self._end_if_decided(move)
        else:
            del self._sending[move.request_id]

    def _give_up(self, move: _Move, why: str) -> None:
        """Stop receiving a request; vLLM waits for its end if it has blocks."""
        move.is_over = True
        move.abort(why)
        if not move.is_awaited:
            del self._receiving[move.request_id]

    def _apply_updates(self, updates: Iterable[TransferUpdate[Any]]) -> None:
        for update in updates:
            move = self._moves.get(update.transfer)
            if move is None:
                self._turns.apply_update(update)
                continue
            self._note_news(move)
            if move.is_awaited:
                self._end_if_decided(move)
            if move.is_decided and move.is_safe:
                self._moves.pop(update.transfer, None)
                if move.is_held:
                    self._report.freed += move.blocks
                    self._on_blocks(0, len(move.blocks))

    def _note_news(self, move: _Move) -> None:
        """Report to the scheduler what changes its decisions about a request that has not ended."""
        if isinstance(move.transfer, BlockingSender):
            if move.transfer.wanted is not None and not move.is_asked:
                move.is_asked = True
                self._report.asked.append(move.request_id)
            if move.transfer.failure is not None and not move.is_over:
                self._report.lost.append(move.request_id)
        elif move.is_returned:
            self._report.returned.append(move.request_id)

    def _end_if_decided(self, move: _Move) -> None:
        """Report the end of a request to vLLM, once."""
        if move.is_told or not move.is_decided:
            return
        move.is_told = True
        transfer = move.transfer
        if transfer is not None:
            self._on_end(transfer)
        if not move.is_safe:
            move.is_held = True
            self._report.held += move.blocks
            self._on_blocks(len(move.blocks), 0)
        if self._sending.get(move.request_id) is move:
            del self._sending[move.request_id]
            self._results.sent.add(move.request_id)
            return
        del self._receiving[move.request_id]
        self._results.received.add(move.request_id)
        if not move.has_arrived:
            self._results.failed.add(move.request_id)
            if not move.is_over:
                LOGGER.warning("kvflow: %s was not received: %s", move.request_id, _reason(transfer))
                self._report.failed.append((move.request_id, _short_reason(transfer)))
        elif first_token := move.first_token:
            self._report.first_tokens.append((move.request_id, first_token))

    def _open_gates(self, event: Any) -> None:
        for gates in self._gates:
            for gate in gates.values():
                gate.open(event)
        self._gates = []


def _reason(transfer: BlockingSender | BlockingReceiver | None) -> str:
    if transfer is None:
        return "it could not begin"
    if transfer.failure is None:
        return "prefill has computed another prompt"
    failure = transfer.failure
    return f"{failure.reason}: {failure.detail} ({failure.detected_by})"


def _short_reason(transfer: BlockingSender | BlockingReceiver | None) -> str:
    """Return a reason of which there are few, for a metric."""
    if transfer is None:
        return "unusable_blocks"
    return "another_prompt" if transfer.failure is None else str(transfer.failure.reason.value)


def _record(caches: Caches) -> Any:
    """Record an event on the current device stream; return None on the CPU, which computes synchronously."""
    if caches.layout.memory_kind != "VRAM":
        return None
    event = torch.Event()  # of whatever accelerator torch has
    event.record()
    return event

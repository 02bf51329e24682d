"""A worker's side: a transfer for each request that moves.

Everything is called by vLLM's worker thread, in this order in each step: `preempt`, `begin`, the model, `receive`,
`saved`, and `take_results`. Two of them wait for kvflow's threads: `preempt`, because vLLM is about to overwrite the
pages, and `take_results` for a moment, in a step that computes nothing. No error of kvflow leaves this module, because
vLLM would end with it.

vLLM is told of a request's end as soon as it is decided. Blocks that are not proved to be quiet by then are held for
somebody who may still touch them; see `ConnectorScheduler.take_report`.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch

from kvflow import KvflowError, LayersReady, Memory, Outcome
from kvflow.blocking import BlockingReceiver, BlockingSender, TransferUpdate
from kvflow.engines.vllm.layout import Caches
from kvflow.engines.vllm.metadata import ChunkOrder, GrantOrder, GroupBlocks, StepOrders, WorkerReport
from kvflow.engines.vllm.ranks import Ranks

__all__ = ["ConnectorWorker", "Results"]

LOGGER: Final = logging.getLogger("vllm.kvflow")

LABEL_LENGTH: Final = 200
"""Ids of requests may be longer; the room has the whole."""

PREEMPTION_S: Final = 10.0
"""How long vLLM waits for pages that it takes away."""


@dataclass
class Results:
    """What has ended since the last step, by vLLM's ids: each once.

    Attributes:
        sent: Their blocks may go.
        received: They have their blocks, or have failed.
        failed: Of those, the ones that have failed.
    """

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.sent or self.received)


class Gate:
    """Opens when a layer has been computed: a `ready` of kvflow."""

    def __init__(self) -> None:
        self._is_open = threading.Event()
        self._event: Any = None

    def open(self, event: Any) -> None:
        """Let kvflow read the layer, on a device after an event."""
        self._event = event
        self._is_open.set()

    def synchronize(self) -> None:
        """Wait, in a thread of kvflow."""
        self._is_open.wait()
        if self._event is not None:
            self._event.synchronize()


@dataclass(eq=False)
class _Move:
    """A request that moves.

    Attributes:
        request_id: vLLM's id.
        transfer: On kvflow's side; None if it could not begin.
        prompt: `digest_of` the prompt, which a received one is compared with.
        blocks: That kvflow was given.
        is_offered: All of its tokens were.
        is_awaited: vLLM waits to be told of its end.
        is_over: vLLM is over with the request.
        is_told: vLLM was told.
        is_held: Its blocks are kept out of vLLM's pool until they are safe.
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

    @property
    def is_decided(self) -> bool:
        """It has succeeded or failed."""
        return self.transfer is None or self.transfer.outcome is not Outcome.PENDING

    @property
    def has_arrived(self) -> bool:
        """It was received, and is of the prompt that it was wanted for."""
        transfer = self.transfer
        if not isinstance(transfer, BlockingReceiver) or transfer.outcome is not Outcome.SUCCESS:
            return False
        return transfer.result().metadata == self.prompt.encode()

    @property
    def is_safe(self) -> bool:
        """Nobody can touch its blocks any more."""
        return self.transfer is None or self.transfer.memory is Memory.SAFE

    def note(self, blocks: Iterable[GroupBlocks | None]) -> None:
        """Note that kvflow is given blocks."""
        for given in blocks:
            self.blocks.update(dict.fromkeys(given.blocks if given is not None else ()))

    def abort(self) -> None:
        """Give it up."""
        if self.transfer is not None:
            self.transfer.abort()


class ConnectorWorker:
    """Moves what the scheduler orders.

    Args:
        caches: Memory of the worker.
        ranks: As opened.
        layerwise: Each layer is sent when it is computed.
        patience_s: How long a step that computes nothing waits for something to end.
        on_end: Told of each transfer that has ended.
    """

    def __init__(
        self,
        caches: Caches,
        ranks: Ranks,
        *,
        layerwise: bool,
        patience_s: float,
        on_end: Callable[[BlockingSender | BlockingReceiver], None],
    ) -> None:
        self._caches = caches
        self._ranks = ranks
        self._layerwise = layerwise
        self._patience_s = patience_s
        self._is_empty_step = False
        self._awaited: frozenset[str] = frozenset()
        self._on_end = on_end
        self._sending: dict[str, _Move] = {}
        self._receiving: dict[str, _Move] = {}
        self._moves: dict[object, _Move] = {}
        self._gates: list[dict[str, Gate]] = []
        self._results, self._report = Results(), WorkerReport()

    @property
    def is_moving(self) -> bool:
        """There are requests that move, or blocks that are not safe."""
        return bool(self._moves)

    def close(self) -> None:
        """Close the ranks."""
        self._open_gates(None)
        self._ranks.close()

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
            self._take(self._ranks.wait_any(left_s))
        move.blocks.clear()  # vLLM has taken them, whatever comes
        if sender.is_quiesced or move.is_safe:
            move.is_offered = sender.is_quiesced and sender.resume_at is None
            return
        move.abort()
        LOGGER.error("kvflow: pages of %s are overwritten while they may still be read", move.request_id)

    def begin(self, orders: StepOrders) -> None:
        """Begin with what is new, before the model runs."""
        self._is_empty_step, self._awaited = orders.is_empty, frozenset(orders.awaited)
        for request_id, room in orders.opened.items():
            self._sending[request_id] = self._begin(request_id, partial(self._ranks.send, room))
        for request_id, reference in orders.announced.items():
            move = self._begin(request_id, partial(self._ranks.announce, reference))
            move.prompt = reference.prompt or ""
            self._receiving[request_id] = move
        for request_id in orders.declined:
            self._give_up(self._receiving[request_id])
        if self._layerwise:
            for request_id, chunk in orders.chunks.items():
                self._gates.append({name: Gate() for name in self._caches.layers})
                self._send(request_id, chunk, gates=self._gates[-1])

    def receive(self, orders: StepOrders) -> None:
        """Give pages to requests that were announced."""
        for request_id, order in orders.granted.items():
            move = self._receiving[request_id]
            move.is_awaited = True
            self._grant(move, order)
            self._end_if_decided(move)  # it had failed before there were pages, or could not begin

    def layer_saved(self, name: str) -> None:
        """Let a layer go that was just computed."""
        if self._gates:
            event = _record(self._caches)
            for gates in self._gates:
                if name in gates:  # those of a draft model, say, are not moved
                    gates[name].open(event)

    def saved(self, orders: StepOrders) -> None:
        """Let everything go that this step has computed."""
        ready = _record(self._caches) if orders.chunks else None
        if self._layerwise:
            self._open_gates(ready)  # of layers that vLLM did not tell of
            return
        for request_id, chunk in orders.chunks.items():
            self._send(request_id, chunk, ready=ready)

    def take_results(self, finished: Iterable[str]) -> Results:
        """Return what has ended, once.

        Args:
            finished: Ids of requests that are over in vLLM since the last step.
        """
        for request_id in finished:
            if request_id in self._sending:
                self._over(self._sending[request_id], is_awaited=request_id in self._awaited)
            if request_id in self._receiving:
                self._give_up(self._receiving[request_id])
        self._take(self._ranks.completed())
        if self._is_empty_step:
            self._await_results()
        results, self._results = self._results, Results()
        return results

    def _await_results(self) -> None:
        """Wait a little for something to end, since vLLM has nothing else to do."""
        until = time.monotonic() + self._patience_s
        while self._moves and not self._results and (left_s := until - time.monotonic()) > 0:
            self._take(self._ranks.wait_any(left_s))

    def take_report(self) -> WorkerReport | None:
        """Return what the scheduler is to know besides, if there is anything."""
        report, self._report = self._report, WorkerReport()
        return report if report.held or report.freed else None

    # Requests --------------------------------------------------------------------------------------------------------

    def _begin(self, request_id: str, begin: Callable[[str], BlockingSender | BlockingReceiver]) -> _Move:
        try:
            move = _Move(request_id, begin(request_id[:LABEL_LENGTH]))
        except KvflowError as error:
            LOGGER.warning("kvflow: %s does not move: %s", request_id, error)
            return _Move(request_id, None)
        self._moves[move.transfer] = move
        return move

    def _send(
        self, request_id: str, order: ChunkOrder, *, ready: Any = None, gates: Mapping[str, Gate] | None = None
    ) -> None:
        move = self._sending.get(request_id)
        if move is None or move.is_offered:  # all of it had been posted when it was preempted
            return
        move.note(order.blocks)
        move.is_offered = order.is_last
        if not isinstance(move.transfer, BlockingSender):
            return
        layers = [LayersReady(number + 1, gates[name]) for name, number in self._caches.layers.items()] if gates else ()
        offer = move.transfer.chunk
        if order.is_last:
            offer = partial(move.transfer.finish, metadata=order.prompt.encode())
        try:
            offer((order.start, order.stop), self._caches.pages(order.blocks, order.stop), ready=ready, layers=layers)
        except KvflowError as error:
            LOGGER.warning("kvflow: tokens of %s are not sent: %s", request_id, error)
            move.abort()

    def _grant(self, move: _Move, order: GrantOrder) -> None:
        if not isinstance(move.transfer, BlockingReceiver):
            return
        try:
            move.transfer.grant(tokens=(order.start, order.stop), pages=self._caches.pages(order.blocks, order.stop))
        except KvflowError as error:
            LOGGER.warning("kvflow: %s is not received: %s", move.request_id, error)
            move.abort()
        else:
            move.note(order.blocks)

    def _over(self, move: _Move, *, is_awaited: bool) -> None:
        """Let a request go on to decode that vLLM is over with, if all of it was computed."""
        move.is_over, move.is_awaited = True, is_awaited
        if not move.is_offered:
            move.abort()
        if move.is_awaited:
            self._end_if_decided(move)
        else:
            del self._sending[move.request_id]

    def _give_up(self, move: _Move) -> None:
        """Receive no more; vLLM waits for the end if there are blocks."""
        move.is_over = True
        move.abort()
        if not move.is_awaited:
            del self._receiving[move.request_id]

    def _take(self, updates: Iterable[TransferUpdate[Any]]) -> None:
        for update in updates:
            move = self._moves.get(update.transfer)
            if move is None:
                continue
            if move.is_awaited:
                self._end_if_decided(move)
            if move.is_decided and move.is_safe:
                self._moves.pop(update.transfer, None)
                if move.is_held:
                    self._report.freed += move.blocks

    def _end_if_decided(self, move: _Move) -> None:
        """Tell vLLM of the end of a request, once."""
        if move.is_told or not move.is_decided:
            return
        move.is_told = True
        transfer = move.transfer
        if transfer is not None:
            self._on_end(transfer)
        if not move.is_safe:
            move.is_held = True
            self._report.held += move.blocks
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
    return f"{failure.reason}: {failure.detail} ({failure.rank})"


def _record(caches: Caches) -> Any:
    """Record an event on the device that has just been given work; None on the CPU, which is done."""
    if caches.layout.memory_kind != "VRAM":
        return None
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event

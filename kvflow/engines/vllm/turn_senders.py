"""The worker's side of turns that are kept: one transfer for each, which waits for a prefill server to ask for it."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from kvflow import Memory, Outcome
from kvflow.blocking import BlockingSender, TransferUpdate
from kvflow.engines.containment import contained
from kvflow.engines.logs import adapter_logger
from kvflow.engines.vllm.layout import Caches
from kvflow.engines.vllm.metadata import TurnOrder
from kvflow.engines.vllm.ranks import Ranks

__all__ = ["TurnSenders"]

LOGGER: Final = adapter_logger("vllm.kvflow")


class TurnSenders:
    """Offers turns that have been computed.

    Args:
        caches: Memory of the worker.
    """

    def __init__(self, caches: Caches) -> None:
        self._caches = caches
        self._by_request: dict[str, BlockingSender] = {}
        self._requests: dict[object, str] = {}
        self._released: list[str] = []

    def begin(self, ranks: Ranks, turns: Mapping[str, TurnOrder], ready: Any) -> None:
        """Offer turns, which are computed once `ready` has occurred on a device."""
        for request_id, (room, chunk) in turns.items():
            with contained(partial(self._fail, request_id)):
                sender = ranks.send(room, request_id)
                self._by_request[request_id], self._requests[sender] = sender, request_id
                pages = self._caches.pages(chunk.blocks, chunk.stop)
                sender.finish((chunk.start, chunk.stop), pages, ready=ready, metadata=chunk.metadata)

    def _fail(self, request_id: str, reason: str) -> None:
        LOGGER.warning("kvflow: the turn of %s is not kept: %s", request_id, reason)
        if (sender := self._by_request.get(request_id)) is None:
            self._released.append(request_id)
        else:
            sender.abort(reason)

    def give_up(self, request_id: str) -> None:
        """Give up a turn, if it is kept and not being sent."""
        sender = self._by_request.get(request_id)
        if sender is not None and sender.wanted is None:
            sender.abort("the turn is not kept any longer")

    def abort(self, why: str) -> None:
        """Abort all turns, and tell the other side why."""
        for sender in self._by_request.values():
            sender.abort(why)

    def apply_update(self, update: TransferUpdate[Any]) -> None:
        """Release a turn, if the transfer is of one, when nothing reads its blocks any more."""
        if update.outcome is Outcome.PENDING or update.memory is not Memory.SAFE:
            return
        if (request_id := self._requests.pop(update.transfer, None)) is not None:
            del self._by_request[request_id]
            self._released.append(request_id)

    def take_released(self) -> list[str]:
        """Return the turns that were released since the last call."""
        released, self._released = self._released, []
        return released

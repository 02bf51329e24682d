"""Two managers of transformers in one process, connected by kvflow."""

import queue
import time
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

import kvflow
from kvflow import FailureReason
from kvflow.engines.transformers.decode import DecodeManager
from kvflow.engines.transformers.prefill import PrefillManager
from kvflow.testing.adapter import AdapterUnderTest, SideName
from tests.engines.transformers.models import make_manager

__all__ = ["Pair"]


class Pair(AdapterUnderTest):
    """A prefill and a decode manager with pages of different sizes, and a reference manager; a context manager.

    Attributes:
        receivers: Receivers of the requests of the decode manager.
        fingerprint: Fingerprint of both caches.
    """

    fingerprint = "tests"

    def __init__(
        self,
        model: str = "full",
        *,
        page_sizes: tuple[int, int] = (16, 8),
        backend: str = "memory",
        num_blocks: int = 64,
        allow_block_sharing: bool = True,
        handshake_s: float = 20,
        drain_s: float = 5,
        sides: Sequence[SideName] = ("prefill", "decode"),
    ) -> None:
        self._model = model
        self._backend = backend
        self._sides = sides
        self._timeouts = kvflow.Timeouts(handshake_s=handshake_s, drain_s=drain_s)
        self._settings: dict[str, Any] = {"num_blocks": num_blocks, "allow_block_sharing": allow_block_sharing}
        self._sizes: dict[SideName, int] = dict(zip(("prefill", "decode"), page_sizes, strict=True))
        self.receivers: dict[str, Any] = {}
        self._outputs: dict[str, Any] = {}
        self._alone = make_manager(model)

    def __enter__(self) -> "Pair":
        self._alone.start()
        for side in self._sides:
            self._start(side)
        return self

    def __exit__(self, *_: object) -> None:
        for side in self._sides:
            self._stop(side)
        self._alone.stop(hard_stop=True)

    def _start(self, side: SideName) -> None:
        manager = make_manager(self._model, page_size=self._sizes[side], **self._settings)
        if side == "prefill":
            prefill = kvflow.PrefillConfig(instance=side, backend=self._backend)
            self.prefill_end = PrefillManager(manager, prefill, fingerprint=self.fingerprint).__enter__()
        else:
            decode = kvflow.DecodeConfig(instance=side, backend=self._backend, timeouts=self._timeouts)
            self.decode_end = DecodeManager(manager, decode, fingerprint=self.fingerprint).__enter__()
        manager.start()

    def _stop(self, side: SideName) -> None:
        end = self.end(side)
        end.__exit__(None, None, None)
        end.engine.manager.stop(hard_stop=True)

    def end(self, side: SideName) -> PrefillManager | DecodeManager:
        return self.prefill_end if side == "prefill" else self.decode_end

    @override
    def reference(self, prompt: Sequence[int]) -> list[int]:
        self._alone.add_request(list(prompt))
        tokens: list[int] = self._alone.get_result(timeout=20).generated_tokens
        return tokens

    @override
    def prefill(self, prompt: Sequence[int], room: str) -> dict[str, object]:
        return self.prefill_end.add_request(prompt, room).ticket

    @override
    def decode(
        self, prompt: Sequence[int], ticket: dict[str, object], *, max_tokens: int | None = None, **settings: Any
    ) -> None:
        receiver = self.decode_end.add_request(prompt, ticket, max_new_tokens=max_tokens, **settings)
        self.receivers[str(receiver.room)] = receiver

    @override
    def result(self, room: str, timeout_s: float = 20) -> list[int] | FailureReason:
        output = self.output(room, timeout_s)
        if output.error is not None:
            reason: FailureReason = self.receivers[room].failure.reason
            return reason
        tokens: list[int] = output.generated_tokens
        return tokens

    def output(self, room: str, timeout_s: float = 20) -> Any:
        """Wait for the output of the decode manager."""
        deadline = time.monotonic() + timeout_s
        outputs = self.decode_end.engine.manager.output_router.output_queue
        while room not in self._outputs:
            try:
                output = outputs.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty as error:
                raise TimeoutError(room) from error
            self._outputs[output.request_id] = output
        return self._outputs.pop(room)

    @override
    def abort(self, side: SideName, room: str) -> None:
        self.end(side).engine.manager.cancel_request(room)

    @override
    def refuse_next(self) -> None:
        scheduler = self.prefill_end.engine.scheduler
        add = scheduler.add_waiting_request

        def refuse(_: Any) -> None:
            scheduler.add_waiting_request = add
            raise ValueError("refused on purpose")

        scheduler.add_waiting_request = refuse

    @override
    def fits(self, side: SideName, prompts: Sequence[Sequence[int]]) -> bool:
        cache = self.end(side).engine.cache
        needed: list[int] = [
            -(-allocator.needs_new_blocks("", 0, len(prompt) + 1) // allocator.blocks_per_sector)
            for prompt in prompts
            for allocator in cache.cache_allocators.values()
        ]
        capacity: int = cache.num_sectors
        return sum(needed) <= capacity

    @override
    def used_pages(self, side: SideName) -> int:
        engine = self.end(side).engine
        tables = sum(len(one.block_table) for one in engine.cache.cache_allocators.values())
        return tables + len(engine._held)

    @override
    def spoil(self) -> None:
        end = self.decode_end
        arrive = end._arrive

        def arrive_spoiled(one: Any) -> None:
            for name, blocks in end.engine.blocks(one.state.request_id).items():
                end.engine.cache.cache_allocators[name]._copy_view[blocks] = 0
            end._arrive = arrive  # type: ignore[method-assign]
            arrive(one)

        end._arrive = arrive_spoiled  # type: ignore[method-assign]

    @override
    def restart(self, side: SideName) -> None:
        self._stop(side)
        self._start(side)

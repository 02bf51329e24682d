"""Engines: schedulers that run by themselves, and return checksums of pages in place of generated tokens."""

import zlib
from typing import Any, Final

import torch

from tests.engines.sglang.models import content
from tests.engines.sglang.schedulers import DecodeScheduler, PrefillScheduler, Scheduler
from tests.engines.sglang.sides import FIRST_TOKEN

__all__ = ["ENGINES", "Engine"]

CHUNK: Final = 32


class Engine(Scheduler):
    """Common base of both roles."""

    def __init__(self, *arguments: Any) -> None:
        self.prompts: dict[int, list[int]] = {}
        self.waiting: dict[int, int] = {}
        super().__init__(*arguments)

    def seed(self, room: int) -> int:
        return _checksum(torch.tensor(self.prompts[room]))

    def used_pages(self) -> int:
        """Return the number of pages that are not free."""
        used: int = self.free - self.allocator.available_size()
        return used // self.model.page


class PrefillEngine(Engine, PrefillScheduler):
    """Computes each bootstrapped request, and sends one chunk of it per step."""

    def _release(self, request: Any, *_: Any, **__: Any) -> None:
        super()._release(request)
        self.mixed.req_to_token_pool.free(request)

    def serve(self, room: int, prompt: list[int]) -> None:
        """Add a request."""
        self.prompts[room], self.waiting[room] = prompt, 0
        self.add(room, len(prompt))

    def refuse_next(self) -> None:
        """Treat the next prompt as too long."""
        length, self.queue.max_input_len = self.queue.max_input_len, 0
        add = self.queue.add

        def refuse(*request: Any) -> None:
            add(*request)
            self.queue.max_input_len, self.queue.add = length, add

        self.queue.add = refuse

    def abort(self, room: int) -> None:
        if room not in self.waiting:
            return
        super().abort(room)
        if self.is_bootstrapped(room):
            self.retire(room)
            del self.waiting[room]

    def step(self) -> None:
        super().step()
        for room, start in tuple(self.waiting.items()):
            if self.was_told(room):
                del self.waiting[room]
            elif self.is_bootstrapped(room):
                self._go_on(room, start)

    def _go_on(self, room: int, start: int) -> None:
        tokens = len(self.prompts[room])
        if start == 0:
            if self.allocator.available_size() < tokens + self.model.page:
                return
            self.compute(room, tokens)
        self.waiting[room] = end = min(tokens, start + CHUNK)
        self.send(room, end, last=end == tokens)
        if end == tokens:
            del self.waiting[room]


class DecodeEngine(Engine, DecodeScheduler):
    """Reads each request that has arrived, and frees its pages."""

    def __init__(self, *arguments: Any) -> None:
        self.results: dict[int, list[int] | str] = {}
        self.is_spoiled = False
        super().__init__(*arguments)

    def _release(self, request: Any, *_: Any, **__: Any) -> None:
        super()._release(request)
        if request.kv.req_pool_idx is not None:
            self.queue.req_to_token_pool.free(request)

    def serve(self, room: int, prompt: list[int], max_tokens: int | None) -> None:
        """Add a request."""
        self.prompts[room], self.waiting[room] = prompt, max_tokens or 1_000
        self.add(room, len(prompt))

    def reference(self, prompt: list[int]) -> list[int]:
        """Return the expected tokens for a prompt."""
        seed, shape = 1_000 * _checksum(torch.tensor(prompt)), (len(prompt), self.model.heads, self.model.dim)
        return [FIRST_TOKEN, *(_checksum(content(seed + part, *shape)) for part in range(2 * self.model.layers))]

    def result(self, room: int) -> list[int] | str | None:
        """Return the tokens of a room or its failure; None while it is pending."""
        return self.results.get(room)

    def spoil(self) -> None:
        """Zero the pages of the next request that arrives."""
        self.is_spoiled = True

    def step(self) -> None:
        super().step()
        for room, limit in tuple(self.waiting.items()):
            if self.has_arrived(room):
                self.results[room] = self._read(room)[:limit]
                self.finish(room)
            elif reason := self.was_told(room):
                self.results[room] = reason
            else:
                continue
            del self.waiting[room]

    def _read(self, room: int) -> list[int]:
        found = [FIRST_TOKEN]
        for tensor, index, _ in self.cells(room, len(self.prompts[room])):
            if self.is_spoiled:
                tensor[index] = 0
            found.append(_checksum(tensor[index]))
        self.is_spoiled = False
        return found


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().tobytes())


ENGINES: Final = {"prefill": PrefillEngine, "decode": DecodeEngine}

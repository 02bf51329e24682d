"""A prefill and a decode manager connected by kvflow, each in a process of its own."""

import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Final

from typing_extensions import override

from kvflow import FailureReason
from kvflow.testing.adapter import KillableAdapter, SideName
from tests.engines.transformers.pair import Pair

__all__ = ["Processes"]

SPAWN: Final = multiprocessing.get_context("spawn")


class Processes(KillableAdapter):
    """One half of a `Pair` in each process; a context manager."""

    def __init__(self) -> None:
        self._processes: dict[SideName, tuple[Any, Connection]] = {}

    def __enter__(self) -> "Processes":
        self.restart("prefill")
        self.restart("decode")
        return self

    def __exit__(self, *_: object) -> None:
        for side in tuple(self._processes):
            self.kill(side)

    def _ask(self, side: SideName, method: str, *arguments: Any, **options: Any) -> Any:
        _, pipe = self._processes[side]
        pipe.send((method, arguments, options))
        return pipe.recv()

    @override
    def kill(self, side: SideName) -> None:
        process, pipe = self._processes.pop(side)
        process.kill()
        process.join()
        pipe.close()

    @override
    def restart(self, side: SideName) -> None:
        if side in self._processes:
            self.kill(side)
        pipe, its_pipe = SPAWN.Pipe()
        process = SPAWN.Process(target=_serve, args=(side, its_pipe), daemon=True)
        process.start()
        its_pipe.close()
        pipe.recv()  # wait until the process is ready
        self._processes[side] = process, pipe

    @override
    def reference(self, prompt: Sequence[int]) -> list[int]:
        tokens: list[int] = self._ask("decode", "reference", prompt)
        return tokens

    @override
    def prefill(self, prompt: Sequence[int], room: str) -> Any:
        return self._ask("prefill", "prefill", prompt, room)

    @override
    def decode(self, prompt: Sequence[int], ticket: Any, *, max_tokens: int | None = None) -> None:
        self._ask("decode", "decode", prompt, ticket, max_tokens=max_tokens)

    @override
    def result(self, room: str, timeout_s: float) -> list[int] | FailureReason:
        found: list[int] | FailureReason = self._ask("decode", "result", room, timeout_s)
        return found

    @override
    def abort(self, side: SideName, room: str) -> None:
        self._ask(side, "abort", side, room)

    @override
    def refuse_next(self) -> None:
        self._ask("prefill", "refuse_next")

    @override
    def fits(self, side: SideName, prompts: Sequence[Sequence[int]]) -> bool:
        answer: bool = self._ask(side, "fits", side, prompts)
        return answer

    @override
    def used_pages(self, side: SideName) -> int:
        count: int = self._ask(side, "used_pages", side)
        return count

    @override
    def spoil(self) -> None:
        self._ask("decode", "spoil")


def _serve(side: SideName, pipe: Connection) -> None:
    with Pair(backend="nixl", handshake_s=2, sides=(side,)) as pair:
        pipe.send(None)
        while True:
            method, arguments, options = pipe.recv()
            pipe.send(getattr(pair, method)(*arguments, **options))

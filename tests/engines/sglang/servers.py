"""A prefill and a decode engine for `kvflow.testing.adapter`."""

import itertools
import time
from collections.abc import Sequence
from typing import Any, Final

from typing_extensions import override

from kvflow import FailureReason
from kvflow.testing.adapter import KillableAdapter, SideName
from tests.engines.sglang.processes import Process, free_port

__all__ = ["Servers"]

PAGE: Final = 16
PAGES: Final = 20
SETTINGS: Final = {"backend": "nixl", "timeouts": {"lease_s": 2.0, "drain_s": 1.0}}
ENVIRONMENT: Final = {
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "10",
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "1",
}
SGLANGS_REASONS: Final = {
    "Aborted by AbortReq": FailureReason.ABORTED,
    "Lost connection with prefill instance": FailureReason.PEER_LOST,
    "timed out": FailureReason.DEADLINE,
}


class Servers(KillableAdapter):
    """A process for each side that runs SGLang's own queues; a context manager."""

    def __init__(self) -> None:
        self._port = free_port()
        self._processes: dict[SideName, Process] = {}
        self._numbers = itertools.count(1)
        self._rooms: dict[str, int] = {}

    def __enter__(self) -> "Servers":
        self.restart("prefill")
        self.restart("decode")
        return self

    def __exit__(self, *_: object) -> None:
        for side in tuple(self._processes):
            self.kill(side)

    def _ask(self, side: SideName, what: str, **arguments: Any) -> Any:
        return self._processes[side].tell("ask", what=what, **arguments)

    @override
    def kill(self, side: SideName) -> None:
        self._processes.pop(side).kill()

    @override
    def restart(self, side: SideName) -> None:
        if side in self._processes:
            self.kill(side)
        self._processes[side] = process = Process(side, SETTINGS, ENVIRONMENT)
        process.tell("serve", port=self._port)

    @override
    def reference(self, prompt: Sequence[int]) -> list[int]:
        tokens: list[int] = self._ask("decode", "reference", prompt=prompt)
        return tokens

    @override
    def prefill(self, prompt: Sequence[int], room: str) -> int:
        self._rooms[room] = number = next(self._numbers)
        self._ask("prefill", "serve", room=number, prompt=prompt)
        return number

    @override
    def decode(self, prompt: Sequence[int], ticket: int, *, max_tokens: int | None = None) -> None:
        self._ask("decode", "serve", room=ticket, prompt=prompt, max_tokens=max_tokens)

    @override
    def result(self, room: str, timeout_s: float) -> list[int] | FailureReason:
        deadline = time.monotonic() + timeout_s
        while (found := self._ask("decode", "result", room=self._rooms[room])) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(room)
            time.sleep(0.01)
        return _reason_in(found) if isinstance(found, str) else list(found)

    @override
    def abort(self, side: SideName, room: str) -> None:
        self._ask(side, "abort", room=self._rooms[room])

    @override
    def refuse_next(self) -> None:
        self._ask("prefill", "refuse_next")

    @override
    def fits(self, side: SideName, prompts: Sequence[Sequence[int]]) -> bool:
        return sum(-(-len(prompt) // PAGE) for prompt in prompts) <= PAGES

    @override
    def used_pages(self, side: SideName) -> int:
        count: int = self._ask(side, "used_pages")
        return count

    @override
    def spoil(self) -> None:
        self._ask("decode", "spoil")


def _reason_in(message: str) -> FailureReason:
    """Parse the reason of kvflow from the message that SGLang sends to the client.

    A call after the failure raises it, and SGLang passes that text on.

    A call that comes after the failure raises it, and SGLang passes the text of that on.
    """
    named = {f"{reason}: ": reason for reason in FailureReason} | SGLANGS_REASONS
    named |= {f"reason={reason.value!r}": reason for reason in FailureReason}
    return next(reason for words, reason in named.items() if words in message)

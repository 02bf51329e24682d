"""Two managers of transformers in one process, each with both ends, so that requests and turns go both ways."""

from contextlib import ExitStack
from typing import Any

import kvflow
from kvflow.engines.transformers.decode import DecodeManager
from kvflow.engines.transformers.prefill import PrefillManager
from tests.engines.transformers.models import make_manager

__all__ = ["Server"]


class Server:
    """A manager with both ends.

    Attributes:
        computed: Tokens that the manager has computed.
    """

    def __init__(self, name: str, stack: ExitStack, *, page_size: int, num_blocks: int = 64) -> None:
        self.manager = manager = make_manager(page_size=page_size, num_blocks=num_blocks, allow_block_sharing=True)
        sending = kvflow.PrefillConfig(instance=name, backend="memory", takes_offers=True)
        self.prefill = stack.enter_context(PrefillManager(manager, sending, fingerprint="tests"))
        receiving = kvflow.DecodeConfig(instance=name, backend="memory")
        self.decode = stack.enter_context(DecodeManager(manager, receiving, fingerprint="tests"))
        self.outputs: dict[str, Any] = {}
        self.computed = 0
        schedule = self.decode.engine.scheduler.schedule_batch

        def count(*budgets: int) -> Any:
            found = schedule(*budgets)
            self.computed += sum(len(one.state.tokens_to_process) for one in found[0] or [])
            return found

        stack.callback(setattr, self.decode.engine.scheduler, "schedule_batch", schedule)
        self.decode.engine.scheduler.schedule_batch = count
        manager.start()
        stack.callback(manager.stop, hard_stop=True)

    def output(self, room: str, num_tokens: int = 0, timeout_s: float = 20) -> Any:
        """Wait until a request has ended, or has that many tokens."""
        while True:
            last = self.outputs.get(room)
            if last is not None and (last.is_finished() or 0 < num_tokens <= len(last.generated_tokens)):
                return last
            output = self.manager.output_router.output_queue.get(timeout=timeout_s)
            self.outputs[output.request_id] = output

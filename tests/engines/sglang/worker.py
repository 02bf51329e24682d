"""A process with one side of a deployment; it executes commands, lines of JSON, from its standard input.

`processes` starts it; run as `python -m tests.engines.sglang.worker prefill`.
"""

import json
import os
import select
import sys
import time
import traceback
import warnings
from typing import Any

warnings.filterwarnings("ignore")

from benchmarks.embedded import sglang_shim  # noqa: E402 - before anything of SGLang

sglang_shim.install()

from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402

from kvflow.engines.sglang import plugin  # noqa: E402
from tests.engines.sglang import engines, models, schedulers, sides, soak, strangers  # noqa: E402

__all__: list[str] = []


class Worker:
    """Executes commands; each is a method.

    Args:
        mode: "prefill" or "decode".
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.side: Any = None

    def open(self, **arguments: Any) -> None:
        """Create a side in place of the former one."""
        self.close()
        self.side = sides.Side(self.mode, **arguments)

    def close(self) -> None:
        """Close the side."""
        if self.side is not None:
            self.side.close()
            self.side = None

    def start(self, port: int, rank: tuple[int, ...] = (1, 0), store: str = "") -> None:
        """Create a scheduler in place of the former side."""
        self.close()
        self.side = schedulers.SCHEDULERS[self.mode](port, models.Rank(*rank), store)

    def serve(self, port: int) -> None:
        """Create an engine, which steps by itself."""
        self.close()
        self.side = engines.ENGINES[self.mode](port, models.Rank(1, 0))

    def converse(self, port: int) -> None:
        """Create a server of conversations, which steps by itself."""
        from tests.engines.sglang import turns  # noqa: PLC0415 - imports SGLang's whole scheduler

        self.close()
        self.side = turns.SERVERS[self.mode](port, models.Rank(1, 0))

    def wait(self) -> None:
        """Wait for the next command, one line, while an engine goes on."""
        while isinstance(self.side, engines.Engine) and not select.select([sys.stdin], [], [], 0)[0]:
            self.side.step()
            time.sleep(5e-4)

    def set_variable(self, name: str, value: str) -> None:
        """Set an environment variable that SGLang reads each time it needs it."""
        os.environ[name] = value

    def ask(self, what: str, **arguments: Any) -> Any:
        """Call a method of the scheduler."""
        return getattr(self.side, what)(**arguments)

    def until(self, what: str, timeout_s: float = 20, **arguments: Any) -> bool:
        """Run steps until the scheduler confirms."""
        found: bool = self.side.until(lambda: getattr(self.side, what)(**arguments), timeout_s)
        return found

    def steps(self, count: int) -> None:
        """Run as many steps as the other ranks of the group, which wait for each other in every step."""
        for _ in range(count):
            self.side.step()
            time.sleep(1e-3)

    def rest(self, seconds: float) -> None:
        """Run steps for a while."""
        self.side.until(lambda: False, seconds)

    def transfer(self, **arguments: Any) -> Any:
        """Send or receive a request."""
        return self.side.transfer(**arguments)

    def begin(self, room: int) -> Any:
        """Create the end of a request, and return what SGLang logs meanwhile."""
        return self.side.begin(room)

    def failure(self, timeout_s: float = 20) -> Any:
        """Return why it has failed, or ""."""
        return self.side.failure(timeout_s)

    def give_up(self, **arguments: Any) -> Any:
        """Start a request, and let decode abort it."""
        return self.side.give_up(**arguments)

    def strangers(self, **arguments: Any) -> Any:
        """Let decode ranks without SGLang request rooms."""
        return strangers.ask_for(self.side, **arguments)

    def soak(self, **arguments: Any) -> Any:
        """Send or receive many requests."""
        return soak.soak(self.side, **arguments)


def main() -> None:
    """Answer each command with a line."""
    plugin.activate()
    HookRegistry.apply_hooks()
    worker = Worker(sys.argv[1])
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = {"result": getattr(worker, command.pop("do"))(**command)}
        except Exception:  # noqa: BLE001 - told to the test
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=OUTPUT, flush=True)
        worker.wait()
    os._exit(0)


if __name__ == "__main__":
    OUTPUT = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to stdout as well
    main()

"""A process with one side of a deployment, which does what lines of JSON on its standard input say.

Started by `processes`; run as `python -m tests.engines.sglang.worker prefill`.
"""

import json
import os
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
from tests.engines.sglang import models, schedulers, sides, soak, strangers  # noqa: E402

__all__: list[str] = []


class Worker:
    """Carries out commands; each is a method.

    Args:
        mode: "prefill" or "decode".
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.side: Any = None

    def open(self, **arguments: Any) -> None:
        """Make a side, in place of the one before."""
        self.close()
        self.side = sides.Side(self.mode, **arguments)

    def close(self) -> None:
        """Close the side."""
        if self.side is not None:
            self.side.close()
            self.side = None

    def start(self, port: int, rank: tuple[int, ...] = (1, 0), store: str = "") -> None:
        """Make a scheduler, in place of what was before."""
        self.close()
        self.side = schedulers.SCHEDULERS[self.mode](port, models.Rank(*rank), store)

    def ask(self, what: str, **arguments: Any) -> Any:
        """Call the scheduler."""
        return getattr(self.side, what)(**arguments)

    def until(self, what: str, timeout_s: float = 20, **arguments: Any) -> bool:
        """Go on with steps until the scheduler says yes."""
        found: bool = self.side.until(lambda: getattr(self.side, what)(**arguments), timeout_s)
        return found

    def steps(self, count: int) -> None:
        """Take as many steps as the other ranks of the group, which wait for each other in each of them."""
        for _ in range(count):
            self.side.step()
            time.sleep(1e-3)

    def rest(self, seconds: float) -> None:
        """Go on with steps for a while."""
        self.side.until(lambda: False, seconds)

    def transfer(self, **arguments: Any) -> Any:
        """Send or receive a request."""
        return self.side.transfer(**arguments)

    def give_up(self, **arguments: Any) -> Any:
        """Begin a request, and let decode abort it."""
        return self.side.give_up(**arguments)

    def strangers(self, **arguments: Any) -> Any:
        """Let decode ranks that are not SGLang's ask for rooms."""
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
    os._exit(0)


if __name__ == "__main__":
    OUTPUT = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print, too
    main()

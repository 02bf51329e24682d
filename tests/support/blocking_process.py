"""A decode rank of an engine with a scheduler loop, in a process of its own.

It receives one room with a ticket. On the order `abort` it aborts the room, reports `quarantined` as soon as its pages
are, and `released` once they are safe. Lines of the log about the quarantine are reported as `logged`.
"""

import logging
import sys
from typing import Any

import msgspec
from typing_extensions import override

from benchmarks.processes import Line, run_child
from kvflow import blocking
from kvflow.config import Timeouts
from tests.support.instances import decode_config, make_pool
from tests.support.prefill_process import PAGES, TOKENS

__all__ = ["ReceiverOptions"]


class ReceiverOptions(msgspec.Struct, frozen=True):
    """Options of the process: the ticket of the room, and the directory for the socket of its rank."""

    ticket: dict[str, Any]
    admin: str


class Reported(logging.Handler):
    """Reports each line about a release."""

    def __init__(self, line: Line) -> None:
        super().__init__()
        self._line = line

    @override
    def emit(self, record: logging.LogRecord) -> None:
        if "quarantine_released" in record.getMessage():
            self._line.report("logged", text=record.getMessage())


def main(options: ReceiverOptions, line: Line) -> None:
    logging.getLogger("kvflow").addHandler(Reported(line))
    timeouts = Timeouts(handshake_s=15.0, drain_s=0.1, lease_s=60.0)
    config = decode_config(None, backend="nixl", admin=options.admin, timeouts=timeouts)
    with blocking.DecodeRank(config, make_pool().layout) as rank:
        receiver = rank.receive(prefill=options.ticket, tokens=TOKENS, pages=PAGES)
        line.report("ready")
        if line.receive()["do"] != "abort":
            return
        receiver.abort()
        wait_for(rank, receiver, blocking.Memory.QUARANTINED)
        line.report("quarantined")
        wait_for(rank, receiver, blocking.Memory.SAFE)
        line.report("released")
        line.receive()


def wait_for(rank: blocking.DecodeRank, receiver: blocking.BlockingReceiver, memory: blocking.Memory) -> None:
    while receiver.memory is not memory:
        rank.wait_any(1.0)


if __name__ == "__main__":
    sys.exit(run_child(main, ReceiverOptions))

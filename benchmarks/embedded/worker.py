"""One process with an engine: `python -m benchmarks.embedded.worker OPTIONS`."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from benchmarks.bare.endpoint import open_endpoint
from benchmarks.embedded.bare_ends import BareDecode, BarePrefill
from benchmarks.embedded.engines import DecodeEnd, PrefillEnd, other_work, play_decode, play_prefill
from benchmarks.embedded.kvflow_ends import open_decode, open_prefill
from benchmarks.embedded.loads import LANES, EmbeddedOptions, Load
from benchmarks.embedded.timeline import Timeline
from benchmarks.pair.loads import SHAPES
from benchmarks.pools import PagePool, page_tables
from benchmarks.processes import Line, run_child
from benchmarks.sides import PREFILL

__all__ = ["main"]


class Side:
    """One engine, and a way to move its pages.

    Args:
        options: Options of this process.
        line: Connection to the parent process.
    """

    def __init__(self, options: EmbeddedOptions, line: Line) -> None:
        shape = SHAPES[options.shape]
        size = options.tokens // shape.page_size
        self.options = options
        self.line = line
        self.is_prefill = options.side == PREFILL
        self.pool = PagePool(shape, LANES * size)
        self.tables, self.peers = (
            page_tables(self.pool.num_pages, LANES, size, [is_prefill]).tolist()
            for is_prefill in (self.is_prefill, not self.is_prefill)
        )
        (self.pool.fill if self.is_prefill else self.pool.wipe)()

    def play(self, end: Any, timeline: Timeline | None = None) -> None:
        """Play loads, or idle, as ordered, until the order to exit."""
        self.line.report("ready")
        play = play_prefill if self.is_prefill else play_decode
        while (order := self.line.receive())["do"] != "leave":
            began_s, used_s = time.monotonic(), time.process_time()
            if order["do"] == "rest":
                time.sleep(order["seconds"])
                self.line.report("rested", cpu_s=time.process_time() - used_s, wall_s=time.monotonic() - began_s)
                continue
            load = msgspec.convert(order["load"], Load)
            with other_work(load.engine) as steps:
                played = play(end, load)
            played |= {"cpu_s": time.process_time() - used_s, "wall_s": time.monotonic() - began_s}
            marks = timeline.take() if timeline is not None else []
            self.line.report("played", room=load.first_room, steps=steps[0], marks=marks, **played)

    def serve_kvflow(self) -> None:
        """Play with kvflow."""
        timeline = Timeline(self.options.side) if self.options.is_traced else None
        with (open_prefill if self.is_prefill else open_decode)(self.options, self.pool, self.tables) as end:
            self.play(end, timeline)

    def serve_bare(self) -> None:
        """Play without kvflow."""
        endpoint = open_endpoint(self.options, self.pool)
        self.line.report("bound", address=endpoint.address().hex())
        endpoint.connect(bytes.fromhex(self.line.receive()["address"]))
        end: PrefillEnd | DecodeEnd = BareDecode(endpoint)
        if self.is_prefill:
            end = BarePrefill(endpoint, self.tables, self.peers)
        self.play(end)
        endpoint.close()

    def serve_sglang(self) -> None:
        """Play with SGLang's interfaces."""
        from benchmarks.embedded.sglang_ends import SglangDecode, SglangPrefill, open_manager  # noqa: PLC0415 - optional

        with _silence():
            manager = open_manager(self.options, self.pool)
            self.line.report("bound", address="")
            self.line.receive()
            self.play((SglangPrefill if self.is_prefill else SglangDecode)(manager, self.tables))
        sys.stderr.flush()
        os._exit(0)  # SGLang's threads do not end


@contextmanager
def _silence() -> Iterator[None]:
    """Discard what libraries write to standard error within the block."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)


def serve(options: EmbeddedOptions, line: Line) -> None:
    """Execute orders until the one to exit."""
    side = Side(options, line)
    ways = {"kvflow": side.serve_kvflow, "bare": side.serve_bare}
    ways.get(options.way, side.serve_sglang)()


def main() -> int:
    """Run the process, and return the exit code."""
    return run_child(serve, EmbeddedOptions)


if __name__ == "__main__":
    sys.exit(main())

"""One process with an engine: `python -m benchmarks.embedded.worker OPTIONS`."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np

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
        self.options = options
        self.line = line
        self.is_prefill = options.side == PREFILL
        self.pool = PagePool(shape, LANES * (options.tokens // shape.page_size))
        (self.pool.fill if self.is_prefill else self.pool.wipe)()

    def tables(self, is_prefill: bool, *, is_fragmented: bool = True) -> list[list[int]]:
        """Return the pages of each lane on a side."""
        size = self.pool.num_pages // LANES
        tables: list[list[int]] = page_tables(
            self.pool.num_pages, LANES, size, [is_prefill] if is_fragmented else None
        ).tolist()
        return tables

    def holds(self, load: Load) -> bool:
        """Return whether the decode pool has what a load moved, and nothing else; wipe it."""
        sent, got = (self.tables(side, is_fragmented=load.is_fragmented) for side in (True, False))
        lanes = sorted({room % LANES for room in load.rooms})
        src, dst = (np.asarray([tables[lane][load.prefix :] for lane in lanes]).ravel() for tables in (sent, got))
        others = np.setdiff1d(np.arange(self.pool.num_pages), dst)
        right = self.pool.holds(dst, src * self.pool.shape.page_size) and self.pool.is_wiped(others)
        self.pool.wipe()
        return right

    def play(self, make_end: Callable[[Load], Any], timeline: Timeline | None = None) -> None:
        """Play loads, check them, or idle, as ordered, until the order to exit."""
        self.line.report("ready")
        play = play_prefill if self.is_prefill else play_decode
        while (order := self.line.receive())["do"] != "leave":
            began_s, used_s = time.monotonic(), time.process_time()
            if order["do"] == "rest":
                time.sleep(order["seconds"])
                self.line.report("rested", cpu_s=time.process_time() - used_s, wall_s=time.monotonic() - began_s)
                continue
            load = msgspec.convert(order["load"], Load)
            if order["do"] == "check":
                self.line.report("checked", is_right=self.holds(load))
                continue
            with other_work(load.engine) as steps:
                played = play(make_end(load), load)
            played |= {"cpu_s": time.process_time() - used_s, "wall_s": time.monotonic() - began_s}
            marks = timeline.take() if timeline is not None else []
            self.line.report("played", room=load.first_room, steps=steps[0], marks=marks, **played)

    def serve_kvflow(self) -> None:
        """Play with kvflow."""
        timeline = Timeline(self.options.side) if self.options.is_traced else None
        open_end = open_prefill if self.is_prefill else open_decode
        with open_end(self.options, self.pool, self.tables(self.is_prefill)) as end:
            self.play(lambda _: end, timeline)

    def serve_bare(self) -> None:
        """Play without kvflow."""
        endpoint = open_endpoint(self.options, self.pool)
        self.line.report("bound", address=endpoint.address().hex())
        endpoint.connect(bytes.fromhex(self.line.receive()["address"]))
        end: PrefillEnd | DecodeEnd = BareDecode(endpoint)
        if self.is_prefill:
            end = BarePrefill(endpoint, self.tables(True), self.tables(False))
        self.play(lambda _: end)
        endpoint.close()

    def serve_sglang(self) -> None:
        """Play with SGLang's interfaces."""
        from benchmarks.embedded.sglang_ends import SglangDecode, SglangPrefill, open_manager  # noqa: PLC0415 - optional

        with _silence():
            manager = open_manager(self.options, self.pool)
            self.line.report("bound", address="")
            self.line.receive()
            end = SglangPrefill if self.is_prefill else SglangDecode
            page_size = self.pool.shape.page_size

            def make_end(load: Load) -> PrefillEnd | DecodeEnd:
                tables = self.tables(self.is_prefill, is_fragmented=load.is_fragmented)
                return end(manager, tables, page_size, load)

            self.play(make_end)
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

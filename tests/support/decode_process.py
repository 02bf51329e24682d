"""A decode instance in a process of its own: `python -m tests.support.decode_process OPTIONS`.

The order `announce` announces a room. The order `grant` grants pages to the last announced room, waits for the
transfer, and reports `received`.
"""

import sys

import anyio
import anyio.to_thread
import msgspec

import kvflow
from benchmarks.processes import Line, run_child
from tests.support.instances import decode_config, make_pool
from tests.support.prefill_process import PAGES, TOKENS

__all__ = ["DecodeOptions"]


class DecodeOptions(msgspec.Struct, frozen=True):
    """Options of the process: the registry that it uses."""

    registry: str


async def main(options: DecodeOptions, line: Line) -> None:
    settings = decode_config(options.registry, backend="nixl")
    async with kvflow.DecodeRank(settings, make_pool().layout) as rank:
        line.report("ready")
        while True:
            order = await anyio.to_thread.run_sync(line.receive)
            if order["do"] != "announce":
                return
            async with rank.announce(order["room"], prefill="prefill") as receiver:
                if (await anyio.to_thread.run_sync(line.receive))["do"] == "grant":
                    receiver.grant(tokens=TOKENS, pages=PAGES)
                    handover = await receiver.done()
                    line.report("received", room=order["room"], num_bytes=handover.num_bytes)


if __name__ == "__main__":
    sys.exit(run_child(lambda options, line: anyio.run(main, options, line), DecodeOptions))

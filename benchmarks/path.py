"""Count the kvflow functions and files that a chunk and a notice pass through, over the memory transport.

A chunk: from `chunk()` of the sender to the transport's `post`. A notice: from the `post` of the last chunk in another
thread to the return of `done()`. The receiver's event loop has nothing else to do meanwhile. Of several transfers the
one with the fewest calls counts, which excludes timed work (pings, leases).

To measure another version: `PYTHONPATH=CHECKOUT python benchmarks/path.py`.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

import anyio
import anyio.to_thread
import torch
from anyio.from_thread import BlockingPortal, start_blocking_portal

import kvflow

__all__ = ["Counts", "Way", "add_arguments", "measure", "prepare"]

ROOT: Final = Path(kvflow.__file__).parent
PURE: Final = ("geometry", "state")
INLINE: Final = frozenset({"<dictcomp>", "<genexpr>", "<listcomp>", "<setcomp>"})

PAGES, PAGE_SIZE = 8, 16
HALVES: Final = ((0, 64), (64, 128))
SETTLE_S: Final = 0.02


class Counts(NamedTuple):
    """Counts of entered functions.

    Attributes:
        functions: Distinct functions.
        calls: Calls of any of them; resuming a coroutine is no call.
        files: Files that define them.
    """

    functions: int
    calls: int
    files: int


class Call(NamedTuple):
    """A function of kvflow that was entered, or a turn of the event loop if `code` is None."""

    at_s: float
    code: CodeType | None


class Way(NamedTuple):
    """The code path of a chunk or a notice.

    Attributes:
        turns: Turns of the event loop after the first.
    """

    everything: Counts
    impure: Counts
    turns: int
    functions: list[str]


class Trace:
    """A profiler that records the functions entered in the thread that calls `on`."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._frames: set[FrameType] = set()  # keeps them alive: another frame could reuse the id

    def on(self) -> None:
        """Record calls in this thread from now on."""
        sys.setprofile(self._note)

    def off(self) -> None:
        """Stop recording."""
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _arg: Any) -> None:
        code = frame.f_code
        if event != "call" or frame in self._frames or code.co_name in INLINE:
            return
        if code.co_name == "_run_once" and code.co_filename.endswith("base_events.py"):
            self.calls.append(Call(time.perf_counter(), None))
        elif code.co_filename.startswith(f"{ROOT}/"):
            self._frames.add(frame)
            self.calls.append(Call(time.perf_counter(), code))

    def post_after(self, start_s: float) -> float:
        """Return the time of the first call of the transport's `post` from `start_s` on."""
        return next(
            call.at_s
            for call in self.calls
            if call.code and call.at_s >= start_s and call.code.co_name == "post" and _place(call.code)[0] == "backends"
        )

    def between(self, start_s: float, stop_s: float) -> list[Call]:
        """Return the calls between two times."""
        return [call for call in self.calls if start_s <= call.at_s <= stop_s]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="transfers (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="name the functions, in the order in which they come")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return a function that measures and prints."""
    return lambda: _print(measure(arguments.rounds), is_json=arguments.json, lists=arguments.list)


def measure(rounds: int) -> dict[str, Way]:
    """Run some transfers, and count what a chunk and a notice pass through."""
    with start_blocking_portal() as portal:
        best = anyio.run(_measure, portal, rounds)
    return {name: _way(calls) for name, calls in zip(("chunk to post", "notice to done"), best, strict=True)}


async def _measure(portal: BlockingPortal, rounds: int) -> list[list[Call]]:
    """Return the shortest list of calls of each kind. Decode runs on this event loop, prefill on the portal's."""
    pools = [torch.zeros(2, PAGES, PAGE_SIZE, 2, 8) for _ in range(2)]
    source, target = (
        kvflow.layout_from_tensors(
            {"k": [pool[0]], "v": [pool[1]]}, axes="page token head dim", heads=(0, 2), fingerprint="path"
        )
        for pool in pools
    )
    async with kvflow.Registry() as registry:
        common: dict[str, Any] = {"registry": registry.endpoint, "backend": "memory"}
        prefill = kvflow.PrefillRank(kvflow.PrefillConfig(instance="prefill", **common), source)
        async with kvflow.DecodeRank(kvflow.DecodeConfig(instance="decode", **common), target) as decode:
            opened = await anyio.to_thread.run_sync(portal.wrap_async_context_manager, prefill)
            await anyio.to_thread.run_sync(opened.__enter__)
            try:
                found = [await _transfer(portal, prefill, decode, room) for room in range(1, rounds + 1)]
            finally:
                await anyio.to_thread.run_sync(opened.__exit__, None, None, None)
    return [min(kind, key=len) for kind in zip(*found, strict=True)]


async def _transfer(
    portal: BlockingPortal, prefill: kvflow.PrefillRank, decode: kvflow.DecodeRank, room: int
) -> tuple[list[Call], list[Call]]:
    """Return the calls for the first chunk on prefill, and for the notice of the last one on decode."""
    trace, tokens = Trace(), (HALVES[0][0], HALVES[1][1])
    async with decode.receive(room, prefill="prefill", tokens=tokens, pages={"kv": range(PAGES)}) as receiver:
        sent = portal.start_task_soon(_send, prefill, room)
        trace.on()
        try:
            await receiver.done()
            done_s = time.perf_counter()
        finally:
            trace.off()
        chunk, posted_s = await anyio.to_thread.run_sync(sent.result)
    return chunk, trace.between(posted_s, done_s)


async def _send(prefill: kvflow.PrefillRank, room: int) -> tuple[list[Call], float]:
    """Send two chunks, the second once all is idle; return the calls of the first, and the post time of the second."""
    trace = Trace()
    while not prefill.statistics().waiting_grants:  # noqa: ASYNC110 - there is no event
        await anyio.sleep(SETTLE_S)
    async with prefill.send(room) as sender:
        await anyio.sleep(SETTLE_S)
        trace.on()
        try:
            began_s = time.perf_counter()
            await sender.chunk(HALVES[0], {"kv": range(PAGES // 2)})
            await anyio.sleep(SETTLE_S)
            last_s = time.perf_counter()
            await sender.finish(HALVES[1], {"kv": range(PAGES // 2, PAGES)})
            await anyio.sleep(SETTLE_S)
        finally:
            trace.off()
    return trace.between(began_s, trace.post_after(began_s)), trace.post_after(last_s)


def _place(code: CodeType) -> tuple[str, ...]:
    return Path(code.co_filename).relative_to(ROOT).parts


def _way(calls: list[Call]) -> Way:
    codes = [call.code for call in calls if call.code]
    impure = [code for code in codes if _place(code)[0] not in PURE]
    names = [f"{'/'.join(_place(code))}:{code.co_firstlineno} {code.co_name}" for code in codes]
    return Way(_counts(codes), _counts(impure), len(calls) - len(codes), names)


def _counts(codes: Iterable[CodeType]) -> Counts:
    codes = list(codes)
    return Counts(len(set(codes)), len(codes), len({code.co_filename for code in codes}))


def _print(ways: dict[str, Way], *, is_json: bool, lists: bool) -> int:
    if is_json:
        shown = {
            name: {"all": way.everything._asdict(), "outside geometry and state": way.impure._asdict()}
            | {"turns": way.turns}
            | ({"list": way.functions} if lists else {})
            for name, way in ways.items()
        }
        print(json.dumps(shown))
        return 0
    print(f"{'':42} {'functions':>9} {'calls':>6} {'files':>6} {'turns':>6}")
    for name, way in ways.items():
        for part, counts in (("all", way.everything), ("outside geometry and state", way.impure)):
            print(
                f"{name}, {part:{40 - len(name)}} {counts.functions:9} {counts.calls:6} {counts.files:6} {way.turns:6}"
            )
        if lists:
            print("\n".join(f"    {function}" for function in way.functions))
    return 0


if __name__ == "__main__":
    own_parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(own_parser)
    own_parser.add_argument("--json", action="store_true")
    prepare(own_parser.parse_args())()

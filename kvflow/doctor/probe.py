"""A real transfer between two processes, from which latency, rate and path are told.

One process serves: its prefill rank keeps a few rooms open, and sends each to whoever asks for it. The other one asks:
a decode rank receives them, and compares what has arrived with what was to be sent. `python -m kvflow.doctor.probe ask
ORDER` asks, and `pair ORDER` serves and starts a process that asks; both print the `ProbeResult` as JSON.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final, Literal

import anyio
import anyio.to_thread
import msgspec
import numpy as np
from numpy.typing import NDArray

import kvflow
from kvflow.errors import KvflowError, TransferFailed
from kvflow.trust import Trust

__all__ = [
    "FINGERPRINT",
    "NUM_PIECES",
    "PIECE_BYTES",
    "UCX_LOG",
    "Facts",
    "ProbeOrder",
    "ProbeResult",
    "log_ucx_to",
    "paths_in",
    "run_in_child",
    "serve_logged_probe",
    "serve_probe",
]

FINGERPRINT: Final = "kvflow doctor 1"
"""Of the layout of a probe; another version is another probe."""

NUM_PIECES: Final = 4_096
PIECE_BYTES: Final = 4_096
SEED: Final = 78
REPEATS: Final = {"piece": 9, "whole": 3, "pieces": 3, "facts": 1}
"""How often each load is measured, each time in a room of its own: the last one may not be over yet for prefill."""

PAGES: Final[dict[str, Sequence[int]]] = {
    "piece": range(1),
    "whole": range(NUM_PIECES),  # neighbours are one descriptor
    "pieces": range(0, 2 * NUM_PIECES, 2),
    "facts": range(1),
}
"""Loads, and the pages that each moves."""

TIMEOUTS: Final = kvflow.Timeouts(handshake_s=5.0, transfer_s=20.0, progress_s=10.0, drain_s=1.0, lease_s=1.0)
PATH_S: Final = 1.5
"""How long to wait until the path of the writes is known, in seconds. The transport looks twice a second."""

UCX_LOG: Final = "UCX_LOG_FILE"
NO_UCX_LOG: Final = {"UCX_PROTO_INFO": "n", "UCX_LOG_LEVEL": "fatal", UCX_LOG: os.devnull}
WRITES: Final = re.compile(
    r"(?:intra|inter)-node cfg#\d+ +\|\n.*\| remote memory write by ucp_put\*(?:\(multi\))? .*\n"
)
ROW: Final = re.compile(r"\| +\d+\.\.inf +\|[^|]*\| (.*?) +\|")


class ProbeOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What a process is to do.

    Attributes:
        address: Of the process that serves, if it is to ask.
        instance: Name of the instance; with keys, the one that the key belongs to.
        keys: Key directory, if it is to ask.
    """

    address: str = ""
    instance: str = "kvflow-doctor"
    backend: str = "nixl"
    backend_options: dict[str, Any] = {}
    keys: str | None = None


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What the process that serves says of itself.

    Attributes:
        paths: Paths that the kernel's TCP byte counters tell, as `RankStatistics.paths`.
        ucx: Transports that UCX has chosen for the writes, as it logs them.
    """

    host: str
    version: str
    uptime_s: float
    paths: list[str]
    ucx: list[str]


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured; the best of a few repeats.

    Attributes:
        failure: Why the transfer has failed; empty if it has not.
        reason: The `FailureReason`, or "" if the rank could not start.
        is_identical: Whether the bytes that arrived are those that were sent.
        latency_s: From asking for one piece to its notice.
        whole_s: The same for 16 MiB in one descriptor.
        pieces_s: The same for 16 MiB in 4,096 descriptors.
    """

    failure: str = ""
    reason: str = ""
    is_identical: bool = False
    latency_s: float = 0.0
    whole_s: float = 0.0
    pieces_s: float = 0.0
    facts: Facts | None = None


class ProbePool:
    """The memory of one side."""

    def __init__(self) -> None:
        self.pages: NDArray[np.uint8] = np.zeros((2 * NUM_PIECES, 1, 1, PIECE_BYTES), np.uint8)
        self.layout = kvflow.layout_from_tensors(
            {"kv": [self.pages]}, axes="page token head dim", heads=(0, 1), fingerprint=FINGERPRINT
        )

    def expected(self) -> NDArray[np.uint8]:
        """Return what both sides know that is sent."""
        return np.random.default_rng(SEED).integers(0, 256, self.pages.shape, np.uint8)


def log_ucx_to(path: Path) -> dict[str, str]:
    """Return the variables with which UCX writes the transports that it chooses to a file."""
    return {"UCX_PROTO_INFO": "y", "UCX_LOG_LEVEL": "info", UCX_LOG: str(path)}


def paths_in(log: str) -> list[str]:
    """Return the transports of large writes to other processes, from UCX's log."""
    found: dict[str, None] = {}
    for table in WRITES.finditer(log):
        row = ROW.search(log, table.end())
        if row is not None:
            found[row[1]] = None
    return list(found)


@asynccontextmanager
async def serve_probe(
    order: ProbeOrder, bind: str, advertise: str | None = None, *, trust: Trust | None = None
) -> AsyncIterator[str]:
    """Serve probes inside the block; yields the address to ask.

    Raises:
        KvflowError: The rank cannot be opened.
    """
    pool, began_at = ProbePool(), time.monotonic()
    pool.pages[:] = pool.expected()
    config = kvflow.PrefillConfig(bind=bind, advertise=advertise, packing="never", **_settings(order, trust))
    async with kvflow.PrefillRank(config, pool.layout) as rank, anyio.create_task_group() as tasks:
        for load, count in REPEATS.items():
            for number in range(count):
                tasks.start_soon(_serve_room, rank, load, number, began_at)
        yield rank.endpoint
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def serve_logged_probe(
    order: ProbeOrder, bind: str, advertise: str | None = None, *, trust: Trust | None = None
) -> AsyncIterator[str]:
    """Serve probes as `serve_probe`, with UCX's log in a file of this process, so that the path can be told."""
    before = dict(os.environ)
    with tempfile.TemporaryDirectory() as place:
        os.environ.update(log_ucx_to(Path(place, "ucx.log")))
        try:
            async with serve_probe(order, bind, advertise, trust=trust) as address:
                yield address
        finally:
            os.environ.clear()
            os.environ.update(before)


async def _serve_room(rank: kvflow.PrefillRank, load: str, number: int, began_at: float) -> None:
    pages = PAGES[load]
    while True:
        with suppress(TransferFailed):  # whoever has asked is told, and may ask again
            async with rank.send(f"{load} {number}") as sender:
                await sender.granted()
                metadata = await _facts(rank, began_at) if load == "facts" else b""
                await sender.finish((0, len(pages)), {"kv": list(pages)}, metadata=metadata)
                await sender.delivered()


async def _facts(rank: kvflow.PrefillRank, began_at: float) -> bytes:
    with anyio.move_on_after(PATH_S):
        while not rank.statistics().paths:  # noqa: ASYNC110 - nothing tells of it
            await anyio.sleep(PATH_S / 10)
    return msgspec.json.encode(
        Facts(
            host=socket.gethostname(),
            version=kvflow.__version__,
            uptime_s=time.monotonic() - began_at,
            paths=sorted(rank.statistics().paths),
            ucx=await _read_ucx_log(),
        )
    )


async def _read_ucx_log() -> list[str]:
    path = os.environ.get(UCX_LOG, "")
    try:
        return paths_in(await anyio.Path(path).read_text("utf-8", "replace"))
    except OSError:  # UCX is not in use, or logs elsewhere
        return []


async def ask_probe(order: ProbeOrder) -> ProbeResult:
    """Measure transfers from a process that serves probes to this one."""
    pool = ProbePool()
    expected = pool.expected()
    try:
        trust = Trust.none() if order.keys is None else kvflow.load_trust(order.keys)  # it has nothing to hide
        config = kvflow.DecodeConfig(**_settings(order, trust))
        async with kvflow.DecodeRank(config, pool.layout) as rank:
            is_identical, seconds = True, dict[str, float]()
            for load in ("piece", "whole", "pieces"):
                pool.pages[:] = 0
                received = [await _receive(rank, order, load, number) for number in range(REPEATS[load])]
                pages = list(PAGES[load])
                is_identical = is_identical and np.array_equal(pool.pages[pages], expected[pages])
                seconds[load] = min(handover.elapsed_s for handover in received)
            facts = msgspec.json.decode((await _receive(rank, order, "facts", 0)).metadata, type=Facts)
    except TransferFailed as error:
        return ProbeResult(failure=str(error), reason=error.reason.value)
    except KvflowError as error:
        return ProbeResult(failure=str(error))
    return ProbeResult(
        is_identical=is_identical,
        latency_s=seconds["piece"],
        whole_s=seconds["whole"],
        pieces_s=seconds["pieces"],
        facts=facts,
    )


async def _receive(rank: kvflow.DecodeRank, order: ProbeOrder, load: str, number: int) -> kvflow.Handover:
    """Receive a room; the first one of each load is compared by digest, too."""
    pages, prefill = {"kv": list(PAGES[load])}, kvflow.Endpoint.parse(order.address)
    tokens, room = (0, len(PAGES[load])), f"{load} {number}"
    async with rank.receive(room, prefill=prefill, tokens=tokens, pages=pages, digest=not number) as receiver:
        return await receiver.done()


def _settings(order: ProbeOrder, trust: Trust | None) -> dict[str, Any]:
    """Return what both sides set."""
    return {
        "instance": order.instance,
        "backend": order.backend,
        "backend_options": order.backend_options,
        "trust": trust,
        "timeouts": TIMEOUTS,
        "staging_bytes": 0,
        "admin": False,
        "black_box": False,
    }


def run_in_child(
    role: Literal["ask", "pair"], order: ProbeOrder, environment: Mapping[str, str], timeout_s: float | None = None
) -> ProbeResult | None:
    """Run a probe in a process of its own, which may crash; None if it does not end in time.

    With a timeout, the process leads a group, which ends with it.
    """
    command = [sys.executable, "-m", "kvflow.doctor.probe", role, msgspec.json.encode(order).decode()]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": {**os.environ, **environment}}
    leads = timeout_s is not None
    with subprocess.Popen(command, start_new_session=leads, **pipes) as process:  # noqa: S603 - our own module
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except BaseException as error:
            (os.killpg if leads else os.kill)(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                return None
            raise
    try:
        return msgspec.json.decode(output.rpartition(b"\n")[2], type=ProbeResult)
    except msgspec.DecodeError:
        lines = errors.decode(errors="replace").splitlines()
        last = next((line.strip() for line in reversed(lines) if any(map(str.isalpha, line))), "")
        return ProbeResult(failure=f"the probe ended with {process.returncode} and no result: {last}")


async def _pair(order: ProbeOrder) -> ProbeResult | None:
    try:
        async with serve_probe(order, "tcp://127.0.0.1:0") as address:
            order = msgspec.structs.replace(order, address=address)
            return await anyio.to_thread.run_sync(run_in_child, "ask", order, NO_UCX_LOG)
    except KvflowError as error:
        return ProbeResult(failure=str(error))


def main(role: str, order: str) -> None:
    """Run one side, and print the result as the last line of standard output."""
    result = anyio.run(ask_probe if role == "ask" else _pair, msgspec.json.decode(order, type=ProbeOrder))
    sys.stdout.write(f"\n{msgspec.json.encode(result).decode()}")


if __name__ == "__main__":
    main(*sys.argv[1:])

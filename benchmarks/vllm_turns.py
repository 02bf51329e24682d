"""Conversations between two vLLM servers: what prefill computes and receives of a turn, kept by decode or not.

With `--nixl`, the other side is vLLM's NixlConnector with `bidirectional_kv_xfer`, instead of kvflow without turns.
"""

import argparse
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.rows import Measured, Row, compare, print_rows, there_and_back
from kvflow.cli.options import check_installed, check_positive

if TYPE_CHECKING:
    import aiohttp

    from kvflow.cli.serve.server import Server

__all__ = ["add_arguments", "prepare"]

FIRST_PORT: Final = 8150
TURNS: Final = 5
FIRST_WORDS, WORDS = 250, 20
"""Of what a user says in the first turn, and in each of the others."""

ARGUMENTS: Final = ("--block-size", "32")
NIXL: Final[Mapping[str, Any]] = {
    **{"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"},
    "kv_connector_extra_config": {"bidirectional_kv_xfer": True},
}
COUNTED: Final = ("prompt_tokens_total", "prefix_cache_hits_total", "external_prefix_cache_hits_total")
BYTES: Final = ("kvflow_transfer_bytes_sum", "nixl_bytes_transferred_sum")
FIRST_TOKEN: Final = "time_to_first_token_seconds_sum"  # noqa: S105 - no password
QUANTITIES: Final = {
    "tokens computed by prefill": ("tokens", 1.0),
    "received by prefill": ("MB", 1e-6),
    "time to the first token": ("ms", 1e3),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--answers", type=int, default=100, metavar="N", help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="conversations of each side")
    parser.add_argument("--nixl", action="store_true", help="compare with NixlConnector")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return a function that measures and prints.

    Raises:
        ConfigError: An option is unusable, or a package is missing.
    """
    check_positive(arguments, "answers", "rounds")
    check_installed("vllm", "aiohttp")
    return lambda: print_rows(partial(_measure, arguments), is_json=arguments.json)


async def _measure(arguments: argparse.Namespace, on_row: Callable[[Row], None]) -> Sequence[Row]:
    from benchmarks.vllm_handover.client import open_client  # noqa: PLC0415 - its dependencies may be missing

    other = "NixlConnector" if arguments.nixl else "not kept"
    found: dict[str, list[list[Sequence[float]]]] = {"kvflow": [], other: []}
    async with _started(arguments.nixl) as servers, open_client() as client:
        for number, way in enumerate(there_and_back(["kvflow", other], arguments.rounds + 1)):
            used = servers[2:] if arguments.nixl and way == other else servers[:2]
            with _stopped([server for server in servers if server not in used]):
                turns = await _converse(client, used, number, arguments.answers, is_kept=way != "not kept")
            found[way].append(turns)
    rows = []
    group = f"answers of {arguments.answers} tokens, against {other}"
    for place, (quantity, (unit, factor)) in enumerate(QUANTITIES.items()):
        for turn in range(1, TURNS):
            own, bare = ([talk[turn][place] * factor for talk in found[way][1:]] for way in ("kvflow", other))
            measured = Measured(
                bench="vllm_turns", group=group, case=f"turn {turn + 1}", quantity=quantity, unit=unit, better="lower"
            )
            rows.append(compare(measured, own, bare if all(bare) else (), others={} if all(bare) else {other: bare}))
            on_row(rows[-1])
    return rows


@contextmanager
def _stopped(servers: "Sequence[Server]") -> Iterator[None]:
    """Stop servers within the block: while NixlConnector keeps a turn, vLLM steps its server without pause."""
    for server in servers:
        os.killpg(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for server in servers:
            os.killpg(server.pid, signal.SIGCONT)


async def _converse(
    client: "aiohttp.ClientSession", servers: Sequence["Server"], number: int, tokens: int, *, is_kept: bool
) -> list[Sequence[float]]:
    """Have a conversation; return the values of each turn, in the order of `QUANTITIES`."""
    from benchmarks.vllm_handover.client import BenchFailed, ask, metrics, prompt_of  # noqa: PLC0415 - as above
    from kvflow.cli.proxy.application import PREFILL_PARAMS  # noqa: PLC0415 - as above

    (prefill, decode), prompt, params, turns = servers, "", None, list[Sequence[float]]()
    for turn in range(TURNS):
        prompt += ("\n" if turn else "") + prompt_of(number + 100 * turn, WORDS if turn else FIRST_WORDS)
        before = [await metrics(client, server.url) for server in servers]
        first = await ask(client, prefill.url, prompt, 1, params if is_kept and params else PREFILL_PARAMS)
        answer = await ask(client, decode.url, prompt, tokens, first.params)
        if not answer.text:
            raise BenchFailed("no answer", turn=turn, prefill=first.error, decode=answer.error)
        after = [await metrics(client, server.url) for server in servers]
        delta = [
            {name: now.get(name, 0.0) - then.get(name, 0.0) for name in now}
            for now, then in zip(after, before, strict=True)
        ]
        counted = [delta[0].get(name, 0.0) for name in COUNTED]
        num_bytes = sum(delta[0].get(name, 0.0) for name in BYTES)
        first_s = first.ended_at - first.began_at + delta[1][FIRST_TOKEN]
        turns.append((counted[0] - counted[1] - counted[2], num_bytes, first_s))
        prompt, params = prompt + answer.text, answer.params
    return turns


@asynccontextmanager
async def _started(has_nixl: bool) -> "AsyncIterator[list[Server]]":
    """Start two servers with kvflow's connector, and two with NixlConnector if wanted."""
    import msgspec  # noqa: PLC0415 - as above

    from benchmarks.vllm_handover.client import MODEL  # noqa: PLC0415 - as above
    from benchmarks.vllm_handover.plugin import Probe  # noqa: PLC0415 - as above
    from benchmarks.vllm_handover.servers import ENVIRONMENT, UNBOUND, running  # noqa: PLC0415 - as above
    from kvflow.cli.serve.server import Server  # noqa: PLC0415 - as above
    from kvflow.cli.serve.vllm import pair, vllm_server  # noqa: PLC0415 - as above
    from kvflow.cli.smollm2 import prepare_smollm2  # noqa: PLC0415 - as above

    place, servers = Path(tempfile.mkdtemp(prefix="kvflow-turns-")), list[Server]()
    for way in ("kvflow", *(("NixlConnector",) if has_nixl else ())):
        for one in pair(
            model=str(prepare_smollm2()),
            served_name=MODEL,
            first_port=FIRST_PORT + len(servers),
            extra_config={"keep_turns_s": 600.0},
            arguments=ARGUMENTS,
            is_cpu=True,
        ):
            connector = one.connector if way == "kvflow" else NIXL
            environment = {**one.environment, **ENVIRONMENT}
            if has_nixl:
                environment |= UNBOUND
            if way != "kvflow":
                environment |= Probe(eases_nixl=True).environment()
                environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(5700 + len(servers))
            described = msgspec.structs.replace(
                one,
                name=f"{way}-{one.name}",
                role="kv_both",
                connector={**connector, "kv_load_failure_policy": "recompute"},
                cpus=None if has_nixl else one.cpus,
                environment=environment,
            )
            servers.append(vllm_server(described, place))
    async with running(servers):
        yield servers

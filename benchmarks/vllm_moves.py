"""Requests that move between two vLLM servers while they are answered: the pause, what it costs, and draining."""

import argparse
import json
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import anyio

from benchmarks.rows import Measured, Row, Tail, compare, percentile, print_rows
from kvflow.cli.options import check_installed, check_positive
from kvflow.cli.tasks import open_tasks

if TYPE_CHECKING:
    import aiohttp

    from kvflow.cli.serve.server import Server

__all__ = ["add_arguments", "prepare"]

FIRST_PORT: Final = 8170
BETWEEN: Final = 50
"""Tokens between two moves of a request."""

AT_ONCE: Final = 4
"""Requests on a server that is drained."""

BYTES: Final = "kvflow_transfer_bytes_sum"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--words", type=int, default=250, metavar="N", help="words of each prompt")
    parser.add_argument("--moves", type=int, default=8, metavar="N", help="moves of each request")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="requests of each side")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return a function that measures and prints.

    Raises:
        ConfigError: An option is unusable, or a package is missing.
    """
    check_positive(arguments, "words", "moves", "rounds")
    check_installed("vllm", "aiohttp")
    return lambda: print_rows(partial(_measure, arguments), is_json=arguments.json)


class Tokens:
    """When the tokens of an answer have come, in seconds."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._is_over = False
        self._changed = anyio.Event()

    def note(self, *, is_over: bool = False) -> None:
        """Note a token, or the end."""
        self._is_over = is_over
        if not is_over:
            self.times.append(time.monotonic())
        self._changed.set()
        self._changed = anyio.Event()

    async def wait_for(self, count: int) -> None:
        """Wait until there are so many tokens, or the answer is over."""
        while len(self.times) < count and not self._is_over:
            await self._changed.wait()

    def gaps(self, since: int = 0) -> list[float]:
        """Return the times between tokens."""
        return [then - now for now, then in pairwise(self.times[since:])]


class Deployed(NamedTuple):
    """A proxy in front of two servers, of which one is drained; it computes the prompts."""

    client: "aiohttp.ClientSession"
    url: str
    control: str
    servers: "Sequence[Server]"

    async def drain(self, server: "Server", *, moves: bool = True) -> None:
        """Use the other server alone, and wait until this one has no requests."""
        (other,) = [one for one in self.servers if one is not server]
        await self._post("resume", server=other.url)
        await self._post("drain", server=server.url, move=json.dumps(moves))

    async def _post(self, what: str, **query: str) -> None:
        async with self.client.post(f"{self.control}/{what}", params=query) as answer:
            answer.raise_for_status()

    async def stream(self, prompt: str, count: int, tokens: Tokens) -> str:
        """Have a prompt answered, and note when each token comes; return the text."""
        from benchmarks.vllm_handover.client import MODEL, BenchFailed  # noqa: PLC0415 - dependencies may be missing

        body = {"model": MODEL, "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        text = ""
        async with self.client.post(f"{self.url}/v1/completions", json={**body, "stream": True}) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line.removeprefix(b"data: "))
                    if "error" in event:
                        raise BenchFailed("request failed", error=event["error"])
                    tokens.note()
                    text += event["choices"][0]["text"]
        tokens.note(is_over=True)
        return text

    async def counted(self) -> tuple[float, float]:
        """Return the bytes that both servers have received until now, and the CPU time that they have used."""
        from benchmarks.vllm_handover.client import metrics  # noqa: PLC0415 - as above
        from benchmarks.vllm_handover.servers import usage_of  # noqa: PLC0415 - as above

        received = [(await metrics(self.client, server.url)).get(BYTES, 0.0) for server in self.servers]
        return sum(received), sum(usage_of(server.pid).cpu_s for server in self.servers)


async def _measure(arguments: argparse.Namespace, on_row: Callable[[Row], None]) -> Sequence[Row]:
    from benchmarks.vllm_handover.client import BenchFailed, prompt_of  # noqa: PLC0415 - as above

    group = f"prompts of {arguments.words} words"
    pauses, gaps, costs = list[list[float]](), list[list[float]](), list[tuple[float, float]]()
    empties: dict[bool, list[float]] = {True: [], False: []}
    rows = list[Row]()

    def report(
        case: str, quantity: str, unit: str, own: Sequence[float], bare: Sequence[float] = (), tail: Tail | None = None
    ) -> None:
        measured = Measured(bench="vllm_moves", group=group, case=case, quantity=quantity, unit=unit, better="lower")
        rows.append(compare(measured, own, bare, tail=tail))
        on_row(rows[-1])

    def middle(rounds: Sequence[Sequence[float]]) -> list[float]:
        return [percentile(values, 0.5) * 1e3 for values in rounds]

    async with _started() as deployed:
        for number in range(arguments.rounds + 1):
            prompt = prompt_of(number, arguments.words)
            await deployed.drain(deployed.servers[0])
            plain = await _moved(deployed, prompt, arguments.moves, moves=False)
            moved = await _moved(deployed, prompt, arguments.moves, moves=True)
            if plain.text != moved.text:
                raise BenchFailed("texts differ", plain=plain.text, moved=moved.text)
            if number:
                pauses.append(moved.pauses)
                gaps.append(plain.gaps)
                num_bytes, cpu_s = (now - then for now, then in zip(moved.cost, plain.cost, strict=True))
                costs.append((num_bytes / arguments.moves, cpu_s / arguments.moves))
        own, bare = ([value * 1e3 for values in rounds for value in values] for rounds in (pauses, gaps))
        tail = Tail(
            kvflow_p50=percentile(own, 0.5),
            kvflow_p99=percentile(own, 0.99),
            bare_p50=percentile(bare, 0.5),
            bare_p99=percentile(bare, 0.99),
        )
        report("moved, against undisturbed", "longest gap between tokens", "ms", middle(pauses), middle(gaps), tail)
        report("each move", "bytes", "MB", [one[0] * 1e-6 for one in costs])
        report("each move", "CPU of both servers", "ms", [one[1] * 1e3 for one in costs])
        for number in range(arguments.rounds):
            for moves in (True, False) if number % 2 else (False, True):
                empties[moves].append(await _emptied(deployed, number, arguments.words, moves=moves))
        report(f"{AT_ONCE} requests, moved against waited for", "time to empty", "s", empties[True], empties[False])
    return rows


class Streamed(NamedTuple):
    """A request that was answered: its text, its gaps in seconds, and the bytes and CPU time of both servers."""

    text: str
    gaps: list[float]
    pauses: list[float]
    cost: tuple[float, float]


async def _moved(deployed: Deployed, prompt: str, count: int, *, moves: bool) -> Streamed:
    """Have a prompt answered; with `moves`, move the request after every `BETWEEN` tokens, there and back."""
    tokens, texts, pauses = Tokens(), list[str](), list[float]()
    before = await deployed.counted()

    async def ask() -> None:
        texts.append(await deployed.stream(prompt, BETWEEN * (count + 1), tokens))

    async with open_tasks() as tasks:
        tasks.start_soon(ask)
        for number in range(count if moves else 0):
            await tokens.wait_for(BETWEEN * (number + 1))
            since = len(tokens.times) - 1
            await deployed.drain(deployed.servers[(number + 1) % 2])
            await tokens.wait_for(len(tokens.times) + 2)
            pauses.append(max(tokens.gaps(since)))
    after = await deployed.counted()
    return Streamed(texts[0], tokens.gaps(), pauses, (after[0] - before[0], after[1] - before[1]))


async def _emptied(deployed: Deployed, number: int, words: int, *, moves: bool) -> float:
    """Drain a server that has just begun with several requests; return how long it takes."""
    from benchmarks.vllm_handover.client import prompt_of  # noqa: PLC0415 - as above

    await deployed.drain(deployed.servers[0])
    each = [Tokens() for _ in range(AT_ONCE)]
    async with open_tasks() as tasks:
        for place, tokens in enumerate(each):
            prompt = prompt_of(100 + AT_ONCE * number + place, words)
            tasks.start_soon(deployed.stream, prompt, 10 * BETWEEN, tokens)
        for tokens in each:
            await tokens.wait_for(1)
        began_at = time.monotonic()
        await deployed.drain(deployed.servers[1], moves=moves)
        return time.monotonic() - began_at


@asynccontextmanager
async def _started() -> AsyncIterator[Deployed]:
    import msgspec  # noqa: PLC0415 - as above

    from benchmarks.vllm_handover.client import MODEL, open_client  # noqa: PLC0415 - as above
    from benchmarks.vllm_handover.servers import ENVIRONMENT, running  # noqa: PLC0415 - as above
    from kvflow.cli.proxy.application import serve_proxy  # noqa: PLC0415 - as above
    from kvflow.cli.serve.vllm import pair, vllm_server  # noqa: PLC0415 - as above
    from kvflow.cli.smollm2 import prepare_smollm2  # noqa: PLC0415 - as above

    described = pair(
        model=str(prepare_smollm2()),
        served_name=MODEL,
        first_port=FIRST_PORT,
        extra_config={"keep_turns_s": 60.0},
        arguments=("--block-size", "32"),
        is_cpu=True,
    )
    place = Path(tempfile.mkdtemp(prefix="kvflow-moves-"))
    servers = [
        vllm_server(
            msgspec.structs.replace(
                one,
                role="kv_both",
                connector={**one.connector, "kv_load_failure_policy": "recompute"},
                environment={**one.environment, **ENVIRONMENT},
            ),
            place,
        )
        for one in described
    ]
    urls, control = [server.url for server in servers], FIRST_PORT + 5
    async with (
        running(servers),
        serve_proxy(urls[:1], urls, "127.0.0.1", 0, control) as url,
        open_client() as client,
    ):
        yield Deployed(client, url, f"http://127.0.0.1:{control}", servers)

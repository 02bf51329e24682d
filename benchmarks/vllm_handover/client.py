"""A client of vLLM servers, and prompts for it."""

import json
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp
import msgspec

from kvflow.cli.proxy.application import PREFILL_PARAMS
from kvflow.cli.tasks import open_tasks
from kvflow.errors import KvflowError

__all__ = [
    "MODEL",
    "Answer",
    "BenchFailed",
    "ask",
    "hand_over",
    "hand_over_at_once",
    "metrics",
    "open_client",
    "prompt_of",
    "prompts",
]

ANSWER_S: Final = 240.0
MODEL: Final = "smollm2"

SENTENCE: Final = (
    "the light of the sun has many colours and the sky is blue because the air scatters short waves more than long "
    "ones while a ship that leaves the harbour at night sees first the lamp on the pier then the hills and at last "
    "only stars"
)

FIRST_WORDS: Final = ("One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Once", "Today", "Now", "Later")

METRIC: Final = re.compile(r"^vllm:(\w+)(?:\{[^}]*\})? ([-+.\deE]+)$", re.MULTILINE)


class BenchFailed(KvflowError):
    """A server failed to do what the benchmark measures."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A server's answer. Times are monotonic, in seconds.

    Attributes:
        status: HTTP status.
        text: Generated text.
        error: Error message, also one in the middle of a stream.
        params: `kv_transfer_params`.
        prompt_tokens: Prompt tokens as counted by the server; 0 in streams.
        began_at: When the client sent the request.
        first_at: When the first token came.
        second_at: When the second one came; 0 if there was none, or no stream.
        ended_at: When the answer was complete.
    """

    status: int
    text: str = ""
    error: str = ""
    params: dict[str, Any] | None = None
    prompt_tokens: int = 0
    began_at: float = 0.0
    first_at: float = 0.0
    second_at: float = 0.0
    ended_at: float = 0.0


async def ask(  # noqa: PLR0913 - a request has many parameters
    session: aiohttp.ClientSession,
    url: str,
    prompt: str,
    tokens: int,
    params: Mapping[str, Any] | None = None,
    *,
    stream: bool = False,
    name: str = "",
) -> Answer:
    """Request a greedy completion of a prompt; `name` becomes part of the server's request id."""
    body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": stream}
    if params is not None:
        body["kv_transfer_params"] = params
    began_at = time.monotonic()
    headers = {"X-Request-Id": name} if name else None
    async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
        if response.status != 200:
            return Answer(status=response.status, error=await response.text(), began_at=began_at)
        if stream:
            return await _streamed(response, began_at)
        answer = await response.json()
    now = time.monotonic()
    return Answer(
        status=200,
        text=answer["choices"][0]["text"],
        params=answer.get("kv_transfer_params"),
        prompt_tokens=answer["usage"]["prompt_tokens"],
        began_at=began_at,
        first_at=now,
        ended_at=now,
    )


async def _streamed(response: aiohttp.ClientResponse, began_at: float) -> Answer:
    text, error, times = "", "", list[float]()
    async for line in response.content:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            error = json.dumps(event["error"])
            break
        times.append(time.monotonic())
        text += "".join(choice["text"] for choice in event["choices"])
    first_at, second_at = [*times, 0.0, 0.0][:2]
    return Answer(
        status=200,
        text=text,
        error=error,
        began_at=began_at,
        first_at=first_at,
        second_at=second_at,
        ended_at=time.monotonic(),
    )


async def hand_over(
    session: aiohttp.ClientSession, prefill: str, decode: str, prompt: str, tokens: int, *, name: str = ""
) -> tuple[Answer, Answer | None]:
    """Hand over a request as a proxy does; return the answers of prefill and decode (None if prefill failed)."""
    first = await ask(session, prefill, prompt, 1, PREFILL_PARAMS, name=name)
    if first.params is None:
        return first, None
    return first, await ask(session, decode, prompt, tokens, first.params, stream=True, name=name)


async def hand_over_at_once(  # noqa: PLR0913 - as `hand_over`
    session: aiohttp.ClientSession, prefill: str, decode: str, address: str, prompt: str, tokens: int, *, name: str
) -> tuple[Answer, Answer]:
    """Hand over a request as a concurrent proxy does, given the address of prefill's rank."""
    answers: dict[str, Answer] = {}
    params = {"do_remote_prefill": True, "transfer_id": name, "remote_engine_id": address}

    async def ask_prefill() -> None:
        told = {**PREFILL_PARAMS, "transfer_id": name}
        answers["prefill"] = await ask(session, prefill, prompt, 1, told, name=name)

    async def ask_decode() -> None:
        answers["decode"] = await ask(session, decode, prompt, tokens, params, stream=True, name=name)

    async with open_tasks() as tasks:
        tasks.start_soon(ask_prefill)
        tasks.start_soon(ask_decode)
    return answers["prefill"], answers["decode"]


async def metrics(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Return a server's metrics without prefix and labels, summed up by name."""
    values: dict[str, float] = {}
    async with session.get(f"{url}/metrics") as response:
        for name, value in METRIC.findall(await response.text()):
            values[name] = values.get(name, 0.0) + float(value)
    return values


@asynccontextmanager
async def open_client() -> AsyncIterator[aiohttp.ClientSession]:
    """Open an HTTP client without a limit of connections, each for one request: vLLM closes idle ones at any time."""
    timeout, connector = aiohttp.ClientTimeout(total=ANSWER_S), aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        yield session


def prompt_of(number: int, num_words: int) -> str:
    """Return a prompt with first words that no other prompt has."""
    step = 1 + number % 5
    count = len(FIRST_WORDS)
    known = SENTENCE.split()
    words = [FIRST_WORDS[number % count], FIRST_WORDS[number // count % count].lower()]
    words += [known[(number + step * place) % len(known)] for place in range(max(0, num_words - 2))]
    return " ".join(words)


def prompts(count: int, fewest: int, most: int) -> list[str]:
    """Return prompts whose lengths in words grow by a constant factor. A word is slightly more than one token."""
    factor = (most / fewest) ** (1 / max(1, count - 1))
    return [prompt_of(number, round(fewest * factor**number)) for number in range(count)]

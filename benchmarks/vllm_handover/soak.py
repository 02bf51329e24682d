"""Many requests, of which some leave: what grows in the servers meanwhile."""

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import aiohttp
import anyio

from benchmarks.vllm_handover.client import ask, hand_over, metrics, prompt_of
from kvflow.cli.processes import open_tasks
from kvflow.cli.proxy.application import PREFILL_PARAMS

if TYPE_CHECKING:
    from benchmarks.vllm_handover.servers import Pair

__all__ = ["soak"]

LANES: Final = 4
TOKENS: Final = 4
PROMPTS: Final = 16
LEAVES_DECODE: Final = 7
LEAVES_PREFILL: Final = 31
"""Every so many requests leave while decode answers, or before decode is asked."""

LEAVES_S: Final = 0.1
LONG_WORDS: Final = 1_300
LONG_PROMPTS: Final = 16
"""They use more blocks than the servers have."""

SETTLES_S: Final = 60.0
LOOK_S: Final = 0.5
"""Prefill keeps what nobody asks for for 30 s."""


async def soak(pair: "Pair", client: aiohttp.ClientSession, requests: int) -> list[tuple[str, str, float]]:
    """Ask, and return what has grown after the first tenth, with its unit; also how many texts were wrong.

    Memory of a block is touched when the block is used for the first time, so all of them are used beforehand.
    """
    for url in pair.urls:
        for number in range(LONG_PROMPTS):
            await ask(client, url, prompt_of(PROMPTS + number, LONG_WORDS), 1)
    asked = [prompt_of(number, 20 + 25 * number) for number in range(PROMPTS)]
    expected = {prompt: (await ask(client, pair.urls[0], prompt, TOKENS)).text for prompt in asked}
    wrong: list[str] = []

    async def run(numbers: Iterator[int]) -> None:
        for number in numbers:
            prompt = asked[number % PROMPTS]
            with suppress(aiohttp.ClientError):
                await one(number, prompt)

    async def one(number: int, prompt: str) -> None:
        if number % LEAVES_PREFILL == 0:
            await ask(client, pair.urls[0], prompt, 1, PREFILL_PARAMS)
            return
        with anyio.move_on_after(LEAVES_S if number % LEAVES_DECODE == 0 else None):
            _, answer = await hand_over(client, *pair.urls, prompt, TOKENS)
            if answer is None or answer.error or answer.text != expected[prompt]:
                wrong.append(prompt)

    async def run_all(count: int) -> None:
        numbers = iter(range(count))
        async with open_tasks() as tasks:
            for _ in range(LANES):
                tasks.start_soon(run, numbers)
        await _until_free(pair, client)

    await run_all(requests // 10)
    before = pair.usage()
    await run_all(requests // 2 - requests // 10)
    middle = pair.usage()
    await run_all(requests - requests // 2)
    after = pair.usage()
    return [
        ("wrong texts and errors", "requests", len(wrong)),
        ("growth of memory in the first half", "MiB", (middle.resident - before.resident) / 2**20),
        ("growth of memory in the second half", "MiB", (after.resident - middle.resident) / 2**20),
        ("growth of threads", "threads", after.threads - before.threads),
        ("growth of open files", "files", after.files - before.files),
        ("blocks in use", "%", 100 * sum([await _in_use(client, url) for url in pair.urls])),
    ]


async def _in_use(client: aiohttp.ClientSession, url: str) -> float:
    return (await metrics(client, url))["kv_cache_usage_perc"]


async def _until_free(pair: "Pair", client: aiohttp.ClientSession) -> None:
    """Wait until no block is in use, but not for ever: what is in use then is reported."""
    with anyio.move_on_after(SETTLES_S):
        while any([await _in_use(client, url) for url in pair.urls]):  # noqa: ASYNC110 - servers are asked
            await anyio.sleep(LOOK_S)

"""Growth of the servers under many requests, some of which are cancelled."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import aiohttp
import anyio

from benchmarks.vllm_handover.client import Answer, ask, hand_over, metrics, prompt_of
from kvflow.cli.proxy.application import PREFILL_PARAMS
from kvflow.cli.tasks import open_tasks

if TYPE_CHECKING:
    from benchmarks.vllm_handover.servers import Pair, Usage

__all__ = ["soak"]

LANES: Final = 4
QUARTERS: Final = 4
TOKENS: Final = 4
PROMPTS: Final = 16
LEAVES_DECODE: Final = 7
LEAVES_PREFILL: Final = 31
"""One request in this many leaves while decode answers, or before it reaches decode."""

LEAVES_S: Final = 0.1
LONG_WORDS: Final = 1_300
LONG_PROMPTS: Final = 16
"""Number of long prompts, which together use more blocks than the servers have."""

SETTLES_S: Final = 60.0
LOOK_S: Final = 0.5
"""How long to wait for free blocks, and how often to look. Prefill keeps unclaimed blocks for 30 s."""


async def soak(pair: "Pair", client: aiohttp.ClientSession, requests: int) -> Mapping[tuple[str, str], float]:
    """Send requests; return the growth since the first tenth, by name and unit, and the number of wrong texts.

    The long prompts use every block beforehand, because the first use of a block touches its memory. Without a
    connector decode computes each prompt again.
    """
    for url in pair.urls:
        for number in range(LONG_PROMPTS):
            await ask(client, url, prompt_of(PROMPTS + number, LONG_WORDS), 1)
    asked = [prompt_of(number, 20 + 25 * number) for number in range(PROMPTS)]
    load = _Load(pair, client, {prompt: (await ask(client, pair.urls[0], prompt, TOKENS)).text for prompt in asked})
    await load.run(requests // 10)
    usages = [pair.usage_by_server()]
    for quarter in range(QUARTERS):
        await load.run(requests * (quarter + 1) // QUARTERS - requests * quarter // QUARTERS)
        usages.append(pair.usage_by_server())
    in_use = 100 * sum([await _in_use(client, url) for url in pair.urls])
    return {("wrong texts and errors", "requests"): load.wrong, **_grown(usages), ("blocks in use", "%"): in_use}


class _Load:
    """A load of handovers of the same prompts; some clients leave early.

    Attributes:
        wrong: Number of answers with an error or an unexpected text.
    """

    def __init__(self, pair: "Pair", client: aiohttp.ClientSession, expected: Mapping[str, str]) -> None:
        self.wrong = 0
        self._pair = pair
        self._client = client
        self._expected = expected
        self._prompts = list(expected)

    async def run(self, count: int) -> None:
        """Send `count` requests, and wait until the servers have freed their blocks."""
        numbers = iter(range(count))
        async with open_tasks() as tasks:
            for _ in range(LANES):
                tasks.start_soon(self._lane, numbers)
        await _until_free(self._pair, self._client)

    async def _lane(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            with suppress(aiohttp.ClientError):
                await self._one(number, self._prompts[number % len(self._prompts)])

    async def _one(self, number: int, prompt: str) -> None:
        is_plain = self._pair.way == "none"
        if number % LEAVES_PREFILL == 0:
            await ask(self._client, self._pair.urls[0], prompt, 1, None if is_plain else PREFILL_PARAMS)
            return
        with anyio.move_on_after(LEAVES_S if number % LEAVES_DECODE == 0 else None):
            answer = await (self._computed_twice(prompt) if is_plain else self._handed_over(prompt))
            self.wrong += answer is None or bool(answer.error) or answer.text != self._expected[prompt]

    async def _handed_over(self, prompt: str) -> Answer | None:
        _, answer = await hand_over(self._client, *self._pair.urls, prompt, TOKENS)
        return answer

    async def _computed_twice(self, prompt: str) -> Answer:
        prefill, decode = self._pair.urls
        await ask(self._client, prefill, prompt, 1)
        return await ask(self._client, decode, prompt, TOKENS)


def _grown(usages: "Sequence[Mapping[str, Usage]]") -> dict[tuple[str, str], float]:
    grown: dict[tuple[str, str], float] = {}
    for name in usages[0]:
        for quarter, (before, after) in enumerate(pairwise(usages), 1):
            memory = (after[name].resident - before[name].resident) / 2**20
            grown[f"growth of memory of {name} in quarter {quarter}", "MiB"] = memory
        grown[f"growth of threads of {name}", "threads"] = usages[-1][name].threads - usages[0][name].threads
        grown[f"growth of open files of {name}", "files"] = usages[-1][name].files - usages[0][name].files
    return grown


async def _in_use(client: aiohttp.ClientSession, url: str) -> float:
    return (await metrics(client, url))["kv_cache_usage_perc"]


async def _until_free(pair: "Pair", client: aiohttp.ClientSession) -> None:
    """Wait until no block is in use, at most `SETTLES_S`; the caller reports blocks still in use."""
    with anyio.move_on_after(SETTLES_S):
        while any([await _in_use(client, url) for url in pair.urls]):  # noqa: ASYNC110 - polls the servers
            await anyio.sleep(LOOK_S)

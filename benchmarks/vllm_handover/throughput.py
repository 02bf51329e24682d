"""Many requests at a time: how fast the servers answer, and how much CPU time they take."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from benchmarks.vllm_handover.client import BenchFailed, hand_over, prompt_of
from kvflow.cli.tasks import open_tasks

if TYPE_CHECKING:
    import aiohttp

    from benchmarks.vllm_handover.servers import Pair

__all__ = ["Load", "load"]

WORDS: Final = 250
"""Length of the prompts: 255 tokens."""

TOKENS: Final = 32


class Load(NamedTuple):
    """What a load of requests has shown.

    Attributes:
        rate: Answered requests per second.
        first_s: Times to the first tokens.
        cpu_s: CPU time of both servers per answered request.
        failed: Number of requests without a complete answer.
    """

    rate: float
    first_s: list[float]
    cpu_s: float
    failed: int


async def load(pair: "Pair", client: "aiohttp.ClientSession", at_once: int, numbers: range) -> Load:
    """Hand over one prompt for each number, `at_once` at any time."""
    first_s: list[float] = []

    async def lane(left: Iterator[int]) -> None:
        for number in left:
            first, second = await hand_over(client, *pair.urls, prompt_of(number, WORDS), TOKENS)
            if second is not None and second.status == 200 and not second.error:
                first_s.append(second.first_at - first.began_at)

    left, cpu_s, began_at = iter(numbers), pair.usage().cpu_s, time.monotonic()
    async with open_tasks() as tasks:
        for _ in range(at_once):
            tasks.start_soon(lane, left)
    elapsed_s = time.monotonic() - began_at
    answered = len(first_s)
    if not answered:
        raise BenchFailed("no request was answered", way=pair.way)
    return Load(
        rate=answered / elapsed_s,
        first_s=first_s,
        cpu_s=(pair.usage().cpu_s - cpu_s) / answered,
        failed=len(numbers) - answered,
    )

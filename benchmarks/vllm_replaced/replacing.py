"""Requests in flight, the death of one server, and its replacement."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import aiohttp
import anyio
from anyio.abc import TaskGroup

from benchmarks.vllm_handover.client import Answer, BenchFailed, ask, hand_over, metrics, prompt_of
from benchmarks.vllm_replaced.servers import Pair, Side, wait_until_healthy
from benchmarks.vllm_replaced.standing import Standing
from kvflow.cli.proxy.application import PREFILL_PARAMS
from kvflow.cli.tasks import open_tasks

__all__ = ["AFTER_FIRST_S", "OTHER", "Dead", "Replacing", "Served", "Survivor", "expected_texts"]

OTHER: Final[Mapping[Side, Side]] = {"prefill": "decode", "decode": "prefill"}

TOKENS: Final = 100
"""Of each answer in flight, so that decode is still at the first ones when prefill has computed the last one."""

IN_FLIGHT: Final = [prompt_of(number, 250) for number in range(4)]
COMPUTED: Final = prompt_of(10, 1100)
"""Prompt that prefill still computes when it is killed."""

LONG: Final = [prompt_of(number, 1300) for number in (20, 21)]
FIRST, FIRST_TOKENS = prompt_of(30, 60), 12
"""Prompt that the replacement is asked first, and the tokens of its answer."""

USUAL: Final = 5
BEGUN_TOKENS: Final = 4
COMPUTES_S: Final = 0.5
ANSWER_S: Final = 60.0
FREE_S: Final = 60.0
POLL_S: Final = 0.05
SETTLE_S: Final = 3.0
AFTER_FIRST_S: Final = (1.0, 5.0)
"""When to look at the survivor after the first right answer of the replacement."""


class Dead(NamedTuple):
    """What a death has done.

    Attributes:
        ended: Requests in flight by how they have ended.
        last_s: When the last of them had ended, in seconds after the kill.
        free_s: When the survivor had no blocks in use; None if it still had some after a minute.
        looks: What stands in the survivor, by seconds after the kill.
    """

    ended: Mapping[str, int]
    last_s: float
    free_s: float | None
    looks: Mapping[float, Standing]


class Served(NamedTuple):
    """How a replacement serves.

    Attributes:
        start_s: From its start until it was healthy.
        first_s: From then until the first right answer, which is complete.
        second_s: How long the answer after it took.
        failed: Answers before it.
        looks: What stands in the survivor, by seconds after it.
    """

    start_s: float
    first_s: float
    second_s: float
    failed: Sequence[str]
    looks: Mapping[float, Standing]


class Survivor(NamedTuple):
    """What stands in a server before its peer is killed.

    Attributes:
        alone: Before the first handover.
        fresh_s: How long the first handover between both took.
        usual_s: How long others took.
    """

    alone: Standing
    fresh_s: float
    usual_s: Sequence[float]


class Replacing:
    """Kills one server of a pair, and replaces it, again and again.

    Args:
        pair: The servers.
        victim: Which of them is killed.
        client: HTTP client.
        expected: The right texts.
    """

    def __init__(self, pair: Pair, victim: Side, client: aiohttp.ClientSession, expected: Mapping[str, str]) -> None:
        self.pair = pair
        self._victim = victim
        self._client = client
        self._expected = expected
        self._replied = 0
        self._ended: list[tuple[str, float]] = []

    async def warm_up(self) -> Survivor:
        """Touch all blocks, and hand over some requests.

        Raises:
            BenchFailed: An answer was wrong.
        """
        for url in (self.pair.prefill, self.pair.decode):
            for prompt in LONG:
                await ask(self._client, url, prompt, 1)
        await anyio.sleep(SETTLE_S)
        alone = self.look()
        fresh_s, *usual = [await self._first_answer() for _ in range(1 + USUAL)]
        async with open_tasks() as tasks:
            self._start_requests(tasks)
        if {how for how, _ in self._ended} != {"right"}:
            raise BenchFailed("wrong without a fault", way=self.pair.way, ended=[how for how, _ in self._ended])
        return Survivor(alone, fresh_s, usual)

    def look(self) -> Standing:
        """Return what stands in the survivor."""
        return self.pair.look_at(OTHER[self._victim])

    async def kill(self, look_s: Sequence[float], *, is_idle: bool) -> Dead:
        """Kill the victim, and look at the survivor at some times after that."""
        looks: dict[float, Standing] = {}
        async with open_tasks() as tasks:
            if is_idle:
                self._ended = []
            else:
                before = await self._generated()
                self._start_requests(tasks)
                await self._wait_until_in_flight(before, tasks)
            self.pair.server(self._victim).kill()
            killed_at = time.monotonic()
            free = _Free(self._client, self._url(OTHER[self._victim]), killed_at)
            tasks.start_soon(free.watch)
            for after_s in look_s:
                await anyio.sleep(killed_at + after_s - time.monotonic())
                looks[after_s] = self.look()
        ended = [how for how, _ in self._ended]
        last_s = max((at - killed_at for _, at in self._ended), default=0.0)
        return Dead({how: ended.count(how) for how in sorted(set(ended))}, last_s, free.after_s, looks)

    async def replace(self) -> Served:
        """Start the victim again, and ask it until the answer is right."""
        server = self.pair.server(self._victim)
        started_at = time.monotonic()
        server.start()
        healthy_at = await wait_until_healthy(server)
        failed: list[str] = []
        while (how := await self._ask_once()) != "right":
            failed.append(how)
        first_at = time.monotonic()
        looks: dict[float, Standing] = {}
        second_s = await self._first_answer()
        for after_s in AFTER_FIRST_S:
            await anyio.sleep(max(0.0, first_at + after_s - time.monotonic()))
            looks[after_s] = self.look()
        return Served(healthy_at - started_at, first_at - healthy_at, second_s, failed, looks)

    def _url(self, side: Side) -> str:
        return self.pair.server(side).url

    def _start_requests(self, tasks: TaskGroup) -> None:
        self._replied, self._ended = 0, []
        for prompt in IN_FLIGHT:
            tasks.start_soon(self._note_end, prompt)

    async def _wait_until_in_flight(self, before: float, tasks: TaskGroup) -> None:
        """Wait until prefill has computed all requests, and decode has begun with the first ones."""
        while (  # noqa: ASYNC110 - the servers tell nobody
            self._replied < len(IN_FLIGHT) or await self._generated() < before + BEGUN_TOKENS
        ):
            await anyio.sleep(POLL_S)
        if self._victim == "prefill":
            tasks.start_soon(self._note_end, COMPUTED)
            await anyio.sleep(COMPUTES_S)

    async def _generated(self) -> float:
        return (await metrics(self._client, self.pair.decode))["generation_tokens_total"]

    async def _note_end(self, prompt: str) -> None:
        how = f"no answer within {ANSWER_S:.0f} s"
        with anyio.move_on_after(ANSWER_S):
            try:
                how = await self._how_it_ends(prompt)
            except aiohttp.ClientError as error:
                how = f"connection broken ({type(error).__name__})"
        self._ended.append((how, time.monotonic()))

    async def _how_it_ends(self, prompt: str) -> str:
        first = await ask(self._client, self.pair.prefill, prompt, 1, PREFILL_PARAMS)
        self._replied += 1
        if first.params is None:
            return _how(first, "")
        answer = await ask(self._client, self.pair.decode, prompt, TOKENS, first.params, stream=True)
        return _how(answer, self._expected.get(prompt, ""))

    async def _ask_once(self) -> str:
        with anyio.move_on_after(ANSWER_S):
            try:
                first, second = await hand_over(self._client, self.pair.prefill, self.pair.decode, FIRST, FIRST_TOKENS)
            except aiohttp.ClientError as error:
                return f"connection broken ({type(error).__name__})"
            return _how(first if second is None else second, self._expected[FIRST])
        return f"no answer within {ANSWER_S:.0f} s"

    async def _first_answer(self) -> float:
        began_at = time.monotonic()
        if (how := await self._ask_once()) != "right":
            raise BenchFailed("wrong without a fault", way=self.pair.way, ended=how)
        return time.monotonic() - began_at


class _Free:
    """Watches when a server has no blocks in use.

    Attributes:
        after_s: When, in seconds; None until then.
    """

    def __init__(self, client: aiohttp.ClientSession, url: str, since: float) -> None:
        self.after_s: float | None = None
        self._client = client
        self._url = url
        self._since = since

    async def watch(self) -> None:
        with anyio.move_on_after(FREE_S):
            while (await metrics(self._client, self._url))["kv_cache_usage_perc"]:  # noqa: ASYNC110 - as above
                await anyio.sleep(POLL_S)
            self.after_s = time.monotonic() - self._since


async def expected_texts(client: aiohttp.ClientSession, url: str) -> Mapping[str, str]:
    """Return the texts of one server alone."""
    asked = {**dict.fromkeys(IN_FLIGHT, TOKENS), FIRST: FIRST_TOKENS}
    return {prompt: (await ask(client, url, prompt, tokens)).text for prompt, tokens in asked.items()}


def _how(answer: Answer, expected: str) -> str:
    if answer.status != 200 or answer.error:
        return f"{answer.status if answer.status != 200 else 'stream ended'}: {_message(answer.error)}"
    return "right" if answer.text == expected else "wrong text"


def _message(text: str) -> str:
    try:
        found = json.loads(text)
    except ValueError:
        return text[:60]
    inner = found.get("error", found)
    return str(inner.get("message", inner))[:60] if isinstance(inner, dict) else str(inner)[:60]

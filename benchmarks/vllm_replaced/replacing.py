"""Requests in flight, the death of one server, and its replacement."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import aiohttp
import anyio
from anyio.abc import TaskGroup

from benchmarks.vllm_handover.client import Answer, BenchFailed, ask, hand_over, metrics, prompt_of
from benchmarks.vllm_replaced.servers import RUNNING, Pair, Side, wait_until_healthy
from benchmarks.vllm_replaced.standing import Standing
from kvflow.cli.proxy.application import PREFILL_PARAMS
from kvflow.cli.tasks import open_tasks

__all__ = ["AFTER_FIRST_S", "OTHER", "Dead", "Replacing", "Served", "Survivor", "expected_texts"]

OTHER: Final[Mapping[Side, Side]] = {"prefill": "decode", "decode": "prefill"}

TOKENS: Final = 120
"""Of each answer in flight, so that decode is still at the first ones when prefill has computed the last one."""

RUN: Final = [prompt_of(number, 250) for number in range(RUNNING)]
WAIT: Final = [prompt_of(RUNNING + number, 250) for number in range(2)]
"""Prompts of requests that decode runs when one of the servers is killed, and of those that wait there meanwhile.

Prefill keeps the blocks of the latter. If all came at once, decode would take the blocks of all.
"""

COMPUTED: Final = prompt_of(10, 1100)
"""Prompt that prefill still computes when it is killed."""

LONG: Final = [prompt_of(number, 1300) for number in (20, 21)]
FIRST, FIRST_TOKENS = prompt_of(30, 60), 12
"""Prompt that the replacement is asked first, and the tokens of its answer."""

USUAL: Final = 5
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
        free_s: When the survivor had no blocks in use, or was not looked at any more.
        is_free: Whether it had none then.
        looks: What stands in the survivor, by seconds after the kill.
    """

    ended: Mapping[str, int]
    last_s: float
    free_s: float
    is_free: bool
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
        self._ends: list[anyio.Event] = []
        self._killed_at = 0.0

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
            for prompt in (*RUN, *WAIT):
                self._start_request(tasks, prompt)
        if {how for how, _ in self._ended} != {"right"}:
            raise BenchFailed("wrong without a fault", way=self.pair.way, ended=[how for how, _ in self._ended])
        return Survivor(alone, fresh_s, usual)

    def look(self) -> Standing:
        """Return what stands in the survivor."""
        return self.pair.look_at(OTHER[self._victim])

    async def kill(self, tasks: TaskGroup, *, is_idle: bool) -> None:
        """Kill the victim while requests are in flight, or none; they go on in `tasks`.

        Raises:
            BenchFailed: The requests have ended before.
        """
        self._replied, self._ended, self._ends = 0, [], []
        if not is_idle:
            await self._fill(tasks)
        self.pair.server(self._victim).kill()
        self._killed_at = time.monotonic()

    async def watch(self, look_s: Sequence[float]) -> Dead:
        """Look at the survivor at some times after the kill, and wait until its requests have ended."""
        looks: dict[float, Standing] = {}
        free = _Free(self._client, self._url(OTHER[self._victim]), self._killed_at)
        async with open_tasks() as tasks:
            tasks.start_soon(free.watch)
            for after_s in look_s:
                await anyio.sleep(self._killed_at + after_s - time.monotonic())
                looks[after_s] = self.look()
        await self.wait_for_ends()
        ended = [how for how, _ in self._ended]
        last_s = max((at - self._killed_at for _, at in self._ended), default=0.0)
        return Dead({how: ended.count(how) for how in sorted(set(ended))}, last_s, free.after_s, free.is_free, looks)

    async def wait_for_ends(self) -> None:
        """Wait until the requests that were in flight have ended."""
        for end in self._ends:
            await end.wait()

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

    def _start_request(self, tasks: TaskGroup, prompt: str) -> None:
        self._ends.append(anyio.Event())
        tasks.start_soon(self._note_end, prompt, self._ends[-1])

    async def _fill(self, tasks: TaskGroup) -> None:
        for prompts in (RUN, WAIT):
            for prompt in prompts:
                self._start_request(tasks, prompt)
            await self._wait_until_decode_has(len(self._ends))
        if self._victim == "prefill":
            self._start_request(tasks, COMPUTED)
            await anyio.sleep(COMPUTES_S)

    async def _wait_until_decode_has(self, count: int) -> None:
        """Wait until prefill has computed all requests, and decode runs the first ones, while the others wait."""
        wanted = (RUNNING, count - RUNNING)
        while self._replied < count or await self._run_and_wait() != wanted:
            if self._ended:
                raise BenchFailed("requests ended too early", way=self.pair.way, ended=[how for how, _ in self._ended])
            await anyio.sleep(POLL_S)

    async def _run_and_wait(self) -> tuple[float, float]:
        found = await metrics(self._client, self.pair.decode)
        return found["num_requests_running"], found["num_requests_waiting"]

    async def _note_end(self, prompt: str, end: anyio.Event) -> None:
        how = f"no answer within {ANSWER_S:.0f} s"
        with anyio.move_on_after(ANSWER_S):
            try:
                how = await self._how_it_ends(prompt)
            except aiohttp.ClientError as error:
                how = f"connection broken ({type(error).__name__})"
        self._ended.append((how, time.monotonic()))
        end.set()

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
        after_s: When, in seconds; at most `FREE_S`.
        is_free: Whether it has none.
    """

    def __init__(self, client: aiohttp.ClientSession, url: str, since: float) -> None:
        self.after_s = FREE_S
        self.is_free = False
        self._client = client
        self._url = url
        self._since = since

    async def watch(self) -> None:
        with anyio.move_on_after(FREE_S):
            while (await metrics(self._client, self._url))["kv_cache_usage_perc"]:  # noqa: ASYNC110 - as above
                await anyio.sleep(POLL_S)
            self.after_s, self.is_free = time.monotonic() - self._since, True


async def expected_texts(client: aiohttp.ClientSession, url: str) -> Mapping[str, str]:
    """Return the texts of one server alone."""
    asked = {**dict.fromkeys((*RUN, *WAIT), TOKENS), FIRST: FIRST_TOKENS}
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

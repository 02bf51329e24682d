"""kvflow's connector beside vLLM's tiers in memory and on disk, on both servers, in both orders.

Blocks that prefill has computed and decode has received have the same name in both tiers, so their files must be equal.
"""

import re
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import aiohttp
import anyio
import numpy as np
import pytest

from benchmarks.vllm_handover.client import ask, hand_over, metrics, prompt_of
from tests.engines.vllm.deployment import BROUGHT, KNOWN, SETTLE_S, Deployment, Own, settled

pytestmark = [pytest.mark.anyio, pytest.mark.vllm, pytest.mark.timeout(900)]

TOKENS = 12
NUM_BLOCKS = 42
FEW_BLOCKS = (
    *("--block-size", "32", "--num-gpu-blocks-override", str(NUM_BLOCKS), "--max-model-len", "1024"),
    *("--max-num-batched-tokens", "64", "--no-scheduler-reserve-full-isl"),
)
CHUNK_HITS: Final = re.compile(r"^vllm:kv_offload_tiering_chunk_hits_total\{.*\} (.+)$", re.MULTILINE)
ANSWERED: Final = "request_success_total"
WAITING_S = 5.0
"""How long it takes decode to receive, if nothing keeps it from that."""

ROUNDING = 0.01
"""Most by which a value may differ that both servers have computed, in chunks of different sizes."""


class Tiered(Deployment):
    """Two servers with few blocks, each with a tier in memory above one on disk.

    Attributes:
        place: Directory of their files.
        is_first: kvflow's connector is asked before the tier.
        held: While this file exists, decode copies nothing into its tier.
        ranks: Directory of the sockets of both ranks.
    """

    def __init__(self, place: Path, *, is_first: bool) -> None:
        self.place, self.is_first, self.held, self.ranks = place, is_first, place / "held-decode", place / "ranks"
        own = {name: _with_tier(place, name, is_first=is_first) for name in ("prefill", "decode")}
        super().__init__(
            place,
            own=own,
            load_failure_policy="recompute",
            arguments=(*FEW_BLOCKS, "--middleware", "kvflow.engines.vllm.health.RanksHealth"),
            extra_config={"admin": str(self.ranks)},
        )

    async def forget(self, client: aiohttp.ClientSession, *names: str) -> None:
        """Empty vLLM's prefix cache; the tiers keep what they have. All requests have ended."""
        await self.until_free(client)
        for name in names:
            async with client.post(f"{getattr(self, name).url}/reset_prefix_cache") as answer:
                assert await answer.json() == {"success": True}

    async def hits(self, client: aiohttp.ClientSession) -> int:
        """Return how many blocks decode has found in its tier."""
        async with client.get(f"{self.decode.url}/metrics") as answer:
            return sum(int(float(value)) for value in CHUNK_HITS.findall(await answer.text()))

    def blocks(self, name: str) -> dict[str, bytes]:
        """Return the blocks in a server's tier on disk, by their names."""
        return {path.name: path.read_bytes() for path in (self.place / f"disk-{name}").rglob("*.bin")}

    def check_blocks(self) -> None:
        """Check that both tiers have the same block under the same name, for at least some names."""
        computed, received = self.blocks("prefill"), self.blocks("decode")
        names = computed.keys() & received.keys()
        assert names
        assert not [name for name in names if _difference(computed[name], received[name]) > ROUNDING]


def _with_tier(place: Path, name: str, *, is_first: bool) -> Own:
    tier = {
        "kv_connector": "KvflowOffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "HostTieringSpec",
            "spec_module_path": "tests.engines.vllm.host_tier",
            "cpu_bytes_to_use": 2**27,
            "held": str(place / f"held-{name}"),
            "secondary_tiers": [{"type": "fs", "root_dir": str(place / f"disk-{name}")}],
        },
    }
    environment = {"VLLM_SERVER_DEV_MODE": "1"}  # for /reset_prefix_cache
    return Own(after=[tier], environment=environment) if is_first else Own(before=[tier], environment=environment)


def _difference(one: bytes, other: bytes) -> float:
    values = np.frombuffer(one, np.float32), np.frombuffer(other, np.float32)
    return float(np.abs(values[0] - values[1]).max())


@pytest.fixture(scope="module", params=[True, False], ids=["kvflow first", "tier first"])
def tiered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiered]:
    with Tiered(tmp_path_factory.mktemp("tiers"), is_first=request.param) as deployment:
        yield deployment


async def receive(tiered: Tiered, client: aiohttp.ClientSession, prompt: str, tokens: int = TOKENS) -> str:
    """Hand over a request, and return its text."""
    _, answer = await hand_over(client, tiered.prefill.url, tiered.decode.url, prompt, tokens)
    assert answer is not None
    assert (answer.status, answer.error) == (200, "")
    return answer.text


async def test_received_blocks_come_back_from_the_tier(tiered: Tiered, client: aiohttp.ClientSession) -> None:
    prompt = prompt_of(700, 300)
    assert await receive(tiered, client, prompt) == await tiered.text(client, prompt, TOKENS)
    await tiered.forget(client, "decode")
    before = await tiered.hits(client)
    again = await ask(client, tiered.decode.url, prompt, TOKENS)
    assert again.text == await tiered.text(client, prompt, TOKENS)
    assert await tiered.hits(client) - before == 9  # of 32 tokens
    tiered.check_blocks()


async def test_parts_of_a_prompt_from_the_tier_and_from_prefill(tiered: Tiered, client: aiohttp.ClientSession) -> None:
    """Blocks of an earlier prompt that came back from the tier, and the rest of a longer one from prefill."""
    prompt = prompt_of(701, 200)
    longer = f"{prompt} {prompt_of(702, 200)}"
    assert await receive(tiered, client, prompt) == await tiered.text(client, prompt, TOKENS)
    await tiered.forget(client, "decode")
    await ask(client, tiered.decode.url, prompt, TOKENS)
    before = await metrics(client, tiered.decode.url)
    assert await receive(tiered, client, longer) == await tiered.text(client, longer, TOKENS)
    after = await metrics(client, tiered.decode.url)
    assert after[KNOWN] - before[KNOWN] == 192
    assert after[BROUGHT] - before[BROUGHT] > 200


async def test_prefill_sends_what_its_tier_had(tiered: Tiered, client: aiohttp.ClientSession) -> None:
    """Of a prompt whose beginning prefill has loaded, all is sent, unless decode's tier is asked first."""
    prompt = prompt_of(703, 200)
    longer = f"{prompt} {prompt_of(704, 200)}"
    expected = [await tiered.text(client, one, TOKENS) for one in (prompt, longer)]
    await tiered.forget(client, "prefill", "decode")
    assert [await receive(tiered, client, one) for one in (prompt, longer)] == expected
    await tiered.forget(client, "prefill", "decode")
    before = await tiered.hits(client), await metrics(client, tiered.decode.url)
    assert await receive(tiered, client, longer) == expected[1]
    after = await tiered.hits(client), await metrics(client, tiered.decode.url)
    brought = after[1][BROUGHT] - before[1][BROUGHT]
    assert after[0] - before[0] == 12  # blocks; vLLM asks all connectors, and loads from the first that has some
    assert brought > 400 if tiered.is_first else brought == 12 * 32
    tiered.check_blocks()


async def test_a_wrong_page_comes_back_from_the_tier(tiered: Tiered, client: aiohttp.ClientSession) -> None:
    """The comparisons can fail: decode's tier has what decode has received, and answers with it."""
    prompt = f"{prompt_of(62, 29)} {prompt_of(65, 33)} and"  # two blocks, of which the second is wrong
    tiered.wrong_page.touch()
    try:
        assert await receive(tiered, client, prompt) != await tiered.text(client, prompt, TOKENS)
    finally:
        tiered.wrong_page.unlink()
    await tiered.until_free(client)
    computed, received = tiered.blocks("prefill"), tiered.blocks("decode")
    (name,) = (it for it in computed.keys() & received.keys() if _difference(computed[it], received[it]) > ROUNDING)
    for path in (tiered.place / "disk-decode").rglob(name):
        path.unlink()  # no other test may find it


async def test_blocks_are_copied_before_others_are_received(tiered: Tiered, client: aiohttp.ClientSession) -> None:
    """Requests end before the tier has copied their blocks, which decode then needs for others."""
    first, others = [prompt_of(710 + number, 290) for number in range(3)], [prompt_of(720, 290), prompt_of(721, 290)]
    for prompt in first + others:
        await tiered.text(client, prompt, TOKENS)
    await tiered.forget(client, "decode")
    async with nothing_copied(tiered):
        for prompt in first:
            await receive(tiered, client, prompt, 2)
        async with anyio.create_task_group() as tasks:
            for prompt in others:
                tasks.start_soon(receive, tiered, client, prompt)
            await until_received(tiered, client, len(others))
            tiered.held.unlink()
    await tiered.forget(client, "decode")
    for prompt in first:
        again = await ask(client, tiered.decode.url, prompt, TOKENS)
        assert again.text == await tiered.text(client, prompt, TOKENS)
    tiered.check_blocks()


@asynccontextmanager
async def nothing_copied(tiered: Tiered) -> AsyncIterator[None]:
    tiered.held.touch()
    try:
        yield
    finally:
        tiered.held.unlink(missing_ok=True)


async def until_received(tiered: Tiered, client: aiohttp.ClientSession, count: int) -> None:
    """Wait until decode has received requests that prefill begins to compute now; some seconds at most, if it waits."""
    before = (await metrics(client, tiered.prefill.url))[ANSWERED]
    with suppress(AssertionError):
        is_free = lambda found: found[ANSWERED] == before + count and not found["kv_cache_usage_perc"]  # noqa: E731
        await settled(client, tiered.prefill, is_free, WAITING_S)


@pytest.mark.parametrize("at_once", [4, 16])
async def test_many_prompts_at_once(tiered: Tiered, client: aiohttp.ClientSession, at_once: int) -> None:
    """Prompts with common beginnings need more blocks than there are: some are evicted while others are received."""
    asked = [f"{prompt_of(730 + number % 4, 60 + 40 * (number % 3))} {number} {at_once}" for number in range(24)]
    expected = [await tiered.text(client, prompt, TOKENS) for prompt in asked]
    await tiered.forget(client, "prefill", "decode")
    assert await all_at_once(tiered, client, asked, TOKENS, at_once) == expected
    await tiered.until_free(client)
    tiered.check_blocks()


async def all_at_once(
    tiered: Tiered, client: aiohttp.ClientSession, asked: Sequence[str], tokens: int, at_once: int
) -> list[str]:
    found: dict[str, str] = {}
    slots = anyio.Semaphore(at_once)

    async def one(prompt: str) -> None:
        async with slots:
            found[prompt] = await receive(tiered, client, prompt, tokens)

    async with anyio.create_task_group() as tasks:
        for prompt in asked:
            tasks.start_soon(one, prompt)
    return [found[prompt] for prompt in asked]


async def test_decode_preempts(tiered: Tiered, client: aiohttp.ClientSession) -> None:
    """Six answers need more blocks than decode has."""
    asked = [prompt_of(740 + number, 180) for number in range(6)]
    expected = [await tiered.text(client, prompt, 150) for prompt in asked]
    before = await metrics(client, tiered.decode.url)
    assert await all_at_once(tiered, client, asked, 150, 6) == expected
    after = await metrics(client, tiered.decode.url)
    assert after["num_preemptions_total"] > before["num_preemptions_total"]
    await tiered.until_free(client)
    tiered.check_blocks()


async def test_prefill_preempts(tiered: Tiered, client: aiohttp.ClientSession) -> None:
    """Prefill also answers other requests, which need more and more blocks while prompts are computed for decode."""
    asked = [prompt_of(750 + number, 250) for number in range(6)]
    before = await metrics(client, tiered.prefill.url)
    found: list[str] = []
    async with anyio.create_task_group() as tasks:
        for number in range(6):
            tasks.start_soon(ask, client, tiered.prefill.url, prompt_of(760 + number, 60), 300)
        found += await all_at_once(tiered, client, asked, TOKENS, 6)
    after = await metrics(client, tiered.prefill.url)
    assert after["num_preemptions_total"] > before["num_preemptions_total"]
    assert found == [await tiered.text(client, prompt, TOKENS) for prompt in asked]
    await tiered.until_free(client)
    tiered.check_blocks()


async def test_routers_hear_of_ranks_beside_a_tier(tiered: Tiered, client: aiohttp.ClientSession) -> None:
    """Comes last: afterwards, both servers refuse requests."""

    async def health_of(name: str) -> tuple[int, list[str]]:
        async with client.get(f"{getattr(tiered, name).url}/health") as answer:
            return answer.status, [] if answer.status == 200 else list((await answer.json())["ranks"].values())

    names = ("prefill", "decode")
    assert [await health_of(name) for name in names] == 2 * [(200, [])]
    command = [sys.executable, "-m", "kvflow.cli", "drain", "--all", "--socket", str(tiered.ranks), "--wait", "60"]
    await anyio.run_process(command)
    with anyio.fail_after(SETTLE_S):
        for name in names:
            while await health_of(name) == (200, []):  # noqa: ASYNC110 - answers are kept for a second
                await anyio.sleep(0.1)
    assert [await health_of(name) for name in names] == 2 * [(503, ["the rank is draining"])]

"""What runs inside vLLM's workers answers kvflow's commands, and vLLM exports what happened there."""

import json
import sys
from typing import Any

import aiohttp
import anyio
import pytest

from benchmarks.vllm_handover.client import ask, hand_over, prompt_of
from tests.engines.vllm.deployment import Deployment

pytestmark = [pytest.mark.anyio, pytest.mark.vllm, pytest.mark.timeout(900)]

TOKENS = 8


async def run(*arguments: str) -> tuple[int, str]:
    """Run a command of kvflow; return its exit code and output."""
    done = await anyio.run_process([sys.executable, "-m", "kvflow.cli", *arguments], check=False)
    return done.returncode, done.stdout.decode()


async def exported(client: aiohttp.ClientSession, url: str, start: str) -> float:
    """Return the sum of the series of a server that begin with a text."""
    async with client.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(start))


async def test_ranks_in_workers_answer(pair: Deployment, client: aiohttp.ClientSession) -> None:
    await hand_over(client, pair.prefill.url, pair.decode.url, prompt_of(70, 300), TOKENS)
    code, printed = await run("status", "--json")
    ranks: list[dict[str, Any]] = [json.loads(line) for line in printed.splitlines()]
    assert (code, {rank["role"] for rank in ranks}) == (0, {"prefill", "decode"})
    assert all(rank["health"]["transfer"] == "ok" for rank in ranks), ranks
    assert (await run("health", "--ready"))[0] == 0
    code, printed = await run("doctor", "--no-probe", "--json")
    found = [finding["cause"] for finding in json.loads(printed) if finding["check"] == "running ranks"]
    assert any(rank["instance"] in cause for rank in ranks for cause in found), found


async def test_vllm_says_what_decode_computed_itself_and_where_the_time_went(
    pair: Deployment, client: aiohttp.ClientSession
) -> None:
    await hand_over(client, pair.prefill.url, pair.decode.url, prompt_of(71, 200), TOKENS)
    await ask(client, pair.decode.url, prompt_of(72, 50), TOKENS)
    with anyio.fail_after(60.0):  # vLLM exports with its next step
        for series in ("kvflow_recomputed_tokens_total", "kvflow_handover_part_seconds_count"):
            while not await exported(client, pair.decode.url, f"vllm:{series}"):
                await ask(client, pair.decode.url, prompt_of(73, 20), 2)

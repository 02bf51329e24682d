"""A prefill server with two engines (data parallelism) hands over to a decode server with one.

Pipeline parallelism is not tested: vLLM 0.32.0 fails its first request on CPUs, also without a connector.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import anyio
import pytest

from benchmarks.vllm_handover.client import hand_over, metrics, prompts
from tests.engines.vllm.deployment import BROUGHT, Deployment

pytestmark = [pytest.mark.anyio, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

TOKENS = 12


SERVED = re.compile(r'^vllm:request_success_total\{engine="(\d)",.*\} ([1-9].*)$', re.MULTILINE)


@pytest.fixture(scope="module")
def two_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    place: Path = tmp_path_factory.mktemp("vllm")
    with Deployment(place, prefill_workers=2, divided_by="data") as deployment:
        yield deployment


async def test_texts_are_those_of_one_server(two_engines: Deployment, client: aiohttp.ClientSession) -> None:
    asked = [f"{number} {prompt}" for number, prompt in enumerate(prompts(12, 4, 500))]
    before = await metrics(client, two_engines.decode.url)
    slots = anyio.Semaphore(4)

    async def one(prompt: str) -> None:
        async with slots:
            _, answer = await hand_over(client, two_engines.prefill.url, two_engines.decode.url, prompt, TOKENS)
        assert answer is not None
        assert (answer.status, answer.error) == (200, "")
        assert answer.text == await two_engines.text(client, prompt, TOKENS)

    async with anyio.create_task_group() as tasks:
        for prompt in asked:
            tasks.start_soon(one, prompt)
    after = await metrics(client, two_engines.decode.url)
    assert after[BROUGHT] - before[BROUGHT] > sum(len(prompt.split()) for prompt in asked)
    await two_engines.until_free(client)
    async with client.get(f"{two_engines.prefill.url}/metrics") as response:
        assert {engine for engine, _ in SERVED.findall(await response.text())} == {"0", "1"}

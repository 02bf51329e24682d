"""With `first_token.patch`, decode begins with the second token, and everything is as with a single server."""

import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

pytest.importorskip("vllm")

from benchmarks.vllm_handover.client import MODEL, prompt_of
from benchmarks.vllm_handover.patched import make_patched_vllm
from benchmarks.vllm_handover.plugin import Probe
from benchmarks.vllm_handover.timeline import read_events
from kvflow.cli.proxy.application import PREFILL_PARAMS, serve_proxy
from tests.engines.vllm.deployment import Deployment, Own

pytestmark = [pytest.mark.anyio, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

TOKENS = 12
SEEDED = {"temperature": 1.0, "seed": 11}


class Traced(NamedTuple):
    """Two servers whose vLLM is patched, and the trace of decode."""

    deployment: Deployment
    trace: Path

    def num_computed(self, name: str) -> int:
        """Return how many tokens decode's worker has computed for a request."""
        steps = [event for event in read_events(self.trace) if event.event == "step_began"]
        return sum(int(step.values["tokens"]) for step in steps if any(name in it for it in step.requests))


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    place = tmp_path_factory.mktemp("first_token")
    trace = place / "decode.trace"
    with pytest.MonkeyPatch.context() as change:
        change.setenv("PYTHONPATH", str(make_patched_vllm(tmp_path_factory.mktemp("patched"))))
        own = {"decode": Own(environment=Probe(trace=str(trace)).environment())}
        deployment = Deployment(place, own=own)
    with deployment:
        yield Traced(deployment, trace)


@pytest.fixture
async def proxy(patched: Traced) -> AsyncIterator[str]:
    """Start a proxy, which sends its first request to prefill first, and the following ones to both at once."""
    servers = patched.deployment
    async with serve_proxy([servers.prefill.url], [servers.decode.url], "127.0.0.1", 0) as url:
        yield url


async def post(client: aiohttp.ClientSession, url: str, prompt: str, name: str = "", **fields: Any) -> Any:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0.0, **fields}
    async with client.post(f"{url}/v1/completions", json=body, headers={"X-Request-Id": name}) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def complete(client: aiohttp.ClientSession, url: str, prompt: str, name: str = "", **fields: Any) -> Any:
    """Return the choices that a server answers with."""
    answer = await post(client, url, prompt, name or uuid.uuid4().hex, **fields)
    return sorted(answer["choices"], key=lambda choice: int(choice["index"]))


def without_logprobs(choices: Any) -> Any:
    return [{**choice, "logprobs": None} for choice in choices]


def logprobs_of(choices: Any) -> list[dict[str, float]]:
    """Return the most likely tokens of each position with their logprobs."""
    return [position for choice in choices for position in choice["logprobs"]["top_logprobs"]]


@pytest.mark.parametrize(
    ("fields", "num_steps"),
    [
        ({}, TOKENS - 1),
        ({"logprobs": 4}, TOKENS - 1),
        ({"max_tokens": 1, "logprobs": 2}, 0),
        ({**SEEDED, "logprobs": 0}, TOKENS - 1),
        ({**SEEDED, "top_p": 0.9, "top_k": 40, "min_p": 0.01}, TOKENS - 1),
        ({"repetition_penalty": 1.5, "presence_penalty": 0.7, "frequency_penalty": 0.3}, TOKENS - 1),
        ({"structured_outputs": {"regex": "[0-9]{3}-[a-c]{4}-[0-9]{2}"}}, None),
        ({**SEEDED, "structured_outputs": {"choice": ["Berlin is large", "Paris is small"]}}, None),
        ({**SEEDED, "n": 3}, None),
        ({"min_tokens": 3}, TOKENS),
    ],
    ids=lambda value: " ".join(value) or "greedy" if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("at_once", [False, True], ids=["one after the other", "at once"])
async def test_answers_are_those_of_one_server(
    patched: Traced,
    client: aiohttp.ClientSession,
    proxy: str,
    fields: dict[str, Any],
    num_steps: int | None,
    *,
    at_once: bool,
) -> None:
    """Decode computes one token fewer; where it may sample another first token than prefill, it computes all."""
    if at_once:
        await complete(client, proxy, prompt_of(1, 3))
    servers = patched.deployment
    for number, num_words in enumerate((3, 170)):
        prompt, name = prompt_of(300 + number, num_words), uuid.uuid4().hex
        expected = await complete(client, servers.prefill.url, prompt, **fields)
        found = await complete(client, proxy, prompt, name, **fields)
        assert without_logprobs(found) == without_logprobs(expected)
        if "logprobs" in fields:
            for here, there in zip(logprobs_of(found), logprobs_of(expected), strict=True):
                assert here == pytest.approx(there, abs=1e-4)
        if num_steps is not None and found[0]["finish_reason"] == "length":
            assert patched.num_computed(name) == num_steps
    await servers.until_free(client)


async def test_texts_stop_where_those_of_one_server_do(
    patched: Traced, client: aiohttp.ClientSession, proxy: str
) -> None:
    """Within the first token, across the first two, and later; also at a token instead of a text."""
    servers = patched.deployment
    prompt = prompt_of(310, 40)
    (alone,) = await complete(client, servers.prefill.url, prompt, logprobs=0, return_token_ids=True)
    texts, ids = alone["logprobs"]["tokens"], alone["token_ids"]
    assert len(ids) == TOKENS
    for fields in (
        {"stop": [texts[0]]},
        {"stop": [texts[0][-1:] + texts[1][:2]]},
        {"stop": [texts[4] + texts[5]], "include_stop_str_in_output": True},
        {"stop_token_ids": [ids[0]]},
        {"stop_token_ids": [ids[3]]},
        {"stop_token_ids": [ids[0]], "ignore_eos": True, "logit_bias": {str(ids[0]): -100.0}},
    ):
        expected = await complete(client, servers.prefill.url, prompt, **fields)
        found = await complete(client, proxy, prompt, **fields)
        assert found == expected, fields
    await servers.until_free(client)


async def test_decode_begins_with_the_token_that_prefill_has_drawn(
    patched: Traced, client: aiohttp.ClientSession
) -> None:
    """Without a seed, two servers would draw different ones."""
    servers = patched.deployment
    for number in range(8):
        prompt = prompt_of(320 + number, 30)
        fields: dict[str, Any] = {"temperature": 2.0, "return_token_ids": True}
        told = {**fields, "max_tokens": 1, "kv_transfer_params": PREFILL_PARAMS}
        first = await post(client, servers.prefill.url, prompt, **told)
        fields["kv_transfer_params"] = first["kv_transfer_params"]
        second = await post(client, servers.decode.url, prompt, **fields)
        assert second["choices"][0]["token_ids"][:1] == first["choices"][0]["token_ids"]
    await servers.until_free(client)

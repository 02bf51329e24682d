"""Requests that move between two servers while they are answered, through `kvflow proxy`."""

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Final, NamedTuple

import aiohttp
import anyio
import pytest

from benchmarks.vllm_handover.client import MODEL, ask, metrics, prompt_of
from kvflow.cli.proxy.application import serve_proxy
from kvflow.cli.serve.server import Server
from tests.engines.vllm.deployment import BROUGHT, KNOWN, SETTLE_S, Deployment
from tests.support.ports import unused_port

pytest.importorskip("vllm")

pytestmark = [pytest.mark.anyio, pytest.mark.vllm, pytest.mark.timeout(900)]

TOKENS: Final = 60
KEEP_S: Final = 8.0
"""How long the last part of an answer is kept for a next turn."""

AT: Final = (6, 19, 37)
"""Tokens after which a request moves."""

FRAGMENTS: Final = [18645, 250, 48392, 138, 7906, 240, 178, 239, 230, 15107, 116, 224, 216]
"""Tokens that are parts of characters."""

BODY: Final[Mapping[str, Any]] = {
    **{"model": MODEL, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True},
    "stream_options": {"include_usage": True},
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    with Deployment(
        tmp_path_factory.mktemp("moves"),
        has_both_roles=True,
        load_failure_policy="recompute",
        extra_config={"keep_turns_s": KEEP_S, "port": 0, "mooncake_port": None},
        arguments=("--block-size", "32"),
    ) as deployment:
        yield deployment.prefill, deployment.decode


class Deployed(NamedTuple):
    """A proxy, whose requests begin at the second server; the first one computes their prompts."""

    client: aiohttp.ClientSession
    url: str
    control: str
    servers: tuple[Server, Server]

    async def drain(self, place: int) -> dict[str, int]:
        """Use the other server alone, and wait until this one has no requests."""
        for what, server in (("resume", self.servers[1 - place]), ("drain", self.servers[place])):
            async with self.client.post(f"{self.control}/{what}", params={"server": server.url}) as answer:
                assert answer.status == 200, await answer.text()
                found: dict[str, int] = await answer.json()
        return found

    async def chunks(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        async with self.client.post(self.url + path, json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))

    async def ask(self, *at: int, path: str = "/v1/completions", **fields: Any) -> list[dict[str, Any]]:
        """Return the chunks of an answer, which moves to the other server after some tokens each."""
        found, places = list[dict[str, Any]](), {count: number for number, count in enumerate(at)}
        async with anyio.create_task_group() as tasks:
            async for chunk in self.chunks(path, {**BODY, **fields}):
                found.append(chunk)
                if (place := places.pop(len(found), None)) is not None:
                    tasks.start_soon(self.drain, (place + 1) % 2)
        await self.drain(0)
        return found


@pytest.fixture
async def deployed(servers: tuple[Server, Server], client: aiohttp.ClientSession) -> AsyncIterator[Deployed]:
    urls, control = [server.url for server in servers], unused_port()
    async with serve_proxy(urls[:1], urls, "127.0.0.1", 0, control) as url:
        made = Deployed(client, url, f"http://127.0.0.1:{control}", servers)
        await made.drain(0)
        yield made


def told(chunks: list[dict[str, Any]]) -> tuple[str, list[int], str, Any]:
    """Return the text, the token ids, the finish reason and the usage of an answer."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in choices)
    tokens = [token for choice in choices for token in choice.get("token_ids") or ()]
    (reason,) = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    assert len({(chunk["id"], chunk["created"], chunk["object"]) for chunk in chunks}) == 1
    return text, tokens, reason, chunks[-1]["usage"]


CHAT: Final = {"messages": [{"role": "user", "content": "Tell me of the sea."}]}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": prompt_of(1, 60)}),
        ("/v1/completions", {"prompt": prompt_of(2, 60), "return_token_ids": True, "min_tokens": 50}),
        ("/v1/completions", {"prompt": prompt_of(3, 60), "allowed_token_ids": FRAGMENTS}),
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {**CHAT, "return_token_ids": True, "ignore_eos": False, "max_tokens": 400}),
    ],
    ids=["text", "tokens", "parts of characters", "chat", "chat that ends by itself"],
)
async def test_answers_are_those_of_one_server(deployed: Deployed, path: str, fields: Any) -> None:
    expected = await deployed.ask(path=path, **fields)
    found = await deployed.ask(*AT, path=path, **fields)
    assert told(found) == told(expected)


async def test_logprobs_are_those_of_one_server(deployed: Deployed) -> None:
    fields: Any = {"prompt": prompt_of(4, 60), "logprobs": 2}
    both = [await deployed.ask(**fields), await deployed.ask(*AT, **fields)]
    expected, found = ([it["choices"][0]["logprobs"] for it in chunks if it["choices"]] for chunks in both)
    for name in ("tokens", "text_offset"):
        assert [it for one in found for it in one[name]] == [it for one in expected for it in one[name]]
    values = [[it for one in side for it in one["token_logprobs"]] for side in (found, expected)]
    assert values[0] == pytest.approx(values[1], abs=1e-4)


async def test_no_token_is_computed_twice_but_the_last(deployed: Deployed) -> None:
    """Each part of the answer is a request, of whose prompt one token is computed, and the rest known or received."""

    async def computed() -> float:
        each = [await metrics(deployed.client, server.url) for server in deployed.servers]
        return sum(one["prompt_tokens_total"] - one.get(KNOWN, 0) - one.get(BROUGHT, 0) for one in each)

    num_chunks, places = 0, dict(zip(AT, (1, 0, 1), strict=True))
    async with anyio.create_task_group() as tasks:
        async for _ in deployed.chunks("/v1/completions", {**BODY, "prompt": prompt_of(5, 60)}):
            num_chunks += 1
            if num_chunks == 2:
                before = await computed()
            if num_chunks in places:
                tasks.start_soon(deployed.drain, places[num_chunks])
    orders = len(AT)  # what stops a request is a request with a prompt of one token
    assert await computed() - before == len(AT) + orders
    await deployed.drain(0)


@pytest.mark.parametrize(
    "fields",
    [{"seed": 5, "temperature": 1.0}, {"stop": ["zzz"]}, {"presence_penalty": 0.5}, {"n": 2}, {"stream": False}],
    ids=lambda it: next(iter(it)),
)
async def test_what_would_be_answered_otherwise_is_waited_for(deployed: Deployed, fields: Any) -> None:
    body = {**BODY, "prompt": prompt_of(7, 60), **fields}
    if not body["stream"]:
        del body["stream_options"]
    drained = list[dict[str, int]]()
    async with (
        anyio.create_task_group() as tasks,
        deployed.client.post(deployed.url + "/v1/completions", json=body) as answer,
    ):

        async def drain() -> None:
            drained.append(await deployed.drain(1))

        tasks.start_soon(drain)
        assert (await answer.text()).strip()
    assert drained[0]["moved"] == 0
    await deployed.drain(0)


async def test_draining_a_server_that_gets_requests_all_the_time(deployed: Deployed) -> None:
    """They are at all stages when it begins: waiting for their prompt, for a slot, and nearly complete."""
    prompts = [prompt_of(20 + number, 40 + 10 * number) for number in range(10)]
    expected = {prompt: told(await deployed.ask(prompt=prompt))[0] for prompt in prompts}
    found, drained = dict[str, str](), list[dict[str, int]]()
    has_begun = anyio.Event()

    async def ask(prompt: str) -> None:
        chunks = list[dict[str, Any]]()
        async for chunk in deployed.chunks("/v1/completions", {**BODY, "prompt": prompt}):
            chunks.append(chunk)
            has_begun.set()
        found[prompt] = told(chunks)[0]

    async with anyio.create_task_group() as tasks:
        for prompt in prompts:
            tasks.start_soon(ask, prompt)
        await has_begun.wait()
        drained.append(await deployed.drain(1))
        assert (await metrics(deployed.client, deployed.servers[1].url))["num_requests_running"] == 0
    await deployed.drain(0)
    assert found == expected
    assert drained[0]["moved"] > 3, drained
    assert drained[0]["recomputed"] == 0, drained


async def test_a_server_dies_while_a_request_moves_there(deployed: Deployed) -> None:
    """The first one goes on: it has computed all tokens that the client has."""
    expected = await deployed.ask(prompt=prompt_of(8, 60))
    first = deployed.servers[0]
    chunks = list[dict[str, Any]]()
    async with anyio.create_task_group() as tasks:
        async for chunk in deployed.chunks("/v1/completions", {**BODY, "prompt": prompt_of(8, 60)}):
            chunks.append(chunk)
            if len(chunks) == AT[0]:
                first.kill()
                tasks.start_soon(deployed.drain, 1)
    assert told(chunks) == told(expected)
    first.start()
    await first.wait_until_ready()


async def test_all_blocks_are_free_in_the_end(deployed: Deployed) -> None:
    """An idle server learns of it with its next step."""
    await deployed.ask(*AT, prompt=prompt_of(9, 60))
    for server in deployed.servers:
        with anyio.fail_after(KEEP_S + SETTLE_S):
            while (await metrics(deployed.client, server.url))["kv_cache_usage_perc"]:
                await ask(deployed.client, server.url, "Hello", 1)

"""Clients that disconnect and servers that die: resources are released, and the next request succeeds."""

import sys
import uuid
from functools import partial
from pathlib import Path

import aiohttp
import anyio
import pytest

from benchmarks.vllm_handover.client import MODEL, ask, hand_over, metrics, prompt_of
from kvflow.cli.proxy.application import PREFILL_PARAMS, serve_proxy
from kvflow.cli.serve.server import Server
from tests.engines.vllm.deployment import GRANT_S, SETTLE_S, Deployment, leave_after
from tests.engines.vllm.routers import vllm_router

pytestmark = [pytest.mark.anyio, pytest.mark.vllm, pytest.mark.timeout(900)]

TOKENS = 8


async def check_service(pair: Deployment, client: aiohttp.ClientSession, number: int) -> None:
    """Check that nothing stays in use, and that a request is handed over."""
    await pair.until_free(client)
    prompt = prompt_of(number, 150)
    _, answer = await hand_over(client, pair.prefill.url, pair.decode.url, prompt, TOKENS)
    assert answer is not None
    assert (answer.status, answer.error) == (200, "")
    assert answer.text == await pair.text(client, prompt, TOKENS)
    await pair.until_free(client)


async def test_the_client_leaves_while_prefill_computes(pair: Deployment, client: aiohttp.ClientSession) -> None:
    prompt = prompt_of(60, 1100)
    assert await leave_after(0.5, lambda: ask(client, pair.prefill.url, prompt, 1, PREFILL_PARAMS)) is None
    await check_service(pair, client, 61)


async def test_the_client_leaves_while_decode_answers(pair: Deployment, client: aiohttp.ClientSession) -> None:
    first = await ask(client, pair.prefill.url, prompt_of(62, 300), 1, PREFILL_PARAMS)
    assert first.params is not None
    call = lambda: ask(client, pair.decode.url, prompt_of(62, 300), 1000, first.params)  # noqa: E731 - called later
    assert await leave_after(2.0, call) is None
    await check_service(pair, client, 63)


@pytest.mark.parametrize("delay_s", [0.03, 0.06, 0.1])
async def test_the_client_leaves_while_pages_move(
    pair: Deployment, client: aiohttp.ClientSession, delay_s: float
) -> None:
    """Each delay lets decode see the request first; otherwise prefill would keep the blocks for `grant_s`."""
    prompt = prompt_of(64, 1000)
    first = await ask(client, pair.prefill.url, prompt, 1, PREFILL_PARAMS)
    assert first.params is not None
    await leave_after(delay_s, lambda: ask(client, pair.decode.url, prompt, TOKENS, first.params))
    await check_service(pair, client, 65)


async def test_a_ticket_of_another_prompt_is_not_used(pair: Deployment, client: aiohttp.ClientSession) -> None:
    """Decode computes its own prompt instead of using another's cache. vLLM's own connector crashes the server."""
    first = await ask(client, pair.prefill.url, prompt_of(66, 100), 1, PREFILL_PARAMS)
    assert first.params is not None
    prompt = prompt_of(67, 300)
    answer = await ask(client, pair.decode.url, prompt, TOKENS, first.params)
    assert (answer.status, answer.text) == (200, await pair.text(client, prompt, TOKENS))
    right = await ask(client, pair.decode.url, prompt_of(66, 100), TOKENS, first.params)
    assert (right.status, right.text) == (200, await pair.text(client, prompt_of(66, 100), TOKENS))
    await check_service(pair, client, 68)


async def test_a_ticket_that_was_used_fails_at_once(pair: Deployment, client: aiohttp.ClientSession) -> None:
    """Prefill has released the blocks, so decode returns an error, not a text."""
    prompt = prompt_of(71, 100)
    first = await ask(client, pair.prefill.url, prompt, 1, PREFILL_PARAMS)
    assert first.params is not None
    assert (await ask(client, pair.decode.url, prompt, TOKENS, first.params)).status == 200
    with anyio.fail_after(SETTLE_S):
        assert (await ask(client, pair.decode.url, prompt, TOKENS, first.params)).status == 500
    await check_service(pair, client, 72)


async def test_a_retry_of_the_pair_with_the_same_ids_succeeds(pair: Deployment, client: aiohttp.ClientSession) -> None:
    """Routers retry like this: the first decode request was lost, and the client's id stays the same."""
    prompt, name = prompt_of(69, 200), uuid.uuid4().hex
    client.headers["X-Request-Id"] = name
    first = await ask(client, pair.prefill.url, prompt, 1, PREFILL_PARAMS)
    assert first.params is not None
    await leave_after(0.01, lambda: ask(client, pair.decode.url, prompt, TOKENS, first.params))
    _, answer = await hand_over(client, pair.prefill.url, pair.decode.url, prompt, TOKENS)
    assert answer is not None
    assert (answer.status, answer.text) == (200, await pair.text(client, prompt, TOKENS))
    await pair.until_free(client, GRANT_S + SETTLE_S)  # the result of the first try is never requested


async def test_decode_never_comes(pair: Deployment, client: aiohttp.ClientSession) -> None:
    first = await ask(client, pair.prefill.url, prompt_of(73, 100), 1, PREFILL_PARAMS)
    assert first.params is not None
    await pair.until_free(client, GRANT_S + SETTLE_S)
    await check_service(pair, client, 74)


async def test_decode_refuses_the_request(pair: Deployment, client: aiohttp.ClientSession) -> None:
    """Decode's front end refuses it, so its scheduler never sees it; prefill must still be notified."""
    first = await ask(client, pair.prefill.url, prompt_of(75, 100), 1, PREFILL_PARAMS)
    assert first.params is not None
    refused = await ask(client, pair.decode.url, prompt_of(75, 100), 1_000_000, first.params)
    assert refused.status == 400
    await check_service(pair, client, 76)


async def test_decode_refuses_the_ticket(pair: Deployment, client: aiohttp.ClientSession) -> None:
    first = await ask(client, pair.prefill.url, prompt_of(79, 100), 1, PREFILL_PARAMS)
    assert first.params is not None
    first.params["kvflow_ticket"]["fingerprint"] = "another model"
    refused = await ask(client, pair.decode.url, prompt_of(79, 100), TOKENS, first.params)
    assert refused.status == 500
    await check_service(pair, client, 80)


async def test_clients_leave_at_any_time(pair: Deployment, client: aiohttp.ClientSession) -> None:
    """The proxy tells prefill, also of a request whose answer it has not seen."""
    async with serve_proxy([pair.prefill.url], [pair.decode.url], "127.0.0.1", 0) as url:
        async with anyio.create_task_group() as tasks:
            for number in range(20):
                call = partial(ask, client, url, prompt_of(400 + number, 60), TOKENS)
                tasks.start_soon(leave_after, 0.1 * number, call)
        await check_service(pair, client, 81)


async def test_two_answers_to_one_prompt(pair: Deployment, client: aiohttp.ClientSession, tmp_path: Path) -> None:
    """On each server they are two requests, with one ticket. With `top_k` of 1 both answers are equal."""
    prompt = prompt_of(77, 300)
    body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0.5, "top_k": 1, "n": 2}
    async with (
        vllm_router([pair.prefill.url], [pair.decode.url], tmp_path) as url,
        client.post(f"{url}/v1/completions", json=body) as response,
    ):
        assert response.status == 200
        choices = (await response.json())["choices"]
    assert [choice["text"] for choice in choices] == 2 * [await pair.text(client, prompt, TOKENS)]
    await check_service(pair, client, 78)


async def test_prefill_ends_after_it_gave_a_ticket(pair: Deployment, client: aiohttp.ClientSession) -> None:
    """Its host refuses connections, so decode does not wait for it."""
    prompt = prompt_of(79, 150)
    first = await ask(client, pair.prefill.url, prompt, 1, PREFILL_PARAMS)
    pair.prefill.kill()
    began = anyio.current_time()
    answer = await ask(client, pair.decode.url, prompt, TOKENS, first.params)
    sys.stdout.write(f"answered after {anyio.current_time() - began:.2f} s\n")
    pair.prefill.start()
    await pair.prefill.wait_until_ready()
    assert answer.status == 500
    assert "unreachable" in pair.decode.log.read_text()
    await check_service(pair, client, 80)


@pytest.mark.parametrize("victim", ["prefill", "decode"])
@pytest.mark.parametrize("times", [1, pytest.param(5, marks=pytest.mark.slow)])
async def test_a_killed_server_comes_back(
    pair: Deployment, client: aiohttp.ClientSession, victim: str, times: int
) -> None:
    """Four requests run at a time. The survivor is not restarted, and no answer is wrong."""
    server: Server = getattr(pair, victim)
    other = pair.decode if victim == "prefill" else pair.prefill
    for number in range(times):
        asked = [prompt_of(100 + 8 * number + place, 300) for place in range(8)]
        expected = {prompt: await pair.text(client, prompt, TOKENS) for prompt in asked}
        async with anyio.create_task_group() as tasks:
            for lane in range(4):
                tasks.start_soon(_ask_all, pair, asked[lane::4], expected)
            await anyio.sleep(1.0)
            server.kill()
        assert not other.has_ended()
        server.start()
        await server.wait_until_ready()
        await check_service(pair, client, 300 + number)
        found = await metrics(client, other.url)
        assert found["num_requests_waiting"] == 0


async def _ask_all(pair: Deployment, asked: list[str], expected: dict[str, str]) -> None:
    """Send requests until all have been tried; errors are allowed, wrong texts are not."""
    async with aiohttp.ClientSession() as client:
        for prompt in asked:
            try:
                _, answer = await hand_over(client, pair.prefill.url, pair.decode.url, prompt, TOKENS)
            except aiohttp.ClientError:
                continue
            if answer is not None and answer.status == 200 and not answer.error:
                assert answer.text == expected[prompt]

"""Conversations: prefill receives each turn from decode, and computes only what the next one adds."""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp
import anyio
import pytest

from benchmarks.vllm_handover.client import MODEL, ask, metrics, prompt_of
from benchmarks.vllm_handover.plugin import Probe
from kvflow.cli.proxy.application import PREFILL_PARAMS
from kvflow.cli.serve.server import Server
from kvflow.cli.smollm2 import prepare_smollm2
from tests.engines.vllm.deployment import BROUGHT, KNOWN, SETTLE_S, Deployment, Own
from tests.engines.vllm.models import WINDOW, make_windowed_model

pytest.importorskip("vllm")

pytestmark = [pytest.mark.anyio, pytest.mark.vllm, pytest.mark.timeout(900)]

TOKENS, TURNS = 40, 5
ARGUMENTS: Final = ("--block-size", "32", "--max-num-batched-tokens", "512")
RESETTABLE: Final = {"VLLM_SERVER_DEV_MODE": "1"}


class Talk(NamedTuple):
    """A conversation.

    Attributes:
        texts: The answer of each turn.
        prompt: Everything that was said.
        params: The last answer's parameters for the next turn.
        num_computed: Tokens that prefill has computed in each turn.
    """

    texts: Sequence[str]
    prompt: str
    params: Mapping[str, Any] | None
    num_computed: Sequence[int]


class Both(NamedTuple):
    """Two servers with both roles; `wrong_turn` makes decode send wrong pages while it exists."""

    deployment: Deployment
    wrong_turn: Path

    @property
    def servers(self) -> tuple[Server, Server]:
        """Prefill and decode."""
        return self.deployment.prefill, self.deployment.decode


@pytest.fixture(scope="module")
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    place: Path = tmp_path_factory.mktemp("turns")
    wrong_turn = place / "wrong_turn"
    with Deployment(
        place,
        model=make_windowed_model(place / "model", prepare_smollm2()) if request.param != "full attention" else None,
        prefill_workers=2 if "2 workers" in request.param else 1,
        has_both_roles=True,
        load_failure_policy="recompute",
        extra_config={"keep_turns_s": 120.0, "port": 0, "mooncake_port": None},
        arguments=ARGUMENTS,
        own={
            "prefill": Own(environment=RESETTABLE),
            "decode": Own(environment={**RESETTABLE, **Probe(wrong_page=str(wrong_turn)).environment()}),
        },
    ) as deployment:
        yield Both(deployment, wrong_turn)


def said(number: int, turn: int) -> str:
    """Return what a user says in one turn of a conversation."""
    return ("\n" if turn else "") + prompt_of(number + 100 * turn, 60 if turn == 0 else 12)


async def num_computed(client: aiohttp.ClientSession, server: Server) -> int:
    found = await metrics(client, server.url)
    return int(found["prompt_tokens_total"] - found.get(KNOWN, 0) - found.get(BROUGHT, 0))


async def converse(
    client: aiohttp.ClientSession, servers: Sequence[Server], number: int, *, hands_back: bool, swaps: bool = False
) -> Talk:
    """Have a conversation, as a router that passes on what decode answers; `swaps` changes roles with each turn."""
    prompt, texts, params, counts = "", list[str](), None, list[int]()
    for turn in range(TURNS):
        prefill, decode = servers if not (swaps and turn % 2) else (servers[1], servers[0])
        prompt += said(number, turn)
        before = await num_computed(client, prefill)
        first = await ask(client, prefill.url, prompt, 1, params if hands_back and params else PREFILL_PARAMS)
        assert (first.status, first.error) == (200, "")
        counts.append(await num_computed(client, prefill) - before)
        answer = await ask(client, decode.url, prompt, TOKENS, first.params)
        assert (answer.status, answer.error) == (200, "")
        texts.append(answer.text)
        prompt, params = prompt + answer.text, answer.params
    return Talk(texts, prompt, params, counts)


async def complete(
    client: aiohttp.ClientSession, server: Server, prompt: Sequence[int] | str, count: int, **fields: object
) -> Any:
    """Complete a text or tokens; return the answer, with its tokens."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": count, "temperature": 0, "return_token_ids": True}
    async with client.post(f"{server.url}/v1/completions", json={**body, **fields}) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def alone(client: aiohttp.ClientSession, server: Server, prompt: Sequence[int] | str) -> Any:
    """Return what one server answers that computes all of a prompt, and uses no block that it has received."""
    answer = await complete(client, server, prompt, TOKENS, cache_salt=uuid.uuid4().hex)
    return answer["choices"][0]["text" if isinstance(prompt, str) else "token_ids"]


async def expected(client: aiohttp.ClientSession, server: Server, number: int) -> list[str]:
    """Return the answers of one server in a conversation."""
    prompt, texts = "", list[str]()
    for turn in range(TURNS):
        prompt += said(number, turn)
        texts.append(await alone(client, server, prompt))
        prompt += texts[-1]
    return texts


async def forget(client: aiohttp.ClientSession, server: Server) -> None:
    """Empty a server's prefix cache, once it has no blocks in use; an idle one learns that with its next step."""
    with anyio.fail_after(SETTLE_S):
        while (await metrics(client, server.url))["kv_cache_usage_perc"]:
            await ask(client, server.url, "Hello", 1)
    async with client.post(f"{server.url}/reset_prefix_cache") as response:
        assert response.status == 200


def models(*names: str) -> pytest.MarkDecorator:
    """Return a mark that runs a test with these models, each in servers of its own."""
    return pytest.mark.parametrize("both", names, indirect=True, scope="module")


@models("full attention")
async def test_texts_are_those_of_one_server(both: Both, client: aiohttp.ClientSession) -> None:
    """Of the turn before, prefill computes nothing; without the hand-back, it computes what decode has generated."""
    returned = [await converse(client, both.servers, number, hands_back=True) for number in range(2)]
    not_returned = await converse(client, both.servers, 10, hands_back=False)
    for number, talk in [*enumerate(returned), (10, not_returned)]:
        assert talk.texts == await expected(client, both.servers[0], number)
    added = [count for talk in returned for count in talk.num_computed[1:]]
    again = not_returned.num_computed[1:]
    assert all(count < 40 for count in added), added  # what the user has said, and the last token of the answer
    assert all(count >= TOKENS for count in again), again


@models("full attention")
async def test_conversations_at_once(both: Both, client: aiohttp.ClientSession) -> None:
    found: dict[int, Talk] = {}

    async def one(number: int) -> None:
        found[number] = await converse(client, both.servers, number, hands_back=True)

    async with anyio.create_task_group() as tasks:
        for number in range(20, 23):
            tasks.start_soon(one, number)
    for number, talk in found.items():
        assert talk.texts == await expected(client, both.servers[0], number)


@models("full attention")
async def test_prefill_that_has_never_seen_a_conversation(both: Both, client: aiohttp.ClientSession) -> None:
    """As when it goes to another server: all of the turn is received."""
    prefill, decode = both.servers
    talk = await converse(client, both.servers, 30, hands_back=True)
    await forget(client, prefill)
    prompt = talk.prompt + said(30, TURNS)
    before = await num_computed(client, prefill)
    first = await ask(client, prefill.url, prompt, 1, talk.params)
    assert 0 < await num_computed(client, prefill) - before < 40
    answer = await ask(client, decode.url, prompt, TOKENS, first.params)
    assert answer.text == await alone(client, decode, prompt)


@models("full attention")
async def test_conversation_that_moves_to_another_decode_server(both: Both, client: aiohttp.ClientSession) -> None:
    """Each server computes the prompt of every other turn, of which it has generated the answer before."""
    talk = await converse(client, both.servers, 40, hands_back=True, swaps=True)
    assert talk.texts == await expected(client, both.servers[0], 40)
    assert all(count < 40 for count in talk.num_computed[1:])


@models("full attention")
async def test_history_that_the_client_has_changed(both: Both, client: aiohttp.ClientSession) -> None:
    prefill, decode = both.servers
    talk = await converse(client, both.servers, 50, hands_back=True)
    prompt = talk.prompt.replace(talk.texts[-1], " Something else.") + said(50, TURNS)
    first = await ask(client, prefill.url, prompt, 1, talk.params)
    answer = await ask(client, decode.url, prompt, TOKENS, first.params)
    assert (answer.status, answer.text) == (200, await alone(client, prefill, prompt))


@models("full attention")
async def test_decode_dies_between_two_turns(both: Both, client: aiohttp.ClientSession) -> None:
    prefill, decode = both.servers
    talk = await converse(client, both.servers, 70, hands_back=True)
    decode.kill()
    prompt = talk.prompt + said(70, TURNS)
    with anyio.fail_after(SETTLE_S):
        first = await ask(client, prefill.url, prompt, 1, talk.params)
    assert (first.status, first.error) == (200, "")
    assert first.params is not None
    decode.start()
    await decode.wait_until_ready()
    answer = await ask(client, decode.url, prompt, TOKENS, first.params)
    assert (answer.status, answer.text) == (200, await alone(client, prefill, prompt))


@models("windows", "windows, 2 workers")
async def test_windows_of_turns(both: Both, client: aiohttp.ClientSession) -> None:
    """Turns shorter and longer than the window; the model says what no text would be tokenised to.

    The servers change roles with each turn.
    """
    for first in (20, WINDOW - TOKENS, WINDOW + 50):
        prompt, turn_of, answers, counts = list(range(1000, 1000 + first)), None, [], []
        for turn in range(TURNS):
            prefill, decode = both.servers if turn % 2 == 0 else both.servers[::-1]
            before = await num_computed(client, prefill)
            params = turn_of or PREFILL_PARAMS
            handed = await complete(client, prefill, prompt, 1, kv_transfer_params=params)
            counts.append(await num_computed(client, prefill) - before)
            answer = await complete(client, decode, prompt, TOKENS, kv_transfer_params=handed["kv_transfer_params"])
            tokens, turn_of = answer["choices"][0]["token_ids"], answer["kv_transfer_params"]
            answers.append((prompt, tokens))
            prompt = [*prompt, *tokens, *range(2000 + 100 * turn, 2012 + 100 * turn)]
        assert all(count < 20 for count in counts[1:]), counts
        for prompt, tokens in answers:
            assert await alone(client, both.servers[0], prompt) == tokens


@models("windows")
async def test_a_wrong_page_of_a_turn_gives_another_answer(both: Both, client: aiohttp.ClientSession) -> None:
    """The comparisons can fail, so prefill does use what it receives."""
    prefill, decode = both.servers
    prompt = list(range(3000, 3150))
    handed = await complete(client, prefill, prompt, 1, kv_transfer_params=PREFILL_PARAMS)
    both.wrong_turn.touch()
    answer = await complete(client, decode, prompt, TOKENS, kv_transfer_params=handed["kv_transfer_params"])
    prompt += [*answer["choices"][0]["token_ids"], 4000, 4001]
    handed = await complete(client, prefill, prompt, 1, kv_transfer_params=answer["kv_transfer_params"])
    both.wrong_turn.unlink()
    found = await complete(client, decode, prompt, TOKENS, kv_transfer_params=handed["kv_transfer_params"])
    assert found["choices"][0]["token_ids"] != await alone(client, prefill, prompt)

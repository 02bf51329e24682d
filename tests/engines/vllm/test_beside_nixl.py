"""kvflow's connector and vLLM's NixlConnector in one server, and in two servers that a router has mixed up."""

from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from benchmarks.vllm_handover.client import ask, hand_over, metrics, prompt_of
from kvflow.cli.proxy.application import PREFILL_PARAMS
from tests.engines.vllm.deployment import BROUGHT, Deployment, Own
from tests.support.ports import unused_port

pytestmark = [pytest.mark.anyio, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

TOKENS = 12
BY_KVFLOW, BY_NIXL = "kvflow_transfer_bytes_count", "nixl_bytes_transferred_count"


@pytest.fixture(scope="module", params=[True, False], ids=["kvflow first", "NIXL first"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Deployment, bool]]:
    place: Path = tmp_path_factory.mktemp("both")
    own = {}
    for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        nixl = {"kv_connector": "NixlConnector", "kv_role": role}
        environment = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(unused_port())}
        own[name] = (
            Own(after=[nixl], environment=environment) if request.param else Own([nixl], environment=environment)
        )
    with Deployment(place, own=own) as deployment:
        yield deployment, request.param


async def test_the_first_one_is_used(both: tuple[Deployment, bool], client: aiohttp.ClientSession) -> None:
    deployment, is_first = both
    for number, num_words in enumerate((20, 200, 700)):
        before = await metrics(client, deployment.decode.url)
        prompt = prompt_of(800 + number, num_words)
        _, answer = await hand_over(client, deployment.prefill.url, deployment.decode.url, prompt, TOKENS)
        assert answer is not None
        assert (answer.status, answer.error) == (200, "")
        assert answer.text == await deployment.text(client, prompt, TOKENS)
        await deployment.until_free(client)  # both connectors have let go of the blocks
        after = await metrics(client, deployment.decode.url)
        used = [after.get(one, 0) > before.get(one, 0) for one in (BY_KVFLOW, BY_NIXL)]
        assert used == [is_first, not is_first]
        assert after[BROUGHT] > before[BROUGHT]


async def test_a_request_that_only_nixl_can_receive(
    both: tuple[Deployment, bool], client: aiohttp.ClientSession
) -> None:
    """As from a prefill server without kvflow: its connector leaves the request to the other one, in both orders."""
    deployment, _ = both
    prompt = prompt_of(810, 200)
    kept = await ask(client, deployment.prefill.url, prompt, 1, PREFILL_PARAMS)
    assert kept.params is not None
    params = {name: value for name, value in kept.params.items() if not name.startswith("kvflow")}
    before = await metrics(client, deployment.decode.url)
    answer = await ask(client, deployment.decode.url, prompt, TOKENS, params)
    assert answer.text == await deployment.text(client, prompt, TOKENS)
    after = await metrics(client, deployment.decode.url)
    assert after[BY_NIXL] > before.get(BY_NIXL, 0)


@pytest.fixture(params=["fail", "recompute"])
def apart(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Deployment, str]]:
    """Start a prefill server with kvflow and a decode server without."""
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}
    own = Own(instead=nixl, environment={"VLLM_NIXL_SIDE_CHANNEL_PORT": str(unused_port())})
    with Deployment(tmp_path, own={"decode": own}, load_failure_policy=request.param) as deployment:
        yield deployment, request.param


async def test_a_decode_server_without_kvflow_lives_on(
    apart: tuple[Deployment, str], client: aiohttp.ClientSession
) -> None:
    """It asks kvflow's port in NixlConnector's protocol, hears nothing, and does with the request what it is set to."""
    deployment, policy = apart
    for number in range(2):
        prompt = prompt_of(820 + number, 200)
        kept = await ask(client, deployment.prefill.url, prompt, 1, PREFILL_PARAMS)
        assert kept.params is not None
        answer = await ask(client, deployment.decode.url, prompt, TOKENS, kept.params)
        text = await deployment.text(client, prompt, TOKENS)
        assert (answer.status, answer.text) == ((200, text) if policy == "recompute" else (500, ""))
        assert (await ask(client, deployment.decode.url, prompt, TOKENS)).text == text

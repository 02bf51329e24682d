"""vLLM's servers hand over between two processes on one GPU."""

import contextlib
import importlib.util
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from benchmarks.vllm_handover.client import MODEL, ask, hand_over, metrics, open_client, prompt_of
from kvflow.cli.serve.vllm import pair, vllm_server
from kvflow.cli.smollm2 import prepare_smollm2
from tests.device.devices import needs_device
from tests.support.ports import unused_port

HAS_VLLM = importlib.util.find_spec("vllm") is not None

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.device,
    pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed"),
]

DEVICE = needs_device()

TOKENS = 8
PROMPT_TOKENS = 400

ARGUMENTS = (
    *("--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "8"),
    *("--kv-cache-memory-bytes", str(2**30), "--gpu-memory-utilization", "0.3"),
)

ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


async def test_decode_continues_what_prefill_has_computed(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    if DEVICE.is_fake:
        pytest.skip("vLLM cannot use the fake device")
    described = pair(
        model=str(prepare_smollm2()),
        served_name=MODEL,
        first_port=0,
        extra_config={},
        arguments=ARGUMENTS,
        is_cpu=False,
    )
    servers = [
        vllm_server(msgspec.structs.replace(one, port=unused_port(), environment=ENVIRONMENT), tmp_path)
        for one in described
    ]
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
            server.start()
            await server.wait_until_ready()  # one after the other: each measures the memory that is free
        prefill, decode = (server.url for server in servers)
        async with open_client() as client:
            prompt = prompt_of(1, PROMPT_TOKENS)
            first, answer = await hand_over(client, prefill, decode, prompt, TOKENS)
            assert answer is not None, first.error
            assert (answer.status, answer.error) == (200, "")
            assert answer.text == (await ask(client, prefill, prompt, TOKENS)).text
            known = (await metrics(client, decode))["external_prefix_cache_hits_total"]
            record_property("prompt tokens from prefill", known)
            assert known
